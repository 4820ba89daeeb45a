//! Computes the layout of a function's frame from its code: the distance from the stack pointer to
//! the caller's frame at one instruction.
//!
//! For a sleeping thread, the kernel reveals the stack pointer but not the frame pointer, which is
//! needed to unwind functions that are compiled with one. Compilers move the stack pointer by
//! constant amounts, so the code before an instruction determines the distance. Where it does not
//! (`alloca`, a stack that is aligned at run time), there is no result instead of a guess.

use std::{collections::HashMap, ops::Range};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

/// Maximum number of bytes and of instructions of a function to analyze.
pub(crate) const MAX_CODE_BYTES: u64 = 256 << 10;
const MAX_INSTRUCTIONS: usize = 100_000;

/// The frame of a function at one instruction. All distances are relative to the CFA, the stack
/// pointer before the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameLayout {
    /// The stack pointer, which is below the CFA.
    pub sp: i64,
    pub fp: FramePointer,
    /// Where the caller's frame pointer is saved.
    pub saved_fp: Option<i64>,
}

/// Value of the frame pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FramePointer {
    /// The caller's value.
    Callers,
    /// The address at this distance.
    At(i64),
    Unknown,
}

const ENTRY: FrameLayout = FrameLayout { sp: -8, fp: FramePointer::Callers, saved_fp: None };

/// The frame at `pc`, which is the next instruction (`exact`) or a return address. `code` is the
/// code of the whole function, which starts at `start`.
pub(crate) fn layout(code: &[u8], start: u64, pc: u64, exact: bool) -> Option<FrameLayout> {
    let mut walk = Walk {
        code,
        range: start..start + code.len() as u64,
        pc,
        exact,
        seen: HashMap::new(),
        call_layouts: Vec::new(),
        continuations: Vec::new(),
        found: None,
        conflict: false,
    };
    walk.follow(start, Some(ENTRY));
    while walk.found.is_none() && !walk.conflict {
        // Only jump tables or exception handlers lead to the remaining code. Assume that its frame
        // is like that at the function's calls, if it is equal at all of them.
        let &[body] = walk.call_layouts.as_slice() else { return None };
        let next = std::mem::take(&mut walk.continuations).into_iter().find(|end| !walk.seen.contains_key(end));
        walk.follow(next?, Some(body));
    }
    walk.found.filter(|_| !walk.conflict).flatten()
}

struct Walk<'a> {
    code: &'a [u8],
    range: Range<u64>,
    pc: u64,
    exact: bool,
    /// The layout before each instruction; `None` where it is unknown.
    seen: HashMap<u64, Option<FrameLayout>>,
    /// The distinct layouts at calls and at indirect jumps.
    call_layouts: Vec<FrameLayout>,
    /// Addresses after instructions that do not continue at the next one.
    continuations: Vec<u64>,
    found: Option<Option<FrameLayout>>,
    /// One instruction is reached with two layouts.
    conflict: bool,
}

impl Walk<'_> {
    /// Follows the code from an address on, with all its branches within the function.
    fn follow(&mut self, address: u64, layout: Option<FrameLayout>) {
        let mut open = vec![(address, layout)];
        while let Some((mut address, mut layout)) = open.pop() {
            loop {
                if let Some(known) = self.seen.get(&address) {
                    self.conflict |= known.map(|known| known.sp) != layout.map(|layout| layout.sp);
                    break;
                }
                if !self.range.contains(&address) || self.seen.len() >= MAX_INSTRUCTIONS {
                    break;
                }
                self.seen.insert(address, layout);
                let offset = (address - self.range.start) as usize;
                let mut decoder = Decoder::with_ip(64, &self.code[offset..], address, DecoderOptions::NONE);
                let instruction = decoder.decode();
                if instruction.is_invalid() {
                    break;
                }
                let next = instruction.next_ip();
                let flow = instruction.flow_control();
                let is_call = matches!(flow, FlowControl::Call | FlowControl::IndirectCall);
                if if self.exact { address == self.pc } else { is_call && next == self.pc } {
                    self.found = Some(layout);
                }
                layout = layout.and_then(|layout| step(layout, &instruction));
                let body = is_call || flow == FlowControl::IndirectBranch;
                if let Some(layout) = layout.filter(|layout| body && !self.call_layouts.contains(layout)) {
                    self.call_layouts.push(layout);
                }
                match flow {
                    FlowControl::ConditionalBranch => open.push((instruction.near_branch_target(), layout)),
                    FlowControl::UnconditionalBranch => {
                        open.push((instruction.near_branch_target(), layout));
                        self.continuations.push(next);
                        break;
                    }
                    FlowControl::Return | FlowControl::IndirectBranch | FlowControl::Exception => {
                        self.continuations.push(next);
                        break;
                    }
                    _ => {}
                }
                address = next;
            }
        }
    }
}

