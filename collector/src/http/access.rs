//! Protects the way to a collector: the rule for its address, and the token of a request. The token
//! is required from nodes and users at the cluster collector, and from other users at the control
//! port of a node.

use std::{fs, net::IpAddr, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{anyhow, bail};
use axum::http::{HeaderMap, header};
use tonic::transport::Uri;
use tracing::warn;
use xpu_timer_proto::{file, secrets};

use crate::error::Error;

/// Parses the address of a collector. Returns it and whether it uses TLS.
///
/// # Errors
/// If it is invalid, or plain text would leave this machine.
pub fn check_url(url: &str) -> anyhow::Result<(Uri, bool)> {
    let shown = secrets::text(url);
    let uri: Uri = url.parse().map_err(|error| anyhow!("{shown}: {error}"))?;
    let secure = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => bail!("{shown}: it must begin with https:// or http://"),
    };
    if !secure && !is_loopback(uri.host().unwrap_or_default()) {
        bail!(
            "{shown}: plain text is allowed on loopback only; elsewhere use https:// and set XPU_TIMER_COLLECTOR_TOKEN_FILE"
        );
    }
    Ok((uri, secure))
}

/// `localhost` or a loopback address of this machine.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// An optional token. Its text is never logged.
#[derive(Clone)]
pub struct Token(Option<String>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Token(…)" } else { "Token(none)" })
    }
}

impl Token {
    /// Wraps an optional token.
    #[must_use]
    pub fn new(token: Option<String>) -> Self {
        Token(token)
    }

    /// Whether a token is required.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a request has the token. A browser sends it as the password.
    #[must_use]
    pub fn is_shown(&self, headers: &HeaderMap) -> bool {
        let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        self.0.as_deref().zip(authorization).is_some_and(|(token, authorization)| shows_token(authorization, token))
    }
}

fn shows_token(authorization: &str, token: &str) -> bool {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let Some((scheme, value)) = authorization.split_once(' ') else { return false };
    if scheme.eq_ignore_ascii_case("basic") {
        let decoded = STANDARD.decode(value.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        return decoded
            .as_deref()
            .and_then(|pair| pair.split_once(':'))
            .is_some_and(|(_, word)| equal_in_constant_time(word, token));
    }
    scheme.eq_ignore_ascii_case("bearer") && equal_in_constant_time(value.trim(), token)
}

/// Compares in constant time.
fn equal_in_constant_time(one: &str, other: &str) -> bool {
    let difference = one.bytes().zip(other.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && std::hint::black_box(difference) == 0
}

/// Reads a token file without surrounding white space. A file that others can read is accepted with
/// a warning.
///
/// # Errors
/// If it cannot be read or is empty.
pub fn read_token(path: &Path) -> Result<String, Error> {
    let bytes = file::read_within(path).map_err(Error::path("read", path))?;
    let mode = fs::metadata(path).map_or(0, |status| status.permissions().mode());
    if mode & 0o004 != 0 {
        warn!("every user can read the token file {} (mode {:o}); run chmod 600 on it", path.display(), mode & 0o7777);
    }
    match String::from_utf8_lossy(&bytes).trim() {
        "" => Err(Error::path("use", path)(std::io::Error::other("the token is empty"))),
        token => Ok(token.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_a_bearer_token_or_the_password_of_a_browser() {
        let admits = |token: &Token, authorization: &str| {
            token.is_shown(&[(header::AUTHORIZATION, authorization.parse().unwrap())].into_iter().collect())
        };
        let token = Token::new(Some("s3cret".into()));
        for good in ["Bearer s3cret", "bearer s3cret", "Basic YW55Ym9keTpzM2NyZXQ="] {
            assert!(admits(&token, good), "{good}");
        }
        for bad in ["Bearer s3cre", "Bearer s3cret1", "s3cret", "Basic s3cret", "Basic czNjcmV0", "Bearer", ""] {
            assert!(!admits(&token, bad), "{bad}");
        }
        assert!(!token.is_shown(&HeaderMap::new()) && !admits(&Token::new(None), "Bearer s3cret"));
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn a_token_is_a_line_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, " secret\n").unwrap();
        assert_eq!(read_token(&path).unwrap(), "secret");
        fs::write(&path, "\n").unwrap();
        assert!(crate::error::chain(&read_token(&path).unwrap_err()).contains("the token is empty"));
    }
}
