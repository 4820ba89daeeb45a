//! Two jobs of one name over two nodes each, which nothing but their communicators tells apart.

use std::{collections::BTreeSet, fs};

use xpu_timer_proto::{
    Message as _,
    ring::{comm, offset, pack_halves},
    server::Stacktrace,
};

use super::{Cluster, Node};
use crate::collector::fake::FakeHook;

const WORLD: u32 = 4;

/// The rank makes the communicator of its job's world.
fn make_communicator(hook: &mut FakeHook, id: u64) {
    let rank = hook.hello.rank.as_ref().expect("a rank").rank;
    let entry = offset::COMMS / 8;
    for (word, value) in [(comm::SIZE_RANK, pack_halves(WORLD, rank as u32)), (comm::UNIQUE, 1), (comm::ID, id)] {
        hook.word(entry + word, value);
    }
}

#[test]
fn two_jobs_of_one_name_over_two_nodes_each() {
    let cluster = Cluster::new();
    let mut nodes = [Node::new(&cluster, "node-a"), Node::new(&cluster, "node-b")];
    // Which of the two comes first is not the same on both nodes.
    let order = [[0xa1, 0xb2], [0xb2, 0xa1]];
    for (number, (node, jobs)) in nodes.iter_mut().zip(order).enumerate() {
        for id in jobs {
            let before = node.hooks.len();
            node.add_ranks("twin", 2 * number as i32, 2, WORLD);
            node.hooks[before..].iter_mut().for_each(|hook| make_communicator(hook, id));
        }
    }
    cluster.wait("two jobs are whole", |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        jobs.len() == 2 && jobs.iter().all(|job| job["ranks"] == WORLD && job["world_size"] == WORLD)
    });
    // A rank of the second job of the second node hangs, which is the first one of the first node.
    nodes[1].hooks[2].hang(3);
    let incident = cluster.wait_finished(1);
    let pid = |path: std::path::PathBuf| Stacktrace::decode(&fs::read(path).unwrap()[..]).unwrap().pid;
    let files = fs::read_dir(&incident.path).unwrap().flatten().map(|entry| entry.path());
    let dumped: BTreeSet<i32> =
        files.filter(|path| path.extension().is_some_and(|end| end == "stacktrace")).map(pid).collect();
    let job = nodes[0].hooks[..2].iter().chain(&nodes[1].hooks[2..]);
    assert_eq!(dumped, job.map(FakeHook::pid).collect(), "{}\n{}", incident.verdict, cluster.log());
    assert!(!cluster.log().contains("is refused") && cluster.job.incidents().len() == 1, "{}", cluster.log());
}
