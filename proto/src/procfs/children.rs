//! Threads, children and descendants of a process, and the program that it runs for its parent.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use super::{
    files::{Error, cmdline, numbers, text},
    status::stat,
};

/// The pids of all processes, in no order.
pub fn pids() -> impl Iterator<Item = i32> {
    numbers("/proc".into()).into_iter().flatten()
}

/// Thread ids of a process, ascending.
///
/// # Errors
/// There is no such process.
pub fn threads(pid: i32) -> Result<Vec<i32>, Error> {
    let mut tids: Vec<i32> = numbers(format!("/proc/{pid}/task"))?.collect();
    tids.sort_unstable();
    Ok(tids)
}

/// Maximum number of descendants of one process.
const MAX_DESCENDANTS: usize = 1024;

/// All descendants of `pid`, parents first. Processes in `skip` and their descendants are left out,
/// because they are captured on their own.
#[must_use]
pub fn descendants(pid: i32, skip: &HashSet<i32>) -> Vec<i32> {
    descendants_until(pid, skip, None).0
}

/// The descendants that are found before the deadline, and whether these are all.
#[must_use]
pub fn descendants_until(pid: i32, skip: &HashSet<i32>, deadline: Option<Instant>) -> (Vec<i32>, bool) {
    let mut found = vec![pid];
    let mut parents: Option<HashMap<i32, Vec<i32>>> = None;
    let mut next = 0;
    let in_time = || deadline.is_none_or(|deadline| Instant::now() < deadline);
    while next < found.len() && found.len() <= MAX_DESCENDANTS && in_time() {
        let parent = found[next];
        next += 1;
        let children = children(parent, usize::MAX).unwrap_or_else(|| {
            // A kernel without CONFIG_PROC_CHILDREN: read the parent of every process instead.
            parents.get_or_insert_with(children_by_parent).get(&parent).cloned().unwrap_or_default()
        });
        for child in children {
            if child != std::process::id() as i32 && !skip.contains(&child) && !found.contains(&child) {
                found.push(child);
            }
        }
    }
    let all = next == found.len();
    (found.split_off(1), all)
}

/// Pids of the children of a process, ascending: those that its first `most_threads` threads
/// started. `None` if the kernel does not list them.
#[must_use]
pub fn children(pid: i32, most_threads: usize) -> Option<Vec<i32>> {
    let mut children = Vec::new();
    for tid in threads(pid).unwrap_or_default().into_iter().take(most_threads) {
        match text(format!("/proc/{pid}/task/{tid}/children")) {
            Ok(text) => children.extend(text.split_whitespace().filter_map(|child| child.parse::<i32>().ok())),
            // The folder of a thread that has just ended is gone. On a kernel that does not list
            // children, the folder exists.
            Err(_) if std::path::Path::new(&format!("/proc/{pid}/task/{tid}")).exists() => return None,
            Err(_) => {}
        }
    }
    children.sort_unstable();
    Some(children)
}

/// Maximum number of generations between a process and its ancestor.
const MAX_GENERATIONS: usize = 64;

/// The parents of processes, each read once. To walk up from a process costs one file a generation;
/// [`descendants`] reads one file for each thread.
#[derive(Debug, Default)]
pub struct Parents {
    by_child: Mutex<HashMap<i32, Option<i32>>>,
}

impl Parents {
    /// The parent of a process. `None` if there is no such process.
    pub fn of(&self, pid: i32) -> Option<i32> {
        let mut by_child = self.by_child.lock().unwrap_or_else(PoisonError::into_inner);
        *by_child.entry(pid).or_insert_with(|| stat(pid).ok().map(|stat| stat.parent))
    }

    /// Whether `pid` is a descendant of `ancestor`. False if that is not known before the deadline.
    pub fn is_descendant(&self, pid: i32, ancestor: i32, deadline: Instant) -> bool {
        let parent = |pid: &i32| self.of(*pid).filter(|parent| *parent > 0 && Instant::now() < deadline);
        std::iter::successors(parent(&pid), parent).take(MAX_GENERATIONS).any(|parent| parent == ancestor)
    }
}

