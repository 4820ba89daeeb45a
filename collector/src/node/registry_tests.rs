//! Processes that register, change and end.

use std::process::{Child, Command};

use xpu_timer_proto::env::Source;

use super::*;
use crate::node::launched::Launched;

struct Sleeper(Child);
impl Sleeper {
    fn new() -> Self {
        Sleeper(Command::new("sleep").arg("600").env_clear().env("PATH", "/bin:/usr/bin").spawn().unwrap())
    }
    fn handle(&self) -> Option<Arc<Handle>> {
        Some(Arc::new(Handle::of_peer(self.0.id() as i32).unwrap()))
    }
}
impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn settings() -> Settings {
    Settings::new(&Source::new(|_| None, ""), None, 0)
}

fn hello(rank: i32, attempt: u32) -> Hello {
    let rank = RankInfo { rank, world_size: 4, attempt, job: "j".into(), ..Default::default() };
    Hello { rank: Some(rank), ..Default::default() }
}

fn job() -> JobKey {
    JobKey { name: "j".into(), instance: String::new() }
}

fn ranks(registry: &Registry) -> Vec<(i32, Presence)> {
    registry.of_job(&job()).iter().map(|rank| (rank.info.rank, rank.presence)).collect()
}

#[test]
fn a_goodbye_leaves_and_a_lost_connection_detaches_until_the_process_ends() {
    let (a, b) = (Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    registry.hello(10, a.handle(), (&hello(1, 0), None), &settings(), &mut [], 5);
    let second = registry.hello(11, b.handle(), (&hello(0, 0), None), &settings(), &mut [], 5).id;
    assert_eq!(ranks(&registry), [(0, Presence::Present), (1, Presence::Present)]);
    let left = registry.goodbye(10, 6).unwrap();
    registry.disconnected(10);
    assert_eq!(registry.disconnected(11), Some(second));
    assert_eq!(ranks(&registry), [(0, Presence::Detached), (1, Presence::Left)]);
    assert!(!registry.ended(left, Some("exit code 0".into()), 7), "it had said goodbye");
    assert!(registry.ended(second, Some("killed by SIGKILL".into()), 7));
    // The end of its connection and that of its process may both be noticed.
    let failed = [left, second, second].map(|id| registry.newly_failed(id).is_some());
    assert_eq!(failed, [false, true, false], "a failure is reported once");
    assert_eq!(ranks(&registry), [(0, Presence::Dead), (1, Presence::Left)]);
    assert!(!registry.is_alive(&job()));
    registry.forget(8);
    assert_eq!(registry.ranks().count(), 2);
    registry.forget(8 + FORGET_AFTER_NS);
    assert_eq!(registry.ranks().count(), 0);
}

#[test]
fn a_reconnecting_process_keeps_its_entry_and_a_reused_pid_gets_a_new_one() {
    let a = Sleeper::new();
    let mut registry = Registry::default();
    let first = registry.hello(1, a.handle(), (&hello(0, 0), None), &settings(), &mut [], 1).id;
    registry.disconnected(1);
    let again = registry.hello(2, a.handle(), (&hello(0, 0), None), &settings(), &mut [], 2).id;
    assert_eq!((first, ranks(&registry)), (again, vec![(0, Presence::Present)]));
    let mut reused = Handle::of_peer(a.0.id() as i32).unwrap();
    reused.start += 1;
    assert!(registry.ended(again, None, 3));
    let other = registry.hello(3, Some(Arc::new(reused)), (&hello(0, 0), None), &settings(), &mut [], 4).id;
    assert_ne!(other, first);
    assert_eq!(ranks(&registry), [(0, Presence::Present)]);
    assert_eq!(registry.get(first).unwrap().presence, Presence::Left);
}

#[test]
fn a_new_attempt_supersedes_the_old_one() {
    let (a, b, c) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    let old = registry.hello(1, a.handle(), (&hello(0, 0), None), &settings(), &mut [], 1).id;
    registry.hello(2, b.handle(), (&hello(1, 0), None), &settings(), &mut [], 1);
    let result = registry.hello(3, c.handle(), (&hello(0, 1), None), &settings(), &mut [], 2);
    assert!(result.new_attempt && result.new_world && result.remark.is_none());
    assert_eq!(ranks(&registry), [(0, Presence::Present)], "rank 1 of attempt 0 is not a rank of attempt 1");
    assert_eq!(registry.get(old).unwrap().presence, Presence::Left);
}

/// A process of an agent, which gives each attempt a port of its own.
fn of_agent(sleeper: &Sleeper, agent: i32, port: &str) -> Option<Arc<Handle>> {
    let mut handle = Handle::of_peer(sleeper.0.id() as i32).unwrap();
    (handle.instance, handle.ancestors) = (format!("localhost:{port}"), vec![(agent, 1), (2, 1)]);
    handle.launched = Some((2, 1));
    Some(Arc::new(handle))
}

#[test]
fn an_attempt_with_another_port_supersedes_the_one_before_it() {
    let sleepers = [Sleeper::new(), Sleeper::new(), Sleeper::new()];
    let mut registry = Registry::default();
    let old = registry.hello(1, of_agent(&sleepers[0], 5, "1"), (&hello(0, 0), None), &settings(), &mut [], 1).id;
    let old_job = registry.get(old).unwrap().job.clone();
    registry.goodbye(1, 2);
    // It is of another agent, and so perhaps of another job.
    registry.hello(2, of_agent(&sleepers[1], 6, "2"), (&hello(0, 1), None), &settings(), &mut [], 3);
    assert!(!registry.get(old).unwrap().is_past());
    let result = registry.hello(3, of_agent(&sleepers[2], 5, "3"), (&hello(0, 1), None), &settings(), &mut [], 4);
    assert_eq!((&result.superseded[..], result.new_world), (&[old][..], true));
    assert_ne!(registry.get(result.id).unwrap().job, old_job);
    assert!(registry.get(old).unwrap().is_past());
}

#[test]
fn a_process_without_a_rank_that_is_started_again_supersedes_the_one_that_failed() {
    let sleepers: Vec<Sleeper> = (0..5).map(|_| Sleeper::new()).collect();
    let worker = |command: &str| {
        let rank = RankInfo { rank: -1, job: "j".into(), command: command.into(), ..Default::default() };
        Hello { rank: Some(rank), ..Default::default() }
    };
    let mut registry = Registry::default();
    let mut add = |index: usize, agent: i32, command: &str, at_ns: u64, fails: bool| {
        let process = of_agent(&sleepers[index], agent, "1");
        let connection = index as u64 + 1;
        let added = registry.hello(connection, process, (&worker(command), None), &settings(), &mut [], at_ns);
        if fails {
            assert!(registry.ended(added.id, Some("exit code 1".into()), at_ns + 1));
        }
        (added.id, added.superseded)
    };
    let (failed, _) = add(0, 5, "worker 1", 1, true);
    assert!(add(1, 5, "worker 2", 3, false).1.is_empty(), "it has another command");
    assert!(add(2, 6, "worker 1", 3, false).1.is_empty(), "it has another parent");
    let (again, superseded) = add(3, 5, "worker 1", 4, true);
    assert_eq!(superseded, [failed]);
    assert_eq!(add(4, 5, "worker 1", 6, false).1, [again], "only one that nothing has replaced yet");
    assert!(registry.get(failed).unwrap().is_past());
}

#[test]
fn a_member_of_a_communicator_is_not_superseded_by_a_process_with_its_command() {
    let sleepers = [Sleeper::new(), Sleeper::new()];
    let rank = RankInfo { rank: -1, job: "j".into(), command: "worker".into(), ..Default::default() };
    let hello = Hello { rank: Some(rank), ..Default::default() };
    let mut registry = Registry::default();
    let old = registry.hello(1, of_agent(&sleepers[0], 5, "1"), (&hello, None), &settings(), &mut [], 1).id;
    registry.set_communicators(old, vec![CommunicatorRank { id: 7, size: 2, rank: 0, unique: true }]);
    registry.ended(old, None, 2);
    let new = registry.hello(2, of_agent(&sleepers[1], 5, "1"), (&hello, None), &settings(), &mut [], 3);
    assert!(new.superseded.is_empty(), "its peers may wait for it");
}

#[test]
fn ranks_that_a_launcher_has_started_since_the_end_of_others_count_before_they_register() {
    let sleeper = Sleeper::new();
    let mut registry = Registry::default();
    let old = registry.hello(1, of_agent(&sleeper, 5, "1"), (&hello(0, 0), None), &settings(), &mut [], 1).id;
    let job = registry.get(old).unwrap().job.clone();
    registry.note_starting(BTreeMap::from([((2, 1), 20)]));
    assert!(!registry.is_restarted(&job, 0), "it runs");
    registry.goodbye(1, 10);
    assert!(registry.is_restarted(&job, 0));
    registry.note_starting(BTreeMap::from([((2, 1), 9)]));
    assert!(!registry.is_restarted(&job, 0), "that one began before, and never registered");
    registry.note_starting(BTreeMap::from([((3, 1), 20)]));
    assert!(!registry.is_restarted(&job, 0), "that one is of another command");
}

#[test]
fn a_world_started_after_the_previous_one_ended_is_new() {
    let (a, b, c, d) = (Sleeper::new(), Sleeper::new(), Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    let second = 1_000_000_000;
    registry.hello(1, a.handle(), (&hello(2, 0), None), &settings(), &mut [], second);
    registry.hello(2, b.handle(), (&hello(3, 0), None), &settings(), &mut [], second);
    registry.goodbye(1, 2 * second);
    // The other rank still lives: a rank that registers now belongs to its world.
    assert!(!registry.hello(3, c.handle(), (&hello(1, 0), None), &settings(), &mut [], 9 * second).new_world);
    let left = Presence::Left;
    assert_eq!(ranks(&registry), [(1, Presence::Present), (2, left), (3, Presence::Present)]);
    registry.goodbye(2, 10 * second);
    registry.goodbye(3, 10 * second);
    // The attempt is the same, because the job has only shrunk.
    let result = registry.hello(4, d.handle(), (&hello(0, 0), None), &settings(), &mut [], 20 * second);
    assert!(result.new_attempt && result.new_world && result.superseded.len() == 3);
    assert_eq!(ranks(&registry), [(0, Presence::Present)]);
    // A restarted agent counts from 0 again.
    registry.goodbye(4, 30 * second);
    registry.hello(5, a.handle(), (&hello(0, 1), None), &settings(), &mut [], 40 * second);
    registry.goodbye(5, 50 * second);
    registry.hello(6, c.handle(), (&hello(1, 0), None), &settings(), &mut [], 60 * second);
    assert_eq!(ranks(&registry), [(1, Presence::Present)]);
}

#[test]
fn a_rank_that_ends_before_the_others_register_belongs_to_their_world() {
    let (early, late) = (Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    let second = 1_000_000_000;
    let first = registry.hello(1, early.handle(), (&hello(2, 0), None), &settings(), &mut [], 10 * second).id;
    assert!(registry.ended(first, Some("exit code 1".into()), 10 * second + 1));
    // It was started half a second before the other one registered.
    let mut started_before = Handle::of_peer(late.0.id() as i32).unwrap();
    started_before.start -= 70;
    let (process, now_ns) = (Some(Arc::new(started_before)), 10 * second + second / 5);
    let result = registry.hello(2, process, (&hello(0, 0), None), &settings(), &mut [], now_ns);
    assert!(!result.new_world && result.superseded.is_empty(), "{result:?}");
    assert_eq!(ranks(&registry), [(0, Presence::Present), (2, Presence::Dead)]);
}

#[test]
fn a_late_ending_rank_of_another_world_size_belongs_to_another_world() {
    let (a, b, c) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    let second = 1_000_000_000;
    registry.hello(1, a.handle(), (&hello(2, 0), None), &settings(), &mut [], second);
    registry.goodbye(1, 20 * second);
    // A process that existed before that.
    let same = registry.hello(2, b.handle(), (&hello(1, 0), None), &settings(), &mut [], 9 * second);
    assert!(!same.new_world && registry.of_job(&job()).len() == 2);
    registry.goodbye(2, 20 * second);
    let mut smaller = hello(0, 0);
    smaller.rank.as_mut().unwrap().world_size = 1;
    assert!(registry.hello(3, c.handle(), (&smaller, None), &settings(), &mut [], 9 * second).new_world);
    assert_eq!(ranks(&registry), [(0, Presence::Present)]);
}

#[test]
fn a_helper_of_a_rank_is_not_a_rank() {
    // The shell stays the parent of a process that inherited its variables.
    let shell = Sleeper(Command::new("sh").args(["-c", "sleep 600 & wait"]).spawn().unwrap());
    let mut child = None;
    while child.is_none() {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.0.id())).unwrap();
        child = children.trim().parse::<i32>().ok();
    }
    let child = child.unwrap();
    let mut registry = Registry::default();
    let helper = Some(Arc::new(Handle::of_peer(child).unwrap()));
    let parent = registry.hello(1, shell.handle(), (&hello(0, 0), None), &settings(), &mut [], 1).id;
    let helper = registry.hello(2, helper, (&hello(0, 0), None), &settings(), &mut [], 2).id;
    assert!(registry.get(helper).unwrap().auxiliary && !registry.get(parent).unwrap().auxiliary);
    assert_eq!(registry.of_job(&job())[0].id, parent);
    Handle::open(child).unwrap().signal(nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn a_younger_process_with_a_living_rank_number_belongs_to_another_job() {
    let sleepers: Vec<Sleeper> = (0..4).map(|_| Sleeper::new()).collect();
    let mut registry = Registry::default();
    let join = |registry: &mut Registry, number: usize, rank: i32| {
        let handle = sleepers[number].handle();
        registry.hello(number as u64, handle, (&hello(rank, 0), None), &settings(), &mut [], 1)
    };
    let first = join(&mut registry, 0, 0).id;
    let second = join(&mut registry, 1, 0);
    assert!(second.superseded.is_empty() && second.remark.unwrap().contains("XPU_TIMER_JOB"));
    assert_eq!(registry.of_job(&job())[0].id, first);
    let other = JobKey::of_process("j", "", sleepers[1].0.id() as i32);
    assert_eq!((registry.of_job(&other)[0].id, registry.jobs().len()), (second.id, 2));
    // The jobs of the others are known once they have created communicators.
    let (third, fourth) = (join(&mut registry, 2, 1).id, join(&mut registry, 3, 1).id);
    for (id, communicator, rank) in [(first, 7, 0), (second.id, 8, 0), (third, 8, 1), (fourth, 7, 1)] {
        registry.set_communicators(id, vec![CommunicatorRank { id: communicator, size: 4, rank, unique: true }]);
    }
    registry.rejoin(&mut [], 2);
    let of = |job: &JobKey| registry.of_job(job).iter().map(|rank| rank.id).collect::<Vec<_>>();
    assert_eq!((of(&job()), of(&other)), (vec![first, fourth], vec![second.id, third]));
    assert!(!registry.rejoin(&mut [], 3), "and stays so");
    // A job keeps its key when the other one has ended.
    registry.goodbye(0, 4);
    registry.goodbye(3, 4);
    registry.ended(first, None, 4);
    registry.ended(fourth, None, 4);
    registry.rejoin(&mut [], 5);
    registry.forget(4 + FORGET_AFTER_NS);
    registry.rejoin(&mut [], 6);
    assert_eq!(registry.jobs(), BTreeSet::from([other.clone()]));
    assert_eq!(registry.of_job(&other).len(), 2);
}

#[test]
fn an_unregistered_rank_joins_the_job_that_lacks_its_rank() {
    let (a, b, c) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    registry.hello(0, a.handle(), (&hello(0, 0), None), &settings(), &mut [], 1);
    registry.hello(1, b.handle(), (&hello(0, 0), None), &settings(), &mut [], 1);
    let other = registry.jobs().into_iter().find(|other| *other != job()).unwrap();
    registry.hello(2, c.handle(), (&hello(1, 0), None), &settings(), &mut [], 1);
    let first_has = registry.of_job(&job()).len();
    let mut launched = Launched::default();
    let mut child = Command::new("sleep");
    let child = child.arg("600").env_clear().env("PATH", "/bin:/usr/bin").envs([("RANK", "1"), ("WORLD_SIZE", "4")]);
    let unregistered = Sleeper(child.env("XPU_TIMER_JOB", "j").spawn().unwrap());
    launched.add(unregistered.handle().unwrap());
    registry.rejoin(launched.unregistered(), 2);
    let wanted = if first_has == 2 { other } else { job() };
    assert_eq!(launched.unregistered()[0].job, wanted);
}

#[test]
fn processes_without_a_rank_are_separate_jobs_until_they_get_one() {
    let (a, b) = (Sleeper::new(), Sleeper::new());
    let mut registry = Registry::default();
    for (connection, sleeper) in [(1, &a), (2, &b)] {
        registry.hello(connection, sleeper.handle(), (&hello(-1, 0), None), &settings(), &mut [], 1);
    }
    assert_eq!(registry.jobs().len(), 2);
    for (connection, rank) in [(1, 0), (2, 1)] {
        registry.changed(connection, hello(rank, 0).rank.unwrap(), &mut [], 2).unwrap();
    }
    assert_eq!(ranks(&registry), [(0, Presence::Present), (1, Presence::Present)]);
    assert_eq!(registry.changed(9, RankInfo::default(), &mut [], 2), None);
}
