//! HTTP requests that the collector itself makes: webhooks, and the `incidents` command.

use std::{sync::Arc, time::Duration};

use ureq::{
    Agent,
    tls::{Certificate, RootCerts, TlsConfig, parse_pem},
};

/// A client that trusts the system's authorities, or only those of a PEM text.
#[must_use]
pub fn agent(deadline: Duration, authorities: Option<&[u8]>) -> Agent {
    let own = |pem: &[u8]| {
        let items = parse_pem(pem).filter_map(Result::ok);
        let certificates = items.filter_map(|item| match item {
            ureq::tls::PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        });
        RootCerts::Specific(Arc::new(certificates.collect::<Vec<Certificate<'static>>>()))
    };
    let tls = TlsConfig::builder().root_certs(authorities.map_or(RootCerts::PlatformVerifier, own)).build();
    // Whatever was installed before serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Agent::config_builder().timeout_global(Some(deadline)).http_status_as_error(false).tls_config(tls).build().into()
}
