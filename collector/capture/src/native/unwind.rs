//! Computes the program counters of a stack from registers and copied memory. It follows the call
//! frame information with all registers, through signal frames and expressions. Where there is
//! none, it falls back to reading the code and to frame pointers. It reads from the process only
//! such code.

use std::cell::{Cell, RefCell};

use gimli::{CfaRule, EvaluationResult, Location, RegisterRule, UnwindContext, UnwindExpression, Value};

use crate::{error::Error, memory::Region, objects::image::RuleSection};

use super::{
    FRAME_POINTER, PC, RawFrame, Registers, STACK_POINTER, SYSCALL_RESULT,
    address_space::{AddressSpace, MappedObject},
    epilogue,
    prologue::{FrameLayout, FramePointer},
    register_name,
};

/// Maximum number of frames of one thread. The unwinding of a deeper stack ends there, with
/// [`End::Limit`].
pub(crate) const MAX_FRAMES: usize = 100_000;

/// Why unwinding ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// At the root frame, which has no caller.
    Root,
    /// The copies do not contain this address.
    Memory(u64),
    /// An unknown register is needed.
    Register(usize),
    /// This address has no rules, and the frame pointer leads nowhere.
    NoRules(u64),
    /// The rules for this address cannot be followed.
    BadRules(u64),
    /// The caller would be below its callee.
    Backwards(u64),
    /// More than [`MAX_FRAMES`].
    Limit,
}

impl End {
    /// The reason as text for a person; empty for a complete stack.
    pub(super) fn describe(&self) -> String {
        match self {
            End::Root => String::new(),
            End::Memory(address) => format!("memory at {address:#x} could not be read"),
            End::Register(register) => format!("register {} is not known", register_name(*register)),
            End::NoRules(pc) => format!("no unwind information for {pc:#x}"),
            End::BadRules(pc) => format!("unwind information for {pc:#x} cannot be followed"),
            End::Backwards(pc) => format!("the stack runs backwards at {pc:#x}"),
            End::Limit => format!("more than {MAX_FRAMES} frames"),
        }
    }
}

/// Unwinds one thread.
pub(crate) fn unwind(
    mut registers: Registers,
    memory: &Memory<'_>,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
) -> (Vec<RawFrame>, End) {
    let mut frames = Vec::new();
    let mut exact = true;
    loop {
        let frame = RawFrame { pc: registers.pc(), exact, signal: false };
        frames.push(frame);
        if frames.len() >= MAX_FRAMES {
            return (frames, End::Limit);
        }
        let step = match space.object_at(frame.lookup()) {
            Some(object) => step_by_rules(frame, &object, registers, memory, space, context),
            None => None,
        };
        let step = step.unwrap_or_else(|| step_without_rules(frame, &registers, memory, space));
        let (caller, signal) = match step {
            Ok(step) => step,
            Err(end) => return (frames, end),
        };
        if signal && let Some(frame) = frames.last_mut() {
            frame.signal = true;
        }
        // A handler on an alternate stack may be anywhere; any other caller is above its callee.
        // Only a leaf may have popped its own return address, as vfork does.
        let above = caller.sp() > registers.sp() || (frame.exact && caller.sp() == registers.sp());
        if !signal && !above {
            return (frames, End::Backwards(frame.pc));
        }
        if caller.pc() == 0 {
            return (frames, End::Root);
        }
        registers = caller;
        exact = signal;
    }
}

type Step = Result<(Registers, bool), End>;

