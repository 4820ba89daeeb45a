//! Processes under the launchers of this node: the commands, and the ranks among them and their
//! descendants. A rank connects at its first device call. If it ends before that, only this module
//! knows that it existed.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
};

use nix::unistd::getuid;
use xpu_timer_proto::{
    procfs::{self, Stat},
    v1::RankInfo,
};

use crate::{
    job::{
        JobKey,
        partition::{Member, ProcessId},
    },
    os::process::{self, Handle},
};

/// Entries of ended ranks are removed after this time when nothing else of their job remains.
pub(super) const FORGET_AFTER_NS: u64 = 600 * 1_000_000_000;

/// A rank that has not registered.
#[derive(Debug, Clone)]
pub(super) struct Unregistered {
    /// Its job.
    pub job: JobKey,
    /// Its identity, from its environment.
    pub info: RankInfo,
    /// Start time of its process, as in [`Stat`].
    pub start: u64,
    /// Tells several jobs of one name apart; from its environment.
    pub instance: String,
    /// Its ancestors when it was found.
    pub ancestors: Vec<ProcessId>,
    /// Whether it runs.
    pub state: State,
}

/// Whether an unregistered rank runs.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// It runs as this process.
    Runs(Arc<Handle>),
    /// It ended at this CLOCK_MONOTONIC time, with the exit status when that is known.
    Ended(u64, Option<String>),
}

/// The commands of this node, and their ranks that have not registered.
#[derive(Debug, Default)]
pub(super) struct Launched {
    // Their ranks may take an hour to their first device call.
    commands: Vec<LaunchedCommand>,
    // Those that have ended, oldest first.
    ended: Vec<EndedCommand>,
    // In the order in which they were found.
    ranks: Vec<Unregistered>,
}

/// A launched command that runs.
#[derive(Debug, Clone)]
struct LaunchedCommand {
    process: Arc<Handle>,
    command: String,
}

/// A launched command that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndedCommand {
    /// Its pid and start time.
    pub process: ProcessId,
    /// Its command line.
    pub command: String,
    /// How it ended, when known.
    pub exit: Option<String>,
}

/// Beyond this number, the oldest ended commands are forgotten.
const MAX_ENDED: usize = 64;
/// More commands than this are a mistake or an attack.
const MAX_COMMANDS: usize = 1024;
/// Beyond this number, the oldest ended ranks are removed.
const MAX_RANKS: usize = 1024;
/// Number of descendants of one command to look at: an agent has a few processes between itself and
/// its ranks.
const MAX_BELOW: usize = 256;
/// Number of threads of a process whose children are looked up.
const MAX_THREADS: usize = 512;
/// Number of threads of a rank whose children are checked, each once a second: the main thread
/// starts most of them.
const MAX_STARTERS: usize = 1;
/// By this age a process has executed its final program.
const SETTLED_NS: u64 = 30_000_000_000;

impl Unregistered {
    fn new(process: Arc<Handle>, info: RankInfo, instance: String, ancestors: Vec<ProcessId>) -> Self {
        let command = process::command(process.pid);
        let info = RankInfo { pid: process.pid, command, ..info };
        let job = JobKey { name: info.job.clone(), instance: instance.clone() };
        Unregistered { job, info, start: process.start, instance, ancestors, state: State::Runs(process) }
    }

    /// The identity from which its job is determined.
    #[must_use]
    pub(super) fn member(&self, now_ns: u64) -> Member {
        Member {
            process: Some((self.info.pid, self.start)),
            ancestors: self.ancestors.clone(),
            rank: self.info.rank,
            world_size: self.info.world_size,
            attempt: self.info.attempt,
            instance: self.instance.clone(),
            started_ns: process::started_ns(self.start, now_ns),
            alive_ns: process::started_ns(self.start, now_ns),
            registered_ns: u64::MAX,
            ended_ns: match self.state {
                State::Runs(_) => u64::MAX,
                State::Ended(ended_ns, _) => ended_ns,
            },
            ..Member::default()
        }
    }

