//! Devices and contexts, and each thread's stack of them.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    mem::ManuallyDrop,
    sync::{
        Arc, LazyLock, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use sim_abi::{
    cuda::{ContextHandle, CuError, Device},
    handles::Handles,
};

use crate::{process, stream::Stream};

static DEVICES: LazyLock<i32> = LazyLock::new(|| process::setting("XPU_SIM_DEVICES", 8).min(64) as i32);
static CONTEXTS: Handles<Context> = Handles::new();
/// The primary context of each device, and how often it is retained.
static PRIMARY: Mutex<BTreeMap<Device, (Arc<Context>, u32)>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Never dropped: libraries still call from their destructors, when what a thread drops at its end is gone.
    static STACK: RefCell<ManuallyDrop<Vec<Arc<Context>>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// How many devices there are.
pub fn device_count() -> i32 {
    *DEVICES
}

/// The device, when there is one of this number.
pub fn device(number: Device) -> Result<Device, CuError> {
    if (0..device_count()).contains(&number) { Ok(number) } else { Err(CuError::INVALID_DEVICE) }
}

/// Bytes of a thread's stack, of the device's printf and of its heap.
const DEFAULT_LIMITS: [(u32, usize); 3] = [(0, 1 << 10), (1, 1 << 20), (2, 8 << 20)];

/// See the module.
pub struct Context {
    pub id: u64,
    pub device: Device,
    pub flags: AtomicU32,
    /// By CUlimit; nothing is held to them.
    pub limits: Mutex<BTreeMap<u32, usize>>,
    alive: AtomicBool,
    legacy: Mutex<Option<Arc<Stream>>>,
    streams: Mutex<Vec<Weak<Stream>>>,
}

impl Context {
    /// A new context.
    pub fn create(device: Device, flags: u32) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Arc::new(Context {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            flags: AtomicU32::new(flags),
            limits: Mutex::new(DEFAULT_LIMITS.into()),
            alive: AtomicBool::new(true),
            legacy: Mutex::default(),
            streams: Mutex::default(),
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

    /// Ends it: whatever runs on it ends, too.
    pub fn destroy(self: &Arc<Self>) {
        CONTEXTS.remove(self.handle());
        self.alive.store(false, Ordering::Relaxed);
        self.all_streams().iter().for_each(|stream| stream.queue.cancel());
        self.legacy.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether it is not destroyed.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Waits for all its streams.
    pub fn synchronize(&self) {
        let pending: Vec<_> = self
            .all_streams()
            .into_iter()
            .filter_map(|s| s.queue.pending().map(|at| (Arc::clone(&s.queue), at)))
            .collect();
        pending.iter().for_each(|(queue, position)| queue.wait(*position));
    }

    /// The legacy default stream, made at its first use.
    pub fn legacy(&self, create: impl FnOnce() -> Arc<Stream>) -> Arc<Stream> {
        self.legacy.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(create).clone()
    }

    /// The legacy default stream, if it was ever used.
    pub fn existing_legacy(&self) -> Option<Arc<Stream>> {
        self.legacy.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a stream known.
    pub fn add_stream(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// The streams that have an order with the legacy one.
    pub fn blocking_streams(&self) -> Vec<Arc<Stream>> {
        self.all_streams().into_iter().filter(|stream| stream.is_blocking()).collect()
    }

    fn all_streams(&self) -> Vec<Arc<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
    }
}

/// Nothing runs on any context any more.
pub fn cancel_all() {
    CONTEXTS.all().iter().flat_map(|context| context.all_streams()).for_each(|stream| stream.queue.cancel());
}

/// cuCtxPushCurrent.
pub fn push(context: Arc<Context>) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

/// cuCtxPopCurrent.
pub fn pop() -> Result<Arc<Context>, CuError> {
    STACK.with_borrow_mut(|stack| stack.pop()).ok_or(CuError::INVALID_CONTEXT)
}

/// cuCtxSetCurrent: replaces the top; `None` takes it away.
pub fn set_current(context: Option<Arc<Context>>) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
}
