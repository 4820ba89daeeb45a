//! Captures one thread that waits in the handler of a fatal signal: its stacks, and the reason of
//! an abort. It reads what the C library and the C++ runtime keep in memory, and changes nothing.

use std::{collections::HashSet, rc::Rc};

use xpu_timer_proto::{
    procfs::{self, Mapping},
    server::{CaptureMethod, PstackStacktrace, PySpyStacktrace},
};

use crate::{
    memory::{PAGE, Region, Snapshot},
    native::{Registers, address_space::AddressSpace, perf::Sample, thread::Thread},
    objects::{Images, bytes::exported_symbol},
    python::reader::{self, PythonReader},
    symbols::demangle,
};

use super::{CodeLocations, RawProcess, capture::unix_ns};

/// Bytes of the stack to copy at a fatal signal. Most stacks use a few KB, and of a stack that has
/// overflowed, the inner frames suffice.
const FAULT_STACK_BYTES: usize = 256 << 10;
/// Number of pages above the stack pointer that may be unmapped: a function with large variables
/// has overflowed its stack.
const MAX_OVERFLOW_PAGES: u64 = 1 << 12;

/// Takes the native and the Python stack of one thread that waits in a signal handler, the native
/// one from its registers at the signal. Calls `release` when the thread need not wait any longer.
/// The second part is the reason, if the process aborts.
pub(crate) fn capture(
    pid: i32,
    tid: i32,
    signal: i32,
    registers: &[u64; 17],
    images: &Images,
    release: impl FnOnce(),
) -> (RawProcess, Option<String>) {
    let mut process = RawProcess { pid, ..RawProcess::default() };
    process.sample.captured_unix_ns = unix_ns();
    let own_tid = tid;
    let tid = reader::tids_by_namespaced_tid(pid).get(&own_tid).copied().unwrap_or(own_tid);
    let mut thread = Thread::default();
    (thread.tid, thread.status) = (tid, procfs::status(pid, tid).unwrap_or_default());
    let taken = AddressSpace::open(images, pid, tid).and_then(|space| {
        let first = interrupted(&space, tid, registers[SAMPLED_SP]);
        let registers = Registers::from_sample(first.as_ref().unwrap_or(registers));
        let sp = registers.sp();
        let is_readable = |address: &u64| space.mapping(*address).is_some_and(|mapping| mapping.readable);
        let pages = (1..MAX_OVERFLOW_PAGES).map(|page| (sp & !(PAGE - 1)) + page * PAGE);
        let start = std::iter::once(sp).chain(pages).find(is_readable).unwrap_or(sp);
        let mapping = space.mapping(start);
        let stack = Region::read_stack(tid, start, mapping.as_deref(), vec![1; FAULT_STACK_BYTES])?;
        let reason = if signal == libc::SIGABRT { abort_reason(&space, tid, &stack) } else { None };
        Ok((space, Sample { registers, stack, in_kernel: false }, reason))
    });
    let mut why = None;
    let mut places = CodeLocations::default();
    // The unwind tables and the code of a process that has ended cannot be read any more.
    let unwound = taken.map(|(space, sample, reason)| {
        why = reason;
        thread.store_sample(pid, sample, &space, &mut Box::default());
        process.frames.push(places.of(&thread.frames, Some(&space)));
        if let Some((stack, entries)) = waiting_python(pid, &thread, own_tid, &space) {
            process.sample.py_stacktrace.push(stack);
            process.python_entries.push(entries);
        }
    });
    release();
    match unwound {
        Ok(()) => {
            process.places = places.list;
            process.sample.stacktrace.push(PstackStacktrace {
                pid: tid as u32,
                thread_name: thread.status.name,
                capture: CaptureMethod::ZeroStop.into(),
                incomplete: thread.incomplete,
                ..PstackStacktrace::default()
            });
        }
        Err(error) => process.sample.errors.push(error.to_string()),
    }
    (process, why)
}

