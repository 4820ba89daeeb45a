//! Communicators: their ranks, their running kernels, and their end.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use sim_abi::{
    cuda::{ContextHandle, Device, EventHandle, StreamHandle},
    ffi::Handles,
    nccl::{CommHandle, NcclError},
};

use crate::{
    arena::{Aborted, Arena},
    driver::driver,
};

/// The communicators that callers hold.
pub(crate) static COMMUNICATORS: Handles<Communicator> = Handles::new();
/// Communicators by a number that is never reused; kernels have it in their arguments.
static NUMBERED: Mutex<Option<HashMap<u64, Weak<Communicator>>>> = Mutex::new(None);

/// A communicator.
pub(crate) struct Communicator {
    pub(crate) number: u64,
    pub(crate) device: Device,
    pub(crate) context: ContextHandle,
    pub(crate) blocking: bool,
    /// This rank and the number of ranks, once known.
    pub(crate) place: OnceLock<(usize, usize)>,
    /// The name of its arena, from which those of its children are derived.
    pub(crate) name: OnceLock<String>,
    arena: OnceLock<Arena>,
    aborted: AtomicBool,
    /// Number of splits and shrinks, equal on every rank.
    pub(crate) children: AtomicU64,
    status: Mutex<Status>,
    changed: Condvar,
    /// The phase of its kernels; locked while one runs.
    phase: Mutex<u32>,
    /// The stream of the latest launch, and the event that makes another stream wait for it.
    pub(crate) order: Mutex<(Option<StreamHandle>, Option<EventHandle>)>,
}

pub(crate) struct Status {
    /// The result of ncclCommGetAsyncError.
    result: Result<(), NcclError>,
    /// Launched kernels that have not ended. Launches of graphs are not counted.
    pub(crate) running: u64,
}

impl Communicator {
    /// A communicator on the current context that has not met its peers yet. It is registered and
    /// in progress.
    pub(crate) fn create(device: Device, context: ContextHandle, blocking: bool) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let communicator = Arc::new(Communicator {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            context,
            blocking,
            place: OnceLock::new(),
            name: OnceLock::new(),
            arena: OnceLock::new(),
            aborted: AtomicBool::new(false),
            children: AtomicU64::new(0),
            status: Mutex::new(Status { result: Err(NcclError::IN_PROGRESS), running: 0 }),
            changed: Condvar::new(),
            phase: Mutex::new(0),
            order: Mutex::default(),
        });
        let mut numbered = NUMBERED.lock().unwrap_or_else(PoisonError::into_inner);
        numbered.get_or_insert_default().insert(communicator.number, Arc::downgrade(&communicator));
        drop(numbered);
        COMMUNICATORS.insert(Arc::clone(&communicator));
        communicator
    }

    /// The communicator of a handle.
    pub(crate) fn find(handle: CommHandle) -> Result<Arc<Self>, NcclError> {
        COMMUNICATORS.get(handle).ok_or(NcclError::INVALID_ARGUMENT)
    }

    /// The communicator of a handle, if it is initialized and no call on it is in progress.
    pub(crate) fn find_ready(handle: CommHandle) -> Result<Arc<Self>, NcclError> {
        let communicator = Self::find(handle)?;
        match communicator.result() {
            Ok(()) => Ok(communicator),
            Err(NcclError::IN_PROGRESS) => Err(NcclError::INVALID_ARGUMENT),
            Err(error) => Err(error),
        }
    }

    /// The communicator of a kernel's arguments.
    pub(crate) fn numbered(number: u64) -> Option<Arc<Self>> {
        NUMBERED.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&number)?.upgrade()
    }

    /// Its handle.
    pub(crate) fn handle(self: &Arc<Self>) -> CommHandle {
        Arc::as_ptr(self) as usize
    }

    /// Meets the peers in the arena `name`, as `rank` of `ranks`.
    pub(crate) fn connect(&self, name: &str, rank: usize, ranks: usize) -> Result<(), NcclError> {
        let _ = self.place.set((rank, ranks));
        let _ = self.name.set(name.into());
        let arena = Arena::open(name, rank, ranks)?;
        let arena = self.arena.get_or_init(|| arena);
        arena.join(&self.aborted).map_err(|Aborted| NcclError::REMOTE)
    }

    /// The arena in which it meets its peers; `None` if a fault skipped its initialization.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        self.arena.get()
    }

    /// The flag that ends all its waits.
    pub(crate) fn aborted(&self) -> &AtomicBool {
        &self.aborted
    }

    /// The phase of its kernels, for the running one.
    pub(crate) fn phase(&self) -> MutexGuard<'_, u32> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of the last background call.
    pub(crate) fn result(&self) -> Result<(), NcclError> {
        self.status().result
    }

    /// Sets it.
    pub(crate) fn set_result(&self, result: Result<(), NcclError>) {
        self.status().result = result;
    }

    /// Records the end of a counted kernel.
    pub(crate) fn finished(&self) {
        self.status().running -= 1;
        self.changed.notify_all();
    }

    /// Waits until no counted kernel runs.
    pub(crate) fn drain(&self) {
        let mut status = self.status();
        while status.running > 0 && !self.aborted.load(Ordering::SeqCst) {
            status = self.changed.wait(status).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends all its waits: kernels return, a blocked initialization fails.
    pub(crate) fn abort(&self) {
        let status = self.status();
        self.aborted.store(true, Ordering::SeqCst);
        drop(status);
        self.changed.notify_all();
        if let Some(arena) = self.arena() {
            arena.wake_all();
            arena.ring(arena.rank);
        }
    }

    /// Waits for an abort, which is the only way to end a wait for an event that never happens.
    pub(crate) fn wait_for_abort(&self) -> Aborted {
        let mut status = self.status();
        while !self.aborted.load(Ordering::SeqCst) {
            status = self.changed.wait(status).unwrap_or_else(PoisonError::into_inner);
        }
        Aborted
    }

    /// Invalidates its handle.
    pub(crate) fn forget(self: &Arc<Self>) {
        COMMUNICATORS.remove(self.handle());
    }

    pub(crate) fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let mut numbered = NUMBERED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(numbered) = numbered.as_mut() {
            numbered.remove(&self.number);
        }
        drop(numbered);
        let event = self.order.get_mut().unwrap_or_else(PoisonError::into_inner).1;
        if let (Some(event), Ok(driver)) = (event, driver()) {
            (driver.event_destroy)(event);
        }
    }
}
