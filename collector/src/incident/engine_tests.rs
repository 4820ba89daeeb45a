//! Lifecycles of incidents with a simulated clock.

use std::cell::Cell;

use super::*;

const SECOND: u64 = 1_000_000_000;

struct Alive(Cell<bool>);
impl Jobs for Alive {
    fn is_alive(&self, _: &JobKey, attempt: u32) -> bool {
        self.0.get() && attempt == 0
    }

    fn is_outlived(&self, _: &JobKey, _: u32) -> bool {
        false
    }

    fn grace_ns(&self, _: &JobKey, _: u32) -> u64 {
        DEATH_GRACE_NS
    }
}
fn alive() -> Alive {
    Alive(Cell::new(true))
}

fn at(seconds: u64) -> Now {
    Now { mono_ns: seconds * SECOND, unix_ns: (1_795_258_500 + seconds) * SECOND }
}

fn job(name: &str) -> JobKey {
    JobKey { name: name.into(), instance: String::new() }
}

fn operation(pid: i32, ticket: u64) -> Cause {
    Cause::Operation { pid, ticket }
}

fn raise(cause: Cause, since_s: u64) -> RaisedCause {
    let since_ns = since_s * SECOND;
    RaisedCause { job: job("j"), attempt: 0, rank: 2, cause, operation: None, since_ns, late_ns: 0 }
}

fn opened(action: Option<Action>) -> String {
    let Some(Action::Dump(id)) = action else { panic!("opens an incident, not {action:?}") };
    id
}

/// An engine with a dumped incident of a job that hangs in one operation.
fn hung(cause: Cause) -> (Engine, String) {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(cause, 1), at(10)));
    assert_eq!(engine.dump_finished(&id, at(15)), None);
    (engine, id)
}

#[test]
fn all_signals_of_one_hang_join_one_incident() {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(operation(1, 7), 5), at(10)));
    assert_eq!(id, "20261121T105510Z-00000000");
    assert_eq!(engine.raise(raise(operation(2, 7), 5), at(11)), None);
    assert!(engine.hangs(&job("j")) && engine.is_busy());
    assert_eq!(engine.dump_finished(&id, at(15)), None);
    assert_eq!(engine.raise(raise(Cause::Idle, 5), at(20)), None);
    assert_eq!(engine.raise(raise(operation(1, 7), 5), at(21)), None);
    assert_eq!(engine.tick(&alive(), at(100)), []);
    let incident = engine.get(&id).unwrap();
    assert_eq!((incident.state, incident.seen.len()), (State::Dumped, 3));
    assert_eq!(engine.incidents().count(), 1);
}

#[test]
fn an_incident_resolves_when_all_its_causes_are_cleared() {
    let (mut engine, id) = hung(operation(1, 7));
    engine.raise(raise(operation(2, 7), 5), at(16));
    engine.clear_cause(&job("j"), &operation(1, 7), at(20));
    assert_eq!(engine.tick(&alive(), at(30)), [], "rank 2 still waits");
    engine.clear_cause(&job("j"), &operation(2, 7), at(30));
    assert_eq!(engine.tick(&alive(), at(30)), [], "not at once");
    assert_eq!(engine.tick(&alive(), at(31)), [Action::Close(id.clone(), State::Resolved)]);
    assert_eq!(engine.tick(&alive(), at(32)), [], "once");
    assert!(!engine.hangs(&job("j")));
    let second = opened(engine.raise(raise(operation(1, 9), 35), at(40)));
    assert_ne!(second, id);
}

#[test]
fn a_new_signal_right_after_the_last_one_resolved_belongs_to_the_same_incident() {
    let (mut engine, id) = hung(operation(1, 7));
    engine.clear_cause(&job("j"), &operation(1, 7), at(20));
    assert_eq!(engine.raise(raise(operation(1, 8), 5), at(20)), None);
    assert_eq!(engine.tick(&alive(), at(60)), []);
    assert_eq!(engine.get(&id).unwrap().state, State::Dumped);
}

#[test]
fn a_hang_that_resolves_during_its_dump_is_closed_after_it() {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(operation(1, 7), 5), at(10)));
    engine.clear_cause(&job("j"), &operation(1, 7), at(11));
    assert_eq!(engine.tick(&alive(), at(14)), []);
    engine.dump_finished(&id, at(15));
    assert_eq!(engine.tick(&alive(), at(15)), [Action::Close(id, State::Resolved)]);
}

#[test]
fn the_end_of_the_job_ends_its_incident() {
    let (mut engine, id) = hung(operation(1, 7));
    let jobs = alive();
    assert_eq!(engine.tick(&jobs, at(20)), []);
    jobs.0.set(false);
    assert_eq!(engine.tick(&jobs, at(21)), [Action::Close(id, State::Ended)]);
}