    /// Whether this entry is the process with this pid and start time.
    fn is(&self, pid: i32, start: u64) -> bool {
        (self.info.pid, self.start) == (pid, start)
    }

    fn is_over(&self) -> bool {
        matches!(self.state, State::Ended(..))
    }
}

impl Launched {
    /// Adds the command that a launcher executed. It may be a rank itself, or start ranks.
    pub(super) fn add(&mut self, command: Arc<Handle>) {
        // A process that connects repeatedly without a message is still one command.
        let same = |known: &LaunchedCommand| (known.process.pid, known.process.start) == (command.pid, command.start);
        if self.commands.len() >= MAX_COMMANDS || self.commands.iter().any(same) {
            return;
        }
        if let Some(info) = command.rank.clone() {
            let (instance, ancestors) = (command.instance.clone(), command.ancestors.clone());
            self.ranks.push(Unregistered::new(Arc::clone(&command), info, instance, ancestors));
        }
        let text = process::command(command.pid);
        self.commands.push(LaunchedCommand { process: command, command: text });
    }

    /// The pids of the launched commands that run.
    pub(super) fn running_commands(&self) -> impl Iterator<Item = i32> {
        self.commands.iter().filter(|command| !command.process.is_dead()).map(|command| command.process.pid)
    }

    /// The launched commands that have ended, oldest first.
    #[must_use]
    pub(super) fn ended_commands(&self) -> &[EndedCommand] {
        &self.ended
    }

    /// Notes which commands have ended by now.
    fn note_ended_commands(&mut self) {
        let (ended, running) =
            std::mem::take(&mut self.commands).into_iter().partition(|command| command.process.is_dead());
        self.commands = running;
        let ended: Vec<LaunchedCommand> = ended;
        self.ended.extend(ended.into_iter().map(|LaunchedCommand { process, command }| EndedCommand {
            process: (process.pid, process.start),
            command,
            exit: process.exit(),
        }));
        self.ended.drain(..self.ended.len().saturating_sub(MAX_ENDED));
    }

    /// Finds the commands of launchers that an earlier collector of this socket served.
    pub(super) fn find(&mut self, socket: &Path) {
        for pid in process::commands(getuid().as_raw(), socket) {
            if let Ok(command) = Handle::of_peer(pid) {
                self.add(Arc::new(command));
            }
        }
    }

    /// Whether a command runs.
    #[must_use]
    pub(super) fn is_needed(&self) -> bool {
        !self.commands.is_empty()
    }

    /// For poll: readable when a rank has ended.
    pub(super) fn fds(&self) -> impl Iterator<Item = &OwnedFd> {
        self.ranks.iter().filter_map(|rank| match &rank.state {
            State::Runs(process) => Some(process.fd()),
            State::Ended(..) => None,
        })
    }

    /// All unregistered ranks, so that the caller can assign their jobs.
    pub(super) fn unregistered(&mut self) -> &mut [Unregistered] {
        &mut self.ranks
    }

    /// The commands below which a rank runs that has not registered, each with the time at which
    /// the newest of these ranks was started, CLOCK_MONOTONIC nanoseconds.
    #[must_use]
    pub(super) fn starting(&self, now_ns: u64) -> BTreeMap<ProcessId, u64> {
        let mut starting = BTreeMap::new();
        for rank in self.ranks.iter().filter(|rank| !rank.is_over()) {
            let started_ns = process::started_ns(rank.start, now_ns);
            for LaunchedCommand { process: command, .. } in &self.commands {
                if rank.ancestors.contains(&(command.pid, command.start)) {
                    let newest_ns: &mut u64 = starting.entry((command.pid, command.start)).or_default();
                    *newest_ns = started_ns.max(*newest_ns);
                }
            }
        }
        starting
    }

    /// Removes the entry of a process that has registered.
    pub(super) fn registered(&mut self, process: &Handle) {
        self.ranks.retain(|rank| !rank.is(process.pid, process.start));
    }

