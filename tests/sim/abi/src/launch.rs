//! Kernels of a library: functions of the host that the device runs on the stream's thread,
//! launched with `cuLaunchKernelEx`.

use std::{
    ffi::CString,
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::{
    cuda::{
        ContextHandle, CuError, FunctionHandle, HOST_IMAGE, HostImage, LAUNCH_BUFFER_POINTER, LAUNCH_BUFFER_SIZE,
        LAUNCH_END, LaunchConfig, ModuleHandle, StreamHandle, check,
    },
    driver_table,
    ffi::{In, Out, Text},
};

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

/// The kernels of one library. All of them, of any name, run one function.
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
