//! Other users of the machine, and connections that are slow, silent or many: none of them reads
//! what is not theirs, and none of them keeps an incident from being judged.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    process::Command,
    time::Instant,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use xpu_timer_proto::procfs;
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

/// The response that another user gets from a port.
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
fn manual_dumps_are_limited_and_report_when_the_next_is_allowed() {
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
    assert!(refused.1.contains("too many dumps on demand") && refused.1.contains(" s\""), "{refused:?}");
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

/// Opens connections until it is killed; prints `up` when it has opened the wanted number.
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
fn a_flood_of_half_open_connections_delays_no_rank_and_no_incident() {
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

#[test]
fn a_flood_of_connections_without_the_token_ends_none_with_it() {
    // More than the owner may have without the token.
    const WITH_TOKEN: usize = 40;
    let job = Job::new();
    let token = job.dir.join("token");
    fs::write(&token, "a long secret\n").unwrap();
    let job = job.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &token.display().to_string());
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = job.command("sh");
    command.args(["-c", "ulimit -n 400 && exec \"$0\" cluster --listen \"$1\""]);
    command.arg(artifacts().bin("xpu_timer_collector")).arg(format!("127.0.0.1:{port}"));
    let collector = Process::spawn(&mut command);
    wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
    let ask = |stream: &mut TcpStream| {
        let request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a long secret\r\n\r\n";
        let (mut answer, mut piece) = (Vec::new(), [0; 1024]);
        let mut read = |stream: &mut TcpStream| {
            stream.write_all(request)?;
            while !answer.ends_with(b"ok\n") {
                match stream.read(&mut piece)? {
                    0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                    length => answer.extend_from_slice(&piece[..length]),
                }
            }
            Ok::<_, std::io::Error>(())
        };
        read(stream).map_err(|error| format!("{error}\n{}", collector.stderr()))
    };
    let mut streams: Vec<TcpStream> = (0..WITH_TOKEN)
        .map(|_| {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            ask(&mut stream).unwrap();
            stream
        })
        .collect();
    let mut flood = job.command(xpu_timer_tests::python());
    let mut flood = Process::spawn(flood.args(["-c", FLOOD, "1000"]).arg(port.to_string()));
    flood.wait_for("up", PATIENCE);
    let script = format!("for n in $(seq 100); do exec {{fd}}<>/dev/tcp/127.0.0.1/{port}; done; echo up; sleep 600");
    let mut strangers = as_stranger(&script).map(|mut command| Process::spawn(&mut command));
    if let Some(strangers) = &mut strangers {
        strangers.wait_for("up", PATIENCE);
    }
    for stream in &mut streams {
        ask(stream).expect("its connection lasts");
    }
    drop((flood, strangers));
}

fn resident_kib(process: &Process) -> u64 {
    let status = procfs::status_text(process.pid()).unwrap();
    let resident = procfs::field(&status, "VmRSS:").unwrap();
    resident.trim_end_matches(" kB").parse().unwrap()
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
    assert_eq!(http("GET", job.port, &format!("{page}/link")).unwrap().0, 404, "a link is not a file of an incident");
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
    // A reader that continues gets all of it.
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

/// Everything below a folder whose mode is not the one for its kind.
fn wrong_modes(path: &Path, file: u32, folder: u32) -> Vec<String> {
    let mut wrong = Vec::new();
    let status = fs::symlink_metadata(path).unwrap();
    if status.is_symlink() {
        return wrong;
    }
    let wanted = if status.is_dir() { folder } else { file };
    if status.permissions().mode() & 0o777 != wanted {
        wrong.push(format!("{} has mode {:o}", path.display(), status.permissions().mode() & 0o777));
    }
    if status.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            wrong.extend(wrong_modes(&entry.unwrap().path(), file, folder));
        }
    }
    wrong
}

#[test]
fn written_files_are_private_whatever_the_umask_unless_a_group_is_allowed() {
    for (umask, choice, file, folder) in
        [("000", "", 0o600, 0o700), ("277", "", 0o600, 0o700), ("077", "640", 0o640, 0o750)]
    {
        let job = Job::new().with("XPU_TIMER_FILE_MODE", choice);
        let timeline = job.dir.join("timeline");
        fs::set_permissions(&timeline, fs::Permissions::from_mode(0o755)).unwrap();
        let made = timeline.join("made/here");
        let mut command = job.command("sh");
        let program = artifacts().bin("xpu_timer_collector").display().to_string();
        command.args(["-c", &format!("umask {umask} && exec \"$0\" node")]).arg(&program);
        let collector = Process::spawn(&mut command);
        wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
        let mut hook = FakeHook::start(&job, "modes", 0, 1);
        hook.hello.timeline_path = made.display().to_string();
        hook.hello.sample_interval_ms = 1;
        hook.join(&job);
        hook.hang(1);
        wait_until(PATIENCE, "the folder is finished", || made.join("latest/report.html").exists());
        assert_eq!(wrong_modes(&timeline.join("made"), file, folder), [""; 0], "umask {umask}, mode {choice:?}");
        let mode = fs::metadata(&timeline).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o755, "an existing folder is unchanged");
    }
}

