//! Whether the first instructions of a function may be moved: the question before any code is replaced. Whoever is not sure says
//! no, because a function that is not seen is a gap in a report, and a wrong byte is the end of the host.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

/// Bytes that a jump takes.
const JUMP: usize = 5;

/// A function is looked through up to here; a longer one's tail is taken to be harmless only when all of it was seen.
const MOST: usize = 1 << 20;

/// The instruction that marks a function as a target of indirect branches, and does nothing.
pub const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Why a function's code cannot be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Its size is not known, or it is smaller than a jump, or larger than anything that is looked through.
    Size,
    /// Its first instructions are not code that can be moved: a call, a breakpoint of a debugger or of a probe, a return.
    Start,
    /// Something inside jumps back to its first instructions.
    JumpBack,
    /// The system or the engine refused.
    Engine,
}

/// Looks at the code of a whole function at `address`.
///
/// # Errors
/// Why it must be left alone.
pub fn check(code: &[u8], address: u64) -> Result<(), Refusal> {
    if !(JUMP..=MOST).contains(&code.len()) {
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
        // A table of jumps may lie in the code; behind it the decoder finds its step again.
    }
    Ok(())
}

fn can_move(instruction: &Instruction) -> bool {
    if instruction.mnemonic() == Mnemonic::Int3 {
        return false;
    }
    match instruction.flow_control() {
        FlowControl::Next => true,
        // A jump at the very start is a function that is only a door to another, or another tool's hook.
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => true,
        // A conditional branch in the first bytes is moved right by the engine, but such code is rare and may loop.
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
    fn ordinary_starts_can_be_moved() {
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
    fn what_cannot_be_moved_is_left_alone() {
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
    fn a_loop_to_the_start_is_seen_wherever_it_is() {
        // push rax; dec ecx; nop…; jne to the dec
        let start = [0x50, 0xff, 0xc9, 0x90, 0x90, 0x90];
        let back = |to: i8, nops: usize| [vec![0x90; nops], vec![0x75, (to - 8 - nops as i8) as u8, 0xc3]].concat();
        assert_eq!(judge(&start, &back(1, 0)), Err(Refusal::JumpBack));
        assert_eq!(judge(&start, &back(1, 40)), Err(Refusal::JumpBack));
        // To its very first byte the jump goes through the hook again, which is a call like any other.
        assert_eq!(judge(&start, &back(0, 0)), Ok(()));
        assert_eq!(judge(&start, &back(6, 1)), Ok(()));
    }
}
