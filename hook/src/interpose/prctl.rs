//! The interposed `prctl` and `syscall`. They see the program install a seccomp filter, set its own
//! ptrace permission, or forbid itself the time stamp counter ([`seccomp`] describes what the hook
//! does then), and they see it fork without the C library.

use std::{
    ffi::{c_int, c_long, c_ulong, c_void},
    sync::atomic::{AtomicPtr, Ordering},
};

use xpu_timer_proto::ring::header;

use crate::runtime::{
    lifecycle::{fork, panics::guarded},
    linker::dynamic::look_up,
    os::{
        ptracer,
        seccomp::{self, tsc, watcher_may_call},
        sections,
        thread_state::{self, in_hook},
    },
    recorder,
    watcher::thread,
};

const SET_MODE_FILTER: c_ulong = 1;
const TSYNC: c_ulong = 1;
const NEW_LISTENER: c_ulong = 1 << 3;

/// `SECCOMP_MODE_STRICT`
const STRICT: c_ulong = 1;

/// `PR_SET_TSC`, and the value that makes a read of the counter end the process.
const SET_TSC: c_int = 26;

const TSC_SIGSEGV: c_ulong = 2;

/// Whether a prctl(2) forbids the calling thread to read the counter. Strict mode does so too.
fn takes_counter(option: c_ulong, value: c_ulong) -> bool {
    match option as c_int {
        SET_TSC => value == TSC_SIGSEGV,
        libc::PR_SET_SECCOMP => value == STRICT,
        _ => false,
    }
}

/// A call that installs a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Install {
    /// It applies to all threads of the process.
    synchronizes: bool,
    /// It returns a descriptor.
    listens: bool,
}

impl Install {
    /// From the arguments of prctl(2). Strict mode counts as a filter.
    fn of_prctl(option: c_ulong, mode: c_ulong, filter: c_ulong) -> Option<Self> {
        let installs = option as c_int == libc::PR_SET_SECCOMP && (mode != 2 || filter != 0);
        installs.then_some(Install { synchronizes: false, listens: false })
    }

    /// From the arguments of seccomp(2). A call without a filter only queries which flags the
    /// kernel supports, and gets an error.
    fn of_seccomp(operation: c_ulong, flags: c_ulong, filter: c_ulong) -> Option<Self> {
        let installs = operation == 0 || operation == SET_MODE_FILTER && filter != 0;
        let has = |flag| operation == SET_MODE_FILTER && flags & flag != 0;
        installs.then_some(Install { synchronizes: has(TSYNC), listens: has(NEW_LISTENER) })
    }

    fn succeeded(self, result: c_long) -> bool {
        if self.listens { result >= 0 } else { result == 0 }
    }

    /// Makes the call. The hook makes no system calls from before the filter takes effect.
    fn around(self, real: impl FnOnce() -> c_long) -> c_long {
        let errno = thread_state::errno();
        let saved = errno.get();
        let expected = guarded(|| in_hook(|| self.expect()));
        errno.set(saved);
        let result = real();
        let saved = errno.get();
        if expected == Some(true) {
            guarded(|| in_hook(|| self.settle(self.succeeded(result))));
        }
        errno.set(saved);
        result
    }

    /// False in a child of vfork, which shares the memory of a process that will not have the
    /// filter.
    fn expect(self) -> bool {
        if fork::is_vfork_child() {
            return false;
        }
        if self.synchronizes && watcher_may_call() {
            thread::stop();
        }
        let is_first = seccomp::may_call();
        seccomp::begin_install(self.synchronizes);
        if is_first {
            sections::wait_for_watcher();
        }
        true
    }

    fn settle(self, succeeded: bool) {
        seccomp::end_install(self.synchronizes, succeeded);
        if succeeded {
            publish();
        } else if self.synchronizes && watcher_may_call() {
            thread::resume();
        }
    }
}

/// Publishes the filters that this process has seen.
fn publish() {
    if let Some(recorder) = recorder::running() {
        recorder.ring.header(header::FILTERS_SEEN).store(seccomp::seen(), Ordering::Relaxed);
    }
}

