//! Writes the folder of an incident on a thread of its own. A file system that does not answer
//! blocks that thread, but not the verdict: the folder then goes to the fallback path. When that
//! does not answer either, the verdict is served from memory.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use tracing::{error, warn};
use xpu_timer_analysis::Verdict;
use xpu_timer_proto::{
    Message as _, file, samples, timeline,
    v1::{Evidence, NodeDump},
};

use crate::{
    error::{Error, chain},
    incident::{
        engine::Record,
        folder::{Folder, folder_name},
        judging::{self, without_dumps},
        mild,
        part::{ALL_FILES, PART, Part, PartLocation, some_ranks},
        retention,
        verdict_files::{link_latest, write_record, write_verdict},
        viewer,
    },
    node::{
        evidence::file_of,
        plan::{DumpTask, finish_times},
    },
    os::process,
    timeline::files::RankTimeline,
};

/// The findings of a dump.
#[derive(Debug)]
pub(super) struct Findings {
    /// The task of the dump.
    pub task: DumpTask,
    /// The collected evidence.
    pub evidence: Evidence,
}

/// The result of writing the folder.
#[derive(Debug)]
pub(super) struct WriteResult {
    /// The folder; `None` when none could be created.
    pub path: Option<PathBuf>,
    /// Whether it has the verdict.
    pub written: bool,
    /// The part for the cluster collector.
    pub part: Option<PartLocation>,
    /// The verdict, with any errors added.
    pub verdict: Verdict,
}

/// A file system that does not finish one file in this time does not answer. The viewer takes less
/// time.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The viewer gets at least this time, even when the samples used up the budget.
const SHORTEST_VIEW: Duration = Duration::from_millis(300);

/// Writes the folder, and waits for it as long as the file system answers.
pub(super) fn write(found: Findings, verdict: Verdict, deadline: Instant) -> WriteResult {
    write_with(&Arc::new(found), verdict, deadline, STEP_TIMEOUT)
}

