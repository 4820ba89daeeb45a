//! Numbers of nodes and of their streams.

/// A node collector process. It keeps its number when it reconnects with another stream.
pub type NodeId = u64;
/// One stream.
pub type StreamId = u64;