#[test]
fn a_job_that_recovers_before_it_ends_counts_as_resolved() {
    let (mut engine, id) = hung(operation(1, 7));
    engine.clear_cause(&job("j"), &operation(1, 7), at(20));
    engine.process_gone(&job("j"), 1, at(20));
    let jobs = alive();
    jobs.0.set(false);
    assert_eq!(engine.tick(&jobs, at(20)), [Action::Close(id, State::Resolved)]);
}

#[test]
fn a_rank_that_leaves_does_not_resolve_what_it_signalled() {
    let (mut engine, id) = hung(operation(1, 7));
    engine.process_gone(&job("j"), 1, at(20));
    assert_eq!(engine.tick(&alive(), at(21)), [Action::Close(id, State::Ended)]);
}

#[test]
fn a_death_has_a_grace_in_which_the_job_may_end() {
    let mut engine = Engine::default();
    let jobs = alive();
    assert_eq!(engine.raise(raise(Cause::Death { pid: 5 }, 10), at(10)), None);
    assert!(engine.is_busy());
    assert_eq!(engine.tick(&jobs, at(11)), []);
    jobs.0.set(false);
    assert_eq!(engine.tick(&jobs, at(12)), []);
    assert!(!engine.is_busy());

    jobs.0.set(true);
    assert_eq!(engine.raise(raise(Cause::Death { pid: 6 }, 20), at(20)), None);
    let actions = engine.tick(&jobs, at(22));
    let id = opened(actions.into_iter().next());
    assert_eq!(engine.get(&id).unwrap().head.trigger.kind(), TriggerKind::Death);
    engine.dump_finished(&id, at(25));
    engine.process_gone(&job("j"), 6, at(26));
    assert_eq!(engine.tick(&jobs, at(60)), [], "a death does not resolve by being a death");
    engine.clear_cause(&job("j"), &Cause::Death { pid: 6 }, at(70));
    assert_eq!(engine.tick(&jobs, at(71)), [Action::Close(id, State::Resolved)]);
}

#[test]
fn a_death_joins_an_open_incident_at_once() {
    let (mut engine, id) = hung(operation(1, 7));
    assert_eq!(engine.raise(raise(Cause::Death { pid: 5 }, 20), at(20)), None);
    assert!(engine.get(&id).unwrap().causes.contains(&Cause::Death { pid: 5 }));
    assert!(!engine.is_busy());
}

#[test]
fn jobs_and_attempts_have_incidents_of_their_own() {
    let mut engine = Engine::default();
    let first = opened(engine.raise(raise(operation(1, 7), 5), at(10)));
    let other = RaisedCause { job: job("k"), ..raise(operation(9, 7), 5) };
    let second = opened(engine.raise(other, at(10)));
    assert_ne!(first, second);
    let next = RaisedCause { attempt: 1, ..raise(operation(3, 7), 5) };
    opened(engine.raise(next, at(11)));
    assert_eq!(engine.incidents().count(), 3);
}

#[test]
fn a_manual_dump_is_not_a_hang_and_closes_when_done() {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(Cause::Manual, 10), at(10)));
    assert!(!engine.hangs(&job("j")));
    assert_eq!(engine.raise(raise(Cause::Manual, 11), at(11)), None, "one at a time");
    assert_eq!(engine.dump_in_progress(&job("j")).unwrap().head.id, id);
    assert_eq!(engine.dump_finished(&id, at(15)), Some(Action::Close(id, State::Ended)));
    assert!(engine.dump_in_progress(&job("j")).is_none());
}

#[test]
fn a_hang_during_a_dump_by_hand_takes_it_over() {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(Cause::Manual, 10), at(10)));
    assert_eq!(engine.raise(raise(operation(1, 7), 5), at(11)), None);
    assert_eq!(engine.dump_finished(&id, at(15)), None);
    assert!(engine.hangs(&job("j")));
}

#[test]
fn a_hang_that_was_dumped_can_be_dumped_again_by_hand() {
    let (mut engine, id) = hung(operation(1, 7));
    let manual = opened(engine.raise(raise(Cause::Manual, 20), at(20)));
    assert_ne!(manual, id);
    assert_eq!(engine.raise(raise(operation(2, 7), 5), at(21)), None);
    assert!(engine.get(&id).unwrap().causes.contains(&operation(2, 7)), "signals join the hang");
    assert!(!engine.get(&manual).unwrap().is_hang());
}

