//! The handler of fatal signals, which `XPU_TIMER_SIGNAL_HANDLER` turns on.
//!
//! It stores the registers in the ring, tells the collector, and waits for at most [`LONGEST_WAIT`]
//! while the collector copies the stack from outside. Then it calls the handler that was there
//! before. If there was none, the signal ends the process as without the hook: with the same
//! status, and with a core file of the same place. It allocates nothing, takes no lock, and runs on
//! an alternate stack where the thread has one.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use xpu_timer_proto::ring::{fault, lane, offset};

use crate::runtime::os::{
    clock,
    process::{CONNECTION, PROCESS, pid},
    seccomp, sys,
    thread_state::errno,
};

/// The signals that end a process because of an error in it.
const SIGNALS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT];

/// How long a thread waits for the collector.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Time between two looks whether the collector has read the stack.
const LOOK: Duration = Duration::from_micros(500);

/// A program may survive signals on purpose, for example to grow a table. The first ones are
/// reported.
const MOST_REPORTS: u32 = 3;

/// Size of an alternate stack. The handlers that were there before run on it too.
const STACK_BYTES: usize = 64 << 10;

/// The encoding of `HookMessage { fault }`.
pub(crate) const FAULT: [u8; 2] = [0x32, 0x00];

/// The actions that were there before, by the index in [`SIGNALS`].
static PREVIOUS: [AtomicPtr<libc::sigaction>; SIGNALS.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; SIGNALS.len()];

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// One thread reports at a time. The others wait, because their end is the end of all threads.
static REPORTING: AtomicBool = AtomicBool::new(false);

static REPORTS: AtomicU32 = AtomicU32::new(0);

/// The alternate stacks by lane. The next owner of a lane uses the stack of the one that has ended.
static STACKS: [AtomicPtr<c_void>; lane::SLOTS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; lane::SLOTS];

/// Installs the handler once.
pub(crate) fn install() {
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    // SAFETY: an all-zero sigaction is a valid value of that plain structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
        // SAFETY: an all-zero sigaction is a valid value of that plain structure.
        let old = Box::leak(Box::new(unsafe { std::mem::zeroed::<libc::sigaction>() }));
        // The handler may run as soon as it is installed, and needs the previous action.
        // SAFETY: valid places, and a handler of the right type in a library that is never
        // unloaded.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), old);
            previous.store(old, Ordering::Release);
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Gives the calling thread, the owner of this lane, an alternate stack if it has none.
pub(crate) fn equip_thread(lane: usize) {
    let Some(place) = STACKS.get(lane).filter(|_| INSTALLED.load(Ordering::Acquire)) else { return };
    // SAFETY: an all-zero stack_t is a valid value of that plain structure, and a valid place.
    let has_none = unsafe {
        let mut present: libc::stack_t = std::mem::zeroed();
        libc::sigaltstack(std::ptr::null(), &mut present) == 0 && present.ss_flags & libc::SS_DISABLE != 0
    };
    if !has_none {
        return;
    }
    let mut stack = place.load(Ordering::Acquire);
    if stack.is_null() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        stack = unsafe { libc::mmap(std::ptr::null_mut(), STACK_BYTES, access, flags, -1, 0) };
        if stack == libc::MAP_FAILED {
            return;
        }
        place.store(stack, Ordering::Release);
    }
    let stack = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: STACK_BYTES };
    // SAFETY: memory that is never unmapped. The earlier owner of the lane has ended.
    unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let errno = errno();
    let saved = errno.get();
    if seccomp::may_call() {
        // SAFETY: the kernel passes valid places to a handler with SA_SIGINFO.
        unsafe { report(signal, &*info, &*context.cast::<libc::ucontext_t>()) };
    }
    errno.set(saved);
    pass_on(signal, info, context);
}