fn write_with(found: &Arc<Findings>, mut verdict: Verdict, deadline: Instant, silence: Duration) -> WriteResult {
    let (root, fallback) = (&found.task.timeline_path, &found.task.fallback_path);
    for root_choice in [RootChoice::Preferred, RootChoice::Fallback] {
        if root_choice == RootChoice::Fallback && found.task.is_mild {
            break;
        }
        let path = if root_choice == RootChoice::Preferred { root } else { fallback };
        if !ABANDONED.has(path) {
            let (found, verdict) = (Arc::clone(found), verdict.clone());
            let work = move |steps: &Steps| write_in_root(&found, root_choice, verdict, deadline, steps);
            if let Some(written) = run_with_stall_timeout(path, silence, work) {
                return written;
            }
        }
        let problem = format!("{} cannot be used ({})", path.display(), file::unanswered());
        warn!("incident {}: {problem}", found.task.plan.head.id);
        verdict.timing.errors.push(problem);
    }
    finish_times(&found.task.plan, &mut verdict);
    let part = judging::catch_panic(|| part_of(found, verdict.timing.errors.clone())).ok().flatten();
    WriteResult { path: None, written: false, part: part.map(PartLocation::InMemory), verdict }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RootChoice {
    Preferred,
    /// The wanted folder does not answer.
    Fallback,
}

fn write_in_root(
    found: &Findings,
    root_choice: RootChoice,
    mut verdict: Verdict,
    deadline: Instant,
    steps: &Steps,
) -> WriteResult {
    let done = judging::catch_panic(|| write_folder(found, root_choice, &mut verdict, deadline, steps));
    let (path, written, part) = done.unwrap_or_else(|why| {
        error!("incident {}: its folder could not be finished: {why}", found.task.plan.head.id);
        verdict.timing.errors.push(format!("the folder could not be finished: {why}"));
        (None, false, None)
    });
    WriteResult { path, written, part, verdict }
}

/// Writes the folder. The log and the verdict name what cannot be written. The second part of the
/// result is whether the verdict was written.
fn write_folder(
    found: &Findings,
    root_choice: RootChoice,
    verdict: &mut Verdict,
    deadline: Instant,
    steps: &Steps,
) -> (Option<PathBuf>, bool, Option<PartLocation>) {
    let Findings { task, evidence } = found;
    let incident = &task.plan.head.id;
    let folder = make_or_report(task, root_choice, verdict);
    let Some(folder) = folder else {
        return (None, false, part_of(found, verdict.timing.errors.clone()).map(PartLocation::InMemory));
    };
    if !task.is_part() {
        write_record(&folder.path, &task.record);
    }
    // The reader of a hang sees how the job looked before. A disk that does not answer would block
    // this thread, too, so its captures stay captures.
    if root_choice == RootChoice::Preferred && !task.is_mild && !mild::is_mild(verdict) {
        let reason = format!("the job hung later (incident {incident})");
        verdict.timing.earlier.extend(mild::promote(&task.timeline_path, &task.captured_job(), &reason));
    }
    let given_up = || {
        folder.give_up();
        (None, false, None)
    };

    let mut problems = Problems::default();
    if !write_dumps(found, &folder, &mut problems, steps)
        || !write_timelines(&task.timelines, evidence.world_size, &folder, &mut problems, steps)
    {
        return given_up();
    }
    problems.note(folder.write("evidence.bin", &without_dumps(evidence).encode_to_vec()));
    let part =
        part_of(found, verdict.timing.errors.clone()).map(|part| match folder.write(PART, &part.encode_to_vec()) {
            Ok(()) => PartLocation::InFolder(folder.path.clone()),
            Err(error) => {
                problems.note(Err(error));
                PartLocation::InMemory(part)
            }
        });
    folder.release_reserve();
    if !steps.step() {
        return given_up();
    }
    verdict.timing.errors.extend(problems.report(incident));
    finish_times(&task.plan, verdict);
    let mut written = write_first_verdict(task, &folder, verdict);
    if task.is_mild {
        write_record(&folder.path, &Record { writer: String::new(), ..task.record.clone() });
        retention::trim_captures(&task.timeline_path, Duration::ZERO, SystemTime::now());
        return (Some(folder.path), written, part);
    }
    if task.is_part() {
        // The collector that makes the verdict draws the pictures of the complete job.
        return (Some(folder.path), written, part);
    }

    if !steps.step() {
        return given_up();
    }
    let left = deadline.saturating_duration_since(Instant::now()).max(SHORTEST_VIEW);
    if let Err(error) = viewer::run(&folder.path, !task.timelines_follow, left) {
        let problem = chain(&error);
        warn!("incident {incident}: {problem}");
        verdict.timing.errors.push(problem);
    }
    if !steps.step() {
        return given_up();
    }
    finish_times(&task.plan, verdict);
    written = write_verdict(&folder, verdict);
    if !steps.step() {
        return given_up();
    }
    if let Err(error) = link_latest(&folder, verdict) {
        warn!("incident {incident}: {}", chain(&error));
    }
    mild::draw(&task.timeline_path, &verdict.timing.earlier);
    (Some(folder.path), written, part)
}

/// Writes the verdict, and announces the timelines that follow it. Returns whether it was written.
fn write_first_verdict(task: &DumpTask, folder: &Folder, verdict: &mut Verdict) -> bool {
    if task.timelines_follow {
        folder.announce_timelines();
    }
    let written = write_verdict(folder, verdict);
    if task.timelines_follow && !written {
        folder.timelines_came();
        verdict.timing.errors.push("the timelines are not kept, because the verdict could not be written".into());
    }
    written
}

/// Writes the dumps of the ranks. Returns whether the other thread still waits.
fn write_dumps(found: &Findings, folder: &Folder, problems: &mut Problems, steps: &Steps) -> bool {
    let Findings { task, evidence } = found;
    let world = evidence.world_size;
    task.subjects.iter().all(|subject| {
        let Some(rank) = evidence.ranks.iter().find(|rank| rank.rank == subject.rank) else { return true };
        let name = format!("{:05}-{world:05}.stacktrace", subject.rank);
        problems.note(folder.write(&name, &file_of(subject, rank).encode_to_vec()));
        steps.step()
    })
}

/// Writes timelines. Each piece is a step: a file may have some megabytes. Returns whether the
/// other thread still waits.
fn write_timelines(
    timelines: &[(u32, RankTimeline)],
    world_size: u32,
    folder: &Folder,
    problems: &mut Problems,
    steps: &Steps,
) -> bool {
    timelines.iter().all(|(rank, timeline)| {
        if let Some(operations) = &timeline.operations {
            let name = timeline::file_name(*rank, world_size);
            let write = |file: &mut dyn Write| operations.write(&mut Stepping { file, steps }).map(drop);
            problems.note(folder.write_with(&name, write));
        }
        if let Some(samples) = &timeline.samples {
            problems.note(folder.write(&samples::file_name(*rank, world_size), &samples.encode_to_vec()));
        }
        steps.step()
    })
}

/// A file whose writes are steps.
struct Stepping<'a> {
    file: &'a mut dyn Write,
    steps: &'a Steps,
}

