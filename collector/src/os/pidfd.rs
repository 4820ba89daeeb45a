//! System calls on a pidfd: a descriptor that refers to one process, even after another process got
//! its pid. `nix` lacks them.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use nix::{errno::Errno, sys::signal::Signal};

/// Opens a process.
///
/// # Errors
/// If there is no such process, or no descriptor is left.
#[allow(unsafe_code, reason = "this system call has no safe wrapper")]
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two numbers (the pid and no flags) and accesses no memory of this
    // process.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: the kernel has just opened this descriptor (a c_int), so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Sends a signal to the process of a pidfd.
///
/// # Errors
/// If the process has ended or belongs to another user.
#[allow(unsafe_code, reason = "this system call has no safe wrapper")]
pub fn send_signal(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    let information = ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is borrowed, so it stays open across the call. The only pointer is
    // null: the kernel then fills in the siginfo itself, as for `kill`.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), signal as i32, information, 0) };
    Errno::result(sent)?;
    Ok(())
}

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

/// Asks a pidfd for the wait status of a process that was reaped. `None` if it has not been reaped
/// or the kernel is older than 6.15.
#[allow(unsafe_code, reason = "this ioctl has no safe wrapper")]
pub fn reaped_status(fd: &OwnedFd) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..Default::default() };
    // SAFETY: the request number encodes the size of PidfdInfo, the kernel writes no more than that
    // into `info`, which lives across the call; every bit pattern is a valid PidfdInfo.
    let failed = unsafe { libc::ioctl(fd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) } != 0;
    (!failed && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
}