fn record(seen: Cause) -> Record {
    Record {
        id: "20261121T105510Z-00000000".into(),
        job: "j".into(),
        opened_unix_ns: at(10).unix_ns,
        opened_mono_ns: at(10).mono_ns,
        dumped_mono_ns: at(15).mono_ns,
        seen: BTreeSet::from([seen]),
        ..Record::default()
    }
}

#[test]
fn after_a_restart_the_same_hang_is_the_same_incident() {
    let mut engine = Engine::default();
    engine.adopt(record(operation(1, 7)), 10 * SECOND, at(100));
    assert!(!engine.hangs(&job("j")), "not before a signal comes");
    let resumed = Some(Action::Resume(record(Cause::Idle).id));
    assert_eq!(engine.raise(raise(operation(1, 7), 5), at(101)), resumed);
    assert_eq!(engine.raise(raise(operation(2, 7), 5), at(101)), None, "it joins");
    assert!(engine.hangs(&job("j")));
    assert_eq!(engine.tick(&alive(), at(200)), []);
    engine.clear_cause(&job("j"), &operation(1, 7), at(210));
    engine.clear_cause(&job("j"), &operation(2, 7), at(210));
    assert_eq!(engine.tick(&alive(), at(211)), [Action::Close(record(Cause::Idle).id, State::Resolved)]);
}

#[test]
fn after_a_restart_a_rank_with_an_equally_old_operation_joins() {
    let mut engine = Engine::default();
    engine.adopt(record(operation(1, 7)), 10 * SECOND, at(100));
    assert!(matches!(engine.raise(raise(operation(2, 3), 14), at(101)), Some(Action::Resume(_))));
    assert_eq!(engine.incidents().count(), 1);
}

#[test]
fn a_hang_waits_for_the_search_for_older_incidents() {
    let mut engine = Engine::default();
    engine.begin_search(at(100));
    assert_eq!(engine.raise(raise(operation(1, 7), 5), at(100)), None);
    assert_eq!((engine.tick(&alive(), at(100)), engine.incidents().count()), (vec![], 0));
    engine.adopt(record(operation(1, 7)), 10 * SECOND, at(100));
    engine.end_search();
    assert_eq!(engine.tick(&alive(), at(100)), [Action::Resume(record(Cause::Idle).id)]);
    assert_eq!(engine.incidents().count(), 1);
}

#[test]
fn a_hang_does_not_wait_for_a_disk_that_does_not_answer() {
    let mut engine = Engine::default();
    engine.begin_search(at(100));
    assert_eq!(engine.raise(raise(operation(1, 7), 99), at(100)), None);
    // An operation that has ended in the meantime opens nothing.
    assert_eq!(engine.raise(raise(operation(2, 7), 99), at(100)), None);
    engine.clear_cause(&job("j"), &operation(2, 7), at(100));
    assert!(matches!(engine.tick(&alive(), at(101)).as_slice(), [Action::Dump(_)]));
    assert_eq!(engine.incidents().next().unwrap().seen, BTreeSet::from([operation(1, 7)]));
}

#[test]
fn after_a_restart_a_younger_hang_replaces_the_old_incident() {
    let mut engine = Engine::default();
    engine.adopt(record(operation(1, 7)), 10 * SECOND, at(100));
    opened(engine.raise(raise(operation(1, 9), 90), at(101)));
    assert_eq!(engine.tick(&alive(), at(109)), []);
    assert_eq!(engine.tick(&alive(), at(110)), [Action::Close(record(Cause::Idle).id, State::Resolved)]);
}

#[test]
fn a_flapping_job_gets_a_burst_of_dumps_and_is_then_throttled() {
    let mut engine = Engine::default();
    let jobs = alive();
    let flap = |engine: &mut Engine, start: u64| {
        let cause = operation(1, start);
        let action = engine.raise(raise(cause.clone(), start), at(start));
        if let Some(Action::Dump(id)) = &action {
            engine.dump_finished(id, at(start + 1));
        }
        assert!(engine.hangs(&job("j")), "it hangs, whether an incident is opened or not");
        (action, cause)
    };
    for start in [100, 110, 120, 130] {
        let (action, cause) = flap(&mut engine, start);
        opened(action);
        engine.clear_cause(&job("j"), &cause, at(start + 2));
        assert_eq!(engine.tick(&jobs, at(start + 5)).len(), 1, "it resolves");
    }
    // The fifth is deferred, and dropped when its cause is over.
    let (action, cause) = flap(&mut engine, 140);
    assert_eq!((action, engine.deferred.len()), (None, 1));
    engine.clear_cause(&job("j"), &cause, at(142));
    assert!(!engine.hangs(&job("j")) && engine.tick(&jobs, at(2000)).is_empty());
    // A cause that lasts opens an incident as soon as the throttle allows it.
    let mut engine = Engine::default();
    for start in [100, 110, 120, 130] {
        let (action, cause) = flap(&mut engine, start);
        opened(action);
        engine.clear_cause(&job("j"), &cause, at(start + 2));
        engine.tick(&jobs, at(start + 5));
    }
    flap(&mut engine, 140);
    assert_eq!(engine.tick(&jobs, at(900)), []);
    assert!(matches!(&engine.tick(&jobs, at(1001))[..], [Action::Dump(_)]));
    // The throttle affects neither another job nor a dump by hand.
    let other = RaisedCause { job: job("k"), ..raise(operation(9, 9), 1002) };
    opened(engine.raise(other, at(1002)));
    assert_eq!(engine.deferred.len(), 0);
}

