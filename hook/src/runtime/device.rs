//! The driver functions that the hook calls itself.
//!
//! Launching threads call them for the capture check, the context and two event records; the
//! watcher calls the rest. No runtime function is called, because it would create a context.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::family::LaunchTarget;

use crate::runtime::{
    abi::{Context, DRIVER_NOT_FOUND, Event, STREAM_PER_THREAD, SUCCESS, Stream},
    contexts::{address_of, current_generation},
    linker::dynamic::{self, forget_linker_error, loaded, look_up},
    os::{clock, leaked_once::LeakedOnce},
};

/// The functions of the loaded driver.
pub(crate) struct Device {
    event_create: unsafe extern "C" fn(*mut Event, c_uint) -> c_int,
    event_record: unsafe extern "C" fn(Event, Stream) -> c_int,
    event_query: unsafe extern "C" fn(Event) -> c_int,
    event_elapsed: unsafe extern "C" fn(*mut f32, Event, Event) -> c_int,
    event_destroy: unsafe extern "C" fn(Event) -> c_int,
    stream_create: Option<unsafe extern "C" fn(*mut Stream, c_uint) -> c_int>,
    stream_is_capturing: unsafe extern "C" fn(Stream, *mut c_int) -> c_int,
    exchange_capture_mode: unsafe extern "C" fn(*mut c_int) -> c_int,
    capture_info: Option<CaptureInfo>,
    place: LaunchTargetFunctions,
    function_name: Option<GetName>,
    kernel_name: Option<GetName>,
}

type GetName = unsafe extern "C" fn(*mut *const c_char, *mut c_void) -> c_int;

type CaptureInfo = unsafe extern "C" fn(Stream, *mut c_int, *mut u64, *mut c_void, *mut c_void, *mut c_void) -> c_int;

/// The functions for the launch target of a thread: a context or a device. The rest of the hook
/// calls both a context and represents it as a number other than 0: the address of the driver's
/// context, or the device number plus one, with a generation; see `runtime::contexts`.
enum LaunchTargetFunctions {
    Context {
        of_stream: unsafe extern "C" fn(Stream, *mut Context) -> c_int,
        of_any_stream: Option<unsafe extern "C" fn(Stream, *mut Context, *mut Context) -> c_int>,
        current: unsafe extern "C" fn(*mut Context) -> c_int,
        set: unsafe extern "C" fn(Context) -> c_int,
        device: unsafe extern "C" fn(*mut c_int) -> c_int,
    },
    Device {
        of_stream: Option<unsafe extern "C" fn(Stream, *mut c_int) -> c_int>,
        current: unsafe extern "C" fn(*mut c_int) -> c_int,
        set: unsafe extern "C" fn(c_int) -> c_int,
    },
}

static DEVICE: LeakedOnce<Device> = LeakedOnce::new();

/// Time of the last unsuccessful search for the driver, by the coarse clock.
static SEARCHED_NS: AtomicU64 = AtomicU64::new(0);

/// Pause after an unsuccessful search. A search takes milliseconds, because the linker looks into
/// all folders of its path, and a program on another device never has this driver.
const SEARCH_PAUSE_NS: u64 = 500_000_000;

/// The driver, once it is loaded. It may be missed for half a second. A driver that lacks one of
/// the functions is not used, and nothing is bracketed.
pub(crate) fn device() -> Option<&'static Device> {
    DEVICE.get().or_else(|| {
        let searched_ns = SEARCHED_NS.load(Ordering::Relaxed);
        let pauses = searched_ns != 0 && clock::coarse_now_ns().saturating_sub(searched_ns) < SEARCH_PAUSE_NS;
        if pauses { None } else { search() }
    })
}

/// The driver, for calls that are rare, such as the creation of a communicator. No driver that is
/// loaded is missed.
pub(crate) fn device_now() -> Option<&'static Device> {
    DEVICE.get().or_else(search)
}

#[cold]
fn search() -> Option<&'static Device> {
    let found = find();
    forget_linker_error();
    if found.is_none() {
        SEARCHED_NS.store(clock::coarse_now_ns(), Ordering::Relaxed);
    }
    let device = found?;
    Some(DEVICE.get_or_init(|| device))
}

