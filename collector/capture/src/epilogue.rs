//! How a function leaves, read from its code: the way to the caller where no table tells it.
//!
//! A frame that is not a leaf goes on at its return address. When the instructions there do nothing but put back registers
//! and return, they say exactly where the caller is. Trampolines, thunks and the `main` that some compilers make are such code. Anything
//! else is not guessed.

use crate::registers::{FRAME_POINTER, PC, Registers, STACK_POINTER};

/// Bytes of code that are looked at.
pub(crate) const LENGTH: usize = 32;
/// Bytes before a return address that a call may take.
pub(crate) const CALL: usize = 7;

/// DWARF numbers of the registers, in the processor's own order.
const NUMBERS: [usize; 16] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];

/// The registers of the caller, when the code at a return address just leaves.
pub(crate) fn leave(code: &[u8], registers: &Registers, read: impl Fn(u64) -> Option<u64>) -> Option<Registers> {
    let mut caller = registers.preserved();
    let mut sp = registers.sp();
    let mut rest = code;
    loop {
        rest = match rest {
            // ret, also with the prefix that branch predictors once needed
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
                caller.set(NUMBERS[usize::from(opcode - 0x58) + 8], read(sp)?);
                sp = sp.checked_add(8)?;
                rest
            }
            [opcode @ (0x58..=0x5b | 0x5d..=0x5f), rest @ ..] => {
                caller.set(NUMBERS[usize::from(opcode - 0x58)], read(sp)?);
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
            // xor %eax, %eax: the result; nop; vzeroupper
            [0x31, 0xc0, rest @ ..] | [0x90, rest @ ..] | [0xc5, 0xf8, 0x77, rest @ ..] => rest,
            _ => return None,
        };
    }
}

/// Whether the bytes before a return address end with a call.
pub(crate) fn ends_with_call(code: &[u8]) -> bool {
    // ModR/M of `call *operand` has a 2 in the middle; the operand decides about the length.
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

    /// Each word of memory holds its own address, negated.
    fn read(address: u64) -> Option<u64> {
        Some(!address)
    }

    #[test]
    fn code_that_leaves() {
        for (code, sp) in [
            (&[0xc3][..], 0x1000),
            (&[0x48, 0x83, 0xc4, 0x08, 0xc3], 0x1008),
            (&[0x48, 0x81, 0xc4, 0x00, 0x01, 0, 0, 0xf3, 0xc3], 0x1100),
            (&[0x59, 0xc3], 0x1008),
            (&[0x31, 0xc0, 0x5b, 0x41, 0x5c, 0x5d, 0xc3], 0x1018),
            (&[0xc9, 0xc3], 0x2008),
        ] {
            let caller = leave(code, &at(0x1000), read).unwrap_or_else(|| panic!("{code:x?}"));
            assert_eq!((caller.pc(), caller.sp()), (!sp, sp + 8), "{code:x?}");
            // What a call may change is not known any more.
            assert!(caller.get(0).is_none(), "{code:x?}");
        }
        let caller = leave(&[0x5b, 0x41, 0x5c, 0x5d, 0xc3], &at(0x1000), read).expect("pops and a return");
        assert_eq!(
            [3, 12, FRAME_POINTER].map(|number| caller.get(number)),
            [0x1000, 0x1008, 0x1010].map(|at| Some(!at))
        );
    }

    #[test]
    fn code_that_does_anything_else() {
        let codes: [&[u8]; 7] = [
            &[],
            &[0x5c, 0xc3],
            &[0x48, 0x83, 0xc4, 0xf8, 0xc3],
            &[0xe8, 0, 0, 0, 0, 0xc3],
            &[0x74, 2, 0xc3],
            &[0x5d],
            &[0xcc],
        ];
        for code in codes {
            assert_eq!(leave(code, &at(0x1000), read), None, "{code:x?}");
        }
        assert_eq!(leave(&[0xc3], &at(0x1000), |_| None), None, "memory that was not copied");
        assert_eq!(leave(&[0x5d, 0xc3], &at(u64::MAX - 3), read), None);
    }

    #[test]
    fn calls() {
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
