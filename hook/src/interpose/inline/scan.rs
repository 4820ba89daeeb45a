//! Scans loaded objects, and replaces the functions that need an inline hook.

use std::sync::Mutex;

use crate::{
    interpose::inline::{
        deepbind,
        engine::{ENGINE, interface::Engine},
        prologue::{self, Refusal},
        role::Role,
        static_symbols, weak,
    },
    runtime::linker::{
        elf::{self, LinkMap, Object, Symbol, own_base},
        function::Function,
        function_table::is_wrapper,
    },
};

/// The objects that were scanned, in the order of the linker's list, and the functions that were
/// replaced in them.
static STATE: Mutex<ScanState> = Mutex::new(ScanState { objects: Vec::new(), hooks: Vec::new() });

struct ScanState {
    objects: Vec<Place>,
    hooks: Vec<Hook>,
}

/// An object: its link map and its load address.
type Place = (usize, usize);

/// A function that was replaced.
struct Hook {
    object: Place,
    function: &'static Function,
    slot: usize,
}

/// Scans the objects that are new in the linker's list. Called while the list cannot change.
pub fn scan_new_objects() {
    let Ok(mut known) = STATE.try_lock() else { return };
    let known = &mut *known;
    let mut at = 0;
    let mut map = elf::first();
    while !map.is_null() {
        // SAFETY: an object of the list, which does not change now.
        let place = (map as usize, unsafe { (*map).base });
        if known.objects.get(at) != Some(&place) {
            known.forget_gone();
            if known.objects.get(at) != Some(&place) {
                known.objects.insert(at, place);
                scan_object(known, place, map, at == 0);
                // SAFETY: as above; the linker has not bound the object yet.
                unsafe { deepbind::bind(map) };
                // SAFETY: as above; none of its code runs yet, or the process is starting.
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

impl ScanState {
    /// Removes unloaded objects, and frees the slots of their functions.
    fn forget_gone(&mut self) {
        let mut present = Vec::with_capacity(self.objects.len());
        let mut map = elf::first();
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

fn scan_object(known: &mut ScanState, place: Place, map: *const LinkMap, is_program: bool) {
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
    for function in crate::runtime::linker::function_table::functions() {
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
            Err(_) => function.mark_hidden_copy(),
        }
    }
}

/// Replaces a function, and returns the slot of its original.
fn replace(object: &Object, function: &'static Function, symbol: Symbol) -> Result<usize, Refusal> {
    if !object.holds_code(symbol.address) || !object.holds_code(symbol.address + symbol.size.max(1) - 1) {
        return Err(Refusal::Start);
    }
    if is_wrapper(symbol.address as *mut _) {
        return Err(Refusal::Start);
    }
    // SAFETY: code of a loaded object, as checked above.
    let code = unsafe { std::slice::from_raw_parts(symbol.address as *const u8, symbol.size) };
    // The mark for indirect branches stays, which does nothing else. A uprobe on it may come and
    // go.
    let kept = if code.starts_with(&prologue::ENDBR64) { prologue::ENDBR64.len() } else { 0 };
    let (code, entry) = (&code[kept..], symbol.address + kept);
    prologue::check(code, entry as u64)?;
    let (slot, wrapper) = function.spare_slot().ok_or(Refusal::Engine)?;
    let mut publish = |original: *const ()| function.fill_slot(slot, original.cast_mut().cast());
    // SAFETY: the object has just been mapped, or the process has one thread. The code was checked,
    // and the wrapper belongs to a function of this name.
    let replaced = unsafe { ENGINE.replace(entry, wrapper, &mut publish) };
    match replaced {
        Ok(()) => Ok(slot),
        Err(refusal) => {
            function.free_slot(slot);
            Err(refusal)
        }
    }
}
