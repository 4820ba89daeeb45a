//! The environment of the process, read while other threads of the host may change it.
//!
//! `setenv` moves the array of the environment and frees the old one. A thread that is in `getenv`
//! at that moment may crash. A program may change its environment if none of its own threads reads
//! it, so the hook never calls `getenv` and never follows the current array itself. The kernel
//! copies the memory, and refuses addresses that do not exist.

use std::{
    ffi::{CStr, c_char},
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::runtime::{
    linker::elf::PAGE,
    os::{seccomp, sys, thread_state::errno},
};

/// An array of `NAME=value` strings that ends with a null pointer.
type Array = *const *const c_char;

unsafe extern "C" {
    static environ: Array;
}

/// The array with which the process started. It is on the stack, as are its strings.
static AT_START: AtomicPtr<*const c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Called when the library is loaded. At that time no thread changes the environment.
pub(crate) fn note_start() {
    AT_START.store(current().cast_mut(), Ordering::Relaxed);
}

fn current() -> Array {
    // SAFETY: a word of the C library, which `setenv` replaces as a whole.
    unsafe { (&raw const environ).read_volatile() }
}

/// The value that a variable had when the process was started. A program that sets its title
/// overwrites these strings, so they are read early.
pub(crate) fn at_start(name: &CStr) -> Option<&'static [u8]> {
    strings_at_start().find_map(|entry| entry.strip_prefix(name.to_bytes())?.strip_prefix(b"="))
}

fn strings_at_start() -> impl Iterator<Item = &'static [u8]> {
    let noted: Array = AT_START.load(Ordering::Relaxed);
    // A library that is loaded before the hook may call it.
    let start = if noted.is_null() { current() } else { noted };
    (0..).map_while(move |index| {
        if start.is_null() {
            return None;
        }
        // SAFETY: the array on the stack, which ends with a null pointer.
        let entry = unsafe { start.add(index).read_volatile() };
        // SAFETY: the strings on the stack, or those by which `setenv` has replaced them. The C
        // library does not free these.
        (!entry.is_null()).then(|| unsafe { CStr::from_ptr(entry) }.to_bytes())
    })
}

/// Copies the current environment. If the system does not let a process read its own memory, this
/// is the environment at its start.
pub(crate) fn copy() -> Vec<Vec<u8>> {
    let errno = errno();
    let saved = errno.get();
    let memory = Memory::open();
    let copy = memory.map_or_else(|| strings_at_start().map(<[u8]>::to_vec).collect(), |memory| stable_copy(&memory));
    errno.set(saved);
    copy
}

fn stable_copy(memory: &Memory) -> Vec<Vec<u8>> {
    const ATTEMPTS: usize = 16;
    // If two copies in a row are equal, no thread has changed it in between.
    let mut copy = memory.strings(current() as usize);
    for _ in 1..ATTEMPTS {
        let before = std::mem::replace(&mut copy, memory.strings(current() as usize));
        if before == copy {
            break;
        }
    }
    copy
}

/// The current value of a variable.
pub(crate) fn variable(name: &CStr) -> Option<Vec<u8>> {
    let value = |entry: &Vec<u8>| Some(entry.strip_prefix(name.to_bytes())?.strip_prefix(b"=")?.to_vec());
    copy().iter().find_map(value)
}

/// The memory of this process as the kernel reads it.
enum Memory {
    /// By a system call.
    Direct,
    /// `/proc/self/mem`, where a filter forbids that call.
    File(File),
}

impl Memory {
    fn open() -> Option<Self> {
        let probe = [0u8; 1];
        if sys::read_memory(probe.as_ptr() as usize, &mut [0]).is_ok() {
            return Some(Memory::Direct);
        }
        seccomp::may_call().then(|| File::open("/proc/self/mem").ok().map(Memory::File))?
    }

    fn read(&self, address: usize, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Memory::Direct => sys::read_memory(address, bytes),
            Memory::File(file) => file.read_exact_at(bytes, address as u64),
        }
    }

    /// The strings of an array. Those that cannot be read are left out.
    fn strings(&self, array: usize) -> Vec<Vec<u8>> {
        /// Linux limits the arguments and the environment of a program to a few megabytes.
        const MOST: usize = 1 << 16;
        const WORD: usize = size_of::<usize>();
        let mut strings = Vec::new();
        let mut place = array;
        while place != 0 && strings.len() < MOST {
            let mut part = [0; 64 * WORD];
            // The next page may not exist. The array is aligned to words.
            let bytes = part.len().min(PAGE - place % PAGE) / WORD * WORD;
            let part = &mut part[..bytes];
            if bytes == 0 || self.read(place, part).is_err() {
                break;
            }
            let words = part.chunks_exact(WORD).map(|word| usize::from_ne_bytes(word.try_into().unwrap_or_default()));
            let pointers: Vec<usize> = words.take_while(|pointer| *pointer != 0).collect();
            strings.extend(pointers.iter().filter_map(|pointer| self.string(*pointer)));
            if pointers.len() * WORD < bytes {
                break;
            }
            place = place.wrapping_add(bytes);
        }
        strings
    }

    /// The string at an address, without the byte that ends it.
    fn string(&self, address: usize) -> Option<Vec<u8>> {
        /// Linux limits a string to 32 pages.
        const MOST_BYTES: usize = 32 * PAGE;
        const PART: usize = 256;
        let mut string = Vec::new();
        while string.len() < MOST_BYTES {
            let at = address.checked_add(string.len())?;
            let mut part = [0; PART];
            // The next page may not exist.
            let part = &mut part[..PART.min(PAGE - at % PAGE)];
            self.read(at, part).ok()?;
            if let Some(end) = part.iter().position(|byte| *byte == 0) {
                string.extend_from_slice(&part[..end]);
                return Some(string);
            }
            string.extend_from_slice(part);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memories() -> [Memory; 2] {
        [Memory::Direct, Memory::File(File::open("/proc/self/mem").unwrap())]
    }

    #[test]
    fn the_environment_is_that_of_the_process() {
        let copy = copy();
        let path = std::env::var("PATH").unwrap();
        assert!(copy.contains(&format!("PATH={path}").into_bytes()));
        assert_eq!(variable(c"PATH"), Some(path.into_bytes()));
        assert_eq!(variable(c"PAT"), None);
        assert_eq!(memories().map(|memory| memory.strings(current() as usize)), [copy.clone(), copy]);
    }

    #[test]
    fn freed_memory_is_refused_and_long_strings_are_read() {
        let long = std::ffi::CString::new(format!("LONG={}", "x".repeat(3 * PAGE))).unwrap();
        let entries =
            [c"A=1".as_ptr() as usize, 16, long.as_ptr() as usize, usize::MAX - 3, c"B=".as_ptr() as usize, 0];
        for memory in memories() {
            let read = memory.strings(entries.as_ptr() as usize);
            assert_eq!(read, [b"A=1".to_vec(), long.to_bytes().to_vec(), b"B=".to_vec()]);
            assert_eq!(memory.strings(0).len() + memory.strings(16).len(), 0);
        }
    }
}