/// The next `prctl` and `syscall`, which may belong to another preloaded library.
static NEXT_PRCTL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// See [`NEXT_PRCTL`].
static NEXT_SYSCALL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Replaces the C library's function that a lookup has found by the hook's export. Python programs
/// look both names up in the C library.
pub(crate) fn before(found: *mut c_void, name: &[u8]) -> *mut c_void {
    let (next, export) = match name {
        b"prctl" => (&NEXT_PRCTL, prctl as *const ()),
        b"syscall" => (&NEXT_SYSCALL, syscall as *const ()),
        _ => return found,
    };
    let is_next = !found.is_null() && found == next.load(Ordering::Relaxed);
    if is_next { export.cast_mut().cast() } else { found }
}

/// Called when the library is loaded.
pub(crate) fn find_next() {
    NEXT_PRCTL.store(look_up(libc::RTLD_NEXT, c"prctl"), Ordering::Relaxed);
    NEXT_SYSCALL.store(look_up(libc::RTLD_NEXT, c"syscall"), Ordering::Relaxed);
}

/// Interposes `prctl` to see the program's ptrace permission and its filters.
///
/// # Safety
/// See prctl(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    inspect_prctl(option as c_ulong, second);
    let call = || ptracer::call(&NEXT_PRCTL, [option as c_ulong, second, third, fourth, fifth]);
    match Install::of_prctl(option as c_ulong, second, third) {
        Some(install) => install.around(|| c_long::from(call())) as c_int,
        None => call(),
    }
}

/// Records what a prctl(2) that is about to be made reveals about the program.
fn inspect_prctl(option: c_ulong, value: c_ulong) {
    if takes_counter(option, value) {
        tsc::forbid();
    }
    if option as c_int == libc::PR_SET_PTRACER && thread_state::current().inside.get() & thread_state::IN_HOOK == 0 {
        ptracer::named_by_host();
    }
}

/// Interposes `syscall` to see calls that install a filter, and calls that fork. For every other
/// call it jumps to the next function with the caller's frame intact, because some calls, such as a
/// `clone` with a stack of its own, return twice.
///
/// # Safety
/// See syscall(2).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn syscall(number: c_long) -> c_long {
    core::arch::naked_asm!(
        "cmp rdi, {seccomp}",
        "je {inspected_syscall}",
        "cmp rdi, {prctl}",
        "je {inspected_syscall}",
        "cmp rdi, {fork}",
        "je {inspected_syscall}",
        // A clone that copies the memory and returns on the caller's stack, as fork does.
        "cmp rdi, {clone}",
        "jne 2f",
        "test rsi, {shares_memory}",
        "jnz 2f",
        "test rdx, rdx",
        "jz {inspected_syscall}",
        "2:",
        "mov rax, qword ptr [rip + {next}]",
        "test rax, rax",
        "je {raw_syscall}",
        "jmp rax",
        seccomp = const libc::SYS_seccomp,
        prctl = const libc::SYS_prctl,
        fork = const libc::SYS_fork,
        clone = const libc::SYS_clone,
        shares_memory = const libc::CLONE_VM,
        inspected_syscall = sym inspected_syscall,
        next = sym NEXT_SYSCALL,
        raw_syscall = sym raw_syscall,
    )
}

type Syscall = unsafe extern "C" fn(c_long, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong, c_ulong) -> c_long;

