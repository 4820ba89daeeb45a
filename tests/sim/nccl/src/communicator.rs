//! Communicators: who is in, what is under way, and how it ends.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use sim_abi::{
    cuda::{ContextHandle, Device, EventHandle, StreamHandle},
    ffi::Out,
    handles::Handles,
    nccl::{CommHandle, NcclError},
};

use crate::{
    arena::{Aborted, Arena},
    driver::{Driver, cuda, driver, launch},
    kernel,
    task::Task,
};

/// The communicators that callers hold.
pub(crate) static COMMUNICATORS: Handles<Communicator> = Handles::new();
/// The same by a number that is never used again, which is what a kernel's arguments hold.
static NUMBERED: Mutex<Option<HashMap<u64, Weak<Communicator>>>> = Mutex::new(None);

/// See the module.
pub(crate) struct Communicator {
    number: u64,
    pub(crate) device: Device,
    context: ContextHandle,
    pub(crate) blocking: bool,
    /// This rank and the number of ranks, once known.
    pub(crate) place: OnceLock<(usize, usize)>,
    /// The name of its arena, from which children derive theirs.
    pub(crate) name: OnceLock<String>,
    arena: OnceLock<Arena>,
    aborted: AtomicBool,
    /// How often it was split or shrunk: every rank counts the same.
    pub(crate) children: AtomicU64,
    status: Mutex<Status>,
    changed: Condvar,
    /// The phase that its kernels have come to; held while one runs.
    phase: Mutex<u32>,
    /// The stream of the latest launch, and the event that makes another stream wait for it.
    order: Mutex<(Option<StreamHandle>, Option<EventHandle>)>,
}

struct Status {
    /// What ncclCommGetAsyncError answers.
    result: Result<(), NcclError>,
    /// Launched kernels that have not ended. Launches of graphs are not counted.
    running: u64,
}

impl Communicator {
    /// A communicator on the current context that has not met its peers yet. It is registered, and in progress.
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

    /// The communicator of a handle, when it is initialized and no call on it is under way.
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

    /// Where it meets its peers; `None` when its initialization did not happen.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        self.arena.get()
    }

    /// The flag that ends all its waits.
    pub(crate) fn aborted(&self) -> &AtomicBool {
        &self.aborted
    }

    /// The phase of its kernels, for the one that runs now.
    pub(crate) fn phase(&self) -> MutexGuard<'_, u32> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the last call that went on in the background came to.
    pub(crate) fn result(&self) -> Result<(), NcclError> {
        self.status().result
    }

    /// Sets it.
    pub(crate) fn set_result(&self, result: Result<(), NcclError>) {
        self.status().result = result;
    }

    /// Launches tasks as one kernel.
    pub(crate) fn launch(&self, stream: StreamHandle, tasks: &[Task]) -> Result<(), NcclError> {
        let Some(first) = tasks.first() else { return Ok(()) };
        let driver = driver()?;
        let mut before = 0;
        cuda((driver.context_current)(Out::to(&mut before)))?;
        if before != self.context {
            cuda((driver.context_set_current)(self.context))?;
        }
        let result = self.launch_here(driver, stream, first, tasks);
        if before != self.context {
            cuda((driver.context_set_current)(before))?;
        }
        result
    }

    fn launch_here(
        &self,
        driver: &Driver,
        stream: StreamHandle,
        first: &Task,
        tasks: &[Task],
    ) -> Result<(), NcclError> {
        let mut capturing = 0;
        cuda((driver.is_capturing)(stream, Out::to(&mut capturing)))?;
        let counted = capturing == 0;
        if counted {
            self.order_after_other_streams(driver, stream)?;
            self.status().running += 1;
        }
        let mut arguments = Vec::with_capacity(kernel::HEAD_WORDS + tasks.len() * Task::WORDS);
        arguments.extend([self.number, u64::from(counted)]);
        arguments.extend(tasks.iter().flat_map(Task::encode));
        let launched = launch(&first.kernel_name(), stream, &arguments);
        if launched.is_err() && counted {
            self.finished();
        }
        launched
    }

    /// The kernels of a communicator run in the order of their launches, whatever their streams.
    fn order_after_other_streams(&self, driver: &Driver, stream: StreamHandle) -> Result<(), NcclError> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let last = order.0.replace(stream);
        let Some(last) = last.filter(|last| *last != stream) else { return Ok(()) };
        let event = match order.1 {
            Some(event) => event,
            None => {
                let (mut event, disable_timing) = (0, 2);
                cuda((driver.event_create)(Out::to(&mut event), disable_timing))?;
                *order.1.insert(event)
            }
        };
        let mut capturing = 0;
        // A stream that was destroyed or captures since has no order to give.
        if (driver.is_capturing)(last, Out::to(&mut capturing)) == 0
            && capturing == 0
            && (driver.event_record)(event, last) == 0
        {
            cuda((driver.stream_wait_event)(stream, event, 0))?;
        }
        Ok(())
    }

    /// A counted kernel has ended.
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

    /// Waits for the abort that alone can end what never happens.
    pub(crate) fn wait_for_abort(&self) -> Aborted {
        let mut status = self.status();
        while !self.aborted.load(Ordering::SeqCst) {
            status = self.changed.wait(status).unwrap_or_else(PoisonError::into_inner);
        }
        Aborted
    }

    /// Nobody holds its handle any more.
    pub(crate) fn forget(self: &Arc<Self>) {
        COMMUNICATORS.remove(self.handle());
    }

    fn status(&self) -> MutexGuard<'_, Status> {
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