/// The Python stack of a thread that waits, whose id in the PID namespace of its process is
/// `own_tid`, and for each frame whether C code entered the interpreter with it. `None` if the
/// thread runs no Python or it cannot be read.
fn waiting_python(
    pid: i32,
    thread: &Thread,
    own_tid: i32,
    space: &AddressSpace<'_>,
) -> Option<(PySpyStacktrace, Vec<bool>)> {
    let python = PythonReader::find(thread.tid, space, thread.frames.iter()).ok()??;
    let mut found = python.threads(|tid| (tid == own_tid).then_some(thread.tid)).ok()?;
    found.retain(|one| one.tid != 0);
    python.read(&mut found);
    let mut waiting = found.pop()?;
    waiting.is_consistent = true;
    Some(waiting.finish(pid, true)).filter(|(stack, _)| !stack.frames.is_empty())
}

/// Bytes of an alternate stack that are searched for the registers that a handler has interrupted.
const HANDLER_STACK_BYTES: usize = 64 << 10;
/// Sizes of alternate stacks.
const HANDLER_STACKS: std::ops::Range<u64> = 1 << 10..64 << 20;
/// Place of the stack pointer in the registers of a sample.
const SAMPLED_SP: usize = 7;
/// Words of `ucontext_t`, which the kernel stores for a handler: its flags, a link, the start,
/// flags and size of the alternate stack, and the registers in the order of a sample.
const FRAME_REGISTERS: [usize; 17] = [18, 16, 19, 17, 14, 13, 15, 20, 21, 5, 6, 7, 8, 9, 10, 11, 12];
const FRAME_WORDS: usize = 22;
const MAX_FRAME_FLAGS: u64 = 7;

/// The registers at the first signal, if a handler has raised it again on its alternate stack, as
/// faulthandler does. The stack that it has interrupted is another one.
fn interrupted(space: &AddressSpace<'_>, tid: i32, sp: u64) -> Option<[u64; 17]> {
    let copied = Region::read_into(tid, sp & !7, vec![0; HANDLER_STACK_BYTES]).ok()?;
    let words: Vec<u64> =
        copied.bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect();
    words.windows(FRAME_WORDS).find_map(|frame| {
        let [flags, link, start, _, size, ..] = frame else { return None };
        let is_on_stack = |address| (*start..start.saturating_add(*size)).contains(&address);
        let is_frame = *flags <= MAX_FRAME_FLAGS && *link == 0 && HANDLER_STACKS.contains(size) && is_on_stack(sp);
        let registers = FRAME_REGISTERS.map(|register| frame[register]);
        (is_frame && !is_on_stack(registers[SAMPLED_SP]) && space.is_executable(registers[SAMPLED_SP + 1]))
            .then_some(registers)
    })
}

/// Maximum number of bytes of the reason of an abort.
const MAX_REASON_BYTES: usize = 1024;
/// glibc's text of a failed assertion or of a corrupted heap: a pointer to a number of four bytes,
/// and the text.
const LIBC_TEXT: &[u8] = b"__abort_msg";
const LIBC_TEXT_START: u64 = 4;
/// Bytes of the stack to search for a C++ exception: `abort` is called a few frames below
/// `__cxa_throw`.
const EXCEPTION_STACK_BYTES: usize = 16 << 10;
/// First word of the header of a C++ exception of GCC: `GNUCC++` and 0, or 1 for a reference to
/// another exception. The thrown object follows the header.
const EXCEPTION_CLASS: u64 = 0x474e_5543_432b_2b00;
const EXCEPTION_HEADER: u64 = 32;
/// Bytes before the header: the pointer to the type, or of a reference the pointer to the object.
const EXCEPTION_TYPE: u64 = 80;
/// Bytes before the object: the number of references to it.
const EXCEPTION_REFERENCES: u64 = 128;
const MAX_REFERENCES: u32 = 1 << 16;
/// Bases of an exception whose text follows its virtual table as a pointer: the standard's, and
/// PyTorch's.
const TEXT_CLASSES: [&str; 3] = ["St13runtime_error", "St11logic_error", "N3c105ErrorE"];
const MAX_BASES: usize = 16;
const EXCEPTION: &str = "a C++ exception";

/// Why a process aborts: the text that the C library keeps, else the C++ exception that nobody has
/// caught. Both are written to standard error by the C library itself, which calls no function that
/// could be interposed.
fn abort_reason(space: &AddressSpace<'_>, tid: i32, stack: &Region) -> Option<String> {
    let mut memory = Snapshot::new(tid);
    libc_text(space, &mut memory).or_else(|| uncaught_exception(space, &mut memory, stack))
}

