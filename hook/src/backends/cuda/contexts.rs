//! The functions that destroy contexts: see [`crate::runtime::contexts`].

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    interpose::hooked::{AfterCall, Site, hooked},
    runtime::{
        abi::{DRIVER_NOT_FOUND, Data, RUNTIME_NOT_FOUND, SUCCESS},
        contexts::{self, WatcherOutside},
        os::thread_state::{IN_DRIVER, IN_HOOK, IN_RUNTIME},
        recorder::Recorder,
    },
};

hooked! {
    library Driver, mark IN_DRIVER, bypass IN_HOOK, missing DRIVER_NOT_FOUND;

    cuCtxDestroy | cuCtxDestroy_v2(context: Data) => |recorder, _| Destruction::of(recorder, Ended::Context(context as usize));
    cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2(device: c_int) => |recorder, _| Destruction::of(recorder, Ended::All);
    cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2(device: c_int)
        => |recorder, site| Destruction::of(recorder, Ended::IfInactive { device, state: state_of(&site) });
}

hooked! {
    library Runtime, mark IN_RUNTIME, bypass IN_HOOK, missing RUNTIME_NOT_FOUND;

    hipCtxDestroy(context: Data) => |recorder, _| Destruction::of(recorder, Ended::All);
    hipDeviceReset | mcDeviceReset() => |recorder, _| Destruction::of(recorder, Ended::All);
}

/// `cuDevicePrimaryCtxGetState(device, flags*, active*)`.
type GetState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;

fn state_of(site: &Site) -> Option<GetState> {
    let address = site.companion(0, &[c"cuDevicePrimaryCtxGetState"])?;
    // SAFETY: the driver's function of this name has this type in its public ABI.
    Some(unsafe { std::mem::transmute::<*mut c_void, GetState>(address) })
}

/// The contexts that a successful call has ended.
enum Ended {
    /// The one at this address.
    Context(usize),
    /// Those of a device. Which these are is unknown, so all contexts get a new generation.
    All,
    /// Those of a device, if that was the last reference to its primary context.
    IfInactive { device: c_int, state: Option<GetState> },
}

/// A call that may destroy contexts.
struct Destruction {
    ended: Ended,
    _outside: WatcherOutside,
}

impl Destruction {
    fn of(recorder: &'static Recorder, ended: Ended) -> Self {
        Destruction { ended, _outside: WatcherOutside::wait(recorder) }
    }
}

impl AfterCall for Destruction {
    fn after(self, _: &'static Recorder, result: c_int) {
        match self.ended {
            _ if result != SUCCESS => {}
            Ended::Context(address) => contexts::end(address),
            Ended::All => contexts::end_all(),
            Ended::IfInactive { device, state } => {
                let (mut flags, mut active) = (0, 0);
                // SAFETY: the places are those of this function.
                let known =
                    state.is_some_and(|state| unsafe { state(device, &raw mut flags, &raw mut active) } == SUCCESS);
                if !known || active == 0 {
                    contexts::end_all();
                }
            }
        }
    }
}
