//! Finds the interpreter of a process and its version. What is found out about an object applies to
//! all processes of the node that have it mapped.

use std::{rc::Rc, sync::Arc};

use crate::{
    cpython::{
        layout::Layout,
        runtime::{Runtime, file_name},
    },
    memory::snapshot::Snapshot,
    native::{
        address_space::{AddressSpace, Located},
        frame::RawFrame,
    },
};

/// The interpreter of one process.
pub(super) struct Place {
    pub located: Rc<Located>,
    pub runtime: Arc<Runtime>,
    pub layout: Arc<Layout>,
    /// Address of `_PyRuntime` in the process.
    pub address: u64,
}

/// Finds the interpreter. `None` if the process runs no Python. The search includes the objects on
/// the native stacks: if the process runs Python code, the interpreter is one of them, whatever its
/// name.
pub(super) fn find<'a>(
    live: i32,
    space: &AddressSpace<'_>,
    seen: impl Iterator<Item = &'a RawFrame>,
) -> Result<Option<Place>, String> {
    let exe = std::fs::read_link(format!("/proc/{live}/exe")).unwrap_or_default();
    let exe = exe.to_string_lossy();
    let is_library = |path: &str| file_name(path).starts_with("libpython") && file_name(path).contains(".so");
    let mut claims = file_name(&exe).starts_with("python");
    let mut known = Vec::new();
    let mut idle: Option<Place> = None;
    // The candidates are evaluated lazily: each kind costs more than the one before, and the first
    // one usually suffices.
    let executable = space.first_executable().filter(|mapping| mapping.path == exe).map(|mapping| mapping.start);
    let libraries = std::iter::once_with(|| {
        let code = space.executables();
        let named = code.iter().filter(|mapping| mapping.path == exe || is_library(&mapping.path));
        named.inspect(|mapping| claims |= is_library(&mapping.path)).map(|mapping| mapping.start).collect::<Vec<_>>()
    });
    let addresses = executable.into_iter().chain(seen.map(RawFrame::lookup)).chain(libraries.flatten());
    for address in addresses {
        let Some(located) = space.located(address) else { continue };
        if known.contains(&located.image.id) {
            continue;
        }
        known.push(located.image.id);
        if let Some(runtime) = located.image.python() {
            let address = runtime.address.wrapping_add(located.bias);
            let layout = runtime.layout(live, || located.image.elf(), &located.image.path, located.bias)?;
            let started = Snapshot::new(live).read_u64("_PyRuntime", address.wrapping_add(layout.runtime_interpreters));
            let place = Place { located, runtime, layout, address };
            if started != Ok(0) {
                return Ok(Some(place));
            }
            // A program may contain an interpreter and use that of a library.
            idle.get_or_insert(place);
        }
    }
    if idle.is_some() {
        return Ok(idle);
    }
    if claims {
        return Err("no CPython from 3.8 on: nothing in it is called _PyRuntime".into());
    }
    Ok(None)
}