fn libc_text(space: &AddressSpace<'_>, memory: &mut Snapshot) -> Option<String> {
    let libc = |mapping: &Rc<Mapping>| {
        let name = mapping.path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libc.so.6") || name.starts_with("libc-2.")
    };
    let object = space.executables().into_iter().find(libc).and_then(|mapping| space.object_at(mapping.start))?;
    let variable = object.bias.wrapping_add(exported_symbol(&object.image.elf()?, LIBC_TEXT)?);
    let kept = memory.read_u64("the text of the C library", variable).ok().filter(|kept| *kept != 0)?;
    text_at(memory, kept.wrapping_add(LIBC_TEXT_START))
}

/// A C++ exception that the inner frames of a stack refer to.
fn uncaught_exception(space: &AddressSpace<'_>, memory: &mut Snapshot, stack: &Region) -> Option<String> {
    let words = stack.bytes[..stack.bytes.len().min(EXCEPTION_STACK_BYTES)].chunks_exact(8);
    let addresses = words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let mut seen = HashSet::new();
    let is_data = |address: u64| space.mapping(address).is_some_and(|mapping| mapping.readable && !mapping.executable);
    let header =
        addresses.filter(|address| address % 16 == 0 && *address > PAGE && seen.insert(*address)).find_map(|address| {
            let class = is_data(address).then(|| memory.read_u64(EXCEPTION, address).ok()).flatten()?;
            (class & !1 == EXCEPTION_CLASS).then_some((address, class != EXCEPTION_CLASS))
        });
    let (header, is_reference) = header?;
    let mut word = |address: u64| memory.read_u64(EXCEPTION, address).ok();
    let mut object = header.wrapping_add(EXCEPTION_HEADER);
    let mut class = word(header.wrapping_sub(EXCEPTION_TYPE))?;
    if is_reference {
        object = class;
        class = word(object.wrapping_sub(EXCEPTION_HEADER + EXCEPTION_TYPE))?;
    }
    // The memory of an exception that was caught and freed may still be there.
    let references = memory.read_u32(EXCEPTION, object.wrapping_sub(EXCEPTION_REFERENCES)).ok()?;
    let name = (1..=MAX_REFERENCES).contains(&references).then(|| class_name(memory, class)).flatten()?;
    let mut has_text = false;
    let mut base = Some(class);
    for _ in 0..MAX_BASES {
        let Some(mangled) = base.and_then(|class| class_name(memory, class)) else { break };
        has_text |= TEXT_CLASSES.contains(&mangled.as_str());
        base = base.and_then(|class| memory.read_u64(EXCEPTION, class.wrapping_add(16)).ok());
    }
    let text = if has_text { memory.read_u64(EXCEPTION, object.wrapping_add(8)).ok() } else { None };
    let text = text.and_then(|text| text_at(memory, text));
    let name = demangle(format!("_ZTS{name}").as_bytes());
    let name = name.rsplit("typeinfo name for ").next().unwrap_or_default().to_string();
    Some(text.map_or_else(|| name.clone(), |text| format!("{name}: {text}")))
}

/// The mangled name of a C++ class, from its `type_info`. A star marks classes of one library.
fn class_name(memory: &mut Snapshot, class: u64) -> Option<String> {
    let name = memory.read_u64(EXCEPTION, class.wrapping_add(8)).ok()?;
    let name = text_at(memory, name)?;
    let name = name.trim_start_matches('*');
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte)).then(|| name.into())
}

/// A text that ends with a zero. `None` if it is empty or no text.
fn text_at(memory: &mut Snapshot, address: u64) -> Option<String> {
    let mut bytes = Vec::new();
    while bytes.len() < MAX_REASON_BYTES {
        match memory.read_u8("a text", address.wrapping_add(bytes.len() as u64)).ok()? {
            0 => break,
            byte => bytes.push(byte),
        }
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        // It may be cut within a character.
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            (valid + 4 > MAX_REASON_BYTES).then(|| String::from_utf8_lossy(&error.as_bytes()[..valid]).into_owned())?
        }
    };
    let text = text.trim();
    (!text.is_empty()).then(|| text.into())
}
