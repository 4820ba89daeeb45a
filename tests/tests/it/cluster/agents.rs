//! A job of PyTorch whose agents run on three nodes, which are network namespaces: a rank hangs, the nodes end their ranks after the verdict
//! of all, and the agents start the job again.

use serde_json::json;
use xpu_timer_proto::v1::Presence;
use xpu_timer_tests::{Job, PATIENCE, Process, tree, wait_until};

use super::{evidence, network::Network};
use crate::torch::pypi;

const NODES: u32 = 3;

#[test]
fn agents_on_three_nodes_start_a_job_again_that_hung() {
    let Some(network) = Network::new(NODES) else { return };
    let Some((torch, _turn)) = pypi() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let library_path = torch.library_path().expect("the libraries of stubs");
    let agents: Vec<(Job, Process)> = (1..=NODES)
        .map(|member| {
            let settings = [
                ("XPU_TIMER_HANG_KILL", "1"),
                ("XPU_TIMER_HANG_TIMEOUT", "4"),
                ("XPU_TIMER_SAMPLE_INTERVAL", "1"),
                ("GLOO_SOCKET_IFNAME", "eth0"),
                ("OMP_NUM_THREADS", "1"),
                // Each attempt has a store of its own.
                ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
            ];
            let job = network.job(&cluster, folder.path(), member);
            let job = settings.into_iter().fold(job, |job, (name, value)| job.with(name, value));
            let mut command = job.launch(torch.python());
            command.env("LD_LIBRARY_PATH", &library_path).args(["-m", "torch.distributed.run", "--rdzv-backend=c10d"]);
            command
                .args(["--nproc-per-node=1", "--max-restarts=1", "--rdzv-id=agents"])
                .arg(format!("--nnodes={NODES}"));
            command.arg(format!("--rdzv-endpoint={}:29400", network.address(1)));
            // All have the name of this machine, by which an agent knows whether it is the one that is meant.
            command.arg(format!("--rdzv-conf=is_host={}", u32::from(member == 1)));
            command.arg(format!("--local-addr={}", network.address(member)));
            let process = Process::spawn(command.arg(tree().join("tests/tests/it/cluster/agents.py")));
            (job, process)
        })
        .collect();
    let said = || agents.iter().map(|(_, agent)| format!("{}{}", agent.stdout(), agent.stderr())).collect::<String>();
    let begun = std::time::Instant::now();
    while cluster.job.finished_incidents().is_empty() {
        assert!(begun.elapsed() < 3 * PATIENCE, "no incident\n{}\n{}", cluster.log(), said());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let incident = cluster.job.finished_incidents().remove(0);
    assert_eq!(incident.verdict["cause"], "missing_rank", "{}", incident.verdict);
    assert_eq!(incident.verdict["culprits"], json!([NODES - 1]), "{}", incident.verdict);
    assert!(
        incident.verdict["sentence"].as_str().is_some_and(|text| text.contains("in stay_away")),
        "{}",
        incident.verdict
    );
    let ranks = evidence(&incident).ranks;
    assert_eq!(ranks.iter().map(|rank| rank.presence()).collect::<Vec<_>>(), [Presence::Present; NODES as usize]);

    // The second attempt trains to its end.
    wait_until(3 * PATIENCE, "all ranks are done", || said().matches(" done").count() == NODES as usize);
    for (_, agent) in agents {
        let output = agent.wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    }
    wait_until(PATIENCE, "the incident is closed", || cluster.job.incidents()[0].verdict["status"] != "open");
    assert_eq!(cluster.job.incidents().len(), 1, "the ranks of the second attempt are not to blame: {}", cluster.log());
}
