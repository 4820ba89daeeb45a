//! Nodes on which no rank has registered: what their launchers started takes part all the same.

use xpu_timer_proto::v1::{Presence, RankEvidence};
use xpu_timer_tests::{PATIENCE, Process, python};

use super::{Cluster, Node, evidence};

/// Rank 0 hangs on one node. What became of rank 1, which runs a piece of Python under the launcher of another one, and the sentence.
fn fate(script: &str) -> (RankEvidence, String) {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "silent", 0, 1, 2);
    let b = Node::new(&cluster, "node-b");
    let mut command = b.job.launch(python());
    command.args(["-c", script]).envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("XPU_TIMER_JOB", "silent")]);
    let mut rank = Process::spawn(&mut command);
    rank.wait_for("up", PATIENCE);
    cluster.wait_ranks("silent", 2);
    if script.contains("exit") {
        drop(rank.wait(PATIENCE));
    }
    a.hooks[0].hang(1);
    let incident = cluster.wait_incident(1);
    let mut ranks = evidence(&incident).ranks;
    assert_eq!(ranks.len(), 2, "{}", cluster.log());
    assert_eq!(incident.verdict["errors"].to_string(), "[]", "{}", cluster.log());
    (ranks.remove(1), incident.verdict["sentence"].as_str().expect("a sentence").into())
}

#[test]
fn a_rank_that_runs_and_has_not_registered_is_looked_at_on_its_node() {
    let (rank, sentence) =
        fate("import time\ndef read_shard():\n    time.sleep(600)\nprint('up', flush=True)\nread_shard()");
    assert_eq!((rank.presence(), rank.node.as_str()), (Presence::Unregistered, "node-b"));
    let host = rank.host.expect("facts");
    assert!(host.stack && host.native().contains("nanosleep"), "{host:?}\n{sentence}");
}

#[test]
fn a_rank_that_ended_without_having_registered_is_known_to_have_been_there() {
    let (rank, sentence) = fate("import time\nprint('up', flush=True)\ntime.sleep(3)\nraise SystemExit(3)  # exit");
    assert_eq!((rank.presence(), rank.node.as_str()), (Presence::Dead, "node-b"), "{sentence}");
    assert!(rank.exit.ends_with("before its first device call"), "{rank:?}");
}
