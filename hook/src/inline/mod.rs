//! Inline hooks: where no symbol can be interposed, the first instructions of the function itself are replaced.
//!
//! That is the case for a collective or BLAS library that is linked statically into the program or into another library, for one
//! that binds its symbols to itself (`-Bsymbolic`), and for gloo, which lies inside PyTorch. Everything else is reached without a
//! change of code, and is left alone: a uprobe that somebody puts on a replaced function later breaks it, because the kernel
//! runs the instruction of the file in its place. Only where the function begins with an `endbr64` does it not matter.
//!
//! Code is replaced at two moments only: when the process starts and has one thread, and when the linker has just mapped a library of
//! which nothing has run yet. It is never put back.

pub mod deepbind;
mod elf;
mod engine;
mod loader;
mod prologue;
mod static_symbols;
mod weak;

use std::{
    ffi::{CStr, c_void},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use xpu_timer_proto::family::{FAMILIES, Library};

use crate::{
    original::{Function, is_ours},
    start, sys,
};
use elf::{LinkMap, Object, Symbol};
use engine::{ENGINE, Engine};
use prologue::Refusal;

/// How much is replaced: `XPU_TIMER_INLINE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Level {
    /// Nothing.
    Off = 1,
    /// What cannot be reached otherwise.
    Auto = 2,
    /// Also the driver's and the runtime's functions where these libraries bind to themselves. What the driver launches on its
    /// own is part of a launch that is seen, so this is for the curious.
    All = 3,
}

static LEVEL: AtomicU32 = AtomicU32::new(Level::Off as u32);

/// Objects that have been looked at, in the order of the linker's list, and what was replaced in them.
static KNOWN: Mutex<Known> = Mutex::new(Known { objects: Vec::new(), hooks: Vec::new() });

struct Known {
    objects: Vec<Place>,
    hooks: Vec<Hook>,
}

/// An object, by its link map and its base.
type Place = (usize, usize);

/// A function that was replaced.
struct Hook {
    object: Place,
    function: &'static Function,
    slot: usize,
}

/// Called once when the hook is loaded, before the program runs.
pub fn start() {
    let level = match sys::variable(c"XPU_TIMER_INLINE").as_deref() {
        Some(b"off" | b"0") => Level::Off,
        Some(b"all") => Level::All,
        _ => Level::Auto,
    };
    // With a second thread somebody may be running what would be replaced.
    if level == Level::Off || start::disabled() || !sys::is_alone() {
        return;
    }
    LEVEL.store(level as u32, Ordering::Relaxed);
    look_at_new();
    // Under a debugger the linker's function is not empty; then what is loaded later stays as it is.
    LISTENS.store(loader::listen(), Ordering::Relaxed);
}

static LISTENS: AtomicBool = AtomicBool::new(false);

/// Whether the hook hears of libraries that are loaded later. Not so when that is turned off, when the system does not let code be
/// changed, under a debugger, and in some forked children.
pub fn listens() -> bool {
    LISTENS.load(Ordering::Relaxed) && !loader::is_deaf()
}

/// Looks at every object that is new in the linker's list. Called while the list cannot change.
fn look_at_new() {
    let Ok(mut known) = KNOWN.try_lock() else { return };
    let known = &mut *known;
    let mut at = 0;
    let mut map = loader::first();
    while !map.is_null() {
        // SAFETY: an object of the list, which does not change now.
        let place = (map as usize, unsafe { (*map).base });
        if known.objects.get(at) != Some(&place) {
            known.forget_gone();
            if known.objects.get(at) != Some(&place) {
                known.objects.insert(at, place);
                look_at(known, place, map, at == 0);
                // SAFETY: as above; this is the moment before the linker binds it.
                unsafe { deepbind::bind(map) };
                // SAFETY: as above; nothing of it runs yet, or it is what the program is started with.
                unsafe { weak::unbind(map) };
            }
        }
        at += 1;
        // SAFETY: as above.
        map = unsafe { (*map).next };
    }
    if known.objects.len() > at {
        known.forget_gone();
    }
}

impl Known {
    /// Forgets the objects that are not in the list any more; the slots of their functions are free again.
    fn forget_gone(&mut self) {
        let mut present = Vec::with_capacity(self.objects.len());
        let mut map = loader::first();
        while !map.is_null() {
            // SAFETY: as above.
            unsafe {
                present.push((map as usize, (*map).base));
                map = (*map).next;
            }
        }
        self.objects.retain(|place| present.contains(place));
        self.hooks.retain(|hook| {
            let stays = present.contains(&hook.object);
            if !stays {
                hook.function.free_slot(hook.slot);
            }
            stays
        });
    }
}

