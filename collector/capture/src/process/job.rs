//! The request to capture one process.

use std::{sync::Arc, time::Instant};

use crate::{kernel::tcp_bytes::TcpConnections, options::Options};

/// One process to capture.
pub(crate) struct Job {
    pub pid: i32,
    pub options: Options,
    pub deadline: Instant,
    pub connections: Arc<TcpConnections>,
}