#[test]
fn a_node_part_ends_with_the_cluster_incident_and_its_own_causes() {
    let mut engine = Engine::default();
    let jobs = alive();
    engine.open_for_cluster("wide", &job("j"), 0, Trigger::default(), at(10));
    assert!(engine.hangs(&job("j")) && !engine.has_local_problem(&job("j")));
    assert_eq!(engine.raise(raise(operation(1, 7), 5), at(11)), None, "it joins");
    assert!(engine.has_local_problem(&job("j")));
    engine.dump_finished("wide", at(12));
    engine.clear_cause(&job("j"), &operation(1, 7), at(13));
    assert_eq!(engine.tick(&jobs, at(20)), [], "it still hangs elsewhere");
    engine.clear_cause(&job("j"), &Cause::Cluster, at(21));
    assert_eq!(engine.tick(&jobs, at(23)), [Action::Close("wide".into(), State::Resolved)]);

    // An incident of this node is renamed to the one that another node has opened.
    let own = opened(engine.raise(raise(operation(1, 8), 30), at(30)));
    engine.rename(&own, "other");
    assert!(engine.get(&own).is_none() && engine.get("other").is_some_and(|one| one.causes.len() == 2));
    engine.discard("other");
    assert!(!engine.hangs(&job("j")));
}

#[test]
fn a_job_that_is_killed_and_started_again_is_not_an_incident() {
    let mut engine = Engine::default();
    let jobs = alive();
    for pid in [5, 6] {
        assert_eq!(engine.raise(raise(Cause::Death { pid }, 10), at(10)), None);
    }
    let other = RaisedCause { job: job("k"), ..raise(Cause::Death { pid: 7 }, 10) };
    assert_eq!(engine.raise(other, at(10)), None);
    engine.process_replaced(&job("j"), 5, at(11));
    let actions = engine.tick(&jobs, at(12));
    let id = opened(actions.first().cloned());
    assert_eq!((actions.len(), &engine.get(&id).unwrap().head.job), (1, &job("k")));
    engine.process_replaced(&job("j"), 6, at(12));
    assert_eq!(engine.tick(&jobs, at(60)), []);

    // A rank that is not replaced is still missed.
    for pid in [8, 9] {
        assert_eq!(engine.raise(raise(Cause::Death { pid }, 70), at(70)), None);
    }
    engine.process_replaced(&job("j"), 8, at(71));
    assert_eq!(engine.tick(&jobs, at(72)), []);
    let id = opened(engine.tick(&jobs, at(73)).into_iter().next());
    assert_eq!(engine.get(&id).unwrap().seen, BTreeSet::from([Cause::Death { pid: 9 }]));
}

#[test]
fn a_hang_of_a_new_world_with_an_equal_attempt_opens_another_incident() {
    let mut engine = Engine::default();
    engine.open_for_cluster("1", &job("j"), 0, Trigger::default(), at(5));
    engine.dump_finished("1", at(6));
    // The ranks must end, and those of the next world are running; the cluster has not confirmed
    // yet.
    engine.world_began(&job("j"));
    let second = opened(engine.raise(raise(operation(9, 1), 8), at(10)));
    assert_eq!(engine.tick(&alive(), at(10)), [Action::Close("1".into(), State::Ended)]);
    // It does not join a later round of the first one either.
    engine.open_for_cluster("1", &job("j"), 0, Trigger::default(), at(11));
    assert_eq!(engine.raise(raise(operation(9, 2), 9), at(12)), None);
    assert!(engine.get("1").unwrap().causes.iter().all(|cause| *cause == Cause::Cluster));
    assert_eq!(engine.get(&second).unwrap().causes.len(), 2);
    assert!(engine.has_local_problem(&job("j")));
}

