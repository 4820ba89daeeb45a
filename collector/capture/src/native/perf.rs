//! Samples of running threads: `perf_event_open` on a thread's software task clock, with its user
//! registers and its stack.
//!
//! The kernel's timer interrupt takes the sample on the CPU that runs the thread. The thread gets
//! no signal and does not stop, and its current system call returns the result that it would have
//! returned anyway. Each event takes one sample and then disables itself.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering, fence},
};

use memmap2::{MmapOptions, MmapRaw};

use crate::memory::Region;

use super::Registers;

/// CPU time of the thread until the sample. The kernel's minimum is 10 us.
const PERIOD_NS: u64 = 20_000;
/// Bytes of the user stack in one sample. A record is shorter than 64 KB.
pub(crate) const STACK_BYTES: usize = 65_528;
/// Sizes of a ring to try, in pages. The first fits one record of the maximum length. Unprivileged
/// users may lock only few pages, so smaller sizes are tried too.
const RING_PAGES: [usize; 3] = [16, 8, 4];
const PAGE: usize = 4096;

const TYPE_SOFTWARE: u32 = 1;
const SW_TASK_CLOCK: u64 = 1;
const SAMPLE_REGS_USER: u64 = 1 << 12;
const SAMPLE_STACK_USER: u64 = 1 << 13;
const DISABLED: u64 = 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const FLAG_FD_CLOEXEC: libc::c_ulong = 8;
/// `_IO('$', 1)`: disables the event, and waits until it is no longer counting on any CPU.
const IOC_DISABLE: libc::c_ulong = 0x2401;
/// `_IO('$', 2)`: enables the event until it has taken this many samples.
const IOC_REFRESH: libc::c_ulong = 0x2402;
const RECORD_SAMPLE: u32 = 9;
/// The CPU mode in the `misc` field of a record's header.
const MODE_MASK: u16 = 7;
const MODE_KERNEL: u16 = 1;
/// `PERF_REG_X86_*`: ax, bx, cx, dx, si, di, bp, sp, ip (bits 0 to 8) and r8 to r15 (bits 16 to
/// 23).
const REGISTERS: u64 = 0x00ff_01ff;
const REGISTER_COUNT: usize = REGISTERS.count_ones() as usize;
/// Offsets in the ring's first page: where the kernel writes its position, and where it reads ours.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// `struct perf_event_attr`, third version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
    breakpoint_length: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clock: i32,
}

/// When a thread may be sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleMode {
    /// While its own code runs.
    User,
    /// Also inside a system call. This needs a privilege.
    Kernel,
}

/// An event that samples one thread when the thread next runs.
pub(crate) struct Event {
    descriptor: OwnedFd,
    ring: MmapRaw,
}

/// The state of a running thread at one moment.
pub(crate) struct Sample {
    pub registers: Registers,
    /// The stack from the stack pointer upwards.
    pub stack: Region,
    /// Whether the thread was inside a system call.
    pub in_kernel: bool,
}

impl Event {
    /// Prepares to sample a thread. The error is that of the kernel.
    pub(crate) fn open(tid: i32, mode: SampleMode) -> io::Result<Self> {
        let descriptor = open(tid, mode)?;
        let mut last = io::Error::from_raw_os_error(libc::ENOMEM);
        for pages in RING_PAGES {
            match MmapOptions::new().len((1 + pages) * PAGE).map_raw(&descriptor) {
                Ok(ring) => return Ok(Event { descriptor, ring }),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Requests one sample. Earlier samples are discarded.
    #[allow(unsafe_code)]
    pub(crate) fn arm(&self) -> io::Result<()> {
        self.position(TAIL).store(self.position(HEAD).load(Ordering::Acquire), Ordering::Release);
        let request = |number, argument: libc::c_ulong| {
            // SAFETY: both requests take a number and access no memory of this process.
            let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), number, argument) };
            if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        // The kernel disables the event some time after its last sample. If that came after the
        // refresh, the event would stay off.
        request(IOC_DISABLE, 0)?;
        request(IOC_REFRESH, 1)
    }

    /// The sample, once it was taken. An unusable sample is requested again.
    pub(crate) fn take(&self) -> Option<Sample> {
        let (mut tail, head) =
            (self.position(TAIL).load(Ordering::Relaxed), self.position(HEAD).load(Ordering::Acquire));
        fence(Ordering::Acquire);
        let first = tail;
        let mut found = None;
        while found.is_none() && tail < head {
            let header = self.bytes(tail, 8);
            let (kind, misc, length) = parse_header(&header)?;
            if kind == RECORD_SAMPLE {
                found = parse_sample(&self.bytes(tail + 8, length.saturating_sub(8)), misc & MODE_MASK == MODE_KERNEL);
            }
            // A length of 0 must not lead to an endless loop.
            tail += length.max(8) as u64;
        }
        self.position(TAIL).store(tail, Ordering::Release);
        if found.is_none() && tail > first {
            // This fails if the thread has ended, which the caller notices elsewhere.
            let _ = self.arm();
        }
        found
    }

    #[allow(unsafe_code)]
    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: both offsets are within the first page of the ring and multiples of 8. The
        // mapping lives as long as `self`, and the kernel accesses these words atomically.
        unsafe { AtomicU64::from_ptr(self.ring.as_mut_ptr().add(offset).cast()) }
    }

