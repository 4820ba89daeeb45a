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
        address_space::{AddressSpace, MappedObject},
        frame::RawFrame,
    },
};

/// The interpreter of one process.
pub(super) struct InterpreterLocation {
    pub object: Rc<MappedObject>,
    pub runtime: Arc<Runtime>,
    pub layout: Arc<Layout>,
    /// Address of `_PyRuntime` in the process.
    pub address: u64,
}

/// Finds the interpreter. `None` if the process runs no Python. The search includes the objects on
/// the native stacks: if the process runs Python code, the interpreter is one of them, whatever its
/// name.
pub(super) fn find<'a>(
    live_tid: i32,
    space: &AddressSpace<'_>,
    seen: impl Iterator<Item = &'a RawFrame>,
) -> Result<Option<InterpreterLocation>, String> {
    let exe = std::fs::read_link(format!("/proc/{live_tid}/exe")).unwrap_or_default();
    let exe = exe.to_string_lossy();
    let is_library = |path: &str| file_name(path).starts_with("libpython") && file_name(path).contains(".so");
    let mut claims = file_name(&exe).starts_with("python");
    let mut known = Vec::new();
    let mut idle: Option<InterpreterLocation> = None;
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
        let Some(object) = space.object_at(address) else { continue };
        if known.contains(&object.image.id) {
            continue;
        }
        known.push(object.image.id);
        if let Some(runtime) = object.image.python() {
            let address = runtime.address.wrapping_add(object.bias);
            let layout = runtime.layout(live_tid, || object.image.elf(), &object.image.path, object.bias)?;
            let started =
                Snapshot::new(live_tid).read_u64("_PyRuntime", address.wrapping_add(layout.runtime_interpreters));
            let location = InterpreterLocation { object, runtime, layout, address };
            if started != Ok(0) {
                return Ok(Some(location));
            }
            // A program may contain an interpreter and use that of a library.
            idle.get_or_insert(location);
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
