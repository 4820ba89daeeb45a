//! All settings of the node collector, from the environment table of `proto`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use nix::unistd::getuid;
use xpu_timer_proto::{
    env::{Problem, Source},
    file,
    socket::{self, Fingerprint, NO_CHECKS, SocketChecks},
};

use crate::{metrics::MetricsSettings, timeline::TimelineSettings};

/// Settings of one node collector.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The socket for hooks and launchers.
    pub socket: PathBuf,
    /// Hashes that launchers of other jobs compare with their own settings.
    pub fingerprints: Vec<Fingerprint>,
    /// Control port on loopback.
    pub control_port: u16,
    /// Metrics port on loopback; `None` when there is no port above the control port.
    pub metrics_port: Option<u16>,
    /// The variable that decided the ports, for messages.
    pub port_variable: &'static str,
    /// The folder for incident folders of ranks that name none.
    pub timeline_path: PathBuf,
    /// The folder to use when that cannot be written.
    pub fallback_path: PathBuf,
    /// Time between the two samples, for ranks that report none.
    pub sample_interval: Duration,
    /// Hang timeout, for ranks that report none.
    pub hang_timeout: Duration,
    /// Label `pod_name`, and the node in the dumps of ranks that report none.
    pub node: String,
    /// Windows, intervals and levels of the kernel metrics.
    pub metrics: MetricsSettings,
    /// Limits of the timeline.
    pub timeline: TimelineSettings,
    /// Label `ip`.
    pub ip: String,
    /// The cluster collector; `None` when every node judges its own ranks.
    pub cluster: Option<String>,
    /// File with the token that nodes and cluster share.
    pub token_file: Option<PathBuf>,
    /// Certificate authority that the node trusts; `None` for those of the system.
    pub ca_file: Option<PathBuf>,
    /// URL that receives the verdicts.
    pub webhook: Option<String>,
    /// Files of Python functions to call for each rank that fails.
    pub exit_plugins: Vec<PathBuf>,
    /// How many incident folders to keep.
    pub keep: RetentionLimits,
    /// Folder of the hooks' logs.
    pub logging_dir: PathBuf,
    /// The collector ends when for this long nothing has been connected and no command of a
    /// launcher has run.
    pub linger: Option<Duration>,
}

impl Settings {
    /// Reads this process's environment. The problems are unusable values of all variables, for the
    /// log: the launcher has no log and leaves the report to the collector.
    #[must_use]
    pub fn from_process(linger: Option<Duration>) -> (Self, Vec<Problem>) {
        let source = Source::process();
        let settings = Self::new(&source, linger, getuid().as_raw());
        (settings, source.all_problems())
    }

    /// Reads any source.
    #[must_use]
    pub fn new(source: &Source, linger: Option<Duration>, uid: u32) -> Self {
        let control_port = source.control_port();
        let port_variable = match source.text("XPU_TIMER_PORT") {
            Some(_) => "XPU_TIMER_PORT",
            None => "XPU_TIMER_BASEPORT",
        };
        let seconds = |name| source.seconds(name).unwrap_or(Duration::ZERO);
        let text = |name| source.text(name).unwrap_or_default();
        let place = socket::place(source, uid, &SocketChecks { answers: &unresponsive, ..NO_CHECKS });
        Settings {
            socket: place.socket,
            fingerprints: socket::fingerprints(source),
            control_port,
            metrics_port: control_port.checked_add(1),
            port_variable,
            timeline_path: source.path("XPU_TIMER_TIMELINE_PATH").unwrap_or_default(),
            fallback_path: place.directory.join("timeline"),
            sample_interval: seconds("XPU_TIMER_SAMPLE_INTERVAL"),
            hang_timeout: seconds("XPU_TIMER_HANG_TIMEOUT"),
            node: text("POD_NAME"),
            metrics: MetricsSettings::new(source),
            timeline: TimelineSettings::new(source),
            ip: text("POD_IP"),
            cluster: source.text("XPU_TIMER_COLLECTOR"),
            token_file: source.path("XPU_TIMER_COLLECTOR_TOKEN_FILE"),
            ca_file: source.path("XPU_TIMER_COLLECTOR_CA_FILE"),
            webhook: source.text("XPU_TIMER_WEBHOOK"),
            exit_plugins: source.exit_plugins(),
            keep: RetentionLimits::new(source),
            logging_dir: source.path("XPU_TIMER_LOGGING_DIR").unwrap_or_default(),
            linger,
        }
    }
}

/// Why a path, or the nearest folder above it that exists, cannot be examined: its file system does
/// not answer.
fn unresponsive(path: &Path) -> Option<String> {
    let owned = path.to_path_buf();
    let look =
        move || owned.ancestors().find(|path| path.symlink_metadata().is_ok()).map(|path| path.metadata().is_ok());
    file::within(file::PATIENCE, look).err().map(|error| error.to_string())
}

/// How many incident folders to keep; zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionLimits {
    /// Number of newest folders to keep.
    pub count: usize,
    /// Greatest age to keep.
    pub age: Duration,
}

impl RetentionLimits {
    /// Reads any source.
    #[must_use]
    pub fn new(source: &Source) -> Self {
        let days: u64 = source.number("XPU_TIMER_KEEP_DAYS").unwrap_or(0);
        RetentionLimits {
            count: source.number("XPU_TIMER_KEEP_INCIDENTS").unwrap_or(0),
            age: Duration::from_secs(days.saturating_mul(24 * 3600)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &'static [(&str, &str)]) -> Settings {
        let find = move |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
        Settings::new(&Source::new(find, ""), None, 7)
    }

    #[test]
    fn defaults() {
        let settings = settings(&[("TMPDIR", "/usr")]);
        assert_eq!(settings.socket, PathBuf::from("/usr/xpu_timer-7/18888.sock"));
        assert_eq!((settings.control_port, settings.metrics_port), (18888, Some(18889)));
        assert_eq!(settings.timeline_path, PathBuf::from("/root/timeline"));
        assert_eq!(settings.fallback_path, PathBuf::from("/usr/xpu_timer-7/timeline"));
        assert_eq!((settings.sample_interval.as_secs(), settings.hang_timeout.as_secs()), (5, 300));
    }

    #[test]
    fn the_metrics_port_names_its_variable() {
        let settings = settings(&[("XPU_TIMER_PORT", "65535"), ("XPU_TIMER_SOCKET", "/s/x.sock")]);
        assert_eq!((settings.control_port, settings.metrics_port), (65534, Some(65535)));
        assert_eq!(settings.port_variable, "XPU_TIMER_PORT");
        assert_eq!(settings.socket, PathBuf::from("/s/x.sock"));
    }

    #[test]
    fn the_last_port_has_no_next_one() {
        assert_eq!(settings(&[("XPU_TIMER_BASEPORT", "65535")]).metrics_port, None);
    }
}
