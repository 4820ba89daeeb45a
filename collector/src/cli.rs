//! The command line.

use std::{io::Write, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use nix::sys::stat::{Mode, umask};
use terminal_size::{Width, terminal_size_of};
use tracing::warn;
use xpu_timer_proto::{env::Source, printable};

use crate::{
    client::incidents::Remote,
    cluster,
    config::Settings,
    error::Error,
    logging::{self, Destination},
    node::{self, supervisor},
};

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
}

#[derive(Debug, Subcommand)]
enum Incidents {
    /// Lists all incidents, oldest first
    List {
        /// List the mild captures as well: dumps whose verdict shows no hang
        #[arg(long)]
        all: bool,
    },
    /// Lists the ranks that slow their job down without a hang
    Slow,
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
/// Those of the role. A collector that already runs for this socket is not an error.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let source = Source::process();
    // Stacks and commands are private, whatever the user's umask is.
    umask(Mode::from_bits_truncate(source.umask()));
    let destination = match &arguments.command {
        Role::Node { log: Some(log), .. } | Role::Cluster { log: Some(log), .. } => Destination::File(log),
        Role::Node { log: None, .. } | Role::Cluster { log: None, .. } => Destination::Stderr,
        Role::Incidents { .. } => Destination::Command,
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
    }
}

fn run_incidents(url: Option<String>, json: bool, what: &Incidents) -> anyhow::Result<()> {
    let remote = Remote::new(url, &Source::process())?;
    let text = match what {
        Incidents::List { all } => remote.list(*all, json, terminal_width())?,
        Incidents::Slow => match remote.slow_ranks(json)? {
            none if none.is_empty() => "no slow ranks\n".into(),
            slow => slow,
        },
        Incidents::Show { id } => remote.show(id, json)?,
        Incidents::Fetch { id, dir, rank } => {
            let (folder, remark) = remote.fetch(id, dir, rank)?;
            if let Some(remark) = remark {
                say(&format!("xpu_timer_collector: {remark}"));
            }
            format!("{}\n", printable::line(&folder.to_string_lossy()))
        }
    };
    let text = if json { printable::json(&text) } else { printable::text(&text) };
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
    }
}
