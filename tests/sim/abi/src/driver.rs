//! Finds the driver for the runtime and NCCL, as the real ones do: dlopen of `libcuda.so.1`, dlsym
//! of `cuGetProcAddress_v2` on that handle, and all other functions from `cuGetProcAddress_v2`.
//! Also launches the kernels of NCCL and cuBLAS.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::{
    cuda::{
        CUDA_VERSION, ContextHandle, CuError, FunctionHandle, HOST_IMAGE, HostImage, LAUNCH_BUFFER_POINTER,
        LAUNCH_BUFFER_SIZE, LAUNCH_END, LaunchConfig, ModuleHandle, StreamHandle, check,
    },
    ffi::{In, Out, Text},
};

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
pub const PER_THREAD: u64 = 2;

fn get_proc_address() -> Option<GetProcAddress> {
    static FUNCTION: OnceLock<Option<GetProcAddress>> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        // SAFETY: the names are C strings, the library is never unloaded, and the function has this
        // type in its ABI.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let function = libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr());
            (!function.is_null()).then(|| std::mem::transmute::<*mut c_void, GetProcAddress>(function))
        }
    })
}

/// The address of a driver function, by its base name; `flags` 0 or [`PER_THREAD`].
pub fn address(name: &CStr, flags: u64) -> Result<usize, CuError> {
    let function = get_proc_address().ok_or(CuError::NO_DEVICE)?;
    let (mut address, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: all pointers are to living values, and the function is the driver's.
    let code = unsafe { function(name.as_ptr(), &raw mut address, CUDA_VERSION, flags, &raw mut status) };
    if code != 0 || address.is_null() { Err(CuError::NOT_FOUND) } else { Ok(address as usize) }
}

/// Declares a table of driver functions, which is `load`ed at once: `table! { Name: fn field =
/// c"cuName"(types); … }`.
#[macro_export]
macro_rules! driver_table {
    ($(#[$meta:meta])* $table:ident { $($field:ident = $name:literal ($($argument:ty),*);)* }) => {
        $(#[$meta])*
        pub(crate) struct $table {
            $(pub(crate) $field: extern "C" fn($($argument),*) -> i32,)*
        }

        impl $table {
            /// Gets every function of the table from the driver.
            #[allow(unsafe_code)]
            pub(crate) fn load(flags: u64) -> Result<Self, $crate::cuda::CuError> {
                Ok($table { $($field: {
                    let address = $crate::driver::address($name, flags)?;
                    // SAFETY: the driver returned the function of this name, whose ABI has these
                    // argument types.
                    unsafe { std::mem::transmute::<usize, extern "C" fn($($argument),*) -> i32>(address) }
                },)* })
            }
        }
    };
}

driver_table! {
    /// The driver functions for a launch.
    Launcher {
        init = c"cuInit" (u32);
        context_current = c"cuCtxGetCurrent" (Out<ContextHandle>);
        module_load = c"cuModuleLoadData" (Out<ModuleHandle>, In<HostImage>);
        module_function = c"cuModuleGetFunction" (Out<FunctionHandle>, ModuleHandle, Text);
        launch_ex = c"cuLaunchKernelEx" (In<LaunchConfig>, FunctionHandle, usize, In<usize>);
    }
}

fn launcher() -> Result<&'static Launcher, CuError> {
    static TABLE: OnceLock<Result<Launcher, CuError>> = OnceLock::new();
    let load = || {
        let launcher = Launcher::load(0)?;
        check((launcher.init)(0))?;
        Ok(launcher)
    };
    TABLE.get_or_init(load).as_ref().map_err(|error| *error)
}

/// The kernels of one library: functions of the host that the device runs on the stream's thread,
/// launched with `cuLaunchKernelEx`. All of them, of any name, run one function.
pub struct HostKernels {
    run: extern "C" fn(usize, usize),
    /// One module per context; there are few contexts.
    modules: Mutex<Vec<(ContextHandle, ModuleHandle)>>,
}

impl HostKernels {
    /// `run` gets the address and the length of the arguments.
    #[must_use]
    pub const fn new(run: extern "C" fn(usize, usize)) -> Self {
        HostKernels { run, modules: Mutex::new(Vec::new()) }
    }

    /// Launches the kernel `name` in the thread's context, with an argument buffer and no
    /// parameters.
    pub fn launch(&self, name: &str, stream: StreamHandle, arguments: &[u64]) -> Result<(), CuError> {
        let launcher = launcher()?;
        let mut context = 0;
        check((launcher.context_current)(Out::to(&mut context)))?;
        let (mut function, name) = (0, CString::new(name).map_err(|_| CuError::INVALID_VALUE)?);
        let module = self.module(launcher, context)?;
        check((launcher.module_function)(Out::to(&mut function), module, Text::borrowed(&name)))?;
        let bytes = size_of_val(arguments);
        let extra = [
            LAUNCH_BUFFER_POINTER,
            arguments.as_ptr() as usize,
            LAUNCH_BUFFER_SIZE,
            (&raw const bytes) as usize,
            LAUNCH_END,
        ];
        let config = LaunchConfig {
            grid: [2, 1, 1],
            block: [544, 1, 1],
            shared_bytes: 0,
            stream,
            attributes: 0,
            attribute_count: 0,
        };
        check((launcher.launch_ex)(In::from(&config), function, 0, In::from_slice(&extra)))
    }

    fn module(&self, launcher: &Launcher, context: ContextHandle) -> Result<ModuleHandle, CuError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = modules.iter().find(|(known, _)| *known == context) {
            return Ok(*module);
        }
        let (mut module, image) = (0, HostImage { magic: HOST_IMAGE, run: self.run });
        check((launcher.module_load)(Out::to(&mut module), In::from(&image)))?;
        modules.push((context, module));
        Ok(module)
    }
}