fn step_by_rules(
    frame: RawFrame,
    object: &MappedObject,
    mut registers: Registers,
    memory: &Memory<'_>,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
) -> Option<Step> {
    let address = frame.lookup().wrapping_sub(object.bias);
    let row = object.image.row(address, context)?;
    let (signal, section) = (row.signal, row.section);
    if let CfaRule::RegisterAndOffset { register, offset } = &row.cfa
        && usize::from(register.0) == FRAME_POINTER
        && registers.get(FRAME_POINTER).is_none()
        && let Some((layout, cfa)) = layout_by_code(frame, &registers, memory, space)
        && layout.fp == FramePointer::At(-offset)
    {
        registers.set(FRAME_POINTER, cfa.wrapping_add_signed(-offset));
    }
    let registers = &registers;
    let evaluate = |expression: &UnwindExpression<usize>, initial: Option<u64>| {
        evaluate(expression, section, initial, object, registers, memory, frame.pc)
    };
    let cfa = match &row.cfa {
        CfaRule::RegisterAndOffset { register, offset } => {
            let register = usize::from(register.0);
            match registers.get(register) {
                Some(value) => value.wrapping_add_signed(*offset),
                None => return Some(Err(End::Register(register))),
            }
        }
        CfaRule::Expression(expression) => match evaluate(expression, None) {
            Ok(value) => value,
            Err(end) => return Some(Err(end)),
        },
    };
    let mut caller = registers.preserved();
    // By definition, the CFA is the caller's stack pointer before the call. A signal frame
    // overrides it below.
    caller.set(STACK_POINTER, cfa);
    let mut return_address = None;
    for (register, rule) in &row.registers {
        let register = *register;
        let read = |address: u64| memory.read_number(address, 8).ok_or(End::Memory(address));
        let value = match rule {
            RegisterRule::Undefined => Ok(None),
            RegisterRule::SameValue => Ok(registers.get(register)),
            RegisterRule::Offset(offset) => read(cfa.wrapping_add_signed(*offset)).map(Some),
            RegisterRule::ValOffset(offset) => Ok(Some(cfa.wrapping_add_signed(*offset))),
            RegisterRule::Register(other) => Ok(registers.get(usize::from(other.0))),
            RegisterRule::Expression(expression) => {
                evaluate(expression, Some(cfa)).and_then(|address| read(address).map(Some))
            }
            RegisterRule::ValExpression(expression) => evaluate(expression, Some(cfa)).map(Some),
            RegisterRule::Constant(value) => Ok(Some(*value)),
            _ => Err(End::BadRules(frame.pc)),
        };
        match value {
            Ok(value) if register == PC => return_address = Some(value),
            Ok(value) => caller.set_optional(register, value),
            // A register other than the return address may never be needed.
            Err(end) if register == PC => return Some(Err(end)),
            Err(_) => caller.set_optional(register, None),
        }
    }
    match return_address {
        // The root function of a thread has an undefined return address.
        Some(None) => Some(Err(End::Root)),
        None => Some(Err(End::BadRules(frame.pc))),
        Some(Some(pc)) => {
            caller.set(PC, pc);
            Some(Ok((caller, signal)))
        }
    }
}

/// Steps through code without call frame information: generated at run time, or assembly.
fn step_without_rules(frame: RawFrame, registers: &Registers, memory: &Memory<'_>, space: &AddressSpace<'_>) -> Step {
    if is_new_thread(frame, registers, space) {
        return Err(End::Root);
    }
    if let Some(caller) = caller_by_epilogue(frame, registers, memory, space) {
        return Ok((caller, false));
    }
    if frame.exact && !space.is_executable(frame.pc) {
        return step_out_of_bad_call(frame, registers, memory, space);
    }
    match registers.get(FRAME_POINTER) {
        Some(fp) => step_by_frame_pointer(fp, frame, registers, memory, space),
        None => step_by_code(frame, registers, memory, space),
    }
}

/// The registers of the caller if the function is about to return: its next instructions restore
/// them, and the return address follows a call.
fn caller_by_epilogue(
    frame: RawFrame,
    registers: &Registers,
    memory: &Memory<'_>,
    space: &AddressSpace<'_>,
) -> Option<Registers> {
    let code = space.instructions(frame.pc, epilogue::MAX_CODE_BYTES)?;
    let caller = epilogue::caller_registers(&code, registers, |address| memory.read_number(address, 8))?;
    if !space.is_executable(caller.pc()) {
        return None;
    }
    let call = caller.pc().wrapping_sub(epilogue::MAX_CALL_BYTES as u64);
    let before = space.instructions(call, epilogue::MAX_CALL_BYTES)?;
    epilogue::ends_with_call(&before).then_some(caller)
}

