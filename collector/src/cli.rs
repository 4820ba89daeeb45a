//! The command line.

use std::{io::Write, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand, ValueEnum};
use nix::sys::stat::{Mode, umask};
use terminal_size::{Width, terminal_size_of};
use tracing::warn;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_capture::sampling::Threads;
use xpu_timer_proto::{env::Source, printable};

use crate::{
    client::{incidents::Remote, slow, timeline},
    cluster,
    config::Settings,
    error::Error,
    http::questions::{SHORTEST_PERIOD, WantedRecording, WantedTimeline},
    incident::viewer,
    logging::{self, Destination},
    node::{self, supervisor},
    timeline::folder::Written,
};

/// Time within which the viewer draws a recording.
const DRAW: Duration = Duration::from_secs(60);

/// Finds hangs of training jobs: which rank stopped, where, and why
#[derive(Debug, Parser)]
#[command(version, after_help = "Settings come from XPU_TIMER_* variables and the INI file of XPU_TIMER_CONFIG.")]
pub struct Arguments {
    #[command(subcommand)]
    command: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Serves the ranks of this node; usually started by xpu_timer_launch
    ///
    /// Exit codes: 0 after SIGTERM or SIGINT, after --linger seconds of disuse, or if a collector
    /// already runs for this socket; 1 if the socket cannot be used; 2 for a wrong command line.
    Node {
        /// End after this many seconds without a connection and without a running launched command
        #[arg(long, value_name = "SECONDS", value_parser = seconds)]
        linger: Option<Duration>,
        /// Run as a small parent process that restarts the collector when it dies
        #[arg(long)]
        supervise: bool,
        // Standard input is the socket between the supervisor and its worker.
        #[arg(long, hide = true)]
        tied: bool,
        /// Write the log and all other output to this file, which is rotated
        /// (XPU_TIMER_LOGGING_MAX_MB, XPU_TIMER_LOGGING_FILES)
        #[arg(long, value_name = "FILE")]
        log: Option<PathBuf>,
    },
    /// Joins the nodes of a cluster: they connect to it, and it judges all ranks of a job together
    ///
    /// Nodes find it by XPU_TIMER_COLLECTOR. Beyond loopback it listens only with TLS
    /// (XPU_TIMER_CLUSTER_CERT_FILE and XPU_TIMER_CLUSTER_KEY_FILE) and a token
    /// (XPU_TIMER_COLLECTOR_TOKEN_FILE). The same port answers HTTP: /status, /metrics, /incidents.
    ///
    /// Exit codes: 0 after SIGTERM or SIGINT; 1 if it cannot listen, or lacks the TLS files or the
    /// token that it needs; 2 for a wrong command line.
    Cluster {
        /// Address and port to listen on; default XPU_TIMER_CLUSTER_LISTEN
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: Option<String>,
        /// Write the log and all other output to this file, which is rotated
        /// (XPU_TIMER_LOGGING_MAX_MB, XPU_TIMER_LOGGING_FILES)
        #[arg(long, value_name = "FILE")]
        log: Option<PathBuf>,
    },
    /// Lists, shows and fetches the incidents of a collector
    ///
    /// Queries the cluster collector of XPU_TIMER_COLLECTOR (with XPU_TIMER_COLLECTOR_TOKEN_FILE
    /// and XPU_TIMER_COLLECTOR_CA_FILE), else the collector of this node.
    ///
    /// Exit codes: 0 on success; 1 if there is no such incident or the collector does not answer; 2
    /// for a wrong command line.
    Incidents {
        /// URL of another collector to query
        #[arg(long, global = true)]
        url: Option<String>,
        /// Print JSON instead of text
        #[arg(long, global = true)]
        json: bool,
        /// List the mild captures as well: dumps whose verdict shows no hang
        #[arg(long)]
        all: bool,
        #[command(subcommand)]
        what: Option<Incidents>,
    },
    /// Fetches the last operations of the ranks of a job, of all its nodes, into a new folder
    ///
    /// Queries the cluster collector of XPU_TIMER_COLLECTOR (with XPU_TIMER_COLLECTOR_TOKEN_FILE
    /// and XPU_TIMER_COLLECTOR_CA_FILE), else the collector of this node. Collectors keep the
    /// operations of the last XPU_TIMER_TIMELINE_SECONDS, in at most XPU_TIMER_TIMELINE_MB a node.
    /// Prints the folder; xpu_timer_gen_trace_timeline makes a trace of it.
    ///
    /// Exit codes: 0 on success; 1 if there is no such job, the collector does not answer, or the
    /// timeline of a rank is missing; 2 for a wrong command line.
    Timeline(TimelineArguments),
    /// Samples the stacks of the ranks of a job, of all its nodes, for a while, into a new folder
    ///
    /// No rank is stopped. Queries the cluster collector of XPU_TIMER_COLLECTOR (with
    /// XPU_TIMER_COLLECTOR_TOKEN_FILE and XPU_TIMER_COLLECTOR_CA_FILE), else the collector of this
    /// node. Prints the folder, in which xpu_timer_stacktrace_viewer then draws flame graphs.
    ///
    /// Exit codes: 0 on success; 1 if there is no such job, the collector does not answer, or the
    /// stacks of a rank are missing; 2 for a wrong command line.
    Record(RecordArguments),
}

