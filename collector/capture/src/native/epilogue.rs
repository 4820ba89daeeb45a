//! Finds the caller by reading the code that the function runs before it returns, where no table
//! has unwind rules.
//!
//! If the next instructions only compute, restore registers and return, they determine the caller
//! exactly. Examples are trampolines, thunks, the `main` of some compilers, and functions around a
//! single system call, as in Go. For any other code there is no result, because it would be a
//! guess.

use super::{FRAME_POINTER, PC, Registers, STACK_POINTER};

/// Maximum number of bytes of code to read.
pub(crate) const MAX_CODE_BYTES: usize = 64;
/// Maximum length of a call instruction before a return address.
pub(crate) const MAX_CALL_BYTES: usize = 7;

/// DWARF numbers of the registers, in the order of the processor's encoding.
const DWARF_NUMBERS: [usize; 16] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];

/// The registers of the caller, if the next instructions only leave the function.
pub(crate) fn caller_registers(
    code: &[u8],
    registers: &Registers,
    read: impl Fn(u64) -> Option<u64>,
) -> Option<Registers> {
    let mut caller = registers.preserved();
    let mut sp = registers.sp();
    let mut rest = code;
    loop {
        rest = match rest {
            // ret, with or without the prefix that older branch predictors needed
            [0xc3, ..] | [0xf3, 0xc3, ..] => {
                caller.set(PC, read(sp)?);
                caller.set(STACK_POINTER, sp.checked_add(8)?);
                return Some(caller);
            }
            // add $imm8, %rsp and add $imm32, %rsp
            [0x48, 0x83, 0xc4, immediate, rest @ ..] if *immediate < 0x80 => {
                sp = sp.checked_add(u64::from(*immediate))?;
                rest
            }
            [0x48, 0x81, 0xc4, a, b, c, d, rest @ ..] if *d < 0x80 => {
                sp = sp.checked_add(u64::from(u32::from_le_bytes([*a, *b, *c, *d])))?;
                rest
            }
            // pop of any register but the stack pointer
            [0x41, opcode @ 0x58..=0x5f, rest @ ..] => {
                caller.set(DWARF_NUMBERS[usize::from(opcode - 0x58) + 8], read(sp)?);
                sp = sp.checked_add(8)?;
                rest
            }
            [opcode @ (0x58..=0x5b | 0x5d..=0x5f), rest @ ..] => {
                caller.set(DWARF_NUMBERS[usize::from(opcode - 0x58)], read(sp)?);
                sp = sp.checked_add(8)?;
                rest
            }
            // leave
            [0xc9, rest @ ..] => {
                let frame = caller.get(FRAME_POINTER)?;
                caller.set(FRAME_POINTER, read(frame)?);
                sp = frame.checked_add(8)?;
                rest
            }
            // vzeroupper
            [0xc5, 0xf8, 0x77, rest @ ..] => rest,
            other => &other[computation_length(other)?..],
        };
    }
}

