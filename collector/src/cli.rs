//! The command line.

use std::time::Duration;

use clap::{Parser, Subcommand};
use tracing::warn;

use crate::{config::Settings, error::Error, node};

/// Collects hangs of training jobs: which rank stopped, where, and why
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
    /// Exit codes: 0 when told to end, when nobody is connected for --linger seconds, and when one runs already for this socket; 1
    /// when the socket cannot be had; 2 for a wrong command line.
    Node {
        /// End when nothing has been connected for this many seconds
        #[arg(long, value_name = "SECONDS", value_parser = seconds)]
        linger: Option<Duration>,
    },
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Does what the command line says.
///
/// # Errors
/// What [`node::run`] cannot do without. That one runs already is none.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let Role::Node { linger } = arguments.command;
    let (settings, problems) = Settings::from_process(linger);
    for problem in problems {
        warn!("{problem}");
    }
    if settings.cluster.is_some() {
        warn!("XPU_TIMER_COLLECTOR is set, but this version has no cluster role: this node judges its own ranks");
    }
    match node::run(settings) {
        Err(error @ Error::Running { .. }) => {
            eprintln!("{error}");
            Ok(())
        }
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
        let Role::Node { linger } = Arguments::try_parse_from(["c", "node", "--linger", "1.5"]).unwrap().command;
        assert_eq!(linger, Some(Duration::from_millis(1500)));
        for wrong in ["-1", "soon", "inf"] {
            assert!(Arguments::try_parse_from(["c", "node", &format!("--linger={wrong}")]).is_err(), "{wrong}");
        }
        assert!(Arguments::try_parse_from(["c"]).is_err());
    }
}
