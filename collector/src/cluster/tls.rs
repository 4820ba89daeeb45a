//! Certificate and key of the cluster collector.

use std::{io, path::Path, sync::Arc};

use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;
use xpu_timer_proto::file;

use crate::error::Error;

/// Loads them from PEM files.
///
/// # Errors
/// If a file cannot be read or contains no certificate or key, or if the two do not match.
pub fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, Error> {
    let read = |path: &Path| file::read_within(path).map_err(Error::path("read", path));
    let (certificates, private) = (read(certificate)?, read(key)?);
    let chain: Result<Vec<CertificateDer<'_>>, _> = CertificateDer::pem_slice_iter(&certificates).collect();
    let chain = chain.map_err(io::Error::other).and_then(|chain| match chain.is_empty() {
        true => Err(io::Error::other("there is no certificate in it")),
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