    /// Copies bytes of the ring's data, which may wrap around to its start.
    #[allow(unsafe_code)]
    fn bytes(&self, position: u64, length: usize) -> Vec<u8> {
        let capacity = self.ring.len() - PAGE;
        let start = position as usize % capacity;
        let length = length.min(capacity);
        let first = length.min(capacity - start);
        let mut bytes = vec![0; length];
        // SAFETY: `start + first` and `length - first` are at most `capacity`, the number of bytes
        // after the first page. The kernel does not write between the tail and the head.
        unsafe {
            let data = self.ring.as_ptr().add(PAGE);
            std::ptr::copy_nonoverlapping(data.add(start), bytes.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(data, bytes.as_mut_ptr().add(first), length - first);
        }
        bytes
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[allow(unsafe_code)]
fn open(tid: i32, mode: SampleMode) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind: TYPE_SOFTWARE,
        size: size_of::<Attributes>() as u32,
        config: SW_TASK_CLOCK,
        sample_period: PERIOD_NS,
        sample_type: SAMPLE_REGS_USER | SAMPLE_STACK_USER,
        flags: DISABLED | EXCLUDE_HV | if mode == SampleMode::User { EXCLUDE_KERNEL } else { 0 },
        wakeup_events: 1,
        sample_regs_user: REGISTERS,
        sample_stack_user: STACK_BYTES as u32,
        ..Attributes::default()
    };
    // SAFETY: the kernel reads `attributes`, whose size is in its `size` field. -1: on any CPU, and
    // in no group.
    let result =
        unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, tid, -1, -1, FLAG_FD_CLOEXEC) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

/// Whether the kernel refused for lack of permission.
pub(crate) fn is_forbidden(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM))
}

/// Whether descriptors or locked memory ran out, which may be temporary.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC | libc::EAGAIN | libc::EINTR)
    )
}

