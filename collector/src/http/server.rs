//! Serves a router on a listener, with or without TLS, within the limits and deadlines of
//! [`watch`].

use std::{convert::Infallible, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::{Router, body::Body, extract::Request, http::header, response::Response};
use hyper::{
    body::Incoming,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use nix::unistd::getuid;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};
use xpu_timer_proto::file;

use crate::{
    error::Error,
    http::{
        peer::Owners,
        watch::{self, Answer, Class, InFlight, KEEPALIVE, Limits, Slot, Slots, Watch, Watched},
    },
};

/// How connections are served.
#[derive(Clone)]
pub struct Server {
    /// Deadlines and maximum numbers of connections.
    pub limits: Limits,
    /// The slots of all connections of this process.
    pub slots: Arc<Slots>,
    /// TLS settings with certificate and key; `None` for plain text.
    pub tls: Option<TlsAcceptor>,
    /// Whether to support HTTP/2, which gRPC needs.
    pub http2: bool,
}

/// The sender of a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The user, if it is on this machine and known.
    pub uid: Option<u32>,
    limits: Limits,
    watch: Arc<Watch>,
}

impl Caller {
    /// Whether it is the user of this process, or root.
    #[must_use]
    pub(crate) fn is_owner(&self) -> bool {
        is_owner(self.uid)
    }

    /// Notes that the request had the token, or began the stream of a node.
    pub(crate) fn is_trusted(&self) {
        self.watch.promote(&self.limits);
    }

    /// Notes a wrong token and delays the answer, which slows down guessing: a connection has one
    /// attempt per second, and an address or a user has few connections.
    pub(crate) async fn failed(&self) {
        let mut failures = self.watch.failures.lock().await;
        *failures += 1;
        sleep(FAILURE).await;
        if *failures >= MOST_FAILURES {
            self.watch.kill();
        }
    }
}

/// Delay after a wrong token.
const FAILURE: Duration = Duration::from_secs(1);
/// Maximum number of wrong tokens on one connection.
const MOST_FAILURES: u32 = 10;
/// Pause when the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum size of all headers of a request.
const MAX_HEADER_BYTES: usize = 32 * 1024;
/// Maximum number of requests in flight on one HTTP/2 connection. A node needs one for its stream
/// and a few for deliveries.
const MAX_STREAMS: u32 = 64;
/// Unread bytes that a peer may send per request: three frames of a node. HTTP/2 keeps room for the
/// largest number of unread frames for as long as a connection lasts. With 64 KB, nothing else
/// arrives for two seconds on a link of 256 kbit/s. With more, the connection would be considered
/// dead.
const WINDOW_BYTES: u32 = 24 * 1024;
/// Bytes of a response that wait for the peer.
const SEND_BYTES: usize = 64 * 1024;

fn is_owner(uid: Option<u32>) -> bool {
    uid.is_some_and(|uid| uid == 0 || uid == getuid().as_raw())
}

