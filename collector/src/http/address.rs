//! Addresses of collectors.

use std::{net::IpAddr, time::Duration};

use tonic::transport::Uri;
use xpu_timer_proto::secrets;

/// A peer whose machine vanished is noticed after twice this time.
pub const KEEPALIVE: Duration = Duration::from_secs(5);

/// Parses the address of a collector. Returns it and whether it uses TLS.
///
/// # Errors
/// If it is invalid, or plain text would leave this machine.
pub fn check_url(url: &str) -> Result<(Uri, bool), String> {
    let shown = secrets::text(url);
    let uri: Uri = url.parse().map_err(|error| format!("{shown}: {error}"))?;
    let secure = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(format!("{shown}: it must begin with https:// or http://")),
    };
    if !secure && !is_loopback(uri.host().unwrap_or_default()) {
        return Err(format!(
            "{shown}: plain text is for loopback only; beyond it give https:// and XPU_TIMER_COLLECTOR_TOKEN_FILE"
        ));
    }
    Ok((uri, secure))
}

/// `localhost` or a loopback address of this machine.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
