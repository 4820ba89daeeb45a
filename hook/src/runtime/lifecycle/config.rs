//! The hook's settings, read from a copy of the environment.
//!
//! The launching thread copies the environment, because the host may change it while the watcher
//! reads. It does so at the first device call rather than at load, because launchers such as
//! torch.multiprocessing set RANK after the process has started.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use xpu_timer_proto::{
    env::Source,
    file,
    printable::{MOST_COMMAND_BYTES, MOST_NAME_BYTES, MOST_PATH_BYTES, shortened},
    secrets, socket,
    v1::{Hello, RankInfo},
};

use crate::runtime::os::environment;

/// The environment as `NAME=value` strings.
pub(crate) type Environment = Vec<String>;

/// The operations that get a start and an end event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Bracket {
    /// Collectives, kernels that communicate by themselves, and graphs.
    Collectives = 0,
    /// Every launch.
    All = 1,
    /// Nothing.
    None = 2,
    /// The operations of `Collectives`, and matrix products.
    Matmuls = 3,
}

/// The watcher's settings.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Age at which a pending operation is a hang.
    pub hang_timeout: Duration,
    /// The node collector's socket.
    pub socket: PathBuf,
    /// Path of the log.
    pub log: PathBuf,
    /// Path of the log when the first one is on a network file system.
    pub local_log: PathBuf,
    /// Mode of the log file.
    pub log_mode: u32,
    /// The operations that get events.
    pub bracket: Bracket,
    /// Number of launches whose Python stacks are read.
    pub stack_launches: u32,
    /// `XPU_TIMER_HOST_TRACING_FUNC`, empty for none.
    pub traced_functions: String,
    /// Whether an exit plugin wants the exceptions of Python.
    pub has_exit_plugin: bool,
    /// All streams of the program share one hardware queue: `CUDA_DEVICE_MAX_CONNECTIONS=1`.
    pub has_one_queue: bool,
    /// The hook must do nothing.
    pub disabled: bool,
    /// The first message to the collector.
    pub hello: Hello,
    /// Values that cannot be used, and variables without effect.
    pub problems: Vec<String>,
}

/// Copies the environment of the process.
pub(crate) fn snapshot() -> Environment {
    environment::copy().iter().map(|entry| String::from_utf8_lossy(entry).into_owned()).collect()
}

/// The value of a variable in the copied environment.
pub(crate) fn value<'a>(environment: &'a Environment, name: &str) -> Option<&'a str> {
    environment.iter().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
}

/// `XPU_TIMER_BRACKET` of the environment, for launches before the watcher has read the INI file.
pub(crate) fn bracket_of(environment: &Environment) -> Bracket {
    value(environment, "XPU_TIMER_BRACKET").and_then(parse_bracket).unwrap_or(Bracket::Collectives)
}

/// `XPU_TIMER_SIGNAL_HANDLER` of the environment, or of the INI file that the launcher has read.
pub(crate) fn handles_signals(environment: &Environment) -> bool {
    let environment = environment.clone();
    let lookup = move |name: &str| value(&environment, name).map(str::to_string);
    Source::with_ini(lookup, |_| Err(file::unanswered())).flag("XPU_TIMER_SIGNAL_HANDLER")
}

fn parse_bracket(text: &str) -> Option<Bracket> {
    match text {
        "collectives" => Some(Bracket::Collectives),
        "matmuls" => Some(Bracket::Matmuls),
        "all" => Some(Bracket::All),
        "none" => Some(Bracket::None),
        _ => None,
    }
}

impl Config {
    /// Reads the settings from the copied environment, in which the launcher has put the content of
    /// the INI file. Without a launcher, the watcher reads the file here, on a thread that is
    /// abandoned if the file system does not answer.
    pub(crate) fn read(environment: Environment) -> Self {
        let has_one_queue = value(&environment, "CUDA_DEVICE_MAX_CONNECTIONS").is_some_and(|text| text.trim() == "1");
        let lookup = |environment: Environment| move |name: &str| value(&environment, name).map(str::to_string);
        let source = Source::with_ini(lookup(environment), |path| file::read_within(Path::new(path)));

        let seconds = |name: &str, fallback: u64| source.seconds(name).unwrap_or(Duration::from_secs(fallback));
        let hang_timeout = seconds("XPU_TIMER_HANG_TIMEOUT", 300);
        let own_idle_timeout = source.seconds("XPU_TIMER_IDLE_TIMEOUT");
        let idle_timeout = own_idle_timeout.unwrap_or(hang_timeout * 2);
        // SAFETY: geteuid takes nothing and cannot fail.
        let uid = unsafe { libc::geteuid() };
        let socket = socket::of(&source, uid);
        let name = format!("xpu_timer_hook.{}.log", std::process::id());
        let local_log = socket.with_file_name(&name);
        let log = source.path("XPU_TIMER_LOGGING_DIR").unwrap_or_else(|| "/tmp".into()).join(name);
        let log_mode = source.file_mode();
        let mut problems = Vec::new();
        let hello = Hello {
            protocol: xpu_timer_proto::PROTOCOL_VERSION,
            ring_version: xpu_timer_proto::ring::VERSION,
            rank: Some(complete(source.rank_info())),
            hang_timeout_ms: hang_timeout.as_millis() as u64,
            idle_timeout_ms: idle_timeout.as_millis() as u64,
            sample_interval_ms: seconds("XPU_TIMER_SAMPLE_INTERVAL", 5).as_millis() as u64,
            timeline_path: timeline_path(&source, &mut problems),
            hang_kill: source.flag("XPU_TIMER_HANG_KILL"),
            reports_idle: own_idle_timeout.is_some(),
        };
        let bracket = source.parsed("XPU_TIMER_BRACKET", parse_bracket).unwrap_or(Bracket::Collectives);
        let stack_launches: u64 = source.number("XPU_TIMER_DUMP_STACK_COUNT").unwrap_or(0);
        let stack_launches = u32::try_from(stack_launches).unwrap_or(u32::MAX);
        let traced_functions = source.text("XPU_TIMER_HOST_TRACING_FUNC").unwrap_or_default();
        let has_exit_plugin = source.text("XPU_TIMER_EXIT_HOOK_PLUGIN").is_some_and(|files| !files.trim().is_empty());
        let disabled = source.flag("XPU_TIMER_DISABLE");
        // The inline hooks read this variable before there was a log.
        source.check("XPU_TIMER_INLINE");
        source.check("XPU_TIMER_SIGNAL_HANDLER");
        problems.extend(source.problems().iter().map(ToString::to_string));
        problems.extend(source.without_effect());
        Config {
            hang_timeout,
            socket,
            log,
            local_log,
            log_mode,
            bracket,
            stack_launches,
            traced_functions,
            has_exit_plugin,
            has_one_queue,
            disabled,
            hello,
            problems,
        }
    }
}