impl Server {
    /// Serves until the listener fails permanently, which does not happen.
    pub async fn run(self, listener: TcpListener, router: Router) {
        let Ok(local) = listener.local_addr() else { return };
        let owners = Owners::new(local);
        tokio::spawn(watch::end_overdue(Arc::downgrade(&self.slots), self.limits));
        loop {
            self.slots.settle().await;
            match listener.accept().await {
                Ok((stream, peer)) => self.accept(stream, peer, &owners, &router),
                // The peer has closed it; another connection may be waiting.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    warn!("a connection to {local} cannot be accepted: {error}");
                    self.slots.evict();
                    sleep(PAUSE).await;
                }
            }
        }
    }

    fn accept(&self, stream: TcpStream, peer: SocketAddr, owners: &Owners, router: &Router) {
        let ip = peer.ip().to_canonical();
        let uid = stream.local_addr().ok().filter(|_| ip.is_loopback());
        let uid = uid.and_then(|local| owners.of_peer(peer, local));
        let class = match ip {
            ip if ip.is_loopback() && is_owner(uid) => Class::Own,
            ip if ip.is_loopback() => Class::User(uid),
            // One IPv6 host can have any number of addresses.
            std::net::IpAddr::V6(ip) => Class::Address(std::net::Ipv6Addr::from(u128::from(ip) >> 64 << 64).into()),
            ip => Class::Address(ip),
        };
        let Some(slot) = self.slots.take(class, &self.limits) else {
            debug!("{peer} is refused: {class:?} has too many connections that are busy");
            if self.tls.is_none() {
                // It fits into an empty buffer.
                let _ = stream
                    .try_write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n");
            }
            return;
        };
        // Only an optimization of some milliseconds.
        let _ = stream.set_nodelay(true);
        let caller = Caller { uid, limits: self.limits, watch: Arc::clone(&slot.watch) };
        tokio::spawn(self.clone().connection(stream, peer, slot, caller, router.clone()));
    }

    async fn connection(self, stream: TcpStream, peer: SocketAddr, slot: Slot, caller: Caller, router: Router) {
        let stream = Watched::new(stream, Arc::clone(&slot.watch));
        match &self.tls {
            // Boxed, so that a connection in plain text has no room for the handshake.
            Some(tls) => Box::pin(self.secure(tls, stream, peer, &slot, caller, router)).await,
            None => self.speak(stream, peer, &slot, caller, router).await,
        }
    }

    async fn secure(
        &self,
        tls: &TlsAcceptor,
        stream: Watched<TcpStream>,
        peer: SocketAddr,
        slot: &Slot,
        caller: Caller,
        router: Router,
    ) {
        tokio::select! {
            secured = timeout(self.limits.handshake, tls.accept(stream)) => match secured {
                Ok(Ok(stream)) => {
                    slot.watch.secured();
                    Box::pin(self.speak(stream, peer, slot, caller, router)).await;
                }
                Ok(Err(error)) => debug!("{peer}: {error}"),
                Err(_) => debug!("{peer}: no TLS handshake within {:?}", self.limits.handshake),
            },
            () = slot.watch.killed() => {}
        }
    }

    async fn speak(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: SocketAddr,
        slot: &Slot,
        caller: Caller,
        router: Router,
    ) {
        let watch = Arc::clone(&slot.watch);
        let router = TowerToHyperService::new(router);
        let service = service_fn(move |request: Request<Incoming>| {
            let in_flight = watch.begin();
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(caller.clone());
            let answer = router.call(request);
            async move { Ok::<_, Infallible>(answered(answer.await, in_flight)) }
        });
        let builder = self.builder();
        let mut connection = Box::pin(builder.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!("{peer}: {error}");
                }
            }
            () = slot.watch.killed() => debug!("{peer} is disconnected"),
        }
    }

    fn builder(&self) -> Builder<TokioExecutor> {
        let mut builder = Builder::new(TokioExecutor::new());
        // The watch enforces the deadline of the headers, including the time before their first
        // byte.
        builder.http1().header_read_timeout(None).max_buf_size(MAX_HEADER_BYTES);
        if !self.http2 {
            return builder.http1_only();
        }
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_concurrent_streams(MAX_STREAMS)
            .max_pending_accept_reset_streams(MAX_STREAMS as usize)
            .max_local_error_reset_streams(MAX_STREAMS as usize)
            .max_header_list_size(MAX_HEADER_BYTES as u32)
            .max_send_buf_size(SEND_BYTES);
        builder
    }
}

/// Wraps the response of the router, which never fails.
fn answered(answer: Result<Response, Infallible>, in_flight: InFlight) -> Response<Answer> {
    let (head, body) = match answer {
        Ok(answer) => answer.into_parts(),
        Err(never) => match never {},
    };
    let kind = head.headers.get(header::CONTENT_TYPE);
    let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    Response::from_parts(head, Answer::new(body, in_flight, is_stream))
}

/// Loads the certificate and key of a server from PEM files.
///
/// # Errors
/// If a file cannot be read or contains no certificate or key, or if the two do not match.
pub(crate) fn tls_acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, Error> {
    let read = |path: &Path| file::read_within(path).map_err(Error::path("read", path));
    let (certificates, private) = (read(certificate)?, read(key)?);
    let chain: Result<Vec<CertificateDer<'_>>, _> = CertificateDer::pem_slice_iter(&certificates).collect();
    let chain = chain.map_err(io::Error::other).and_then(|chain| match chain.is_empty() {
        true => Err(io::Error::other("it contains no certificate")),
        false => Ok(chain.into_iter().map(CertificateDer::into_owned).collect::<Vec<_>>()),
    });
    let chain = chain.map_err(Error::path("use", certificate))?;
    let private = PrivateKeyDer::from_pem_slice(&private).map_err(io::Error::other).map_err(Error::path("use", key))?;
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, private));
    let mut config = config.map_err(io::Error::other).map_err(Error::path("use", certificate))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
