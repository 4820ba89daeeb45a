//! Runs the commands of docs/cluster.md, each in a shell of its own, on three nodes and a head that
//! are network namespaces.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, lacks, python, skip, tree, wait_until};

use crate::cluster::network::Network;

/// The commands of the page, by the comment above each.
fn commands() -> Vec<(String, String)> {
    let page = fs::read_to_string(tree().join("docs/cluster.md")).unwrap();
    let chapter = page.split("\n## Commands\n").nth(1).expect("the chapter");
    let block = chapter.split("```").nth(1).expect("its commands");
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("# "), commands.last_mut()) {
            // A comment of several lines.
            (Some(comment), Some((before, text))) if text.is_empty() => *before += &format!(" {comment}"),
            (Some(comment), _) => commands.push((comment.into(), String::new())),
            (None, Some((_, text))) => *text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    commands
}

/// The command below the comment that contains these words.
fn command_below<'a>(commands: &'a [(String, String)], words: &str) -> &'a str {
    let found = commands.iter().find(|(comment, _)| comment.contains(words));
    &found.unwrap_or_else(|| panic!("the page has no command below {words:?}: {commands:#?}")).1
}

/// `head` means the head's address on every node.
struct Names(Vec<PathBuf>);

impl Names {
    fn new(network: &Network, members: u32) -> std::io::Result<Self> {
        let mut names = Names(Vec::new());
        for member in 0..members {
            let folder = Path::new("/etc/netns").join(network.namespace(member));
            fs::create_dir_all(&folder)?;
            names.0.push(folder.clone());
            fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{} head\n", network.address(0)))?;
        }
        Ok(names)
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        for folder in &self.0 {
            // A folder that stays belongs to a namespace that is gone.
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// A shell of a person who has only built the programs: in a folder with the page's files, the
/// programs in front of its PATH.
fn shell(job: &Job, folder: &Path, text: &str) -> Command {
    let mut command = job.command("bash");
    let path = std::env::var("PATH").unwrap_or_default();
    let programs = artifacts().bin("xpu_timer_launch");
    let programs = programs.parent().expect("a folder").display();
    command.env("PATH", format!("{}:{programs}:{path}", folder.join("bin").display()));
    command.current_dir(folder).args(["-euc", text]);
    command
}

/// Replaces torchrun where PyTorch is missing: starts the ranks of one node with the variables that
/// torchrun sets.
const TORCHRUN: &str = r#"#!/usr/bin/env python3
import argparse
import os
import subprocess
import sys

parser = argparse.ArgumentParser()
for name in ("--nnodes", "--node-rank", "--nproc-per-node"):
    parser.add_argument(name, type=int, required=True)
parser.add_argument("--master-addr", required=True)
parser.add_argument("script")
options = parser.parse_args()

local = options.nproc_per_node
ranks = []
for rank in range(local):
    place = {
        "RANK": options.node_rank * local + rank,
        "WORLD_SIZE": options.nnodes * local,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": options.node_rank,
        "MASTER_ADDR": options.master_addr,
        "TORCHELASTIC_RUN_ID": "walk",
    }
    environment = dict(os.environ, **{name: str(value) for name, value in place.items()})
    ranks.append(subprocess.Popen([sys.executable, options.script], env=environment))
sys.exit(max(rank.wait() for rank in ranks))
"#;

#[test]
fn three_nodes_as_documented() {
    let Some(network) = Network::new(3) else { return };
    let _names = match Names::new(&network, 4) {
        Ok(names) => names,
        Err(error) => {
            return skip(&format!("/etc/netns cannot be written, so that no node knows the name head: {error}"));
        }
    };
    if let Some(reason) = lacks("openssl") {
        return skip(&reason);
    }
    let commands = commands();
    // The folder that they all see: the certificate and the token, the training program, the
    // interpreter and torchrun.
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for name in ["train.py", "cuda.py"] {
        fs::copy(tree().join("tests/examples").join(name), folder.join(name)).unwrap();
    }
    fs::create_dir_all(folder.join("bin")).unwrap();
    symlink(python(), folder.join("bin/python3")).unwrap();
    fs::write(folder.join("bin/torchrun"), TORCHRUN).unwrap();
    fs::set_permissions(folder.join("bin/torchrun"), fs::Permissions::from_mode(0o755)).unwrap();

    let head = Job::new().within(&network.namespace(0));
    let collector = Process::spawn(&mut shell(&head, folder, command_below(&commands, "once, on the machine `head`")));
    wait_until(PATIENCE, "the cluster collector listens", || collector.stderr().contains("listening on https://"));

    let rendezvous = folder.join("rendezvous");
    fs::create_dir(&rendezvous).unwrap();
    let on_a_node = command_below(&commands, "on each of three nodes");
    assert!(on_a_node.contains("--node-rank=N") && on_a_node.contains("--nproc-per-node=8"), "{on_a_node}");
    let nodes: Vec<(Job, Process)> = (0..3u32)
        .map(|number| {
            let job = Job::new()
                .within(&network.namespace(number + 1))
                .with("POD_NAME", &format!("node-{number}"))
                .with("XPU_EXAMPLE_RENDEZVOUS", rendezvous.to_str().expect("UTF-8"))
                .with("XPU_SIM_FAULT", "stuck_kernel:rank=3,n=400");
            // Two processes for each of two processors, not twelve.
            let text =
                on_a_node.replace("=N", &format!("={number}")).replace("--nproc-per-node=8", "--nproc-per-node=2");
            let process = Process::spawn(&mut shell(&job, folder, &text));
            (job, process)
        })
        .collect();
    let head_log =
        || format!("{}\n{}", collector.stderr(), nodes.iter().map(|(_, node)| node.stderr()).collect::<String>());
    let start = std::time::Instant::now();
    while head.finished_incidents().is_empty() {
        assert!(start.elapsed() < 2 * PATIENCE, "there is no incident\n{}", head_log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }

    // An on-call person, on one of the nodes.
    let anywhere = command_below(&commands, "anywhere");
    let exports: Vec<&str> = on_a_node.lines().filter(|line| line.starts_with("export ")).collect();
    let variables = exports.join("\n");
    let reader = Job::new().within(&network.namespace(2));
    let say = |text: &str| {
        let output = Process::spawn(&mut shell(&reader, folder, &format!("{variables}\n{text}"))).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{text}: {output:?}");
        output.stdout
    };
    let of = |words: &str| {
        let line = anywhere.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("{words}: {anywhere}"));
        line.split(" #").next().expect("a command").trim().to_string()
    };
    let list = say(anywhere.lines().next().expect("the list"));
    let row = list.lines().nth(1).unwrap_or_else(|| panic!("no incident: {list}"));
    let id = row.split_whitespace().next().expect("its name").to_string();
    assert!(row.contains("kernel_hang") && list.lines().count() == 4, "{list}");
    let process = list.lines().nth(3).expect("the process of the culprit");
    assert!(process.contains("rank 3: pid ") && process.contains(" on node-1: "), "{list}");
    let shown = say(&of("show ID").replace("ID", &id));
    assert!(shown.contains("culprits:    3") && shown.contains("6 ranks"), "{shown}");
    let fetched = say(&of("fetch ID").replace("ID", &id));
    let copy = folder.join(fetched.trim());
    for name in ["report.html", "verdict.txt", "00005-00006.stacktrace", "py_stack.svg"] {
        assert!(copy.join(name).exists(), "{name} is not in {}", copy.display());
    }
    drop(nodes);
}
