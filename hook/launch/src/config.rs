//! Settings of the launcher, from the environment and the INI file.

use std::path::PathBuf;

use xpu_timer_proto::{env::Source, socket};

/// What the launcher must know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Run the command and nothing else.
    pub disabled: bool,
    /// The node collector's socket.
    pub socket: PathBuf,
    /// The collector binary, when the user says where it is.
    pub daemon: Option<PathBuf>,
    /// The hook, when the user says where it is.
    pub hook: Option<PathBuf>,
    /// Where the collector's output goes.
    pub log: PathBuf,
    /// Keep the log of the run before.
    pub append: bool,
    /// Seconds after which an unused collector ends.
    pub linger: String,
    /// Folder of the launcher's own executable.
    pub beside: Option<PathBuf>,
}

impl Config {
    /// Reads the environment of this process. A value that cannot be used is the collector's and the hook's to complain about, in
    /// their logs.
    pub fn read() -> Self {
        Self::of(&Source::process(), nix::unistd::geteuid().as_raw())
    }

    /// The settings of any process of the user `uid`.
    pub fn of(source: &Source, uid: u32) -> Self {
        Config {
            disabled: source.flag("XPU_TIMER_DISABLE"),
            socket: socket::of(source, uid),
            daemon: source.path("XPU_TIMER_DAEMON_PATH"),
            hook: source.path("XPU_TIMER_HOOK_PATH"),
            log: source.path("XPU_TIMER_LOGGING_DIR").unwrap_or_else(|| "/tmp".into()).join("xpu_timer_collector.log"),
            append: source.flag("XPU_TIMER_LOGGING_APPEND"),
            linger: source.number::<u64>("XPU_TIMER_LINGER").unwrap_or(600).to_string(),
            beside: std::env::current_exe().ok().and_then(|exe| exe.parent().map(PathBuf::from)),
        }
    }
}
