//! What the witness of an activity, or a function of the C library, shows beyond the activity.

use super::{
    classify::{SHARED_LOCK, STORE_CONNECT},
    names::strip_variant,
    patterns,
};

/// Whether a witness of [`Activity::Io`](crate::verdict::Activity::Io) waits for a lock on a file
/// and not for its bytes.
pub(crate) fn is_file_lock(witness: &str) -> bool {
    patterns::FILE_LOCKS.contains(&witness)
}

/// Whether a witness of [`Activity::Lock`](crate::verdict::Activity::Lock) is a lock that processes
/// share.
pub(crate) fn is_shared_lock(witness: &str) -> bool {
    witness == SHARED_LOCK
}

/// Whether a witness of [`Activity::CommInit`](crate::verdict::Activity::CommInit) is a failing
/// connection to the store.
pub(crate) fn is_store_connect(witness: &str) -> bool {
    witness == STORE_CONNECT
}

/// Whether a function of the C library waits for data from a socket.
pub(crate) fn is_network(function: &str) -> bool {
    patterns::NETWORK_NATIVE.contains(&strip_variant(function))
}

/// Whether a function of the C library waits for a signal.
pub(crate) fn is_signal_wait(function: &str) -> bool {
    patterns::SIGNAL_NATIVE.contains(&strip_variant(function))
}

/// Whether a function of the C library sleeps for a time.
pub(crate) fn is_sleep(function: &str) -> bool {
    patterns::SLEEP_NATIVE.contains(&strip_variant(function))
}
