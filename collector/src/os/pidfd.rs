//! Asks a pidfd how its process ended, even after the process was reaped (Linux 6.15). This call
//! needs unsafe code.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

/// `struct pidfd_info` of `linux/pidfd.h`, first published size (64 bytes).
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    /// pid, tgid, ppid and eight user and group ids.
    ids: [u32; 11],
    exit_code: i32,
}

const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// `_IOWR(0xff, 11, struct pidfd_info)`. The kernel takes the size of the structure from it.
const PIDFD_GET_INFO: libc::Ioctl = 0xc000_ff0b | (size_of::<PidfdInfo>() as libc::Ioctl) << 16;
const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// Wait status of a reaped process; `None` if it has not been reaped or the kernel is older than
/// 6.15.
pub fn wait_status(fd: &OwnedFd) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..Default::default() };
    // SAFETY: the request number encodes the size of PidfdInfo, the kernel writes no more than that
    // into `info`, which lives across the call; every bit pattern is a valid PidfdInfo.
    let failed = unsafe { libc::ioctl(fd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) } != 0;
    (!failed && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
}
