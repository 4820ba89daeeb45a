//! All settings of the cluster role, from the environment table of `proto` and the command line.

use std::{
    env,
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
};

use anyhow::{anyhow, bail};
use nix::unistd::getuid;
use xpu_timer_proto::{
    env::{Problem, Source},
    socket,
};

use crate::config::RetentionLimits;

/// Settings of the cluster collector.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The address that it listens on.
    pub listen: SocketAddr,
    /// Certificate and key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// File that contains the token.
    pub token_file: Option<PathBuf>,
    /// Root of the incident folders.
    pub timeline_path: PathBuf,
    /// Fallback root if `timeline_path` is not writable.
    pub fallback_path: PathBuf,
    /// URL that verdicts are posted to.
    pub webhook: Option<String>,
    /// Retention of incident folders.
    pub keep: RetentionLimits,
}

impl Settings {
    /// Reads the environment of this process. `listen` of the command line takes precedence.
    ///
    /// # Errors
    /// One sentence that describes the problem: an invalid address, or an address that is not
    /// allowed with these settings.
    pub fn from_process(listen: Option<String>) -> anyhow::Result<(Self, Vec<Problem>)> {
        let source = Source::process();
        let settings = Self::new(&source, listen, env::temp_dir(), getuid().as_raw())?;
        Ok((settings, source.problems()))
    }

    /// Reads any source.
    ///
    /// # Errors
    /// As [`Settings::from_process`].
    pub fn new(source: &Source, listen: Option<String>, temporary: PathBuf, uid: u32) -> anyhow::Result<Self> {
        let text = listen.or_else(|| source.text("XPU_TIMER_CLUSTER_LISTEN")).unwrap_or_default();
        let listen = text.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
        let listen = listen.ok_or_else(|| anyhow!("{text:?} is not an address and port to listen on"))?;
        let files = ["XPU_TIMER_CLUSTER_CERT_FILE", "XPU_TIMER_CLUSTER_KEY_FILE"].map(|name| source.path(name));
        let identity = match files {
            [Some(certificate), Some(key)] => Some((certificate, key)),
            [None, None] => None,
            _ => bail!("set both XPU_TIMER_CLUSTER_CERT_FILE and XPU_TIMER_CLUSTER_KEY_FILE, or neither"),
        };
        let token_file = source.path("XPU_TIMER_COLLECTOR_TOKEN_FILE");
        if !listen.ip().is_loopback() && (identity.is_none() || token_file.is_none()) {
            bail!(
                "{listen} is not a loopback address, so TLS and a token are required: set XPU_TIMER_CLUSTER_CERT_FILE, \
                 XPU_TIMER_CLUSTER_KEY_FILE and XPU_TIMER_COLLECTOR_TOKEN_FILE"
            );
        }
        Ok(Settings {
            listen,
            identity,
            token_file,
            timeline_path: source.path("XPU_TIMER_TIMELINE_PATH").unwrap_or_default(),
            fallback_path: socket::directory(&temporary, uid).join("timeline"),
            webhook: source.text("XPU_TIMER_WEBHOOK"),
            keep: RetentionLimits::new(source),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &'static [(&str, &str)], listen: Option<&str>) -> anyhow::Result<Settings> {
        let find = move |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
        Settings::new(&Source::new(find, ""), listen.map(str::to_string), "/t".into(), 7)
    }

    #[test]
    fn listening_beyond_loopback_requires_tls_and_a_token() {
        assert_eq!(settings(&[], None).unwrap().listen.to_string(), "127.0.0.1:18890");
        const CERT: (&str, &str) = ("XPU_TIMER_CLUSTER_CERT_FILE", "/c");
        const KEY: (&str, &str) = ("XPU_TIMER_CLUSTER_KEY_FILE", "/k");
        const TOKEN: (&str, &str) = ("XPU_TIMER_COLLECTOR_TOKEN_FILE", "/t");
        for (pairs, why) in [
            (&[][..], "TLS and a token are required"),
            (&[TOKEN], "TLS and a token are required"),
            (&[CERT, KEY], "TLS and a token are required"),
            (&[CERT, TOKEN], "or neither"),
        ] {
            let error = settings(pairs, Some("0.0.0.0:18890")).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(settings(&[CERT, KEY, TOKEN], Some("0.0.0.0:18890")).is_ok());
        assert!(settings(&[], Some("nowhere")).unwrap_err().to_string().contains("nowhere"));
    }
}