    /// Looks for new ranks below the commands that use the collector of this socket.
    /// `is_registered` takes a pid and a start time. Returns the processes that it has looked at:
    /// the commands, what is between them and the ranks, the ranks, and the children of ranks.
    pub(super) fn scan(&mut self, socket: &Path, is_registered: impl Fn(i32, u64) -> bool) -> BTreeSet<ProcessId> {
        self.note_ended_commands();
        let mut seen = BTreeSet::new();
        for LaunchedCommand { process: command, .. } in self.commands.clone() {
            let mut above = vec![command.pid];
            // The descendants of a rank are its helpers, which may be many. Only its children, such
            // as the workers of a pool, are checked.
            let mut registered: Vec<i32> = Vec::new();
            if is_registered(command.pid, command.start) {
                std::mem::swap(&mut above, &mut registered);
            }
            let mut looked_at = 0;
            seen.insert((command.pid, command.start));
            while let Some(parent) = above.pop().filter(|_| looked_at < MAX_BELOW) {
                for pid in procfs::children(parent, MAX_THREADS).unwrap_or_default() {
                    looked_at += 1;
                    let Some(stat) = procfs::stat(pid).ok().filter(|stat| !stat.is_dead()) else { continue };
                    seen.insert((pid, stat.start_time));
                    if is_registered(pid, stat.start_time) {
                        // The command is a shell that started this rank, or an agent.
                        self.registered(&command);
                        registered.push(pid);
                        continue;
                    }
                    let is_known = self.ranks.iter().any(|rank| rank.is(pid, stat.start_time));
                    if !is_known && !self.add_rank(&command, pid, &stat, socket) {
                        above.push(pid);
                    }
                }
            }
            let helpers =
                registered.into_iter().flat_map(|rank| procfs::children(rank, MAX_STARTERS).unwrap_or_default());
            let helpers = helpers.take(MAX_BELOW).filter_map(|pid| Some((pid, procfs::stat(pid).ok()?)));
            seen.extend(helpers.filter(|(_, stat)| !stat.is_dead()).map(|(pid, stat)| (pid, stat.start_time)));
        }
        seen
    }

    /// Adds a process below a command if it is a rank, unless it is the helper of a command that is
    /// a rank itself.
    fn add_rank(&mut self, command: &Handle, pid: i32, stat: &Stat, socket: &Path) -> bool {
        if process::age_ns(stat.start_time) > SETTLED_NS {
            return false;
        }
        let Some(found) = process::found(pid, getuid().as_raw()).filter(|found| found.socket == socket) else {
            return false;
        };
        let identity = |info: &RankInfo| (info.job.clone(), info.rank, info.world_size, info.attempt);
        if command.rank.as_ref().is_some_and(|own| identity(own) == identity(&found.info)) {
            return false;
        }
        let Some(process) = Handle::open(pid).ok().filter(|process| process.start == found.start) else { return false };
        // The command is an agent in a pod: the numbers in its environment are those of the agents.
        self.registered(command);
        self.ranks.push(Unregistered::new(Arc::new(process), found.info, found.instance, found.ancestors));
        true
    }

    /// Notes which ranks have ended by now.
    pub(super) fn note_ended(&mut self, now_ns: u64) {
        for rank in &mut self.ranks {
            if let State::Runs(process) = &rank.state
                && process.is_dead()
            {
                rank.state = State::Ended(now_ns, process.exit());
            }
        }
        while self.ranks.len() > MAX_RANKS
            && let Some(oldest) = self.ranks.iter().position(Unregistered::is_over)
        {
            self.ranks.remove(oldest);
        }
    }