/// The layout after an instruction. `None` if the stack pointer becomes unknown.
fn step(before: FrameLayout, instruction: &Instruction) -> Option<FrameLayout> {
    use FramePointer::{At, Callers, Unknown};
    const SP: Register = Register::RSP;
    const FP: Register = Register::RBP;
    let mut after = before;
    let number = || match instruction.op1_kind() {
        OpKind::Immediate8to64 | OpKind::Immediate32to64 => Some(instruction.immediate(1).cast_signed()),
        _ => None,
    };
    // The address that `lea` computes from the stack pointer or the frame pointer.
    let address = || {
        let base = match (instruction.memory_base(), instruction.memory_index()) {
            (SP, Register::None) => before.sp,
            (FP, Register::None) => match before.fp {
                At(at) => at,
                Callers | Unknown => return None,
            },
            _ => return None,
        };
        Some(base.wrapping_add(instruction.memory_displacement64().cast_signed()))
    };
    let first = if instruction.op0_kind() == OpKind::Register {
        instruction.op0_register().full_register()
    } else {
        Register::None
    };
    let second = if instruction.op1_kind() == OpKind::Register { instruction.op1_register() } else { Register::None };
    match instruction.mnemonic() {
        Mnemonic::Push => {
            after.sp += i64::from(instruction.stack_pointer_increment());
            if first == FP && before.fp == Callers {
                after.saved_fp = Some(after.sp);
            }
        }
        Mnemonic::Pop => {
            after.sp += i64::from(instruction.stack_pointer_increment());
            if first == SP {
                return None;
            }
            if first == FP {
                after.fp = if before.saved_fp == Some(before.sp) { Callers } else { Unknown };
                after.saved_fp = before.saved_fp.filter(|_| after.fp == Unknown);
            }
        }
        Mnemonic::Leave => {
            let At(at) = before.fp else { return None };
            after.sp = at + 8;
            after.fp = if before.saved_fp == Some(at) { Callers } else { Unknown };
            after.saved_fp = before.saved_fp.filter(|_| after.fp == Unknown);
        }
        Mnemonic::Cmp | Mnemonic::Test => {}
        Mnemonic::Mov if first == FP => after.fp = if second == SP { At(before.sp) } else { Unknown },
        Mnemonic::Mov if first == SP => {
            let (FP, At(at)) = (second, before.fp) else { return None };
            after.sp = at;
        }
        Mnemonic::Lea if first == FP => after.fp = address().map_or(Unknown, At),
        Mnemonic::Lea if first == SP => after.sp = address()?,
        Mnemonic::Add if first == SP => after.sp += number()?,
        Mnemonic::Sub if first == SP => after.sp -= number()?,
        Mnemonic::Xchg | Mnemonic::Xadd if first == SP || second == SP => return None,
        _ if first == SP => return None,
        // A call pushes and pops the same amount.
        _ if matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) => {}
        _ => {
            if first == FP || (instruction.mnemonic() == Mnemonic::Xchg && second == FP) {
                after.fp = Unknown;
            }
            after.sp += i64::from(instruction.stack_pointer_increment());
        }
    }
    Some(after)
}