impl Write for Stepping<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        if self.steps.step() { Ok(written) } else { Err(file::unanswered()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The timelines of an incident whose verdict does not wait for them: they may have most of the
/// bytes of its folder.
#[derive(Debug)]
pub(super) struct DeferredTimelines {
    incident: String,
    world_size: u32,
    timelines: Vec<(u32, RankTimeline)>,
    // Whether the report is drawn here.
    draws: bool,
}

/// The result of writing the timelines of an incident after its verdict.
#[derive(Debug)]
pub(super) struct WrittenTimelines {
    /// Name of the incident.
    pub incident: String,
    /// Its folder.
    pub path: PathBuf,
    /// The error, if they could not be written.
    pub problem: Option<String>,
}

/// The timelines of one incident are written at a time: those of a second dump into the same folder
/// come after those of the first.
static WRITES_TIMELINES: Mutex<()> = Mutex::new(());
/// Time limit of the viewer that draws the report again.
const REDRAW_TIMEOUT: Duration = Duration::from_secs(60);

impl DeferredTimelines {
    /// Takes the timelines out of a task: in a large job those of the culprits and of one rank of
    /// each group. Those of a mild capture stay, because nobody waits for its verdict. `None` if
    /// none are left.
    pub(super) fn take(task: &mut DumpTask, verdict: &Verdict, world_size: u32) -> Option<Self> {
        let some = some_ranks(verdict);
        if world_size as usize > ALL_FILES {
            task.timelines.retain(|(rank, _)| some.contains(rank));
        }
        task.timelines_follow = !task.is_mild && !task.is_examined_part() && !task.timelines.is_empty();
        task.timelines_follow.then(|| DeferredTimelines {
            incident: task.plan.head.id.clone(),
            world_size,
            timelines: std::mem::take(&mut task.timelines),
            draws: !task.is_part(),
        })
    }

    /// Writes them into the folder of the incident, and draws its report again.
    pub(super) fn write(self, path: PathBuf) -> WrittenTimelines {
        self.write_with(path, STEP_TIMEOUT)
    }

    fn write_with(self, path: PathBuf, silence: Duration) -> WrittenTimelines {
        let _turn = lock(&WRITES_TIMELINES);
        let DeferredTimelines { incident, world_size, timelines, draws } = self;
        let root = path.parent().unwrap_or(&path).to_path_buf();
        let folder = Folder { path: path.clone() };
        let work = move |steps: &Steps| {
            let mut problems = Problems::default();
            // The timelines of an earlier dump into this folder may just have come.
            folder.announce_timelines();
            if !write_timelines(&timelines, world_size, &folder, &mut problems, steps) {
                // The disk answers again, but nobody waits any more.
                folder.timelines_came();
            }
            problems
        };
        let is_abandoned = ABANDONED.has(&root);
        let problems = if is_abandoned { None } else { run_with_stall_timeout(&root, silence, work) };
        let Some(problems) = problems else {
            let problem = format!("the timelines cannot be written into {} ({})", path.display(), file::unanswered());
            warn!("incident {incident}: {problem}");
            return WrittenTimelines { incident, path, problem: Some(problem) };
        };
        if draws && let Err(error) = viewer::run(&path, true, REDRAW_TIMEOUT) {
            warn!("incident {incident}: {}", chain(&error));
        }
        let folder = Folder { path: path.clone() };
        // If the disk does not answer, the next collector does this.
        let _ = run_with_stall_timeout(&root, silence, move |_| folder.timelines_came());
        WrittenTimelines { problem: problems.report(&incident), incident, path }
    }
}

/// Makes the folder. The log and the verdict say why it is elsewhere, or why there is none.
fn make_or_report(task: &DumpTask, root_choice: RootChoice, verdict: &mut Verdict) -> Option<Folder> {
    let incident = &task.plan.head.id;
    let (folder, problem) = match make(task, root_choice) {
        Ok((folder, None)) => return Some(folder),
        Ok((folder, Some(error))) => {
            let problem = format!(
                "{} cannot be used ({}), the folder is {}",
                task.timeline_path.display(),
                chain(&error),
                folder.path.display()
            );
            (Some(folder), problem)
        }
        Err(error) => (None, format!("no folder could be created: {}", chain(&error))),
    };
    warn!("incident {incident}: {problem}");
    verdict.timing.errors.push(problem);
    folder
}

fn make(task: &DumpTask, root_choice: RootChoice) -> Result<(Folder, Option<Error>), Error> {
    let (root, fallback) = (&task.timeline_path, &task.fallback_path);
    let home = task.is_part().then(|| process::home(&task.socket));
    let name = folder_name(&task.plan.head.id, task.is_part().then_some(task.node.as_str()));
    if task.is_mild {
        // Nobody looks for it in another place.
        return Ok((Folder::create_only(&mild::root_of(root), &name)?, None));
    }
    match (root_choice, &home) {
        (RootChoice::Fallback, home) => {
            let folder = Folder::create_in_fallback(fallback, &name, home.as_deref())?;
            Ok((folder, Some(Error::path("write", root)(file::unanswered()))))
        }
        (RootChoice::Preferred, Some(home)) => Folder::create_own(root, fallback, &name, home),
        (RootChoice::Preferred, None) => Folder::create(root, fallback, &name),
    }
}

/// The part for the cluster collector, if there is one.
fn part_of(found: &Findings, errors: Vec<String>) -> Option<Box<NodeDump>> {
    let Findings { task, evidence } = found;
    let operations = task.for_cluster?.operations;
    let mut part = Part::default();
    for subject in &task.subjects {
        let Some(rank) = evidence.ranks.iter().find(|rank| rank.rank == subject.rank) else { continue };
        part.add(&file_of(subject, rank), rank, operations);
    }
    part.add_processes(&evidence.processes);
    Some(Box::new(part.finish(&task.plan.head.id, errors)))
}

type Work<T> = Box<dyn FnOnce(&Steps) -> T + Send>;

/// Runs work in a folder on a thread of its own. Returns `None` when the work makes no step for
/// `silence`. The thread is then abandoned, and no other work starts in that folder until it has
/// ended.
fn run_with_stall_timeout<T: Send + 'static>(
    path: &Path,
    silence: Duration,
    work: impl FnOnce(&Steps) -> T + Send + 'static,
) -> Option<T> {
    let steps = Arc::new(Steps::default());
    let result = Arc::new(Mutex::new(None));
    // The work goes through a channel, so that it is not lost when the thread cannot be started.
    let (give, take) = mpsc::channel();
    let turn = {
        let (steps, result, path) = (Arc::clone(&steps), Arc::clone(&result), path.to_path_buf());
        move || {
            let work = take.recv().ok().map(|work: Work<T>| work(&steps));
            *lock(&result) = work;
            if !steps.end() {
                ABANDONED.remove(&path);
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("writes".into()).spawn(turn) {
        warn!("cannot start a thread that writes to {}: {error}", path.display());
        return Some(work(&steps));
    }
    let _ = give.send(Box::new(work));
    if steps.wait(silence, || ABANDONED.insert(path)) { lock(&result).take() } else { None }
}

/// The progress of some work, for the thread that waits for it.
#[derive(Debug, Default)]
struct Steps {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    count: u64,
    ended: bool,
    given_up: bool,
}

impl Steps {
    /// Records a step. Returns whether the other thread still waits.
    fn step(&self) -> bool {
        let mut state = lock(&self.state);
        state.count += 1;
        self.changed.notify_all();
        !state.given_up
    }

    /// Records the last step. Returns whether the other thread still waits.
    fn end(&self) -> bool {
        lock(&self.state).ended = true;
        self.step()
    }

    /// Waits for the end. Returns false after `silence` without a step, after it has called
    /// `give_up` before the worker could end.
    fn wait(&self, silence: Duration, give_up: impl FnOnce()) -> bool {
        let mut state = lock(&self.state);
        while !state.ended {
            let before = state.count;
            let waited = self.changed.wait_timeout_while(state, silence, |state| state.count == before);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.count == before {
                state.given_up = true;
                give_up();
                return false;
            }
        }
        true
    }
}

/// Folders with abandoned threads, and how many.
static ABANDONED: Abandoned = Abandoned { folders: Mutex::new(BTreeMap::new()) };

struct Abandoned {
    folders: Mutex<BTreeMap<PathBuf, usize>>,
}

impl Abandoned {
    fn has(&self, path: &Path) -> bool {
        lock(&self.folders).contains_key(path)
    }

    fn insert(&self, path: &Path) {
        *lock(&self.folders).entry(path.into()).or_default() += 1;
    }

    fn remove(&self, path: &Path) {
        let mut folders = lock(&self.folders);
        if let Some(count) = folders.get_mut(path) {
            *count -= 1;
            if *count == 0 {
                folders.remove(path);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A full disk refuses every file with an identical error, which is reported once, with the number
/// of files.
#[derive(Default)]
struct Problems {
    first: Option<String>,
    count: usize,
}

impl Problems {
    fn note(&mut self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.count += 1;
            self.first.get_or_insert_with(|| chain(&error));
        }
    }

    fn report(self, incident: &str) -> Option<String> {
        let first = self.first?;
        let problem = match self.count {
            1 => first,
            count => format!("{first} (and {} more files)", count - 1),
        };
        warn!("incident {incident}: {problem}");
        Some(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_work_is_awaited_and_stuck_work_is_abandoned() {
        let (path, silence) = (Path::new("/of/this/test"), Duration::from_millis(200));
        let slow = move |steps: &Steps| {
            for _ in 0..5 {
                thread::sleep(silence / 2);
                assert!(steps.step());
            }
            7
        };
        assert_eq!(run_with_stall_timeout(path, silence, slow), Some(7));
        assert!(!ABANDONED.has(path));

        let (answer, stuck) = mpsc::channel::<()>();
        let (report, waiter) = mpsc::channel();
        let dead = move |steps: &Steps| {
            stuck.recv().unwrap();
            report.send(steps.step()).unwrap();
        };
        assert_eq!(run_with_stall_timeout(path, silence, dead), None);
        assert!(ABANDONED.has(path), "nothing else is begun there");
        answer.send(()).unwrap();
        assert_eq!(waiter.recv(), Ok(false), "it learns that nobody waits");
        let begun = Instant::now();
        while ABANDONED.has(path) {
            assert!(begun.elapsed() < Duration::from_secs(10));
            thread::yield_now();
        }
    }
}
