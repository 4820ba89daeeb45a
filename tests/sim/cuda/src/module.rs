//! Modules and their kernels.
//!
//! An image that begins with `//xpu_sim` is text with lines `kernel NAME MICROSECONDS`, which
//! define the kernels. A host image runs a host function for every name. Any other image has a
//! kernel of every name, which does nothing.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sim_abi::{
    cuda::{CuError, FunctionHandle, HOST_IMAGE, HostImage, ModuleHandle, TEXT_IMAGE},
    ffi::{In, Text},
    handles::Handles,
};

/// All loaded modules.
pub static MODULES: Handles<Module> = Handles::new();
/// All requested kernels.
pub static FUNCTIONS: Handles<Function> = Handles::new();

/// What a kernel does.
#[derive(Clone, Copy)]
pub enum Behaviour {
    /// It keeps the stream busy.
    Lasts(Duration),
    /// It runs this with its arguments.
    Host(extern "C" fn(usize, usize)),
}

/// A kernel.
pub struct Function {
    pub name: CString,
    pub behaviour: Behaviour,
    pub module: ModuleHandle,
}

enum Image {
    Text(HashMap<String, Duration>),
    Host(extern "C" fn(usize, usize)),
    Other,
}

/// A loaded module.
pub struct Module {
    image: Image,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

impl Module {
    /// cuModuleLoadData.
    pub fn load(image: In<u8>) -> Result<ModuleHandle, CuError> {
        let image = if begins_with(image, TEXT_IMAGE)? {
            parse(&image.cast::<std::ffi::c_char>())?
        } else if begins_with(image, &HOST_IMAGE)? {
            Image::Host(image.cast::<HostImage>().get()?.run)
        } else {
            Image::Other
        };
        Ok(MODULES.insert(Arc::new(Module { image, functions: Mutex::default() })))
    }

    /// cuModuleUnload.
    pub fn unload(handle: ModuleHandle) -> Result<(), CuError> {
        let module = MODULES.remove(handle).ok_or(CuError::INVALID_HANDLE)?;
        for function in module.functions.lock().unwrap_or_else(PoisonError::into_inner).values() {
            FUNCTIONS.remove(Arc::as_ptr(function) as usize);
        }
        Ok(())
    }

    /// cuModuleGetFunction.
    pub fn function(handle: ModuleHandle, name: &str) -> Result<FunctionHandle, CuError> {
        let module = MODULES.get(handle).ok_or(CuError::INVALID_HANDLE)?;
        let behaviour = match &module.image {
            Image::Text(kernels) => Behaviour::Lasts(*kernels.get(name).ok_or(CuError::NOT_FOUND)?),
            Image::Host(run) => Behaviour::Host(*run),
            Image::Other => Behaviour::Lasts(Duration::ZERO),
        };
        let mut functions = module.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(Arc::as_ptr(function) as usize);
        }
        let c_name = CString::new(name).map_err(|_| CuError::INVALID_VALUE)?;
        let function = Arc::new(Function { name: c_name, behaviour, module: handle });
        functions.insert(name.into(), Arc::clone(&function));
        Ok(FUNCTIONS.insert(function))
    }
}

/// Compares byte by byte and stops at the first difference, because an image may be shorter than
/// `start`.
fn begins_with(image: In<u8>, start: &[u8]) -> Result<bool, CuError> {
    for (index, byte) in start.iter().enumerate() {
        if image.at(index)? != *byte {
            return Ok(false);
        }
    }
    Ok(true)
}

fn parse(image: &In<std::ffi::c_char>) -> Result<Image, CuError> {
    let text = Text::at(image.address()).get()?;
    let mut kernels = HashMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")) {
        let words: Vec<_> = line.split_whitespace().collect();
        let ["kernel", name, time] = words[..] else { return Err(CuError::INVALID_IMAGE) };
        let time = time.parse().map_err(|_| CuError::INVALID_IMAGE)?;
        kernels.insert(name.to_string(), Duration::from_micros(time));
    }
    Ok(Image::Text(kernels))
}
