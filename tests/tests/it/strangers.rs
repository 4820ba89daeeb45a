//! Other users of the machine, and connections that are slow, silent or many: none of them reads what is not theirs, and none of them
//! keeps an incident from being judged.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    process::Command,
};

use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, http, skip, wait_until};

use crate::collector::fake::{FakeHook, collector, metrics};

const STRANGER: u32 = 23_456;

/// A shell of another user; `None`, after having said so, when this one may not become another.
fn as_stranger(script: &str) -> Option<Command> {
    if !nix::unistd::getuid().is_root() {
        skip("only root can become another user");
        return None;
    }
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={STRANGER}")).args(["--clear-groups", "bash", "-c", script]).current_dir("/");
    Some(command)
}

/// What a stranger gets who sends a request to a port.
fn stranger_gets(port: u16, request: &str) -> Option<String> {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{request}' >&3; cat <&3");
    Some(Process::spawn(&mut as_stranger(&script)?).wait(PATIENCE).stdout)
}

fn request(method: &str, path: &str, more: &str) -> String {
    format!("{method} {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n{more}\\r\\n")
}

fn count(job: &Job, list: &str) -> usize {
    job.status().ok().and_then(|status| Some(status[list].as_array()?.len())).unwrap_or(0)
}

#[test]
fn the_control_port_answers_its_owner_and_root_only_and_the_metrics_hold_no_secret() {
    let job = Job::new();
    let token = job.dir.join("token");
    fs::write(&token, "a long secret\n").unwrap();
    let job = job.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &token.display().to_string());
    let collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "private", 0, 1);
    hook.hello.rank.as_mut().unwrap().command = "train --password=hunter2".into();
    hook.join(&job);
    wait_until(PATIENCE, "the rank registers", || count(&job, "ranks") == 1);
    assert!(job.status().unwrap().to_string().contains("hunter2"), "its owner sees it");
    let Some(refused) = stranger_gets(job.port, &request("GET", "/status", "")) else { return };
    assert!(refused.starts_with("HTTP/1.1 403 ") && !refused.contains("hunter2"), "{refused}");
    assert!(refused.contains(&format!("user {STRANGER}")) && refused.contains("Authorization: Bearer"), "{refused}");
    let gets = |port, request: String| stranger_gets(port, &request).expect("as before");
    for (method, path) in [("POST", "/dump"), ("GET", "/incidents"), ("GET", "/slow_ranks"), ("GET", "/nothing")] {
        let refused = gets(job.port, request(method, path, ""));
        assert!(refused.starts_with("HTTP/1.1 403 ") || refused.starts_with("HTTP/1.1 404 "), "{path}: {refused}");
    }
    assert!(gets(job.port, request("GET", "/health", "")).starts_with("HTTP/1.1 200 "));
    let page = gets(job.port + 1, request("GET", "/metrics", ""));
    assert!(page.starts_with("HTTP/1.1 200 ") && page.contains("XPU_TIMER_COMMON_HANG"), "{page}");
    for secret in ["hunter2", "train", &job.dir.display().to_string()] {
        assert!(!page.contains(secret) && !metrics(&job).contains(secret), "{secret}: {page}");
    }
    // The kernel shows a socket that its process has closed as root's.
    let post = request("POST", "/dump", "");
    let script = format!(
        "for n in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/{}; printf '{post}' >&3; exec 3>&-; done; echo sent",
        job.port
    );
    let sent = Process::spawn(&mut as_stranger(&script).unwrap()).wait(PATIENCE);
    assert!(sent.stdout.contains("sent"), "{sent:?}");
    // Later requests come after all of those.
    assert!(gets(job.port, request("GET", "/health", "")).starts_with("HTTP/1.1 200 "));
    assert_eq!(count(&job, "incidents"), 0, "{}", collector.stderr());
    let wrong = gets(job.port, request("GET", "/status", "Authorization: Bearer a long secre7\\r\\n"));
    assert!(wrong.starts_with("HTTP/1.1 403 "), "{wrong}");
    let right = gets(job.port, request("GET", "/status", "Authorization: Bearer a long secret\\r\\n"));
    assert!(right.starts_with("HTTP/1.1 200 ") && right.contains("hunter2"), "{right}");
    drop(hook);
}