/// The length of an instruction that only computes: it changes neither the stack pointer nor the
/// frame pointer, and may continue at the next instruction. Both directions of a branch leave the
/// function with the same stack.
fn computation_length(code: &[u8]) -> Option<usize> {
    let (rex, start) = match *code.first()? {
        rex @ 0x40..=0x4f => (rex, 1),
        _ => (0, 0),
    };
    let (opcode, operand) = (*code.get(start)?, code.get(start + 1).copied());
    let wide = rex & 8 != 0;
    // The number of bytes after the opcode up to the end of the operand, and the register if the
    // operand is a register instead of memory.
    let operand = || -> Option<(usize, Option<u8>)> {
        let operand = operand?;
        let (mode, base) = (operand >> 6, operand & 7);
        let index = usize::from(mode != 3 && base == 4);
        let absolute = mode == 0 && (base == 5 || (index == 1 && code.get(start + 2)? & 7 == 5));
        let displacement = match mode {
            1 => 1,
            2 => 4,
            _ if absolute => 4,
            _ => 0,
        };
        Some((1 + index + displacement, (mode == 3).then_some(base | (rex & 1) << 3)))
    };
    let modrm_middle = || Some(code.get(start + 1)? >> 3 & 7);
    let is_allowed = |register: Option<u8>| register.is_none_or(|register| !matches!(register, 4 | 5));
    let length = match opcode {
        // nop; short branches
        0x90 => 0,
        0x70..=0x7f => 1,
        // mov $imm, register
        0xb8..=0xbf if is_allowed(Some((opcode & 7) | (rex & 1) << 3)) => {
            if wide {
                8
            } else {
                4
            }
        }
        // add, or, and, sub, xor, mov: register into operand
        0x01 | 0x09 | 0x21 | 0x29 | 0x31 | 0x89 => operand().filter(|(_, register)| is_allowed(*register))?.0,
        // the same instructions with the operands exchanged; lea, movslq
        0x03 | 0x0b | 0x23 | 0x2b | 0x33 | 0x8b | 0x8d | 0x63 if is_allowed(Some(modrm_middle()? | (rex & 4) << 1)) => {
            operand()?.0
        }
        // cmp and test write no register
        0x39 | 0x3b | 0x85 => operand()?.0,
        0x3d => 4,
        // instructions with an immediate, except adc and sbb, which no epilogue uses
        0x81 | 0x83 if !matches!(modrm_middle()?, 2 | 3) => {
            let (length, register) = operand()?;
            let number = if opcode == 0x81 { 4 } else { 1 };
            if modrm_middle()? != 7 && !is_allowed(register) {
                return None;
            }
            length + number
        }
        0xc7 if modrm_middle()? == 0 => operand().filter(|(_, register)| is_allowed(*register))?.0 + 4,
        // not, neg
        0xf7 if matches!(modrm_middle()?, 2 | 3) => operand().filter(|(_, register)| is_allowed(*register))?.0,
        _ => return None,
    };
    let length = start + 1 + length;
    (length <= code.len()).then_some(length)
}

