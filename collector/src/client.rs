//! The commands that talk to a collector, and the notifications that a collector sends. Both make
//! their HTTP requests with a client of this file.

pub mod dump_timeline;
pub(crate) mod incidents;
pub(crate) mod slow;
pub(crate) mod timeline;
pub(crate) mod webhook;

use std::{sync::Arc, time::Duration};

use ureq::{
    Agent, Proxy,
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
};

/// The kind of server that a client connects to.
#[derive(Debug)]
pub enum Peer {
    /// A public service, reached through the proxy of the environment and verified by the
    /// authorities of the system.
    Service,
    /// A collector on this machine or in this cluster, which a proxy does not reach. It is verified
    /// by these authorities, or by those of the system if the list is empty.
    Collector(Vec<Certificate<'static>>),
}

/// The certificates in a PEM text.
#[must_use]
pub fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    let items = parse_pem(pem).filter_map(Result::ok);
    let certificate = |item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None };
    items.filter_map(certificate).collect()
}

/// Makes a client.
#[must_use]
pub fn agent(deadline: Duration, peer: Peer) -> Agent {
    // A collector never redirects: its token is for itself only.
    let (proxy, roots, redirects) = match peer {
        Peer::Service => (Proxy::try_from_env(), RootCerts::PlatformVerifier, 5),
        Peer::Collector(own) if own.is_empty() => (None, RootCerts::PlatformVerifier, 0),
        Peer::Collector(own) => (None, RootCerts::Specific(Arc::new(own)), 0),
    };
    let tls = TlsConfig::builder().root_certs(roots).build();
    // A provider that was installed before works as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = Agent::config_builder().timeout_global(Some(deadline)).http_status_as_error(false);
    config.proxy(proxy).tls_config(tls).max_redirects(redirects).build().into()
}