/// Hands the registers to the collector and waits until it has copied the stack.
fn report(signal: c_int, info: &libc::siginfo_t, context: &libc::ucontext_t) {
    let words = PROCESS.ring_words.load(Ordering::Acquire);
    // A forked child has no ring. A child of vfork has that of its parent.
    if words.is_null() || PROCESS.pid.load(Ordering::Relaxed) != pid() {
        return;
    }
    let deadline = clock::now_ns() + LONGEST_WAIT.as_nanos() as u64;
    while REPORTING.swap(true, Ordering::Acquire) {
        if clock::now_ns() >= deadline {
            return;
        }
        pause();
    }
    if REPORTS.fetch_add(1, Ordering::Relaxed) < MOST_REPORTS {
        // SAFETY: the ring has `offset::END` bytes and is never unmapped.
        let words = unsafe { std::slice::from_raw_parts(words.add(offset::FAULT / 8), fault::WORDS) };
        let count = store(words, signal, info, context);
        let is_read = || words[fault::READ].load(Ordering::Acquire) == count;
        if send() {
            while !is_read() && clock::now_ns() < deadline {
                pause();
            }
        }
    }
    REPORTING.store(false, Ordering::Release);
}

/// Stores a fault and returns its number.
fn store(words: &[AtomicU64], signal: c_int, info: &libc::siginfo_t, context: &libc::ucontext_t) -> u64 {
    const ORDER: [c_int; fault::REGISTER_COUNT] = [
        libc::REG_RAX,
        libc::REG_RBX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_RBP,
        libc::REG_RSP,
        libc::REG_RIP,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    // SAFETY: a signal that the kernel raised for an address has one; of others, nobody uses it.
    let address = unsafe { info.si_addr() } as u64;
    let values = [
        (fault::SIGNAL, signal as u64),
        (fault::CODE, info.si_code as u32 as u64),
        (fault::TID, u64::from(sys::gettid())),
        (fault::ADDRESS, address),
    ];
    values.into_iter().for_each(|(word, value)| words[word].store(value, Ordering::Relaxed));
    for (index, register) in ORDER.into_iter().enumerate() {
        let value = context.uc_mcontext.gregs[register as usize] as u64;
        words[fault::REGISTERS + index].store(value, Ordering::Relaxed);
    }
    words[fault::COUNT].fetch_add(1, Ordering::Release) + 1
}

/// Tells the collector. False if there is no connection.
fn send() -> bool {
    let Some(fd) = CONNECTION.get() else { return false };
    let message = FAULT;
    // SAFETY: a socket of the hook that was just checked. The call does not block and raises no
    // signal.
    let sent =
        unsafe { libc::send(fd, message.as_ptr().cast(), message.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    sent == message.len() as isize
}

fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: i64::from(LOOK.subsec_nanos()) };
    // SAFETY: a valid time; the rest is not wanted.
    unsafe { libc::nanosleep(&time, std::ptr::null_mut()) };
}

/// Calls the handler that was there before, or lets the signal end the process.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let index = SIGNALS.iter().position(|known| *known == signal);
    let previous = index.map_or(std::ptr::null_mut(), |index| PREVIOUS[index].load(Ordering::Acquire));
    // SAFETY: null, or an action that is never freed; and the kernel's information.
    let (previous, code) = unsafe { (previous.as_ref(), (*info).si_code) };
    let is_forced = code > 0;
    match previous {
        // The kernel does not ignore a signal that it raises for an instruction.
        Some(previous) if previous.sa_sigaction == libc::SIG_IGN && !is_forced => {}
        Some(previous) if previous.sa_sigaction > libc::SIG_IGN => {
            // SAFETY: the handler of the program, with the arguments that it asked for.
            unsafe {
                if previous.sa_flags & libc::SA_SIGINFO == 0 {
                    std::mem::transmute::<usize, extern "C" fn(c_int)>(previous.sa_sigaction)(signal);
                } else {
                    type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
                    std::mem::transmute::<usize, Handler>(previous.sa_sigaction)(signal, info, context);
                }
            }
        }
        _ => end(signal, is_forced),
    }
}

/// Ends the process by this signal once the handler returns: the instruction that raised it runs
/// again, or the signal that is blocked until then arrives.
fn end(signal: c_int, is_forced: bool) {
    // SAFETY: an all-zero sigaction is the default action, and the arguments are integers.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &default, std::ptr::null_mut());
        if !is_forced {
            libc::syscall(libc::SYS_tgkill, pid(), sys::gettid(), signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::{
        Message as _,
        v1::{Fault, HookMessage, hook_message::Message},
    };

    #[test]
    fn the_message_matches_the_schema() {
        assert_eq!(HookMessage { message: Some(Message::Fault(Fault {})) }.encode_to_vec(), FAULT);
    }
}
