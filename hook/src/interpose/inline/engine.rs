//! Replaces a function's code, after a check of its first instructions. In doubt the check refuses:
//! a function that is not hooked is a gap in a report, but a wrong byte crashes the host.
//!
//! The engine `detour` is the default. It builds from crates.io alone and costs about a nanosecond
//! per call. The cargo feature `frida` selects `frida-gum`, which needs a Frida devkit; see
//! CONTRIBUTING.md.

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

/// The engine of this build.
#[cfg(not(feature = "frida"))]
pub(crate) static ENGINE: Detour = Detour;

/// The engine of this build.
#[cfg(feature = "frida")]
pub(crate) static ENGINE: frida::Frida = frida::Frida;

/// An engine that replaces code.
pub(crate) trait Engine {
    /// Makes the function at `entry` jump to `wrapper`. Before the jump is written, `publish`
    /// receives the address of code that does what the function did. The change lasts for the rest
    /// of the process's life.
    ///
    /// # Errors
    /// When the engine or the system refuses. Nothing has changed then.
    ///
    /// # Safety
    /// No thread runs the first instructions of the function at the same time,
    /// [`check`] accepts them, and the wrapper has the type of the function.
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal>;
}

/// The engine of the crate `detour`.
#[cfg(not(feature = "frida"))]
pub(crate) struct Detour;

#[cfg(not(feature = "frida"))]
impl Engine for Detour {
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal> {
        // SAFETY: by the contract of `replace`, `check` accepts the first instructions, and the
        // wrapper has the type of the function.
        let hook = unsafe { detour::RawDetour::new(entry as *const (), wrapper) }.map_err(|_| Refusal::Engine)?;
        publish(hook.trampoline());
        // SAFETY: by the contract of `replace`, no thread runs the instructions that the jump
        // replaces.
        let enabled = unsafe { hook.enable() };
        // Never freed, even if it is unused, because other code may hold the trampoline.
        std::mem::forget(hook);
        enabled.map_err(|_| Refusal::Engine)
    }
}

/// The engine of the crate `frida-gum`. It uses the fast form of the interceptor, which jumps to
/// the wrapper without a listener.
///
/// Gum is initialized when the first function is replaced, because most processes replace none.
#[cfg(feature = "frida")]
mod frida {
    use frida_gum::{Gum, NativePointer, interceptor::Interceptor};
    use std::{ffi::c_void, sync::OnceLock};

    use crate::interpose::inline::engine::{Engine, Refusal};

    /// The crate `frida-gum`.
    pub(crate) struct Frida;

    /// Gum's interceptor. Never dropped, because dropping the last handle of Gum removes the code
    /// that the jumps use.
    struct Kept(Interceptor);

    // SAFETY: the interceptor has its own lock, and the hook replaces code only under a lock of its
    // own. Moving the handle to another thread moves a counted pointer.
    unsafe impl Send for Kept {}

    // SAFETY: all threads use the interceptor through its own lock.
    unsafe impl Sync for Kept {}

    fn interceptor() -> Interceptor {
        static INTERCEPTOR: OnceLock<Kept> = OnceLock::new();
        INTERCEPTOR.get_or_init(|| Kept(Interceptor::obtain(&Gum::obtain()))).0.clone()
    }

    /// As many bytes as the shortest jump.
    fn start_of(entry: usize) -> [u8; 5] {
        // SAFETY: the caller of `replace` guarantees the function, which is not shorter than a
        // jump.
        unsafe { (entry as *const [u8; 5]).read_volatile() }
    }

    impl Engine for Frida {
        unsafe fn replace(
            &self,
            entry: usize,
            wrapper: *const (),
            publish: &mut dyn FnMut(*const ()),
        ) -> Result<(), Refusal> {
            let before = start_of(entry);
            let mut interceptor = interceptor();
            // A transaction writes the jump at its end, so the original is known before.
            interceptor.begin_transaction();
            let function = NativePointer(entry as *mut c_void);
            let replaced = interceptor.replace_fast(function, NativePointer(wrapper.cast_mut().cast()));
            if let Ok(original) = &replaced {
                publish(original.0.cast_const().cast());
            }
            interceptor.end_transaction();
            // The end of a transaction reports no result. If the system refuses the change, the
            // bytes are the same as before.
            match replaced {
                Ok(_) if start_of(entry) != before => Ok(()),
                _ => Err(Refusal::Engine),
            }
        }
    }
}

/// Size of a jump.
const JUMP_BYTES: usize = 5;

/// Functions larger than this are refused, because all of their code must be checked.
const MAX_CODE_BYTES: usize = 1 << 20;

/// Marks a target of indirect branches, and does nothing else.
pub(crate) const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Why the code of a function cannot be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
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

/// Decides whether the first instructions of a function at `address` may be moved. Checks its
/// complete code.
///
/// # Errors
/// Why the function must stay unchanged.
pub(crate) fn check(code: &[u8], address: u64) -> Result<(), Refusal> {
    if !(JUMP_BYTES..=MAX_CODE_BYTES).contains(&code.len()) {
        return Err(Refusal::Size);
    }
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut moved = 0;
    while moved < JUMP_BYTES {
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
