//! Decides whether the first instructions of a function may be moved. In doubt it refuses: a
//! function that is not hooked is a gap in a report, but a wrong byte crashes the host.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

/// Size of a jump in bytes.
const JUMP: usize = 5;

/// Functions larger than this are refused, because all of their code must be checked.
const MAX: usize = 1 << 20;

/// Marks a target of indirect branches, and does nothing else.
pub const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Why the code of a function cannot be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The size is unknown, smaller than a jump, or too large to check.
    Size,
    /// The first instructions cannot be moved: a call, a return, or the breakpoint of a debugger or
    /// probe.
    Start,
    /// The function jumps back to its first instructions.
    JumpBack,
    /// The system or the engine refused.
    Engine,
}

/// Checks the complete code of a function at `address`.
///
/// # Errors
/// Why the function must stay unchanged.
pub fn check(code: &[u8], address: u64) -> Result<(), Refusal> {
    if !(JUMP..=MAX).contains(&code.len()) {
        return Err(Refusal::Size);
    }
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut moved = 0;
    while moved < JUMP {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() || !can_move(&instruction) {
            return Err(Refusal::Start);
        }
        moved = (instruction.next_ip() - address) as usize;
    }
    let start = address + 1..address + moved as u64;
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let near = [OpKind::NearBranch16, OpKind::NearBranch32, OpKind::NearBranch64].contains(&instruction.op0_kind());
        if near && start.contains(&instruction.near_branch_target()) {
            return Err(Refusal::JumpBack);
        }
        // The code may contain a jump table. The decoder synchronizes again after it.
    }
    Ok(())
}

fn can_move(instruction: &Instruction) -> bool {
    if instruction.mnemonic() == Mnemonic::Int3 {
        return false;
    }
    match instruction.flow_control() {
        FlowControl::Next => true,
        // A jump at the very start belongs to a stub, or to another tool's hook.
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => true,
        // The engine would move a conditional branch correctly, but such code is rare and may be a
        // loop.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(start: &[u8], rest: &[u8]) -> Result<(), Refusal> {
        check(&[start, rest].concat(), 0x1000)
    }

    const RETURN: &[u8] = &[0xc3];

    #[test]
    fn ordinary_prologues_can_be_moved() {
        // push rbp; mov rbp, rsp; sub rsp, 16
        assert_eq!(judge(&[0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x10], RETURN), Ok(()));
        // endbr64; push r15; …
        assert_eq!(judge(&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x57, 0x90], RETURN), Ok(()));
        // lea rax, [rip+8]
        assert_eq!(judge(&[0x48, 0x8d, 0x05, 8, 0, 0, 0], RETURN), Ok(()));
        // jmp to elsewhere
        assert_eq!(judge(&[0xe9, 0, 1, 0, 0], RETURN), Ok(()));
    }

    #[test]
    fn unmovable_prologues_are_refused() {
        assert_eq!(judge(&[0x55], &[]), Err(Refusal::Size), "shorter than a jump");
        assert_eq!(judge(&[0x31, 0xc0, 0xc3, 0x90, 0x90, 0x90], &[]), Err(Refusal::Start), "xor eax, eax; ret");
        assert_eq!(judge(&[0xcc, 0x48, 0x89, 0xe5, 0x90], RETURN), Err(Refusal::Start), "a breakpoint");
        assert_eq!(
            judge(&[0x55, 0xe8, 0, 0, 0, 0], RETURN),
            Err(Refusal::Start),
            "a call returns into the moved bytes"
        );
        assert_eq!(judge(&[0x85, 0xff, 0x74, 0x02, 0x90, 0x90], RETURN), Err(Refusal::Start), "test edi, edi; je");
        assert_eq!(judge(&[0x06, 0x06, 0x06, 0x06, 0x06], RETURN), Err(Refusal::Start), "no code at all");
    }

    #[test]
    fn a_jump_to_the_start_is_found_anywhere() {
        // push rax; dec ecx; nop…; jne to the dec
        let start = [0x50, 0xff, 0xc9, 0x90, 0x90, 0x90];
        let back = |to: i8, nops: usize| [vec![0x90; nops], vec![0x75, (to - 8 - nops as i8) as u8, 0xc3]].concat();
        assert_eq!(judge(&start, &back(1, 0)), Err(Refusal::JumpBack));
        assert_eq!(judge(&start, &back(1, 40)), Err(Refusal::JumpBack));
        // A jump to the very first byte enters the hook again, like any other call.
        assert_eq!(judge(&start, &back(0, 0)), Ok(()));
        assert_eq!(judge(&start, &back(6, 1)), Ok(()));
    }
}