#[test]
fn a_job_that_recovers_and_is_started_again_was_resolved() {
    let (mut engine, id) = hung(operation(1, 7));
    engine.clear_cause(&job("j"), &operation(1, 7), at(20));
    engine.world_began(&job("j"));
    assert_eq!(engine.tick(&alive(), at(20)), [Action::Close(id, State::Resolved)]);
}

#[test]
fn causes_follow_their_process_to_another_job() {
    let mut engine = Engine::default();
    let id = opened(engine.raise(raise(operation(1, 7), 5), at(10)));
    engine.raise(raise(operation(2, 7), 5), at(11));
    engine.raise(raise(Cause::Death { pid: 3 }, 11), at(11));
    assert_eq!(engine.reassign_causes(|_| Some(job("j")), at(12)), []);
    // Two jobs of one name: process 2 belongs to the other one.
    let of = |pid: i32| Some(job(if pid == 2 { "k" } else { "j" }));
    assert_eq!(engine.reassign_causes(of, at(12)), [operation(2, 7)]);
    assert_eq!(engine.get(&id).unwrap().causes, BTreeSet::from([operation(1, 7), Cause::Death { pid: 3 }]));
    let other = opened(engine.raise(RaisedCause { job: job("k"), ..raise(operation(2, 7), 12) }, at(12)));
    assert!(engine.hangs(&job("k")) && engine.get(&other).unwrap().head.job == job("k"));
    // The job of the first process gets another name: its incident follows.
    assert_eq!(engine.reassign_causes(|pid| Some(job(if pid == 2 { "k" } else { "l" })), at(13)), []);
    assert_eq!(engine.get(&id).unwrap().head.job, job("l"));
    // A process takes back its cause, whichever job it is assigned to.
    engine.clear_cause(&job("j"), &operation(2, 7), at(14));
    assert_eq!(engine.get(&other).unwrap().causes, BTreeSet::new());
}

#[test]
fn records_of_earlier_releases_are_read() {
    let of_node = r#"{"id": "1", "boot": "b", "job": "j", "instance": "i", "attempt": 2, "opened_unix_ns": 3,
        "opened_mono_ns": 4, "dumped_mono_ns": 5, "seen": [{"kind": "operation", "pid": 6, "ticket": 7}]}"#;
    let record: Record = serde_json::from_str(of_node).unwrap();
    assert_eq!((record.boot.as_str(), record.dumped_mono_ns), ("b", 5));
    assert_eq!(record.seen, BTreeSet::from([operation(6, 7)]));
    let head = record.head(record.opened_mono_ns);
    assert_eq!((head.job.instance.as_str(), head.attempt, head.opened.mono_ns, head.late_ns), ("i", 2, 4, 0));
    let of_cluster = r#"{"id": "1", "job": "j", "instance": "i", "attempt": 2, "opened_unix_ns": 3, "late_ns": 8,
        "trigger": [8, 1, 16, 5]}"#;
    let head = serde_json::from_str::<Record>(of_cluster).unwrap().head(9);
    assert_eq!((head.late_ns, head.opened), (8, Now { mono_ns: 9, unix_ns: 3 }));
    assert_eq!((head.trigger.kind(), head.trigger.rank), (TriggerKind::Operation, 5));
    assert_eq!(Record::new(&head).head(9).trigger, head.trigger);
}

#[test]
fn a_mild_verdict_costs_no_incident_and_its_causes_are_examined_under_another_name() {
    let mut engine = Engine::default();
    let operation = |ticket| Cause::Operation { pid: 7, ticket };
    // More often than incidents may follow each other.
    for round in 0..20 {
        let raise = RaisedCause {
            job: job("j"),
            attempt: 0,
            rank: 0,
            cause: operation(round),
            operation: None,
            since_ns: at(10 * round).mono_ns,
            late_ns: 0,
        };
        let Some(Action::Dump(id)) = engine.raise(raise, at(10 * round)) else { panic!("round {round}") };
        assert!(!engine.found_mild(&id, at(10 * round + 1)), "it is not only idle");
        assert!(engine.restart_dump(&id));
        let renamed = engine.rename_examined(&id, at(10 * round + 2)).expect("it is there");
        assert!(renamed != id && engine.get(&id).is_none());
        assert_eq!(engine.get(&renamed).map(|incident| incident.state), Some(State::Open));
        assert!(!engine.found_mild(&renamed, at(10 * round + 3)));
        engine.clear_cause(&job("j"), &operation(round), at(10 * round + 3));
        let closed = engine.tick(&alive(), at(10 * round + 5));
        assert_eq!(closed, [Action::Close(renamed, State::Resolved)]);
    }
}
