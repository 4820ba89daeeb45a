//! The node's stream to the cluster collector: dials, and redials with growing pauses. It contains
//! no logic about ranks and incidents: incoming messages go to the event loop, which composes all
//! outgoing ones.

use std::{
    hash::{BuildHasher, RandomState},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use tokio::{
    runtime::Handle,
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Status,
    metadata::{Ascii, MetadataValue},
    transport::{Certificate, ClientTlsConfig, Endpoint},
};
use tracing::{info, warn};
use xpu_timer_proto::{
    file, secrets,
    v1::{ClusterMessage, cluster_client::ClusterClient, cluster_message},
};

use crate::{
    error::chain,
    http::{
        SmallFrames,
        access::{check_url, read_token},
        watch::KEEPALIVE,
    },
    node::{
        cluster_member::{AuthInterceptor, Link, UplinkEvent, status_text},
        inbox::{Command, Inbox},
    },
};

/// The address of the cluster collector, and the credentials of this node.
#[derive(Debug, Clone)]
pub(super) struct Address {
    endpoint: Endpoint,
    token: Option<MetadataValue<Ascii>>,
    /// The URL of the user's setting, without a password.
    pub url: String,
}

/// Number of control messages that may wait: a node sends a few a second.
const BACKLOG: usize = 256;
const CONNECT: Duration = Duration::from_secs(5);
/// Time limit from the first byte to the confirmation of the stream: TLS, HTTP/2 and the token.
const JOIN: Duration = Duration::from_secs(15);
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// An unchanged problem with the cluster is logged once in this time.
const REPEAT: Duration = Duration::from_secs(600);
/// A cluster collector sends nothing larger.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

impl Address {
    /// Builds the address from the settings.
    ///
    /// # Errors
    /// A sentence about what is wrong with them. A token never travels in plain text beyond this
    /// machine.
    pub(super) fn new(url: &str, token_file: Option<&Path>, ca_file: Option<&Path>) -> anyhow::Result<Self> {
        let (uri, secure) = check_url(url)?;
        let read = |path: &Path| file::read_within(path).map_err(|error| anyhow!("{}: {error}", path.display()));
        let token = match token_file {
            Some(path) => Some(bearer(&read_token(path).map_err(|error| anyhow!(chain(&error)))?)?),
            None => None,
        };
        let mut endpoint = Endpoint::from(uri.clone())
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        if secure {
            let tls = match ca_file {
                Some(path) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?)),
                None => ClientTlsConfig::new().with_native_roots(),
            };
            endpoint = endpoint
                .tls_config(tls)
                .map_err(|error| anyhow!("XPU_TIMER_COLLECTOR={}: {}", secrets::text(url), chain(&error)))?;
        }
        Ok(Address { endpoint, token, url: secrets::text(url).into_owned() })
    }
}

fn bearer(token: &str) -> anyhow::Result<MetadataValue<Ascii>> {
    format!("Bearer {token}")
        .parse()
        .map_err(|_| anyhow!("the token contains a character that an HTTP header cannot contain"))
}

/// Keeps a stream open for as long as the node runs.
pub(super) async fn run(address: Address, inbox: Inbox) {
    let mut pause = SHORTEST_PAUSE;
    let mut last_logged = (String::new(), Instant::now());
    loop {
        let begun = Instant::now();
        let why = match stream(&address, &inbox).await {
            Ok(()) => "it ended the stream".to_string(),
            Err(error) => chain(&error),
        };
        if last_logged.0 != why || last_logged.1.elapsed() > REPEAT {
            warn!("the cluster collector {}: {why}", address.url);
            last_logged = (why.clone(), Instant::now());
        }
        inbox.post(Command::Uplink(UplinkEvent::Lost(why)));
        if begun.elapsed() > LONGEST_PAUSE {
            pause = SHORTEST_PAUSE;
        }
        sleep(jitter(pause)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// A random time between half the pause and all of it, so that all nodes do not reach a restarted
/// cluster collector at one moment.
fn jitter(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + random / 2.0)
}

/// Why a stream ended that the cluster collector did not end.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("no answer within {JOIN:?}")]
    Late,
    #[error(transparent)]
    Connect(#[from] tonic::transport::Error),
    #[error("{}", status_text(.0))]
    Status(Box<Status>),
}

impl From<Status> for StreamError {
    fn from(status: Status) -> Self {
        StreamError::Status(Box::new(status))
    }
}

async fn stream(address: &Address, inbox: &Inbox) -> Result<(), StreamError> {
    let late = |_| StreamError::Late;
    let channel = timeout(JOIN, address.endpoint.connect()).await.map_err(late)??;
    let client = ClusterClient::with_interceptor(SmallFrames(channel), AuthInterceptor(address.token.clone()));
    let mut client = client.max_decoding_message_size(MAX_MESSAGE_BYTES);
    let (sender, messages) = mpsc::channel(BACKLOG);
    let link = Link { messages: sender, client: client.clone(), runtime: Handle::current() };
    inbox.post(Command::Uplink(UplinkEvent::Opened(Box::new(link))));
    let answer = timeout(JOIN, client.join(ReceiverStream::new(messages))).await.map_err(late)??;
    let mut answers = answer.into_inner();
    while let Some(answer) = answers.next().await {
        let ClusterMessage { message } = answer?;
        if let Some(message) = message {
            if matches!(message, cluster_message::Message::Welcome(_)) {
                info!("joined the cluster collector {}", address.url);
            }
            inbox.post(Command::Uplink(UplinkEvent::Message(Box::new(message))));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_allowed_on_loopback_only() {
        for url in ["http://127.0.0.1:18890", "http://localhost:1", "http://[::1]:1"] {
            assert!(Address::new(url, None, None).is_ok(), "{url}");
        }
        for (url, why) in [
            ("http://10.0.0.1:18890", "plain text is allowed on loopback only"),
            ("http://localhost.evil.example:1", "plain text is allowed on loopback only"),
            ("collector:18890", "must begin with https://"),
            ("ftp://x", "must begin with https://"),
        ] {
            let error = Address::new(url, None, None).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(url), "{error}");
        }
    }

    #[test]
    fn a_missing_token_file_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let error =
            Address::new("http://localhost:1", Some(&folder.path().join("none")), None).unwrap_err().to_string();
        assert!(error.contains("none"), "{error}");
    }

    #[test]
    fn pauses_differ_and_stay_within_bounds() {
        let pauses: Vec<Duration> = (0..50).map(|_| jitter(LONGEST_PAUSE)).collect();
        assert!(pauses.iter().all(|pause| *pause >= LONGEST_PAUSE / 2 && *pause <= LONGEST_PAUSE));
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }
}
