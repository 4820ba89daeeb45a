//! The state that holds a process that others wait for.

use xpu_timer_proto::server::AwaitedKind;

use super::{
    classify::{is_exclusive_lock, is_join, is_send},
    helpers::GilHolder,
    host::{Host, Movement, is_terminal},
};
use crate::verdict::Activity;

/// The state that holds a process that others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// It has ended.
    Ended,
    /// A signal, a debugger or the freezer of its control group has stopped it.
    Stopped,
    /// It is in uninterruptible sleep in a kernel function, whose name may be empty.
    SleepsUninterruptibly { wchan: String },
    /// A blocked thread holds its GIL.
    DeadlockedOnGil(GilHolder),
    /// One of its threads serves a request or works on a task, and waits at this place for an
    /// object to which only that thread refers.
    LostRequest { place: String },
    /// It makes progress.
    MakesProgress,
    /// Its main thread waits for a lock.
    WaitsForLock,
    /// Its main thread is inside a read, write or sync, or waits for a lock on a file.
    StuckInIo,
    /// It is at another place.
    Elsewhere,
}

impl ProcessState {
    /// The state of a process, with the holder of its GIL if that is deadlocked.
    pub(crate) fn of(host: &Host, gil_holder: Option<&GilHolder>) -> Self {
        if host.gone() {
            return ProcessState::Ended;
        }
        if host.stopped() {
            return ProcessState::Stopped;
        }
        if let Some(sleep) = host.d_sleep.as_ref().filter(|sleep| sleep.main) {
            return ProcessState::SleepsUninterruptibly { wchan: sleep.wchan.clone() };
        }
        if let Some(holder) = gil_holder.filter(|holder| holder.has_waiters()) {
            return ProcessState::DeadlockedOnGil(holder.clone());
        }
        if let Some(place) = host.lost_request.clone() {
            return ProcessState::LostRequest { place };
        }
        let kind = host.awaited.as_ref().map(|awaited| awaited.kind());
        let at_terminal = host.awaited.as_ref().is_some_and(is_terminal);
        let progresses = |moved: Movement| moved.io || moved.own_frame || moved.helper_progressed;
        match host.observed.activity {
            _ if host.moved.is_some_and(progresses) => ProcessState::MakesProgress,
            Activity::Lock if host.has_thread_in_storage() => ProcessState::StuckInIo,
            Activity::Lock => ProcessState::WaitsForLock,
            // The end of the process waits for its threads.
            Activity::Teardown if host.location.native.as_deref().is_some_and(is_join) => ProcessState::WaitsForLock,
            Activity::Io if kind != Some(AwaitedKind::Socket) && !at_terminal => ProcessState::StuckInIo,
            _ if kind == Some(AwaitedKind::Lock) => ProcessState::StuckInIo,
            _ => ProcessState::Elsewhere,
        }
    }

    /// Whether the process cannot continue by itself, whatever it waits for.
    pub(crate) fn cannot_continue(&self) -> bool {
        matches!(
            self,
            ProcessState::Ended
                | ProcessState::Stopped
                | ProcessState::SleepsUninterruptibly { .. }
                | ProcessState::DeadlockedOnGil(_)
        )
    }

    /// Whether the process is stuck: it cannot continue, waits for a lock or for a file, or one of
    /// its requests never ends.
    pub(crate) fn is_stuck(&self) -> bool {
        use ProcessState::{LostRequest, StuckInIo, WaitsForLock};
        self.cannot_continue() || matches!(self, LostRequest { .. } | StuckInIo | WaitsForLock)
    }
}

impl Host {
    /// The main thread is in a function that sends.
    pub(crate) fn is_in_send(&self) -> bool {
        self.location.native.as_deref().is_some_and(is_send)
    }

    /// The main thread waits for a lock that one process at a time can hold.
    pub(crate) fn wants_exclusive_lock(&self) -> bool {
        self.observed.activity == Activity::Lock && is_exclusive_lock(&self.observed.witness)
    }
}