/// A call through a bad pointer has pushed only its return address.
fn step_out_of_bad_call(frame: RawFrame, registers: &Registers, memory: &Memory<'_>, space: &AddressSpace<'_>) -> Step {
    let sp = registers.sp();
    let pc = memory.read_number(sp, 8).ok_or(End::Memory(sp))?;
    if !space.is_executable(pc) {
        return Err(End::NoRules(frame.pc));
    }
    let mut caller = registers.preserved();
    caller.set(PC, pc);
    caller.set(STACK_POINTER, sp.wrapping_add(8));
    Ok((caller, false))
}

/// The frame pointer is unknown, so the instructions of the function show the layout of its frame.
fn step_by_code(frame: RawFrame, registers: &Registers, memory: &Memory<'_>, space: &AddressSpace<'_>) -> Step {
    let (layout, cfa) = layout_by_code(frame, registers, memory, space).ok_or(End::Register(FRAME_POINTER))?;
    let mut caller = registers.preserved();
    caller
        .set_optional(FRAME_POINTER, layout.saved_fp.and_then(|at| memory.read_number(cfa.wrapping_add_signed(at), 8)));
    caller.set_optional(PC, memory.read_number(cfa.wrapping_sub(8), 8));
    caller.set(STACK_POINTER, cfa);
    Ok((caller, false))
}

/// The chain of frame pointers may continue.
fn step_by_frame_pointer(
    fp: u64,
    frame: RawFrame,
    registers: &Registers,
    memory: &Memory<'_>,
    space: &AddressSpace<'_>,
) -> Step {
    if fp == 0 {
        return Err(End::Root);
    }
    if fp < registers.sp() || !fp.is_multiple_of(8) {
        return Err(End::NoRules(frame.pc));
    }
    let above = fp.wrapping_add(8);
    let pc = memory.read_number(above, 8).ok_or(End::Memory(above))?;
    if pc != 0 && !space.is_executable(pc) {
        return Err(End::NoRules(frame.pc));
    }
    let mut caller = registers.preserved();
    caller.set_optional(FRAME_POINTER, memory.read_number(fp, 8));
    caller.set(PC, pc);
    caller.set(STACK_POINTER, fp.wrapping_add(16));
    Ok((caller, false))
}

/// The layout of a frame, from its code, and the CFA. For sleeping threads, whose frame pointer is
/// unknown. The word at the place of the return address must be an address after a call.
fn layout_by_code(
    frame: RawFrame,
    registers: &Registers,
    memory: &Memory<'_>,
    space: &AddressSpace<'_>,
) -> Option<(FrameLayout, u64)> {
    let layout = space.frame_layout(frame)?;
    let cfa = registers.get(STACK_POINTER)?.wrapping_sub(layout.sp.cast_unsigned());
    let pc = memory.read_number(cfa.wrapping_sub(8), 8)?;
    let before = space.instructions(pc.wrapping_sub(epilogue::MAX_CALL_BYTES as u64), epilogue::MAX_CALL_BYTES)?;
    (space.is_executable(pc) && epilogue::ends_with_call(&before)).then_some((layout, cfa))
}