/// The folder for incidents. A path that is too long is not sent; then the collector uses its own
/// folder.
fn timeline_path(source: &Source, problems: &mut Vec<String>) -> String {
    let path = source.text("XPU_TIMER_TIMELINE_PATH").unwrap_or_default();
    if path.len() <= MOST_PATH_BYTES {
        return path;
    }
    problems.push(format!(
        "XPU_TIMER_TIMELINE_PATH={:?} cannot be used: a path has at most {MOST_PATH_BYTES} bytes, not {}; using the collector's folder",
        shortened(&path, MOST_NAME_BYTES),
        path.len()
    ));
    String::new()
}

/// Adds what the environment does not contain.
fn complete(mut info: RankInfo) -> RankInfo {
    info.pid = std::process::id() as i32;
    let command = fs::read("/proc/self/cmdline").unwrap_or_default();
    info.command = shortened(&secrets::cmdline(&command), MOST_COMMAND_BYTES);
    if info.node.is_empty() || info.node == "NOT_SET" {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        info.node = shortened(host.trim(), MOST_NAME_BYTES);
    }
    info
}

static DISABLED: AtomicU32 = AtomicU32::new(0);

/// `XPU_TIMER_DISABLE`, read when the library is loaded.
pub(crate) fn disabled() -> bool {
    match DISABLED.load(Ordering::Relaxed) {
        0 => {
            let value = environment::at_start(c"XPU_TIMER_DISABLE");
            let text = value.map(|value| String::from_utf8_lossy(value).into_owned());
            let source = Source::new(move |_| text.clone(), "");
            let disabled = source.flag("XPU_TIMER_DISABLE");
            DISABLED.store(1 + u32::from(disabled), Ordering::Relaxed);
            disabled
        }
        known => known == 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[&str]) -> Config {
        Config::read(variables.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_empty_environment_gives_the_documented_defaults() {
        let config = config(&[]);
        assert_eq!(config.hang_timeout, Duration::from_secs(300));
        assert_eq!(config.hello.idle_timeout_ms, 600_000);
        assert_eq!(config.hello.sample_interval_ms, 5_000);
        assert!(config.socket.ends_with("18888.sock"), "{:?}", config.socket);
        assert_eq!(config.bracket, Bracket::Collectives);
        assert_eq!(config.problems, [""; 0]);
        let rank = config.hello.rank.unwrap();
        assert_eq!((rank.rank, rank.pid), (-1, std::process::id() as i32));
        assert!(!rank.node.is_empty() && !rank.command.is_empty());
    }

    #[test]
    fn hello_fits_into_a_packet_whatever_the_environment_holds() {
        let long = "ä".repeat(60_000);
        let names = ["XPU_TIMER_JOB", "POD_NAME", "POD_IP", "MASTER_ADDR", "MASTER_PORT", "XPU_TIMER_TIMELINE_PATH"];
        let variables: Vec<String> = names.iter().map(|name| format!("{name}={long}")).collect();
        let config = config(&variables.iter().map(String::as_str).collect::<Vec<_>>());
        // The command line of a test is short.
        let bytes = xpu_timer_proto::Message::encoded_len(&config.hello) + MOST_COMMAND_BYTES;
        assert!(bytes < socket::MAX_PACKET_BYTES, "{bytes}");
        assert_eq!(config.hello.timeline_path, "");
        for name in names {
            let count = config.problems.iter().filter(|problem| problem.starts_with(name)).count();
            assert_eq!(count, 1, "{name}: {:?}", config.problems);
        }
    }

    #[test]
    fn the_environment_is_read_and_bad_values_are_reported() {
        let config = config(&[
            "RANK=3",
            "WORLD_SIZE=8",
            "XPU_TIMER_HANG_TIMEOUT=2.5",
            "XPU_TIMER_BRACKET=everything",
            "XPU_TIMER_INLINE=sometimes",
            "TMPDIR=/var/tmp",
            "XPU_TIMER_BASEPORT=19000",
            "XPU_TIMER_LOGGING_DIR=/logs",
            "XPU_TIMER_CONFIG=/nowhere.ini",
        ]);
        assert_eq!(config.hello.rank.unwrap().rank, 3);
        assert_eq!((config.hello.hang_timeout_ms, config.hello.idle_timeout_ms), (2500, 5000));
        assert!(config.socket.starts_with("/var/tmp") && config.socket.ends_with("19000.sock"));
        assert!(config.log.starts_with("/logs"));
        assert_eq!(config.problems.len(), 3, "{:?}", config.problems);
    }
}