/// A call of seccomp(2), prctl(2) or fork(2) by number, or of a clone(2) that does what fork does.
unsafe extern "C" fn inspected_syscall(
    number: c_long,
    first: c_ulong,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
    sixth: c_ulong,
) -> c_long {
    let next = NEXT_SYSCALL.load(Ordering::Relaxed);
    // SAFETY: the next function of this name, which accepts as many arguments as the call has.
    let next = if next.is_null() { raw_syscall } else { unsafe { std::mem::transmute::<*mut c_void, Syscall>(next) } };
    // SAFETY: the call gets the caller's arguments. The registers after them hold numbers that it
    // ignores. A forked child returns on its copy of the caller's stack.
    let call = || unsafe { next(number, first, second, third, fourth, fifth, sixth) };
    let install = match number {
        libc::SYS_fork | libc::SYS_clone => return fork::around_system_call(call),
        libc::SYS_prctl => {
            inspect_prctl(first, second);
            Install::of_prctl(first, second, third)
        }
        _ => {
            if first == 0 {
                // SECCOMP_SET_MODE_STRICT
                tsc::forbid();
            }
            Install::of_seccomp(first, second, third)
        }
    };
    match install {
        Some(install) => install.around(call),
        None => call(),
    }
}

/// Does what the C library's `syscall` does, for calls before the next function is known.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn raw_syscall(
    _: c_long,
    _: c_ulong,
    _: c_ulong,
    _: c_ulong,
    _: c_ulong,
    _: c_ulong,
    _: c_ulong,
) -> c_long {
    core::arch::naked_asm!(
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, qword ptr [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 2f",
        "ret",
        "2:",
        "mov rdi, rax",
        "jmp {syscall_error}",
        syscall_error = sym syscall_error,
    )
}

extern "C" fn syscall_error(code: c_long) -> c_long {
    thread_state::errno().set(-code as c_int);
    -1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installs_are_distinguished_from_queries() {
        let own = Install { synchronizes: false, listens: false };
        let plain = Some(own);
        assert_eq!(Install::of_prctl(22, 2, 0x1000), plain);
        assert_eq!(Install::of_prctl(22, 1, 0), plain, "the strict mode");
        assert_eq!((Install::of_prctl(22, 2, 0), Install::of_prctl(38, 1, 0)), (None, None));
        assert_eq!(Install::of_seccomp(0, 0, 0), plain);
        assert_eq!(Install::of_seccomp(1, 1, 0x1000), Some(Install { synchronizes: true, listens: false }));
        assert_eq!(Install::of_seccomp(1, 9, 0), None, "libseccomp asks for the flags that the kernel knows");
        assert_eq!(Install::of_seccomp(2, 0, 0x1000), None, "SECCOMP_GET_ACTION_AVAIL");
        let listener = Install::of_seccomp(1, 8, 0x1000).unwrap();
        assert!(listener.succeeded(7) && !listener.succeeded(-1));
        // With TSYNC, the result may be the id of a thread that could not be synchronized.
        assert!(own.succeeded(0) && !own.succeeded(4711));
    }

    #[test]
    fn calls_that_forbid_the_counter_are_known() {
        assert!(takes_counter(22, 1) && takes_counter(26, 2), "the strict mode, and PR_SET_TSC");
        assert!(!takes_counter(22, 2) && !takes_counter(26, 1) && !takes_counter(38, 1));
    }

    #[test]
    fn a_raw_syscall_returns_what_the_c_library_returns() {
        // SAFETY: getpid and close use no memory.
        let (own, wrong) = unsafe {
            (raw_syscall(libc::SYS_getpid, 0, 0, 0, 0, 0, 0), raw_syscall(libc::SYS_close, u64::MAX, 0, 0, 0, 0, 0))
        };
        assert_eq!((own, wrong, thread_state::errno().get()), (i64::from(std::process::id()), -1, libc::EBADF));
        // SAFETY: the export has this type in registers: it takes seven integers.
        let exported: Syscall = unsafe { std::mem::transmute(syscall as *const ()) };
        // SAFETY: getpid uses no memory, and the second call reads `action`, which lives during the
        // call. It asks whether the kernel knows an action.
        let (own, known) = unsafe {
            let action = libc::SECCOMP_RET_ERRNO;
            let known = exported(libc::SYS_seccomp, 2, 0, (&raw const action) as c_ulong, 0, 0, 0);
            (exported(libc::SYS_getpid, 0, 0, 0, 0, 0, 0), known)
        };
        assert_eq!((own, known, seccomp::may_call()), (i64::from(std::process::id()), 0, true));
    }
}
