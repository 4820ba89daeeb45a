//! Makes rendezvous of different nodes comparable. A rendezvous on loopback is local to the machine
//! that reports it: two jobs that both report `127.0.0.1:29500` on two machines are two jobs, while
//! a job that several collectors of one machine report is one job.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    sync::LazyLock,
};

use crate::{http::address::is_loopback, os::process};

/// Suffix of the instance of a job whose rendezvous is on the loopback of this machine.
static HERE: LazyLock<String> = LazyLock::new(|| {
    // A container may have its own loopback.
    let namespace = fs::read_link("/proc/self/ns/net").map(|link| link.display().to_string()).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    (process::boot_id(), namespace).hash(&mut hasher);
    format!(" on {} {:08x}", process::host_name(), hasher.finish() as u32)
});

/// The instance of a job as it is reported to other machines.
#[must_use]
pub fn beyond_this_machine(instance: &str) -> String {
    match instance.rsplit_once(':') {
        Some((host, port)) if is_loopback(host) && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            of_this_machine(instance)
        }
        _ => instance.into(),
    }
}

/// A machine-local identifier as it is reported to other machines.
#[must_use]
pub fn of_this_machine(instance: &str) -> String {
    format!("{instance}{}", *HERE)
}

/// The instance of a job as it is named on this machine.
#[must_use]
pub fn on_this_machine(instance: &str) -> &str {
    instance.strip_suffix(HERE.as_str()).unwrap_or(instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rendezvous_on_loopback_is_one_of_this_machine() {
        for instance in ["127.0.0.1:29500", "localhost:29500", "[::1]:1", "::1:1", "127.0.1.1:29500"] {
            let reported = beyond_this_machine(instance);
            assert!(reported.starts_with(instance) && reported.len() > instance.len() + 8, "{reported}");
            assert_eq!((on_this_machine(&reported), beyond_this_machine(&reported)), (instance, reported.clone()));
        }
        for instance in ["", "10.0.0.9:29500", "prterun-1", "4711.0", "node:35363", "localhost.evil.example:1"] {
            assert_eq!((beyond_this_machine(instance).as_str(), on_this_machine(instance)), (instance, instance));
        }
        assert_eq!(on_this_machine("127.0.0.1:1 on other 00000001"), "127.0.0.1:1 on other 00000001");
    }
}