#[test]
fn dumps_by_hand_are_limited_and_say_when_the_next_one_may_be() {
    let job = Job::new().with("XPU_TIMER_KEEP_INCIDENTS", "2");
    let _collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "much", 0, 1);
    hook.hello.sample_interval_ms = 1;
    hook.join(&job);
    wait_until(PATIENCE, "the rank registers", || count(&job, "ranks") == 1);
    hook.hang(1);
    let hang = job.wait_incident(1, PATIENCE);
    hook.resolve(1);
    let mut taken = 0;
    let refused = loop {
        assert!(taken < 100, "no limit");
        let (code, body) = http("POST", job.port, "/dump").expect("/dump");
        if code != 200 {
            break (code, body);
        }
        taken += 1;
    };
    assert!(refused.0 == 429 && taken >= 5, "{taken} {refused:?}");
    assert!(refused.1.contains("too many dumps by hand") && refused.1.contains(" s\""), "{refused:?}");
    wait_until(PATIENCE, "the surplus goes", || job.incidents().len() == 3);
    assert!(hang.path.join("verdict.json").exists(), "dumps by hand push out no hang");
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, job.port)).unwrap();
    stream.write_all(b"POST /dump HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.to_lowercase().contains("\r\nretry-after: "), "{answer}");
    // A hang does not wait for that.
    wait_until(PATIENCE, "the first hang is over", || {
        let status = job.status().unwrap_or_default();
        status["incidents"].as_array().is_some_and(|all| all.iter().any(|one| one["state"] == "resolved"))
    });
    hook.hang(2);
    wait_until(PATIENCE, "the hang is dumped", || {
        job.incidents().iter().filter(|one| one.verdict["trigger"]["kind"] == "operation").count() == 2
    });
}

/// Keeps opening connections until it is killed; says `up` when it has had as many as it wants.
const FLOOD: &str = "import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
made = 0
while True:
    for port in map(int, sys.argv[2:]):
        s = socket.socket()
        s.settimeout(1)
        try:
            s.connect(('127.0.0.1', port))
            s.send(b'GET /status HTTP/1.1\\r\\n')
            held.append(s)
        except OSError:
            pass
        made += 1
    if made == int(sys.argv[1]):
        print('up', flush=True)
    if len(held) > 2000:
        held.pop(0).close()
";

#[test]
fn a_flood_of_half_open_connections_keeps_no_rank_and_no_incident_waiting() {
    let job = Job::new();
    // As few descriptors as a container may have.
    let mut command = job.command("sh");
    let program = artifacts().bin("xpu_timer_collector").display().to_string();
    command.args(["-c", "ulimit -n 400 && exec \"$0\" node"]).arg(&program);
    let collector = Process::spawn(&mut command);
    wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
    let ports = [job.port, job.port + 1].map(|port| port.to_string());
    let flood = || {
        let mut flood = job.command(xpu_timer_tests::python());
        let mut flood = Process::spawn(flood.args(["-c", FLOOD, "2000"]).args(&ports));
        flood.wait_for("up", PATIENCE);
        flood
    };
    let flood = flood();
    let mut hook = FakeHook::connected(&job, "flooded", 0, 1);
    hook.hang(1);
    let incident = job.wait_incident(1, PATIENCE);
    assert!(incident.path.join("00000-00001.stacktrace").exists() && incident.path.join("report.html").exists());
    assert_eq!(incident.verdict["errors"], serde_json::json!([]), "{}", collector.stderr());
    let open = fs::read_dir(format!("/proc/{}/fd", collector.pid())).unwrap().count();
    assert!(open < 200, "{open} descriptors are open");
    // The owner's own request finds room in between.
    wait_until(PATIENCE, "the status is answered", || job.status().is_ok());
    assert!(!collector.stderr().contains("Too many open files"), "{}", collector.stderr());
    drop(flood);
}

fn resident_kib(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_large_file_goes_to_a_slow_reader_without_being_in_memory() {
    const BYTES: u64 = 200 << 20;
    let job = Job::new();
    let collector = collector(&job, &[]);
    let folder = job.dir.join("timeline/incident-20261121T000000Z-00000001");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("verdict.json"), "{}").unwrap();
    fs::File::create(folder.join("report.html")).unwrap().set_len(BYTES).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap();
    let page = "/incidents/20261121T000000Z-00000001";
    assert_eq!(http("GET", job.port, &format!("{page}/link")).unwrap().0, 404, "a link is no file of an incident");
    let before = resident_kib(&collector);
    let mut readers: Vec<TcpStream> = (0..6)
        .map(|_| {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, job.port)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let head = format!("GET {page}/report.html HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            // The answer has begun.
            stream.read_exact(&mut [0]).unwrap();
            stream
        })
        .collect();
    // Some bytes more, one at a time: others are served meanwhile.
    for _ in 0..50 {
        readers.iter_mut().for_each(|stream| stream.read_exact(&mut [0]).unwrap());
        assert_eq!(http("GET", job.port, "/health").unwrap().0, 200);
    }
    let grown = resident_kib(&collector).saturating_sub(before);
    assert!(grown < 40 << 10, "{grown} KiB more for six readers of {} MiB", BYTES >> 20);
    // Whoever reads on gets all of it.
    let mut last = readers.pop().unwrap();
    let mut left = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match last.read(&mut buffer).unwrap() {
            0 => break,
            length => left += length as u64,
        }
    }
    assert!(left > BYTES, "{left} of {BYTES} bytes and the headers");
}
