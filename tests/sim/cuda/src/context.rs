//! Devices and contexts, and each thread's stack of them.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    mem::ManuallyDrop,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

use sim_abi::{
    cuda::{ContextHandle, CuError, Device},
    ffi::Handles,
};

use crate::{process, queue::open_queues};

static DEVICES: LazyLock<i32> = LazyLock::new(|| process::setting("XPU_SIM_DEVICES", 8).min(64) as i32);
static CONTEXTS: Handles<Context> = Handles::new();
/// The primary context of each device, and its reference count.
static PRIMARY: Mutex<BTreeMap<Device, (Arc<Context>, u32)>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Never dropped: libraries make calls from their destructors, after the thread-local values of
    /// a thread have been dropped.
    static STACK: RefCell<ManuallyDrop<Vec<Arc<Context>>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Number of devices.
pub fn device_count() -> i32 {
    *DEVICES
}

/// The device of this number, if it exists.
pub fn device(number: Device) -> Result<Device, CuError> {
    if (0..device_count()).contains(&number) { Ok(number) } else { Err(CuError::INVALID_DEVICE) }
}

/// Default limits in bytes: a thread's stack, the device's printf and its heap.
const DEFAULT_LIMITS: [(u32, usize); 3] = [(0, 1 << 10), (1, 1 << 20), (2, 8 << 20)];

/// A context.
pub struct Context {
    pub id: u64,
    pub device: Device,
    pub flags: AtomicU32,
    /// By CUlimit; not enforced.
    pub limits: Mutex<BTreeMap<u32, usize>>,
    alive: AtomicBool,
    /// For a green context, the primary context of its device, to which its events belong.
    primary: Option<Arc<Context>>,
    /// The thread to which a green context is current; there is at most one.
    holder: Mutex<Option<ThreadId>>,
}

impl Context {
    /// A new context.
    pub fn create(device: Device, flags: u32) -> Arc<Self> {
        Self::new(device, flags, None)
    }

    /// A new green context, which retains the primary context of its device.
    pub fn create_green(device: Device) -> Arc<Self> {
        Self::new(device, 0, Some(Self::retain_primary(device)))
    }

    /// The context to which its events belong.
    pub fn of_events(self: &Arc<Self>) -> &Arc<Self> {
        self.primary.as_ref().unwrap_or(self)
    }

    fn new(device: Device, flags: u32, primary: Option<Arc<Context>>) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Arc::new(Context {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            flags: AtomicU32::new(flags),
            limits: Mutex::new(DEFAULT_LIMITS.into()),
            alive: AtomicBool::new(true),
            primary,
            holder: Mutex::default(),
        });
        CONTEXTS.insert(Arc::clone(&context));
        context
    }

    /// The context of a handle.
    pub fn find(handle: ContextHandle) -> Result<Arc<Self>, CuError> {
        CONTEXTS.get(handle).ok_or(CuError::INVALID_CONTEXT)
    }

    /// The calling thread's context.
    pub fn current() -> Result<Arc<Self>, CuError> {
        let context = STACK.with_borrow(|stack| stack.last().cloned()).ok_or(CuError::INVALID_CONTEXT)?;
        if context.is_alive() { Ok(context) } else { Err(CuError::CONTEXT_IS_DESTROYED) }
    }

    /// Its handle.
    pub fn handle(self: &Arc<Self>) -> ContextHandle {
        Arc::as_ptr(self) as usize
    }

    /// Retains the primary context of a device.
    pub fn retain_primary(device: Device) -> Arc<Self> {
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        let (context, count) = primary.entry(device).or_insert_with(|| (Context::create(device, 0), 0));
        *count += 1;
        Arc::clone(context)
    }

    /// Releases the primary context of a device; `all` of its retains at once for a reset.
    pub fn release_primary(device: Device, all: bool) -> Result<(), CuError> {
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((context, count)) = primary.get_mut(&device) else {
            return if all { Ok(()) } else { Err(CuError::INVALID_CONTEXT) };
        };
        *count -= 1;
        if *count == 0 || all {
            let context = Arc::clone(context);
            primary.remove(&device);
            drop(primary);
            context.destroy();
        }
        Ok(())
    }

    /// The flags of a device's primary context, and whether it exists.
    pub fn primary_state(device: Device) -> (u32, bool) {
        let primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        primary.get(&device).map_or((0, false), |(context, _)| (context.flags.load(Ordering::Relaxed), true))
    }

    /// Destroys the context and ends everything that runs in it.
    pub fn destroy(self: &Arc<Self>) {
        CONTEXTS.remove(self.handle());
        self.alive.store(false, Ordering::Relaxed);
        open_queues(Some(self.id)).iter().for_each(|queue| queue.cancel());
    }

    /// Whether it has not been destroyed.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Waits for all its streams.
    pub fn synchronize(&self) {
        let pending: Vec<_> = open_queues(Some(self.id))
            .into_iter()
            .filter_map(|queue| queue.pending().map(|position| (queue, position)))
            .collect();
        pending.iter().for_each(|(queue, position)| queue.wait(*position));
    }
}

/// Records whether a green context is current to the calling thread.
fn hold(context: &Context, holds: bool) -> Result<(), CuError> {
    if context.primary.is_none() {
        return Ok(());
    }
    let own = thread::current().id();
    let mut holder = context.holder.lock().unwrap_or_else(PoisonError::into_inner);
    if holder.is_some_and(|other| other != own) {
        // The behaviour of the real driver is not documented.
        return Err(CuError::ILLEGAL_STATE);
    }
    *holder = holds.then_some(own);
    Ok(())
}

/// cuCtxPushCurrent.
pub fn push(context: Arc<Context>) -> Result<(), CuError> {
    hold(&context, true)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

/// cuCtxPopCurrent.
pub fn pop() -> Result<Arc<Context>, CuError> {
    let context = STACK.with_borrow_mut(|stack| stack.pop()).ok_or(CuError::INVALID_CONTEXT)?;
    hold(&context, false)?;
    Ok(context)
}

/// cuCtxSetCurrent: replaces the top; `None` removes it.
pub fn set_current(context: Option<Arc<Context>>) -> Result<(), CuError> {
    if let Some(context) = &context {
        hold(context, true)?;
    }
    let before = STACK.with_borrow_mut(|stack| {
        let before = stack.pop();
        stack.extend(context.clone());
        before
    });
    match (before, context) {
        (Some(before), Some(now)) if Arc::ptr_eq(&before, &now) => Ok(()),
        (Some(before), _) => hold(&before, false),
        (None, _) => Ok(()),
    }
}
