//! TLS and the token: the conditions for listening, joining and reading.

use std::{fs, path::Path, process::Command, time::Duration};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, wait_until};

use super::{Cluster, Node};

/// An authority, and a certificate of it for some names, as PEM files in a folder.
pub fn certificates(folder: &Path, names: &[&str]) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_string()).collect();
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
    fs::write(folder.join("ca.pem"), authority.pem()).unwrap();
    fs::write(folder.join("cert.pem"), certificate.pem()).unwrap();
    fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
    fs::write(folder.join("token"), "a long secret\n").unwrap();
}

/// Settings of a cluster collector with TLS and a token; the files lie in `folder`.
pub fn secured(job: Job, folder: &Path) -> Job {
    let path = |name: &str| folder.join(name).display().to_string();
    job.with("XPU_TIMER_CLUSTER_CERT_FILE", &path("cert.pem"))
        .with("XPU_TIMER_CLUSTER_KEY_FILE", &path("key.pem"))
        .with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &path("token"))
        .with("XPU_TIMER_COLLECTOR_CA_FILE", &path("ca.pem"))
}

fn run(command: &mut Command) -> (i32, String) {
    let output = Process::spawn(command).wait(PATIENCE);
    (output.code(), output.stderr)
}

#[test]
fn beyond_loopback_it_listens_with_tls_and_a_token_only() {
    let job = Job::new();
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let (code, said) = run(command.args(["cluster", "--listen", "0.0.0.0:0"]));
    assert!(code == 1 && said.contains("is not a loopback address, so TLS and a token are required"), "{code} {said}");
    let job = job.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", "/nowhere/token");
    let (code, said) = run(job.command(artifacts().bin("xpu_timer_collector")).arg("cluster"));
    assert!(code == 1 && said.contains("/nowhere/token"), "{code} {said}");
    // A node sends nothing in plain text to another machine either.
    let node = Job::new().with("XPU_TIMER_COLLECTOR", "http://192.0.2.1:18890");
    let process = crate::collector::fake::collector(&node, &[]);
    wait_until(PATIENCE, "it says so", || process.stderr().contains("plain text is allowed on loopback only"));
    let problems = node.status().expect("/status")["problems"].to_string();
    assert!(problems.contains("this node works alone"), "{problems}");
}

#[test]
fn only_holders_of_the_token_can_join_and_read() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["localhost"]);
    let mut cluster = Cluster::with(secured(Job::new(), folder.path()), "https", "127.0.0.1");
    cluster.start();
    let mut a = Node::on(secured(cluster.node_job("node-a"), folder.path()));
    a.add_ranks("safe", 0, 1, 1);
    wait_until(PATIENCE, "the node joins", || cluster.log().contains("node node-a joined"));

    fs::write(folder.path().join("wrong"), "a long secre7").unwrap();
    let wrong = folder.path().join("wrong").display().to_string();
    let thief =
        Node::on(secured(cluster.node_job("thief"), folder.path()).with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &wrong));
    thief.wait_log("the token is wrong or missing");
    // A node that trusts another authority does not even send its token.
    let other = tempfile::tempdir().unwrap();
    certificates(other.path(), &["localhost"]);
    let wary = Node::on(
        secured(cluster.node_job("wary"), folder.path())
            .with("XPU_TIMER_COLLECTOR_CA_FILE", &other.path().join("ca.pem").display().to_string()),
    );
    wary.wait_log("invalid peer certificate");
    assert!(!cluster.log().contains("node thief") && !cluster.log().contains("node wary"), "{}", cluster.log());

    a.hooks[0].hang(3);
    let url = cluster.url();
    let incidents = |job: &Job, what: &str| {
        let mut command = job.command(artifacts().bin("xpu_timer_collector"));
        Process::spawn(command.args(["incidents", what, "--url", &url])).wait(PATIENCE)
    };
    let reader = secured(Job::new(), folder.path());
    let mut list = String::new();
    wait_until(Duration::from_secs(60), "the incident is listed", || {
        list = incidents(&reader, "list").stdout;
        list.contains(" safe ")
    });
    let stranger = secured(Job::new(), folder.path()).with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &wrong);
    let refused = incidents(&stranger, "list");
    assert!(refused.code() == 1 && refused.stderr.contains("the token is wrong or missing"), "{refused:?}");
    assert_eq!(incidents(&stranger.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", ""), "list").code(), 1);
}