    /// The ranks that run here, or ended here without having registered, one entry for each rank.
    /// `world_start_ns` returns when the first living registered process of a job was started: a
    /// rank that ended before that belongs to another world.
    #[must_use]
    pub(super) fn ranks(&self, world_start_ns: impl Fn(&JobKey) -> Option<u64>, now_ns: u64) -> Vec<&Unregistered> {
        let started_ns = |rank: &Unregistered| process::started_ns(rank.start, now_ns);
        let (over, running): (Vec<&Unregistered>, Vec<&Unregistered>) =
            self.ranks.iter().partition(|rank| rank.is_over());
        let is_of_its_world = |rank: &&Unregistered| {
            let State::Ended(ended_ns, _) = rank.state else { return true };
            let of_its_job = running.iter().copied().filter(|other| other.job == rank.job);
            let first = of_its_job.map(started_ns).min();
            match world_start_ns(&rank.job).into_iter().chain(first).min() {
                Some(world_start_ns) => ended_ns > world_start_ns,
                None => now_ns < ended_ns + FORGET_AFTER_NS,
            }
        };
        let mut ranks: BTreeMap<(&JobKey, i32), &Unregistered> = BTreeMap::new();
        // Prefers the running entry, else the one that ended last. If several run, the oldest is
        // the rank: a process that it has forked may have left its family.
        let mut by_age = running.clone();
        by_age.sort_by_key(|rank| std::cmp::Reverse(rank.start));
        for rank in over.into_iter().filter(is_of_its_world).chain(by_age) {
            ranks.insert((&rank.job, rank.info.rank), rank);
        }
        ranks.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::os::clock::Now;

    /// Starts a process that ends when its input does; with `below`, under a shell that stays.
    fn start(rank: &str, below: bool) -> Child {
        let script = if below { "sh -c 'read _; exit 3'; :" } else { "read _; exit 3" };
        let mut command = Command::new("sh");
        command.args(["-c", script]).env_clear().env("PATH", "/bin:/usr/bin");
        command.envs([("WORLD_SIZE", "2"), ("XPU_TIMER_JOB", "j"), ("XPU_TIMER_SOCKET", "/s")]);
        command.env("LD_PRELOAD", "/nowhere/libxpu_timer_hook.so").stderr(Stdio::null()).stdin(Stdio::piped());
        command.env("RANK", rank).spawn().expect("sh runs")
    }

    fn command(child: &Child) -> Arc<Handle> {
        Arc::new(Handle::of_peer(child.id() as i32).expect("it runs"))
    }

    fn ranks_and_ends(launched: &Launched, world_start_ns: Option<u64>, now: Now) -> Vec<(i32, bool)> {
        let ranks = launched.ranks(|_| world_start_ns, now.mono_ns);
        ranks.iter().map(|rank| (rank.info.rank, rank.is_over())).collect()
    }

    fn wait(child: &mut Child) {
        drop(child.stdin.take());
        child.wait().expect("it ends");
    }

    #[test]
    fn a_command_that_is_a_rank_is_known_until_it_registers_and_after_it_ended() {
        let (mut first, mut second) = (start("0", false), start("1", true));
        let mut launched = Launched::default();
        let handles = [command(&first), command(&second)];
        handles.iter().for_each(|handle| launched.add(Arc::clone(handle)));
        launched.scan(Path::new("/s"), |_, _| false);
        assert_eq!(
            ranks_and_ends(&launched, None, Now::get()),
            [(0, false), (1, false)],
            "what is below rank 1 is its helper"
        );
        launched.registered(&handles[0]);
        assert_eq!(ranks_and_ends(&launched, None, Now::get()), [(1, false)]);
        wait(&mut second);
        let now = Now::get();
        launched.note_ended(now.mono_ns);
        assert_eq!(ranks_and_ends(&launched, Some(now.mono_ns - 1), now), [(1, true)]);
        let Some(State::Ended(_, exit)) = launched.ranks.first().map(|rank| rank.state.clone()) else { panic!() };
        // Kernels before 6.15 do not report the exit of a process that was already waited for.
        assert!(exit.is_none_or(|exit| exit == "exit code 0"));
        assert_eq!(ranks_and_ends(&launched, Some(now.mono_ns + 1), now), [], "it was of a world before");
        let later = Now { mono_ns: now.mono_ns + FORGET_AFTER_NS, ..now };
        assert_eq!(ranks_and_ends(&launched, None, later), []);
        assert_eq!(ranks_and_ends(&launched, Some(1), later), [(1, true)], "as long as the job lives");
        assert!(launched.is_needed());
        wait(&mut first);
        launched.scan(Path::new("/s"), |_, _| false);
        assert!(!launched.is_needed());
    }

    #[test]
    fn the_children_of_a_registered_rank_are_looked_at() {
        let mut rank = start("0", true);
        let pid = rank.id().cast_signed();
        let mut launched = Launched::default();
        launched.add(command(&rank));
        let begun = std::time::Instant::now();
        let child = loop {
            let children = procfs::children(pid, usize::MAX).unwrap_or_default();
            if let Some(child) = children.first() {
                break *child;
            }
            assert!(begun.elapsed().as_secs() < 20, "the shell starts another one");
        };
        let seen = launched.scan(Path::new("/s"), |other, _| other == pid);
        let mut pids: Vec<i32> = seen.into_iter().map(|(pid, _)| pid).collect();
        pids.sort_unstable();
        let mut wanted = [pid, child];
        wanted.sort_unstable();
        assert_eq!(pids, wanted);
        wait(&mut rank);
    }

    #[test]
    fn a_younger_process_never_takes_the_place_of_a_living_older_one() {
        let mut children = [start("0", false), start("0", false)];
        let handles = [command(&children[0]), command(&children[1])];
        // Both may have begun in one tick of the kernel's clock.
        let first = handles[0].start < handles[1].start;
        for order in [[0, 1], [1, 0]] {
            let mut launched = Launched::default();
            order.into_iter().for_each(|at: usize| launched.add(Arc::clone(&handles[at])));
            let ranks = launched.ranks(|_| None, Now::get().mono_ns);
            let pids: Vec<i32> = ranks.iter().map(|rank| rank.info.pid).collect();
            assert!(pids == [handles[0].pid] || !first && pids.len() == 1, "{pids:?} of {handles:?}");
        }
        children.iter_mut().for_each(wait);
    }

    #[test]
    fn the_ranks_of_an_agent_are_found_below_it() {
        let mut agent = Command::new("sh");
        agent.args(["-c", "RANK=4 WORLD_SIZE=8 sh -c 'echo $$; read _; exit 3'; read _; :"]);
        let mut agent = agent.env_clear().env("PATH", "/bin:/usr/bin").env("LD_PRELOAD", "libxpu_timer_hook.so");
        // The number of the agent, as in a pod.
        agent = agent.envs([("XPU_TIMER_SOCKET", "/s"), ("RANK", "1"), ("WORLD_SIZE", "2")]).stderr(Stdio::null());
        let mut agent = agent.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh runs");
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(agent.stdout.take().expect("piped")));
        let pid: i32 = lines.next().expect("a line").expect("text").parse().expect("a pid");
        let mut launched = Launched::default();
        launched.add(command(&agent));
        launched.scan(Path::new("/other"), |_, _| false);
        assert_eq!(ranks_and_ends(&launched, None, Now::get()), [(1, false)], "it uses another collector");
        launched.scan(Path::new("/s"), |other, _| other == pid);
        assert_eq!(ranks_and_ends(&launched, None, Now::get()), [], "a registered process reports for itself");
        launched.scan(Path::new("/s"), |_, _| false);
        assert_eq!(ranks_and_ends(&launched, None, Now::get()), [(4, false)]);
        let fds = launched.fds().count();
        std::io::Write::write_all(agent.stdin.as_mut().expect("piped"), b"\n").expect("it reads");
        let begun = std::time::Instant::now();
        while ranks_and_ends(&launched, None, Now::get()) != [(4, true)] {
            assert!(begun.elapsed().as_secs() < 30, "{launched:?}");
            launched.note_ended(Now::get().mono_ns);
        }
        assert_eq!((fds, launched.fds().count()), (1, 0));
        wait(&mut agent);
    }
}
