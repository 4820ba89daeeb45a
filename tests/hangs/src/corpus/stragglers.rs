//! Jobs that do not hang, and the ranks that slow them down: exactly these are named, and nobody in
//! an even run.

use crate::{
    program::Program,
    scenario::{Scenario, hybrid, job},
};

pub fn scenarios() -> Vec<Scenario> {
    let sharded =
        |name: &str, world: u32, arguments: &[&str]| job(name, Program::Script("sharded.py"), world, arguments);
    vec![
        hybrid("straggler-two-of-8", 1, 1, 8).device("slow:rank=1,ms=4;slow:rank=6,ms=6").slowed_by(&[1, 6]),
        hybrid("straggler-3d", 2, 2, 2).device("slow:rank=5,ms=8").slowed_by(&[5]),
        job("straggler-pipeline", Program::Script("pipeline.py"), 8, &["--stages=2", "--replicas=4"])
            .device("slow:rank=5,ms=10")
            .slowed_by(&[5]),
        sharded("straggler-host", 8, &["--node=4", "--lazy=40@3"]).slowed_by(&[3]),
        sharded("straggler-two-hosts", 8, &["--node=4", "--lazy=40@0", "--lazy=30@6"]).slowed_by(&[0, 6]),
        sharded("straggler-none", 8, &["--node=4", "--think-ms=40"]).slowed_by(&[]),
        sharded("straggler-jitter", 8, &["--node=2", "--think-ms=40", "--jitter=0.6"]).slowed_by(&[]),
    ]
}