/// Whether the thread has not run yet: it is after the system call that created it, which returns 0
/// to the new thread. C libraries have no rules there, because the registers describe the frames of
/// the thread that called clone.
fn is_new_thread(frame: RawFrame, registers: &Registers, space: &AddressSpace<'_>) -> bool {
    /// `syscall`, followed by the next instruction of glibc and musl: `test rax, rax` or `test eax,
    /// eax`.
    const AFTER_CLONE: [&[u8]; 2] = [&[0x0f, 0x05, 0x48, 0x85, 0xc0], &[0x0f, 0x05, 0x85, 0xc0]];
    if !frame.exact || registers.get(SYSCALL_RESULT) != Some(0) {
        return false;
    }
    let Some(code) = space.instructions(frame.pc.wrapping_sub(2), 5) else { return false };
    AFTER_CLONE.iter().any(|cloned| code.starts_with(cloned))
}

/// Evaluates a DWARF expression of a rule.
fn evaluate(
    expression: &UnwindExpression<usize>,
    section: RuleSection,
    initial: Option<u64>,
    object: &MappedObject,
    registers: &Registers,
    memory: &Memory<'_>,
    pc: u64,
) -> Result<u64, End> {
    let bad = End::BadRules(pc);
    let encoding = gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 4 };
    let expression = object.image.expression(expression, section).ok_or(bad)?;
    let mut evaluation = expression.evaluation(encoding);
    evaluation.set_max_iterations(10_000);
    if let Some(initial) = initial {
        evaluation.set_initial_value(initial);
    }
    let mut state = evaluation.evaluate().map_err(|_| bad)?;
    loop {
        state = match state {
            EvaluationResult::Complete => break,
            EvaluationResult::RequiresMemory { address, size, .. } => {
                let value = memory.read_number(address, usize::from(size)).ok_or(End::Memory(address))?;
                evaluation.resume_with_memory(Value::Generic(value)).map_err(|_| bad)?
            }
            EvaluationResult::RequiresRegister { register, .. } => {
                let register = usize::from(register.0);
                let value = registers.get(register).ok_or(End::Register(register))?;
                evaluation.resume_with_register(Value::Generic(value)).map_err(|_| bad)?
            }
            EvaluationResult::RequiresRelocatedAddress(address) => {
                evaluation.resume_with_relocated_address(address.wrapping_add(object.bias)).map_err(|_| bad)?
            }
            _ => return Err(bad),
        };
    }
    match evaluation.as_result() {
        [piece] => match piece.location {
            Location::Address { address } => Ok(address),
            Location::Value { value: Value::Generic(value) } => Ok(value),
            _ => Err(bad),
        },
        _ => Err(bad),
    }
}

/// Bytes of the first copy at an address. A copy that is too short is doubled.
const RANGE_BYTES: usize = 16 << 10;
/// Maximum number of bytes to copy for one thread.
const MAX_BYTES: usize = 64 << 20;

/// The memory that the unwinding of one thread reads: its stack, and whatever else it needs. It has
/// either existing copies, or copies that are made on demand.
pub(crate) struct Memory<'a> {
    regions: RefCell<Vec<Region>>,
    /// Where to copy more from. `None` for a thread that did not run only while the existing copies
    /// were taken.
    source: Option<(i32, &'a AddressSpace<'a>)>,
    /// End of the highest number that was read from the stack.
    highest_read: Cell<u64>,
}

impl<'a> Memory<'a> {
    /// The memory of a sleeping thread, copied on demand.
    pub(super) fn on_demand(tid: i32, space: &'a AddressSpace<'a>) -> Self {
        Memory { regions: RefCell::default(), source: Some((tid, space)), highest_read: Cell::new(0) }
    }

    /// Only these copies.
    pub(super) fn from_copies(regions: Vec<Region>) -> Self {
        Memory { regions: RefCell::new(regions), source: None, highest_read: Cell::new(0) }
    }

    /// Reads an unsigned number of `size` bytes, at most 8.
    pub(super) fn read_number(&self, address: u64, size: usize) -> Option<u64> {
        let known = self.copied(address, size);
        known.or_else(|| self.fetch(address).and_then(|()| self.copied(address, size)))
    }