fn find() -> Option<Device> {
    let names = dynamic::device_family()?.device.as_ref()?;
    let sonames = dynamic::device_family()?.sonames(names.library);
    let library = sonames.iter().find_map(|soname| loaded(soname))?;
    // SAFETY: each function is looked up by a name whose type in the family's public ABI is the
    // type of its field.
    unsafe {
        Some(Device {
            event_create: typed(library, names.event_create)?,
            event_record: typed(library, names.event_record)?,
            event_query: typed(library, names.event_query)?,
            event_elapsed: typed(library, names.event_elapsed)?,
            event_destroy: typed(library, names.event_destroy)?,
            stream_create: typed(library, names.stream_create),
            stream_is_capturing: typed(library, names.stream_is_capturing)?,
            exchange_capture_mode: typed(library, names.exchange_capture_mode)?,
            capture_info: typed(library, names.capture_info),
            place: match &names.place {
                LaunchTarget::Context { of_stream, of_any_stream, current, set, device } => {
                    LaunchTargetFunctions::Context {
                        of_stream: typed(library, of_stream)?,
                        of_any_stream: typed(library, of_any_stream),
                        current: typed(library, current)?,
                        set: typed(library, set)?,
                        device: typed(library, device)?,
                    }
                }
                LaunchTarget::Device { of_stream, current, set } => LaunchTargetFunctions::Device {
                    of_stream: typed(library, of_stream),
                    current: typed(library, current)?,
                    set: typed(library, set)?,
                },
            },
            function_name: names.function_name.and_then(|name| typed(library, name)),
            kernel_name: names.kernel_name.and_then(|name| typed(library, name)),
        })
    }
}

/// A function of a library as a function pointer of type `F`.
///
/// # Safety
/// `F` is the type of the function `name`.
unsafe fn typed<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = look_up(library, name);
    // SAFETY: a function pointer has the size of an address, asserted above, and the caller
    // guarantees its type.
    (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
}

/// Whether a handle denotes a different stream in each context.
pub(crate) fn is_default(stream: usize) -> bool {
    stream <= STREAM_PER_THREAD
}

/// A device number as the number of a context, where 0 means an unknown one.
fn numbered(device: c_int) -> usize {
    (device + 1).max(0) as usize
}

/// A code that the driver returned.
pub(crate) type Code = c_int;

fn check(code: c_int) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}

impl Device {
    /// The name of what a thread is launching. CUDA's runtime launches kernels of libraries
    /// (CUkernel) as functions (CUfunction), and each kind has its own function for the name, which
    /// refuses the other kind. The likely one is asked first.
    ///
    /// # Safety
    /// `function` is valid. The name lives as long as it.
    pub(crate) unsafe fn name_of<'a>(&self, function: *mut c_void, by_runtime: bool) -> Option<&'a CStr> {
        let ask = |get: GetName| {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: the caller's function, and `name` is valid for writing.
            let code = unsafe { get(&raw mut name, function) };
            // SAFETY: the driver's string, which lives as long as the function.
            (code == SUCCESS && !name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
        };
        let mut kinds = [self.function_name, self.kernel_name];
        if by_runtime {
            kinds.reverse();
        }
        kinds.into_iter().flatten().find_map(ask)
    }

    /// Whether a stream is being captured. An error counts as yes: the driver returns one for a
    /// stream that cannot be queried while another stream captures.
    pub(crate) fn is_capturing(&self, stream: usize) -> bool {
        let mut status = 0;
        // SAFETY: the host is launching on this stream; `status` is valid.
        let code = unsafe { (self.stream_is_capturing)(stream as Stream, &mut status) };
        code != SUCCESS || status != 0
    }

    /// The id of the capture that a stream takes part in. 0 when there is none or the driver cannot
    /// say.
    pub(crate) fn capture_of(&self, stream: usize) -> u64 {
        let Some(info) = self.capture_info else { return 0 };
        let (mut status, mut id) = (0, 0);
        let null = std::ptr::null_mut();
        // SAFETY: the host is launching on this stream; outputs that are not wanted may be null.
        let code = unsafe { info(stream as Stream, &mut status, &mut id, null, null, null) };
        if code == SUCCESS && status != 0 { id } else { 0 }
    }

    /// The context for the events of a launch on `stream`: that of the stream, or that of the
    /// thread for a default stream. For a stream of a green context it is the primary context,
    /// because a green context may be current to one thread only.
    pub(crate) fn context_of(&self, stream: usize) -> Option<usize> {
        let own = stream as Stream;
        let context = match &self.place {
            LaunchTargetFunctions::Context { of_any_stream: Some(of_any_stream), .. } => {
                let (mut context, mut green): (Context, Context) = (std::ptr::null_mut(), std::ptr::null_mut());
                // SAFETY: the host is launching on this stream; the places are valid.
                if unsafe { of_any_stream(own, &mut context, &mut green) } == SUCCESS { context as usize } else { 0 }
            }
            _ if is_default(stream) => self.current_address(),
            LaunchTargetFunctions::Context { of_stream, .. } => {
                let mut context: Context = std::ptr::null_mut();
                // SAFETY: the host is launching on this stream; the place is valid.
                if unsafe { of_stream(own, &mut context) } == SUCCESS { context as usize } else { 0 }
            }
            LaunchTargetFunctions::Device { of_stream: Some(of_stream), .. } => {
                let mut device = -1;
                // SAFETY: the host is launching on this stream; the place is valid.
                if unsafe { of_stream(own, &mut device) } == SUCCESS { numbered(device) } else { 0 }
            }
            LaunchTargetFunctions::Device { of_stream: None, .. } => self.current_address(),
        };
        (context != 0).then(|| current_generation(context))
    }

    /// The thread's current context, 0 for none.
    pub(crate) fn current(&self) -> usize {
        current_generation(self.current_address())
    }

    fn current_address(&self) -> usize {
        match &self.place {
            LaunchTargetFunctions::Context { current, .. } => {
                let mut context: Context = std::ptr::null_mut();
                // SAFETY: `context` is valid.
                if unsafe { current(&mut context) } == SUCCESS { context as usize } else { 0 }
            }
            LaunchTargetFunctions::Device { .. } => numbered(self.device_number()),
        }
    }

    /// Makes a context current on this thread.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn make_current(&self, context: usize) -> Result<(), Code> {
        let context = address_of(context);
        match &self.place {
            // SAFETY: a launch was seen in this context; the driver returns an error if it no
            // longer exists.
            LaunchTargetFunctions::Context { set, .. } => check(unsafe { set(context as Context) }),
            LaunchTargetFunctions::Device { .. } if context == 0 => Ok(()),
            // SAFETY: the argument is an integer.
            LaunchTargetFunctions::Device { set, .. } => check(unsafe { set(context as c_int - 1) }),
        }
    }

