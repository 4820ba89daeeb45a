//! System calls on descriptors that `nix` lacks, or that it answers with bare numbers: new
//! connections, descriptors that come with a packet, and pidfds, which refer to one process even
//! after another process got its pid. This module gives each descriptor an owner at once.

use std::{
    io,
    mem::{self, offset_of},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use nix::{
    errno::Errno,
    sys::{
        signal::Signal,
        socket::{SockFlag, accept4},
    },
};

/// The number of descriptors that one packet can bring: a supervisor sends two. The kernel closes
/// any other.
const MOST_DESCRIPTORS: usize = 2;

/// A packet that was read.
#[derive(Debug)]
pub(crate) struct Packet {
    /// Length of the part that is in the buffer.
    pub bytes: usize,
    /// Whether the packet was longer than the buffer.
    pub is_truncated: bool,
    /// The descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
}

/// Room for the one control message that can arrive: no socket of this process asks for a kind
/// other than SCM_RIGHTS.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    descriptors: [RawFd; MOST_DESCRIPTORS],
}

/// The next pending connection, which does not block.
///
/// # Errors
/// EAGAIN when there is none, or for example when there are no descriptors left.
#[allow(unsafe_code, reason = "accept4 returns a number")]
pub(crate) fn accept(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
    // SAFETY: the kernel has just opened this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads one packet without blocking. This is not `nix::sys::socket::recvmsg`, which returns no
/// descriptor at all when the kernel has left one out: those that it has opened would leak.
///
/// # Errors
/// EAGAIN when there is no packet, or another one when the connection is broken.
#[allow(unsafe_code, reason = "recvmsg takes pointers and returns numbers")]
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> nix::Result<Packet> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: both consist of integers and pointers, for which zero is a valid value.
    let (mut header, mut control): (libc::msghdr, Control) = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = size_of::<Control>() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `header` refers to `control` and, through `part`, to `buffer`, each with its length.
    // All live across the call, and `buffer` and `control` may hold any bytes.
    let bytes = Errno::result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) })?;
    let kind = (control.header.cmsg_level, control.header.cmsg_type);
    let length: usize = control.header.cmsg_len as _;
    let number = match kind {
        (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
            length.saturating_sub(offset_of!(Control, descriptors)) / size_of::<RawFd>()
        }
        // No control message came.
        _ => 0,
    };
    let descriptors = control.descriptors.into_iter().take(number);
    // SAFETY: the kernel has just opened these descriptors, so nothing else owns them.
    let descriptors = descriptors.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect();
    Ok(Packet { bytes: bytes as usize, is_truncated: header.msg_flags & libc::MSG_TRUNC != 0, descriptors })
}

/// Opens a process.
///
/// # Errors
/// If there is no such process, or no descriptor is left.
#[allow(unsafe_code, reason = "this system call has no safe wrapper")]
pub(crate) fn open_process(pid: i32) -> io::Result<OwnedFd> {
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
pub(crate) fn send_signal(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
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
pub(crate) fn reaped_status(fd: &OwnedFd) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..Default::default() };
    // SAFETY: the request number encodes the size of PidfdInfo, the kernel writes no more than that
    // into `info`, which lives across the call; every bit pattern is a valid PidfdInfo.
    let failed = unsafe { libc::ioctl(fd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) } != 0;
    (!failed && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{IoSlice, PipeReader},
        os::fd::AsFd,
    };

    use nix::{
        poll::{PollFd, PollFlags, poll},
        sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockType, sendmsg, socketpair},
    };

    use super::*;

    /// Whether the writer of a pipe is closed by then.
    fn is_closed(pipe: &PipeReader, milliseconds: u16) -> bool {
        poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::empty())], milliseconds).unwrap() == 1
    }

    #[test]
    fn a_packet_with_too_many_descriptors_leaks_none() {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        assert_eq!(receive(&ours, &mut [0]).unwrap_err(), Errno::EAGAIN);
        for sent in 0..=MOST_DESCRIPTORS + 2 {
            let (readers, writers): (Vec<_>, Vec<_>) = (0..sent).map(|_| io::pipe().unwrap()).unzip();
            let numbers: Vec<RawFd> = writers.iter().map(AsRawFd::as_raw_fd).collect();
            let rights = [ControlMessage::ScmRights(&numbers)];
            sendmsg::<()>(theirs.as_raw_fd(), &[IoSlice::new(b"text")], &rights, MsgFlags::empty(), None).unwrap();
            drop(writers);
            let mut buffer = [0; 3];
            let packet = receive(&ours, &mut buffer).unwrap();
            assert_eq!((packet.bytes, packet.is_truncated, &buffer), (3, true, b"tex"));
            let (kept, closed) = readers.split_at(sent.min(MOST_DESCRIPTORS));
            assert_eq!(packet.descriptors.len(), kept.len());
            assert!(closed.iter().all(|pipe| is_closed(pipe, 10_000)) && !kept.iter().any(|pipe| is_closed(pipe, 0)));
            drop(packet);
            assert!(kept.iter().all(|pipe| is_closed(pipe, 10_000)));
        }
    }
}
