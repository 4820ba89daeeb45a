//! Modules and their kernels.
//!
//! An image that begins with `//xpu_sim` is text with lines `kernel NAME MICROSECONDS`, which
//! define the kernels. `flags=PATH` after the time makes the kernel communicate with the devices of
//! other processes: `sets=I` writes the number of its launch into word I of that file, and then
//! `awaits=I..J` busy-waits until the words I to J - 1 have at least that number. A host image runs
//! a host function for every name. Any other image has a kernel of every name, which does nothing.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::{File, OpenOptions},
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sim_abi::{
    cuda::{CuError, FunctionHandle, HOST_IMAGE, HostImage, ModuleHandle, TEXT_IMAGE},
    ffi::{Handles, In, Text},
};

/// All loaded modules.
pub static MODULES: Handles<Module> = Handles::new();
/// All requested kernels.
pub static FUNCTIONS: Handles<Function> = Handles::new();

/// The behaviour of a kernel.
#[derive(Clone, Copy)]
pub enum Behaviour {
    /// It keeps the stream busy.
    Lasts(Duration),
    /// It keeps the stream busy, then exchanges flags with other processes.
    Meets(Duration, &'static Flags),
    /// It runs this with its arguments.
    Host(extern "C" fn(usize, usize)),
}

/// The flags that a kernel sets and awaits: little-endian words of a file that processes share.
pub struct Flags {
    file: File,
    sets: Option<u64>,
    awaits: Range<u64>,
    launches: AtomicU64,
}

impl Flags {
    fn parse(words: &[&str]) -> Option<&'static Self> {
        let path = value(words, "flags")?;
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).ok()?;
        let sets = value(words, "sets").map(str::parse).transpose().ok()?;
        let awaits = match value(words, "awaits") {
            Some(range) => {
                let (from, to) = range.split_once("..")?;
                from.parse().ok()?..to.parse().ok()?
            }
            None => 0..0,
        };
        // A kernel may run until the process ends.
        Some(Box::leak(Box::new(Flags { file, sets, awaits, launches: AtomicU64::new(0) })))
    }

    /// Begins a launch and returns its number.
    pub fn set(&self) -> u64 {
        let number = self.launches.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(word) = self.sets {
            // If the write fails, the peers wait forever, as they would for a device that is gone.
            let _ = self.file.write_all_at(&number.to_le_bytes(), word * 8);
        }
        number
    }

    /// Whether all peers have set their flags for this launch.
    pub fn all_set(&self, number: u64) -> bool {
        let mut word = [0; 8];
        let is_set = |at: u64| self.file.read_exact_at(&mut word, at * 8).is_ok() && u64::from_le_bytes(word) >= number;
        self.awaits.clone().all(is_set)
    }
}

/// A kernel of an image.
#[derive(Clone, Copy)]
struct Kernel {
    behaviour: Behaviour,
    /// The time that its first launch takes on the host.
    loading: Duration,
}

/// A kernel.
pub struct Function {
    pub name: CString,
    pub behaviour: Behaviour,
    pub module: ModuleHandle,
    loading: Mutex<Duration>,
}

impl Function {
    /// Loads the kernel if this is its first launch.
    pub fn load(&self) {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::sleep(std::mem::take(&mut *loading));
    }
}

enum Image {
    Text(HashMap<String, Kernel>),
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
        let Kernel { behaviour, loading } = match &module.image {
            Image::Text(kernels) => *kernels.get(name).ok_or(CuError::NOT_FOUND)?,
            Image::Host(run) => Kernel { behaviour: Behaviour::Host(*run), loading: Duration::ZERO },
            Image::Other => Kernel { behaviour: Behaviour::Lasts(Duration::ZERO), loading: Duration::ZERO },
        };
        let mut functions = module.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(Arc::as_ptr(function) as usize);
        }
        let c_name = CString::new(name).map_err(|_| CuError::INVALID_VALUE)?;
        let function = Arc::new(Function { name: c_name, behaviour, module: handle, loading: loading.into() });
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

/// The value of a word `NAME=VALUE`.
fn value<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

fn parse(image: &In<std::ffi::c_char>) -> Result<Image, CuError> {
    let text = Text::at(image.address()).get()?;
    let mut kernels = HashMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")) {
        let words: Vec<_> = line.split_whitespace().collect();
        let ["kernel", name, time, flags @ ..] = &words[..] else { return Err(CuError::INVALID_IMAGE) };
        let time = Duration::from_micros(time.parse().map_err(|_| CuError::INVALID_IMAGE)?);
        let loading = value(flags, "loading").map_or(Ok(0), str::parse).map_err(|_| CuError::INVALID_IMAGE)?;
        let behaviour = match value(flags, "flags") {
            None => Behaviour::Lasts(time),
            Some(_) => Behaviour::Meets(time, Flags::parse(flags).ok_or(CuError::INVALID_IMAGE)?),
        };
        let kernel = Kernel { behaviour, loading: Duration::from_micros(loading) };
        kernels.insert((*name).to_string(), kernel);
    }
    Ok(Image::Text(kernels))
}