/// What to fetch from which collector, and into which folder.
#[derive(Debug, clap::Args)]
struct FetchArguments {
    /// URL of another collector to query
    #[arg(long)]
    url: Option<String>,
    /// Name of the job, if there are several
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Only these ranks, such as 6 or 0-3,7
    #[arg(long, value_name = "RANKS")]
    rank: Option<RankSet>,
    /// The folder in which to make the folder timeline-…
    #[arg(long, value_name = "DIR", default_value = ".")]
    output: PathBuf,
}

#[derive(Debug, clap::Args)]
struct RecordArguments {
    #[command(flatten)]
    fetch: FetchArguments,
    /// How long to record
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    seconds: Duration,
    /// Samples a second, at most 1000
    #[arg(long, value_name = "HZ", value_parser = period, default_value = "50")]
    rate: Duration,
    /// Which threads to sample
    #[arg(long, value_name = "WHICH", default_value = "all")]
    threads: WhichThreads,
    /// Sample C frames as well, which takes some milliseconds for each sample of a rank
    #[arg(long)]
    native: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WhichThreads {
    /// The main thread of the interpreter
    Main,
    /// All threads of the interpreter
    All,
}

/// The time between two samples, of a number of samples a second.
fn period(text: &str) -> Result<Duration, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number of samples a second".to_string())?;
    let period = Duration::try_from_secs_f64(rate.recip()).map_err(|error| error.to_string())?;
    if period >= SHORTEST_PERIOD { Ok(period) } else { Err("more than 1000 a second".into()) }
}