/// Explains why running threads cannot be sampled, and what to do about it.
pub(crate) fn explain(error: &io::Error) -> String {
    const GRANT: &str = "grant CAP_PERFMON (docker run --cap-add PERFMON; in Kubernetes securityContext.capabilities.add: \
                         [PERFMON])";
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    let remedy = match (error.raw_os_error(), paranoid.trim().parse::<i32>()) {
        (Some(libc::EACCES | libc::EPERM), Ok(level)) if level > 2 => {
            format!("; /proc/sys/kernel/perf_event_paranoid is {level}: set it to 2, or {GRANT}")
        }
        (Some(libc::EACCES | libc::EPERM), _) => {
            format!("; a seccomp filter or a security module forbids it: allow perf_event_open, or {GRANT}")
        }
        (Some(libc::ENOSYS), _) => "; this kernel lacks the call, or a seccomp filter hides it".into(),
        (Some(libc::EMFILE), _) => "; this process has reached its limit of open files: raise it (ulimit -n)".into(),
        (Some(libc::ENOMEM), _) => "; raise /proc/sys/kernel/perf_event_mlock_kb".into(),
        _ => String::new(),
    };
    format!("perf_event_open: {error}{remedy}")
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// Kind, `misc` and length of a record.
fn parse_header(header: &[u8]) -> Option<(u32, u16, usize)> {
    let header = read_u64(header, 0)?;
    Some((header as u32, (header >> 32) as u16, (header >> 48) as usize))
}

/// Parses what follows the header: the ABI, the registers, the stack, and how many bytes of the
/// stack were copied.
fn parse_sample(record: &[u8], in_kernel: bool) -> Option<Sample> {
    // 0: no user registers, for example because the thread is exiting.
    if read_u64(record, 0)? == 0 {
        return None;
    }
    let mut values = [0; REGISTER_COUNT];
    for (index, value) in values.iter_mut().enumerate() {
        *value = read_u64(record, 8 + 8 * index)?;
    }
    let registers = Registers::from_sample(&values);
    let capacity_at = 8 + 8 * REGISTER_COUNT;
    let capacity = usize::try_from(read_u64(record, capacity_at)?).ok()?;
    let bytes = record.get(capacity_at + 8..(capacity_at + 8).checked_add(capacity)?)?;
    let copied = if capacity == 0 { 0 } else { usize::try_from(read_u64(record, capacity_at + 8 + capacity)?).ok()? };
    let bytes = bytes.get(..copied)?.to_vec();
    // A system call saves its return address in rcx. Elsewhere in the kernel, for example on entry
    // to a signal handler, the registers may be in the middle of a change.
    let [_, _, rcx, ..] = values;
    if in_kernel && rcx != registers.pc() {
        return None;
    }
    Some(Sample { stack: Region { start: registers.sp(), bytes }, registers, in_kernel })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rcx: u64, capacity: u64, copied: u64) -> Vec<u8> {
        let mut words = vec![2];
        words.extend((0..REGISTER_COUNT as u64).map(|index| match index {
            2 => rcx,
            7 => 0x7000,
            8 => 0x1234,
            _ => index,
        }));
        words.push(capacity);
        words.extend(std::iter::repeat_n(7, capacity as usize / 8));
        words.push(copied);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn parses_records() {
        let sample = parse_sample(&record(0, 16, 8), false).unwrap();
        assert_eq!((sample.registers.pc(), sample.registers.sp()), (0x1234, 0x7000));
        assert_eq!((sample.stack.start, sample.stack.bytes.len()), (0x7000, 8));
        assert!(parse_sample(&record(0, 16, 24), false).is_none(), "more was copied than there was room for");
        assert!(parse_sample(&record(0, 16, 8)[..100], false).is_none(), "it is cut");
        assert!(parse_sample(&record(0x1234, 16, 8), true).is_some(), "inside a system call");
        assert!(parse_sample(&record(0x1233, 16, 8), true).is_none(), "elsewhere in the kernel");
        assert_eq!(parse_header(&(9u64 | 2 << 32 | 40 << 48).to_le_bytes()), Some((9, 2, 40)));
    }

    #[test]
    #[allow(unsafe_code)]
    fn samples_a_running_thread() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let until = stop.clone();
        let thread = std::thread::spawn(move || {
            // SAFETY: gettid takes no arguments and returns a number.
            sender.send((unsafe { libc::syscall(libc::SYS_gettid) } as i32, &raw const sender as u64)).unwrap();
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let (tid, near) = receiver.recv().unwrap();
        let event = match Event::open(tid, SampleMode::User) {
            Ok(event) => event,
            Err(error) => {
                stop.store(true, Ordering::Relaxed);
                eprintln!("SKIPPED: {}", explain(&error));
                return thread.join().unwrap();
            }
        };
        let start = std::time::Instant::now();
        // All samples but the first wrap around the end of the ring. The kernel may be about to
        // disable the event when it is armed again.
        for _ in 0..500 {
            event.arm().unwrap();
            let sample = loop {
                assert!(start.elapsed().as_secs() < 30);
                if let Some(sample) = event.take() {
                    break sample;
                }
                std::thread::yield_now();
            };
            assert!(sample.registers.sp().abs_diff(near) < 1 << 16, "{:#x} {near:#x}", sample.registers.sp());
            assert!(!sample.stack.bytes.is_empty());
            assert!(event.take().is_none(), "one at a time");
        }
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap();
    }
}