/// Whether the bytes before a return address end with a call.
pub(crate) fn ends_with_call(code: &[u8]) -> bool {
    // The middle bits of the ModR/M byte of `call *operand` are 2. The operand determines the
    // length.
    let indirect = |length: usize, mode: u8, has_index: bool| {
        let Some([0xff, operand, ..]) = code.len().checked_sub(length).map(|start| &code[start..]) else {
            return false;
        };
        let absolute = mode == 0 && operand & 7 == 5;
        operand >> 3 & 7 == 2 && operand >> 6 == mode && (operand & 7 == 4) == has_index && (!absolute || length == 6)
    };
    let direct = code.len().checked_sub(5).is_some_and(|start| code[start] == 0xe8);
    let register = code.len().checked_sub(2).is_some_and(|start| code[start] == 0xff && code[start + 1] >> 3 == 0x1a);
    let memory = indirect(2, 0, false)
        || indirect(3, 0, true)
        || indirect(3, 1, false)
        || indirect(4, 1, true)
        || indirect(6, 0, false)
        || indirect(6, 2, false)
        || indirect(7, 2, true);
    direct || register || memory
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(sp: u64) -> Registers {
        let mut registers = Registers::default();
        registers.set(STACK_POINTER, sp);
        registers.set(FRAME_POINTER, 0x2000);
        registers.set(0, 99);
        registers
    }

    /// Each word of memory holds its own address, inverted.
    fn read(address: u64) -> Option<u64> {
        Some(!address)
    }

    #[test]
    fn lengths_of_instructions_that_only_compute() {
        for code in [
            &[0x90][..],
            // add %r8,%rax; mov %eax,0x28(%rsp); mov (%rip+…),%rcx; cmp $-4095,%rax; jbe;
            // neg %rax; mov $-1,%rax; xor %ebx,%ebx
            &[0x4c, 0x01, 0xc0],
            &[0x89, 0x44, 0x24, 0x28],
            &[0x48, 0x8b, 0x0d, 1, 2, 3, 4],
            &[0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff],
            &[0x76, 0x0a],
            &[0x48, 0xf7, 0xd8],
            &[0x48, 0xc7, 0xc0, 0xff, 0xff, 0xff, 0xff],
            &[0x31, 0xdb],
            &[0xb8, 1, 0, 0, 0],
            &[0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x48, 0x83, 0xf8, 0x01],
            &[0x48, 0x63, 0xd0],
            &[0x8b, 0x04, 0x25, 1, 2, 3, 4],
        ] {
            let followed = [code, &[0xc3]].concat();
            assert_eq!(computation_length(&followed), Some(code.len()), "{code:x?}");
            assert_eq!(
                computation_length(&code[..code.len() - 1]).filter(|length| *length >= code.len()),
                None,
                "{code:x?} cut"
            );
        }
        // push; call; jmp; mov %rsp,%rbp; mov $1,%ebp; sub $8,%rsp; lea 8(%rsp),%rsp; xchg
        for code in [
            &[0x55][..],
            &[0xe8, 0, 0, 0, 0],
            &[0xeb, 0],
            &[0x48, 0x89, 0xe5],
            &[0xbd, 1, 0, 0, 0],
            &[0x48, 0x83, 0xec, 0x08],
            &[0x48, 0x8d, 0x64, 0x24, 0x08],
            &[0x48, 0x94],
        ] {
            assert_eq!(computation_length(code), None, "{code:x?}");
        }
        // r12 and r13 share their lower bits with the stack pointer and the frame pointer.
        assert_eq!(computation_length(&[0x41, 0xbd, 1, 0, 0, 0]), Some(6));
        assert_eq!(computation_length(&[0x49, 0x89, 0xc4]), Some(3));
    }

    #[test]
    fn code_that_leaves_the_function() {
        for (code, sp) in [
            (&[0xc3][..], 0x1000),
            (&[0x48, 0x83, 0xc4, 0x08, 0xc3], 0x1008),
            (&[0x48, 0x81, 0xc4, 0x00, 0x01, 0, 0, 0xf3, 0xc3], 0x1100),
            (&[0x59, 0xc3], 0x1008),
            (&[0x31, 0xc0, 0x5b, 0x41, 0x5c, 0x5d, 0xc3], 0x1018),
            (&[0xc9, 0xc3], 0x2008),
        ] {
            let caller = caller_registers(code, &at(0x1000), read).unwrap_or_else(|| panic!("{code:x?}"));
            assert_eq!((caller.pc(), caller.sp()), (!sp, sp + 8), "{code:x?}");
            // A register that a call may change is unknown in the caller.
            assert!(caller.get(0).is_none(), "{code:x?}");
        }
        let caller = caller_registers(&[0x5b, 0x41, 0x5c, 0x5d, 0xc3], &at(0x1000), read).expect("pops and a return");
        assert_eq!(
            [3, 12, FRAME_POINTER].map(|number| caller.get(number)),
            [0x1000, 0x1008, 0x1010].map(|at| Some(!at))
        );
    }

    #[test]
    fn other_code_has_no_result() {
        let codes: [&[u8]; 7] = [
            &[],
            &[0x5c, 0xc3],
            &[0x48, 0x83, 0xc4, 0xf8, 0xc3],
            &[0xe8, 0, 0, 0, 0, 0xc3],
            &[0x0f, 0x84, 2, 0, 0, 0, 0xc3],
            &[0x5d],
            &[0xcc],
        ];
        for code in codes {
            assert_eq!(caller_registers(code, &at(0x1000), read), None, "{code:x?}");
        }
        assert_eq!(caller_registers(&[0xc3], &at(0x1000), |_| None), None, "memory that was not copied");
        assert_eq!(caller_registers(&[0x5d, 0xc3], &at(u64::MAX - 3), read), None);
    }

    #[test]
    fn recognizes_calls() {
        let calls: [&[u8]; 8] = [
            &[0xe8, 1, 2, 3, 4],
            &[0xff, 0xd0],
            &[0x41, 0xff, 0xd3],
            &[0xff, 0x10],
            &[0xff, 0x14, 0xc8],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0xff, 0x94, 0xc8, 1, 2, 3, 4],
        ];
        for call in calls {
            assert!(ends_with_call(call), "{call:x?}");
            assert!(ends_with_call(&[&[0x90; 3], call].concat()), "{call:x?}");
        }
        for other in [&[][..], &[0xc3], &[0x90; 7], &[0xff, 0xe0], &[0x48, 0x89, 0xe5]] {
            assert!(!ends_with_call(other), "{other:x?}");
        }
    }
}