    fn copied(&self, address: u64, size: usize) -> Option<u64> {
        let regions = self.regions.borrow();
        let (index, bytes) =
            regions.iter().enumerate().find_map(|(index, region)| Some((index, region.get(address, size)?)))?;
        if index == 0 {
            self.highest_read.set(self.highest_read.get().max(address.saturating_add(size as u64)));
        }
        let mut number = [0; 8];
        number.get_mut(..size)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(number))
    }

    fn fetch(&self, address: u64) -> Option<()> {
        let (tid, space) = self.source?;
        let mapping = space.mapping(address).filter(|mapping| mapping.readable)?;
        let mut regions = self.regions.borrow_mut();
        if regions.iter().map(|region| region.bytes.len()).sum::<usize>() >= MAX_BYTES {
            return None;
        }
        // Usually the next bytes of the stack are needed.
        let near = |region: &&mut Region| {
            region.start <= address && address < region.end() + region.bytes.len() as u64 && region.end() < mapping.end
        };
        if let Some(region) = regions.iter_mut().find(near) {
            let end = region.end();
            let length = usize::try_from(mapping.end - end)
                .unwrap_or(MAX_BYTES)
                .min(region.bytes.len().max(RANGE_BYTES))
                .min(MAX_BYTES);
            region.bytes.extend_from_slice(&Region::read_into(tid, end, vec![0; length]).ok()?.bytes);
        } else {
            let start = (address & !0xfff).max(mapping.start);
            let length = usize::try_from(mapping.end - start).unwrap_or(RANGE_BYTES).min(RANGE_BYTES);
            regions.push(Region::read_into(tid, start, vec![0; length]).ok()?);
        }
        Some(())
    }

    /// Number of bytes from the start of the stack to the end of the highest number that was read.
    pub(super) fn stack_length(&self) -> usize {
        let regions = self.regions.borrow();
        let length = |stack: &Region| usize::try_from(self.highest_read.get().saturating_sub(stack.start)).unwrap_or(0);
        regions.first().map_or(0, |stack| length(stack).min(stack.bytes.len()))
    }

    /// Copies the stack of a thread from `sp` upwards, as many bytes as most stacks have.
    pub(super) fn fetch_stack(&self, sp: u64) -> Result<(), Error> {
        let Some((tid, space)) = self.source else { return Ok(()) };
        let mapping = space.mapping(sp);
        self.regions.borrow_mut().push(Region::read_stack(tid, sp, mapping.as_deref(), vec![0; RANGE_BYTES])?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{memory::RED_ZONE, objects::Images};

    use super::*;

    #[test]
    fn memory_of_a_sleeping_thread_is_copied_on_demand() {
        let numbers: Vec<u64> = (0..1 << 16).collect();
        let pid = std::process::id() as i32;
        let images = Images::default();
        let space = AddressSpace::open(&images, pid, pid).unwrap();
        let memory = Memory::on_demand(pid, &space);
        memory.fetch_stack(numbers.as_ptr() as u64).unwrap();
        assert_eq!(memory.read_number(&raw const numbers[100] as u64, 8), Some(100));
        let length = memory.stack_length();
        assert!((808..=808 + RED_ZONE as usize).contains(&length), "up to the end of that number: {length}");
        for number in [0, 1, 3000, 60_000, 65_535, 5] {
            assert_eq!(memory.read_number(&raw const numbers[number] as u64, 8), Some(number as u64));
        }
        assert_eq!(memory.read_number(8, 8), None);
    }

    #[test]
    fn a_number_is_read_from_one_region_only() {
        let memory = Memory::from_copies(vec![Region { start: 100, bytes: vec![1, 0, 0, 0, 0, 0, 0, 0, 2] }]);
        assert_eq!(memory.read_number(100, 8), Some(1));
        assert_eq!(memory.read_number(108, 1), Some(2));
        assert_eq!(memory.read_number(104, 8), None);
        assert_eq!(memory.read_number(99, 1), None);
        assert_eq!(memory.read_number(u64::MAX, 8), None);
    }
}