fn children_by_parent() -> HashMap<i32, Vec<i32>> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for pid in pids() {
        if let Ok(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    children
}

/// The last argument of a worker that Python's multiprocessing has spawned.
const SPAWNED: &[u8] = b"--multiprocessing-fork";

/// The arguments of the program that a process runs, like [`cmdline`]. Those of a worker that
/// Python's multiprocessing has spawned only say how it was started (`-c from multiprocessing.spawn
/// import …`). In their place, it has those of its parent and `--multiprocessing-fork`.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn program_cmdline(pid: i32) -> Result<Vec<u8>, Error> {
    /// Maximum number of workers between a worker and the program.
    const MAX_SPAWNED: usize = 4;
    let own = cmdline(pid)?;
    let is_spawned = |arguments: &[u8]| arguments.split(|byte| *byte == 0).any(|argument| argument == SPAWNED);
    let (mut process, mut arguments) = (pid, own.clone());
    for _ in 0..MAX_SPAWNED {
        if !is_spawned(&arguments) {
            break;
        }
        let Ok(parent) = stat(process).map(|stat| stat.parent) else { return Ok(own) };
        (process, arguments) = (parent, cmdline(parent).unwrap_or_default());
    }
    // A process whose parent has ended has another parent.
    let is_python = arguments.split(|byte| *byte == 0).next().is_some_and(|program| {
        program.rsplit(|byte| *byte == b'/').next().is_some_and(|name| name.starts_with(b"python"))
    });
    if process == pid || !is_python || is_spawned(&arguments) {
        return Ok(own);
    }
    arguments.extend_from_slice(SPAWNED);
    arguments.push(0);
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_child_is_found_by_its_parent() {
        let own = std::process::id() as i32;
        assert!(threads(own).unwrap().contains(&own) && pids().any(|pid| pid == own));
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        assert!(children(own, usize::MAX).is_none_or(|children| children.contains(&pid)));
        assert!(children_by_parent()[&own].contains(&pid), "also where the kernel does not list children");
        assert!(descendants(own, &HashSet::new()).contains(&pid));
        assert!(!descendants(own, &HashSet::from([pid])).contains(&pid));
        let (parents, now) = (Parents::default(), Instant::now());
        let late = now + std::time::Duration::from_secs(60);
        assert!(parents.of(pid) == Some(own) && parents.is_descendant(pid, own, late));
        assert!(!parents.is_descendant(own, pid, late) && !parents.is_descendant(own, own, late));
        assert!(!parents.is_descendant(pid, own, now), "there was no time to look");
        let grandparent = parents.of(own).unwrap();
        assert!(grandparent == 0 || parents.is_descendant(pid, grandparent, late));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(Parents::default().of(pid), None);
    }

    #[test]
    fn a_spawned_worker_has_the_arguments_of_its_program() {
        use std::{io::Read, process::Stdio};
        let waits = "import sys; print('x', flush=True); sys.stdin.read()";
        let spawned = format!("subprocess.Popen([sys.executable, '-c', {waits:?}, '--multiprocessing-fork'])");
        let script = format!("import subprocess, sys; print({spawned}.wait())");
        let mut command = Command::new("python3");
        command.args(["-c", &script, "train"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut parent = command.spawn().expect("python3 runs");
        parent.stdout.as_mut().expect("piped").read_exact(&mut [0]).expect("both run");
        let pid = parent.id() as i32;
        let worker = children(pid, 8).unwrap()[0];
        let (own, of_parent) = (program_cmdline(worker).unwrap(), program_cmdline(pid).unwrap());
        drop(parent.stdin.take());
        parent.wait().expect("it ends");
        assert!(of_parent.ends_with(b"\0train\0"), "its own");
        assert_eq!(own, [&of_parent[..], b"--multiprocessing-fork\0"].concat());
    }
}