    /// The thread's current device, -1 for none.
    pub(crate) fn device_number(&self) -> i32 {
        let mut number = -1;
        let (LaunchTargetFunctions::Context { device: ask, .. } | LaunchTargetFunctions::Device { current: ask, .. }) =
            &self.place;
        // SAFETY: `number` is valid.
        if unsafe { ask(&mut number) } == SUCCESS { number } else { -1 }
    }

    /// Creates an event with timing in the thread's context.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn create_event(&self) -> Result<usize, Code> {
        let mut event: Event = std::ptr::null_mut();
        // SAFETY: `event` is valid.
        check(unsafe { (self.event_create)(&mut event, 0) })?;
        Ok(event as usize)
    }

    /// Records an event.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn record_event(&self, event: usize, stream: usize) -> Result<(), Code> {
        // SAFETY: an event of the hook that no other thread uses, and the stream of a launch.
        check(unsafe { (self.event_record)(event as Event, stream as Stream) })
    }

    /// 0 when the event is complete, 600 when it is not, else an error.
    pub(crate) fn query_event(&self, event: usize) -> Code {
        // SAFETY: an event of the hook.
        unsafe { (self.event_query)(event as Event) }
    }

    /// Time from one complete event to another, which may be the earlier one.
    pub(crate) fn elapsed_ns(&self, start: usize, end: usize) -> Option<i64> {
        let mut milliseconds = 0.0f32;
        // SAFETY: two complete events of the hook.
        let code = unsafe { (self.event_elapsed)(&mut milliseconds, start as Event, end as Event) };
        (code == SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
    }

    /// Creates a stream that no default stream waits for, in the thread's context.
    ///
    /// # Errors
    /// The driver's code, or [`DRIVER_NOT_FOUND`].
    pub(crate) fn create_stream(&self) -> Result<usize, Code> {
        const NON_BLOCKING: c_uint = 1;
        let create = self.stream_create.ok_or(DRIVER_NOT_FOUND)?;
        let mut stream: Stream = std::ptr::null_mut();
        // SAFETY: `stream` is valid.
        check(unsafe { create(&mut stream, NON_BLOCKING) })?;
        Ok(stream as usize)
    }

    /// Destroys an event.
    pub(crate) fn destroy_event(&self, event: usize) {
        // SAFETY: an event of the hook without further references.
        unsafe { (self.event_destroy)(event as Event) };
    }

    /// Switches the thread to relaxed capture mode, so that its queries do not break another
    /// thread's capture.
    ///
    /// # Errors
    /// The driver's code.
    pub(crate) fn relax_capture(&self) -> Result<(), Code> {
        let mut mode = crate::runtime::abi::CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is valid.
        check(unsafe { (self.exchange_capture_mode)(&mut mode) })
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    #[test]
    fn a_driver_that_is_not_loaded_is_not_searched_in_each_call() {
        let searched_ns = || SEARCHED_NS.load(Ordering::Relaxed);
        assert!(device_now().is_none());
        let first = searched_ns();
        assert_ne!(first, 0);
        // Longer than a tick of the coarse clock.
        thread::sleep(Duration::from_millis(30));
        assert!(device().is_none());
        assert_eq!(searched_ns(), first);
        assert!(device_now().is_none());
        assert_ne!(searched_ns(), first);
    }
}
