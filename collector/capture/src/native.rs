//! Native stacks: sleeping threads are read, running threads are sampled, and only `--force-ptrace`
//! stops threads. Here are a frame before it is symbolized, and its registers; the tables are for
//! x86-64.

pub(crate) mod address_space;
mod epilogue;
pub(crate) mod perf;
mod prologue;
pub(crate) mod ptrace;
pub(crate) mod stop;
pub(crate) mod thread;
mod unwind;

use xpu_timer_proto::procfs::Syscall;

/// One frame before it is symbolized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RawFrame {
    pub pc: u64,
    /// True if `pc` is the next instruction to run (the leaf, and the frame that a signal
    /// interrupted). False for a return address, where the call is before `pc`.
    pub exact: bool,
    /// True for the code that the kernel makes a signal handler return to.
    pub signal: bool,
}

impl RawFrame {
    /// An address within the frame's current instruction.
    pub(crate) fn lookup(&self) -> u64 {
        if self.exact { self.pc } else { self.pc.wrapping_sub(1) }
    }
}

/// DWARF number of the register with the result of a system call.
pub(crate) const SYSCALL_RESULT: usize = 0;
/// DWARF number of the frame pointer.
pub(crate) const FRAME_POINTER: usize = 6;
/// DWARF number of the stack pointer.
pub(crate) const STACK_POINTER: usize = 7;
/// DWARF number of the return address. It holds the program counter of the frame.
pub(crate) const PC: usize = 16;
const COUNT: usize = 17;

const NAMES: [&str; COUNT] = [
    "rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rip",
];

/// rbx, rbp, r12 to r15: a function without a rule for them has left them unchanged.
const CALLEE_SAVED: [usize; 6] = [3, FRAME_POINTER, 12, 13, 14, 15];

/// Register values of one frame, by their DWARF numbers; `None` where the value is unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Registers([Option<u64>; COUNT]);

impl Registers {
    /// The registers of a sleeping thread that the kernel reveals without a stop. A system call
    /// leaves its arguments in their registers.
    pub(crate) fn from_syscall(syscall: &Syscall) -> Option<Self> {
        let Syscall::Blocked { arguments, sp, pc, .. } = *syscall else { return None };
        let mut registers = Registers::default();
        registers.set(STACK_POINTER, sp);
        registers.set(PC, pc);
        if let Some(arguments) = arguments {
            // rdi, rsi, rdx, r10, r8, r9
            for (register, value) in [5, 4, 1, 10, 8, 9].into_iter().zip(arguments) {
                registers.set(register, value);
            }
        }
        Some(registers)
    }

    /// All registers of a stopped thread.
    pub(crate) fn from_ptrace(regs: &libc::user_regs_struct) -> Self {
        let all = [
            regs.rax, regs.rdx, regs.rcx, regs.rbx, regs.rsi, regs.rdi, regs.rbp, regs.rsp, regs.r8, regs.r9, regs.r10,
            regs.r11, regs.r12, regs.r13, regs.r14, regs.r15, regs.rip,
        ];
        Registers(all.map(Some))
    }

    /// All registers of a sampled thread. `values` is in the kernel's order for samples: ax, bx,
    /// cx, dx, si, di, bp, sp, ip, r8 to r15.
    pub(crate) fn from_sample(values: &[u64; COUNT]) -> Self {
        const DWARF_NUMBERS: [usize; COUNT] =
            [0, 3, 2, 1, 4, 5, FRAME_POINTER, STACK_POINTER, PC, 8, 9, 10, 11, 12, 13, 14, 15];
        let mut registers = Registers::default();
        for (number, value) in DWARF_NUMBERS.into_iter().zip(values) {
            registers.set(number, *value);
        }
        registers
    }

    /// The registers that the caller still has if its callee has no rules for them.
    pub(crate) fn preserved(&self) -> Self {
        let mut kept = Registers::default();
        for register in CALLEE_SAVED {
            kept.0[register] = self.0[register];
        }
        kept
    }

    pub(crate) fn get(&self, register: usize) -> Option<u64> {
        self.0.get(register).copied().flatten()
    }

    pub(crate) fn set(&mut self, register: usize, value: u64) {
        self.set_optional(register, Some(value));
    }

    pub(crate) fn set_optional(&mut self, register: usize, value: Option<u64>) {
        // Vector registers have rules too, but no frame depends on them.
        if let Some(slot) = self.0.get_mut(register) {
            *slot = value;
        }
    }

    pub(crate) fn pc(&self) -> u64 {
        self.get(PC).unwrap_or(0)
    }

    pub(crate) fn sp(&self) -> u64 {
        self.get(STACK_POINTER).unwrap_or(0)
    }
}

/// The name of a register in the processor's manual.
pub(crate) fn register_name(register: usize) -> &'static str {
    NAMES.get(register).copied().unwrap_or("a vector register")
}