#[test]
fn a_timeline_folder_that_another_user_put_into_a_shared_one_is_not_used() {
    if !nix::unistd::getuid().is_root() {
        return skip("only root can play another user");
    }
    let job = Job::new();
    let shared = job.dir.join("tmp");
    let squatted = shared.join("timeline");
    fs::create_dir_all(&squatted).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
    fs::set_permissions(&squatted, fs::Permissions::from_mode(0o777)).unwrap();
    chown(&squatted, Some(STRANGER), None).unwrap();
    let _collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "squat", 0, 1);
    hook.hello.timeline_path = squatted.display().to_string();
    hook.hello.sample_interval_ms = 1;
    hook.join(&job);
    hook.hang(1);
    let mut errors = Value::Null;
    wait_until(PATIENCE, "the incident is dumped", || {
        let status = job.status().unwrap_or_default();
        errors = status["incidents"][0]["errors"].clone();
        status["incidents"][0]["state"] == "dumped"
    });
    assert!(errors.to_string().contains(&format!("user {STRANGER}")), "{errors}");
    assert_eq!(fs::read_dir(&squatted).unwrap().count(), 0, "nothing is written there");
}

#[test]
fn logs_are_capped_whatever_happens_and_belong_to_their_owner() {
    let job = Job::new().with("XPU_TIMER_LOGGING_MAX_MB", "0.02").with("XPU_TIMER_LOGGING_FILES", "3");
    let job = job.with("XPU_TIMER_LOG", "debug");
    let logs = job.dir.join("log");
    // Logs of hooks whose processes have ended long ago, and the one of a process that lives.
    for pid in 0..150 {
        fs::write(logs.join(format!("xpu_timer_hook.{}.log", 4_194_304 + 1000 + pid)), "x").unwrap();
    }
    let own = logs.join(format!("xpu_timer_hook.{}.log", std::process::id()));
    fs::write(&own, "x").unwrap();
    let output = Process::spawn(job.launch("true").arg("x")).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{output:?}");
    let log = logs.join("xpu_timer_collector.log");
    let begun = Instant::now();
    let mut hook = FakeHook::start(&job, &format!("rank{}", "x".repeat(200)), 0, 1);
    // Each registration writes some lines.
    while !logs.join("xpu_timer_collector.log.2").exists() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", fs::read_dir(&logs).unwrap().collect::<Vec<_>>());
        hook.join(&job);
        hook.tell("disconnect");
    }
    wait_until(PATIENCE, "old logs of hooks go", || fs::read_dir(&logs).unwrap().count() < 110);
    assert!(own.exists());
    for entry in fs::read_dir(&logs).unwrap() {
        let path = entry.unwrap().path();
        let status = fs::metadata(&path).unwrap();
        assert!(status.len() <= 21_000, "{}: {} bytes", path.display(), status.len());
        if path.display().to_string().contains("collector") {
            assert_eq!(status.permissions().mode() & 0o777, 0o600, "{}", path.display());
        }
    }
    assert!(!logs.join("xpu_timer_collector.log.3").exists() && log.exists());
}

#[test]
fn an_unread_log_pipe_delays_neither_ranks_nor_incidents_nor_the_exit() {
    let job = Job::new();
    let (reader, mut writer) = std::io::pipe().unwrap();
    // Full before it begins: each line would wait forever.
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    while writer.write(&[b' '; 4096]).is_ok() {}
    while writer.write(b" ").is_ok() {}
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let mut collector = command.arg("node").stderr(writer).spawn().unwrap();
    // Its end of the pipe.
    drop(command);
    wait_until(PATIENCE, "the collector answers", || job.status().is_ok());
    let mut hook = FakeHook::connected(&job, "unread", 0, 1);
    hook.hang(1);
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["errors"], serde_json::json!([]));
    kill(Pid::from_raw(collector.id() as i32), Signal::SIGTERM).unwrap();
    wait_until(PATIENCE, "the collector ends", || collector.try_wait().unwrap().is_some());
    drop(reader);
}