fn look_at(known: &mut Known, place: Place, map: *const LinkMap, is_program: bool) {
    // SAFETY: an object of the list, which does not change now.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    if object.base == own_base() || object.moves_code {
        return;
    }
    let role = Role::of(&object, is_program);
    let mut unexported = static_symbols::Symbols::of(&object, is_program, &role);
    if unexported.is_none() && !role.is_program && !role.is_symbolic {
        return;
    }
    for function in crate::functions() {
        let symbol = match (object.exported(function.name), &mut unexported) {
            (Some(symbol), _) if role.hides_exported(function.library) => symbol,
            (None, Some(symbols)) => match symbols.find(function) {
                Some(symbol) => symbol,
                None => continue,
            },
            _ => continue,
        };
        match replace(&object, function, symbol) {
            Ok(slot) => known.hooks.push(Hook { object: place, function, slot }),
            Err(_) => function.out_of_reach(),
        }
    }
}

/// What an object is to the hook.
pub(crate) struct Role {
    is_program: bool,
    is_symbolic: bool,
    /// One of a family's libraries.
    is_family: bool,
}

impl Role {
    fn of(object: &Object, is_program: bool) -> Self {
        let soname = object.soname();
        let is_one_of = |sonames: &[&CStr]| sonames.iter().any(|name| name.to_bytes() == soname);
        let is_family =
            FAMILIES.iter().any(|family| Library::ALL.iter().any(|library| is_one_of(family.sonames(*library))));
        Role { is_program, is_symbolic: object.is_symbolic, is_family }
    }

    /// Whether calls of an exported function of this library can go past every preloaded symbol.
    fn hides_exported(&self, library: Library) -> bool {
        match library {
            // The program comes before what is preloaded.
            Library::Collectives | Library::Blas => self.is_program || self.is_symbolic,
            Library::Driver | Library::Runtime => {
                self.is_symbolic && self.is_family && LEVEL.load(Ordering::Relaxed) == Level::All as u32
            }
            _ => false,
        }
    }

    /// Whether functions that this object does not export are of interest.
    pub(crate) fn may_hide_copies(&self) -> bool {
        !self.is_family
    }
}

/// Replaces a function; the slot that its original is in.
fn replace(object: &Object, function: &'static Function, symbol: Symbol) -> Result<usize, Refusal> {
    if !object.holds_code(symbol.address) || !object.holds_code(symbol.address + symbol.size.max(1) - 1) {
        return Err(Refusal::Start);
    }
    if is_ours(symbol.address as *mut _) {
        return Err(Refusal::Start);
    }
    // SAFETY: code of a loaded object, as just seen.
    let code = unsafe { std::slice::from_raw_parts(symbol.address as *const u8, symbol.size) };
    // The mark of an indirect branch's target stays, which does nothing else: a uprobe on it may come and go later.
    let kept = if code.starts_with(&prologue::ENDBR64) { prologue::ENDBR64.len() } else { 0 };
    let (code, entry) = (&code[kept..], symbol.address + kept);
    prologue::check(code, entry as u64)?;
    let (slot, wrapper) = function.spare_slot().ok_or(Refusal::Engine)?;
    let mut publish = |original: *const ()| function.fill_slot(slot, original.cast_mut().cast());
    // SAFETY: the object has just been mapped, or the process has one thread; the code was checked; the wrapper is that of a function
    // of this name.
    let replaced = unsafe { ENGINE.replace(entry, wrapper, &mut publish) };
    match replaced {
        Ok(()) => Ok(slot),
        Err(refusal) => {
            function.free_slot(slot);
            Err(refusal)
        }
    }
}

/// A function of the C library, or of the part of it that it had apart until 2.34; null when there is none.
pub fn exported_by_libc(name: &CStr) -> *mut c_void {
    let in_file = |file: &[u8]| {
        let mut map = loader::first();
        while !map.is_null() {
            // SAFETY: the linker's list, whose beginning does not change.
            let object = unsafe { Object::of(map) }.filter(|object| object.soname() == file);
            if let Some(found) = object.and_then(|object| object.exported(name)) {
                return Some(found.address as *mut c_void);
            }
            // SAFETY: as above.
            map = unsafe { (*map).next };
        }
        None
    };
    in_file(b"libc.so.6").or_else(|| in_file(b"libdl.so.2")).unwrap_or(std::ptr::null_mut())
}

/// Whether the program, and no library, has the code at `address`.
pub fn is_in_program(address: usize) -> bool {
    // SAFETY: the first object of the linker's list, which is never unloaded.
    unsafe { Object::of(loader::first()) }.is_some_and(|program| program.holds_code(address))
}

/// Base of the hook's own object.
fn own_base() -> usize {
    unsafe extern "C" {
        static __ehdr_start: u8;
    }
    // Only its address is taken; the static linker makes this symbol in every object.
    &raw const __ehdr_start as usize
}
