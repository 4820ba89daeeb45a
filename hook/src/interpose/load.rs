//! Runs when the library is loaded and when it is unloaded.

use std::sync::atomic::Ordering;

use crate::{
    interpose::{
        exit_functions::{self, NEXT_EXIT, NEXT_QUICK_EXIT},
        prctl, write,
    },
    runtime::{
        lifecycle::{
            config::disabled,
            exit::say_goodbye,
            fork::{self, is_vfork_child},
            panics::guarded,
            start,
        },
        linker::{
            dynamic::{self, look_up},
            originals,
        },
        os::{
            environment, ptracer,
            thread_state::{self, in_hook},
        },
        recorder::running,
    },
};

/// Runs when the library is loaded. Does only what must exist before anything else can happen.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn on_load() {
    // The hook has its own copy of the standard library, so this does not affect the panics of a
    // host in Rust.
    std::panic::set_hook(Box::new(|_| {}));
    let errno = thread_state::errno();
    let saved = errno.get();
    environment::note_start();
    originals::note_named_libraries();
    NEXT_EXIT.store(look_up(libc::RTLD_NEXT, c"_exit"), Ordering::Relaxed);
    NEXT_QUICK_EXIT.store(look_up(libc::RTLD_NEXT, c"quick_exit"), Ordering::Relaxed);
    exit_functions::find_next_pthread_cancel();
    ptracer::find_first();
    prctl::find_next();
    write::find_next();
    // First, because a filter may forbid everything else.
    if !disabled() {
        guarded(start::record_filters_at_load);
    }
    guarded(|| {
        if ptracer::allow_from_environment() {
            fork::watch_forks();
        }
    });
    guarded(|| in_hook(crate::interpose::inline::start));
    dynamic::forget_linker_error();
    errno.set(saved);
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Runs when the library is unloaded, after all exit handlers. The hook says goodbye as late as
/// possible: an exit handler of the host that hangs is a hang of the job.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn at_end() {
    if running().is_some() && !is_vfork_child() {
        say_goodbye();
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;