#[derive(Debug, clap::Args)]
struct TimelineArguments {
    #[command(flatten)]
    fetch: FetchArguments,
    /// The last seconds to fetch; for a hung job, the last ones in which it did something
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    seconds: Duration,
    /// `all`: from now on record every kernel, copy and matrix product for so many seconds, and
    /// fetch them then
    #[arg(long, value_name = "WHICH", default_value = "recorded")]
    kernels: Kernels,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kernels {
    /// Those that XPU_TIMER_BRACKET records anyway
    Recorded,
    /// Every kernel
    All,
}

#[derive(Debug, Subcommand)]
enum Incidents {
    /// Lists all incidents, oldest first
    List {
        /// List the mild captures as well: dumps whose verdict shows no hang
        #[arg(long)]
        all: bool,
    },
    /// Lists the ranks that slow their job down without a hang, and which part of their step is
    /// longer than that of their peers
    Slow {
        /// Compare the operations of this many last seconds
        #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "20")]
        seconds: Duration,
        /// `all`: from now on record every kernel, copy and matrix product for so many seconds, and
        /// compare them then. Otherwise a kernel that is not recorded counts as time on the host
        #[arg(long, value_name = "WHICH", default_value = "recorded")]
        kernels: Kernels,
    },
    /// Shows the verdict of one incident
    Show {
        /// Name of the incident, as `list` prints it
        id: String,
    },
    /// Copies the files of an incident into DIR/incident-ID: all, or the dumps of some ranks
    Fetch {
        /// Name of the incident, as `list` prints it
        id: String,
        /// Folder to copy into
        #[arg(default_value = ".")]
        dir: PathBuf,
        /// Only the dump of this rank; may be repeated
        #[arg(long, value_name = "R")]
        rank: Vec<u32>,
    },
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Runs the command line.
///
/// # Errors
/// The errors of the role. A collector that already runs for this socket is not an error.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let source = Source::process();
    // Stacks and commands are private, whatever the user's umask is.
    umask(Mode::from_bits_truncate(source.umask()));
    let destination = match &arguments.command {
        Role::Node { log: Some(log), .. } | Role::Cluster { log: Some(log), .. } => Destination::File(log),
        Role::Node { log: None, .. } | Role::Cluster { log: None, .. } => Destination::Stderr,
        Role::Incidents { .. } | Role::Timeline(_) | Role::Record(_) => Destination::Command,
    };
    let _last_lines = logging::start(&source, destination);
    match arguments.command {
        Role::Node { linger, supervise, tied, .. } => run_node(linger, supervise, tied),
        Role::Cluster { listen, .. } => {
            let (settings, problems) = cluster::config::Settings::from_process(listen)?;
            for problem in problems {
                warn!("{problem}");
            }
            Ok(cluster::run(settings)?)
        }
        Role::Incidents { url, json, all, what } => {
            let what = match what.unwrap_or(Incidents::List { all }) {
                Incidents::List { all: of_list } => Incidents::List { all: all || of_list },
                other => other,
            };
            run_incidents(url, json, &what)
        }
        Role::Timeline(arguments) => run_timeline(arguments),
        Role::Record(arguments) => run_record(arguments),
    }
}

fn run_incidents(url: Option<String>, json: bool, what: &Incidents) -> anyhow::Result<()> {
    let remote = Remote::new(url, &Source::process())?;
    let text = match what {
        Incidents::List { all } => remote.list(*all, json, terminal_width())?,
        Incidents::Slow { seconds, kernels } => {
            let wanted = slow::Wanted { window: *seconds, detail: *kernels == Kernels::All };
            match slow::explained(&remote, wanted, json)? {
                none if none.is_empty() => "no slow ranks\n".into(),
                slow => slow,
            }
        }
        Incidents::Show { id } => remote.show(id, json)?,
        Incidents::Fetch { id, dir, rank } => {
            let (folder, remark) = remote.fetch(id, dir, rank)?;
            if let Some(remark) = remark {
                say(&format!("xpu_timer_collector: {remark}"));
            }
            format!("{}\n", printable::line(&folder.to_string_lossy()))
        }
    };
    print(&if json { printable::json(&text) } else { printable::text(&text) })
}

fn run_timeline(arguments: TimelineArguments) -> anyhow::Result<()> {
    let TimelineArguments { fetch, seconds, kernels } = arguments;
    let written = fetch.run(seconds, kernels == Kernels::All, None)?;
    let lost = if written.lost > 0 { format!("; {} more were lost", written.lost) } else { String::new() };
    say(&format!("{} operations of {} ranks{lost}", written.operations, written.ranks));
    anyhow::ensure!(written.problems.is_empty(), "the timeline is incomplete");
    Ok(())
}

fn run_record(arguments: RecordArguments) -> anyhow::Result<()> {
    let RecordArguments { fetch, seconds, rate, threads, native } = arguments;
    let threads = if threads == WhichThreads::Main { Threads::Main } else { Threads::All };
    let written = fetch.run(seconds, false, Some(WantedRecording { period: rate, threads, native }))?;
    say(&format!("the stacks of {} ranks", written.ranks));
    anyhow::ensure!(written.problems.is_empty(), "the recording is incomplete");
    Ok(viewer::run(&written.path, true, DRAW)?)
}

impl FetchArguments {
    /// Fetches files into a new folder, and prints its path and what is missing.
    ///
    /// # Errors
    /// The errors of [`timeline::fetch`].
    fn run(self, window: Duration, detail: bool, recording: Option<WantedRecording>) -> anyhow::Result<Written> {
        let Self { url, job, rank, output } = self;
        let remote = Remote::new(url, &Source::process())?;
        let wanted = WantedTimeline { job, ranks: rank, window, detail, recording };
        let written = timeline::fetch(&remote, &wanted, &output)?;
        print(&printable::text(&format!("{}\n", printable::line(&written.path.to_string_lossy()))))?;
        written.problems.iter().for_each(|problem| say(&format!("xpu_timer_collector: {problem}")));
        Ok(written)
    }
}

/// Writes to stdout.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Writes one line to stderr. Nothing can report a failure of that.
pub fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{}\n", printable::line(text)).as_bytes());
}

/// Columns of stdout; `None` if it is not a terminal.
fn terminal_width() -> Option<usize> {
    terminal_size_of(std::io::stdout()).map(|(Width(width), _)| usize::from(width))
}

fn run_node(linger: Option<Duration>, supervise: bool, tied: bool) -> anyhow::Result<()> {
    let (settings, problems) = Settings::from_process(linger);
    let result = if supervise {
        supervisor::run(&settings, tied)
    } else {
        for problem in problems {
            warn!("{problem}");
        }
        node::run(settings, tied).map_err(Into::into)
    };
    match result {
        Err(error) if matches!(error.downcast_ref(), Some(Error::Running { .. })) => {
            say(&error.to_string());
            Ok(())
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
        let arguments = Arguments::try_parse_from(["c", "node", "--linger", "1.5"]).unwrap();
        assert!(matches!(arguments.command, Role::Node { linger: Some(linger), .. } if linger.as_millis() == 1500));
        for wrong in ["-1", "soon", "inf"] {
            assert!(Arguments::try_parse_from(["c", "node", &format!("--linger={wrong}")]).is_err(), "{wrong}");
        }
        assert!(Arguments::try_parse_from(["c"]).is_err());
        for command in ["timeline", "record"] {
            let options = ["c", command, "--job", "j", "--rank", "0-3,7", "--output", "/tmp"];
            let (Role::Timeline(TimelineArguments { fetch, .. }) | Role::Record(RecordArguments { fetch, .. })) =
                Arguments::try_parse_from(options).unwrap().command
            else {
                panic!("{command} is another command");
            };
            assert_eq!((fetch.job.as_deref(), fetch.output.to_str()), (Some("j"), Some("/tmp")));
            assert_eq!((fetch.rank.map(|ranks| ranks.to_string()), fetch.url), (Some("0-3/7".into()), None));
        }
    }
}