#[cfg(test)]
mod tests {
    use super::{
        FramePointer::{At, Callers},
        *,
    };

    const START: u64 = 0x1000;

    fn exact(code: &[u8], at: usize) -> Option<FrameLayout> {
        layout(code, START, START + at as u64, true)
    }

    #[test]
    fn function_with_frame_pointer_and_locals() {
        // push %rbp; mov %rsp,%rbp; push %rbx; sub $0x18,%rsp; call; add $0x18,%rsp; pop %rbx; pop
        // %rbp; ret
        let code = [
            0x55, 0x48, 0x89, 0xe5, 0x53, 0x48, 0x83, 0xec, 0x18, 0xe8, 0, 0, 0, 0, 0x48, 0x83, 0xc4, 0x18, 0x5b, 0x5d,
            0xc3,
        ];
        assert_eq!(exact(&code, 0), Some(ENTRY));
        assert_eq!(exact(&code, 1), Some(FrameLayout { sp: -16, fp: Callers, saved_fp: Some(-16) }));
        let body = FrameLayout { sp: -48, fp: At(-16), saved_fp: Some(-16) };
        assert_eq!(exact(&code, 9), Some(body));
        assert_eq!(layout(&code, START, START + 14, false), Some(body), "behind the call");
        assert_eq!(exact(&code, 20), Some(ENTRY));
        assert_eq!(layout(&code, START, START + 4, false), None, "that is behind no call");
    }

    #[test]
    fn leave_instruction_and_both_branches() {
        // push %rbp; mov %rsp,%rbp; sub $0x100,%rsp; je 1f; leave; ret; 1: call; lea -8(%rbp),%rsp;
        // ret
        let code = [
            0x55, 0x48, 0x89, 0xe5, 0x48, 0x81, 0xec, 0, 1, 0, 0, 0x74, 2, 0xc9, 0xc3, 0xe8, 0, 0, 0, 0, 0x48, 0x8d,
            0x65, 0xf8, 0xc3,
        ];
        assert_eq!(exact(&code, 14), Some(ENTRY));
        assert_eq!(exact(&code, 20).map(|layout| layout.sp), Some(-16 - 0x100));
        assert_eq!(exact(&code, 24).map(|layout| layout.sp), Some(-24));
    }

    #[test]
    fn unknown_layouts() {
        // push %rbp; mov %rsp,%rbp; sub %rax,%rsp; call
        let alloca = [0x55, 0x48, 0x89, 0xe5, 0x48, 0x29, 0xc4, 0xe8, 0, 0, 0, 0];
        assert_eq!(exact(&alloca, 7), None);
        // and $-32,%rsp; call
        assert_eq!(exact(&[0x48, 0x83, 0xe4, 0xe0, 0xe8, 0, 0, 0, 0], 4), None);
        // je 1f; push %rax; 1: nop
        assert_eq!(exact(&[0x74, 1, 0x50, 0x90, 0xc3], 3), None, "two ways with two layouts");
        assert_eq!(exact(&[0xc3, 0x90], 1), None, "nothing leads there, and nothing is called");
        assert_eq!(exact(&[0x06], 1), None);
    }

    #[test]
    fn code_behind_a_jump_table() {
        // push %rbp; mov %rsp,%rbp; jmp *%rax; call; jmp *%rax; nop; call
        let code = [0x55, 0x48, 0x89, 0xe5, 0xff, 0xe0, 0xe8, 0, 0, 0, 0, 0xff, 0xe0, 0x90, 0xe8, 0, 0, 0, 0];
        let body = Some(FrameLayout { sp: -16, fp: At(-16), saved_fp: Some(-16) });
        assert_eq!(layout(&code, START, START + 11, false), body);
        assert_eq!(layout(&code, START, START + 19, false), body);
    }
}
