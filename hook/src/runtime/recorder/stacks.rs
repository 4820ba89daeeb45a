//! Python stacks of launches, which the user asks for with `XPU_TIMER_DUMP_STACK_COUNT`. The
//! launching thread follows its own frames, which cannot change meanwhile, and stores the addresses
//! of their code. The collector names them later.
//!
//! It calls no function of the interpreter, and needs no GIL. The collector sends the place of the
//! frames. Memory is read through the kernel, so a wrong address is an error instead of a crash. A
//! thread under a seccomp filter of the program keeps no stacks.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::{
    ring::{FrameLayout, header, offset, pack_what, stack},
    v1::OpKind,
};

use crate::runtime::{
    os::sys::{read_memory, word_at},
    recorder::{
        NewOperation, Recorder, SEEN,
        names::{is_first, is_known},
    },
};

/// Maximum number of interpreters and of threads of one. A longer list has a cycle.
const MOST_INTERPRETERS: usize = 64;
const MOST_THREADS: usize = 1024;
/// Maximum number of bytes of a frame up to the last field that is read.
const FRAME_BYTES: usize = 192;

impl Recorder {
    /// Starts to look at launches once the collector has said where the frames are. Called by the
    /// watcher in each turn if stacks are wanted.
    pub(crate) fn start_stacks(&self, launches: u32) {
        let stacks = &self.stacks;
        if stacks.is_started.load(Ordering::Relaxed) {
            return;
        }
        self.ring.header(header::STACKS_WANTED).store(launches.into(), Ordering::Relaxed);
        if self.frame_layout().is_some() {
            stacks.seen.get_or_init(|| (0..SEEN).map(|_| AtomicU64::new(0)).collect());
            stacks.is_started.store(true, Ordering::Relaxed);
            stacks.left.store(launches, Ordering::Relaxed);
        }
    }

    fn frame_layout(&self) -> Option<FrameLayout> {
        let word = |index: usize| self.ring.header(header::FRAME_LAYOUT + index).load(Ordering::Acquire);
        FrameLayout::new(std::array::from_fn(word))
    }

    /// Keeps the Python stack of the calling thread, if this is the first operation of its kind.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_stack(&self, ticket: u64, what: &NewOperation) {
        if what.kind == OpKind::HostCall || !self.stacks.count() {
            return;
        }
        let (Some(layout), Some(seen)) = (self.frame_layout(), self.stacks.seen.get()) else { return };
        let kind = kind_of(what);
        if is_known(seen, kind) {
            return;
        }
        // A thread without Python frames leaves the kind to the next one.
        let Some(first) = innermost_frame(&layout) else { return };
        if !is_first(seen, kind) {
            return;
        }
        let used = self.ring.header(header::STACKS);
        let taken = used
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| (used < stack::SLOTS as u64).then_some(used + 1));
        let Ok(index) = taken else { return };
        let entry = self.ring.entry(offset::STACKS, index as usize, stack::WORDS);
        let mut count = 0;
        let mut next = Some(first);
        while let Some(frame) = next.filter(|_| count < stack::MOST_FRAMES).and_then(|at| frame_at(&layout, at)) {
            if let Some((code, instruction)) = frame.code {
                let at = stack::FIRST + 2 * count;
                entry[at].store(code, Ordering::Relaxed);
                entry[at + 1].store(instruction, Ordering::Relaxed);
                count += 1;
            }
            next = frame.previous;
        }
        entry[stack::FRAMES].store(count as u64, Ordering::Relaxed);
        entry[stack::TICKET].store(ticket + 1, Ordering::Release);
    }
}

/// A number for all operations that have one name: type, size and shape, but not the communicator.
fn kind_of(what: &NewOperation) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    // A kernel has no sequence number, a copy has its direction there.
    let seq = if what.kind == OpKind::Kernel { what.seq } else { 0 };
    let shape = what.matmul.map_or([0; 6], |of| [of.batch, of.m, of.n, of.k, of.trans_a, of.trans_b]);
    let parts = [pack_what(what.kind, what.op, what.dtype, what.reduce, 0), seq, what.count, what.function];
    let parts = parts.into_iter().chain(shape.map(u64::from));
    // Odd, because 0 is a free entry.
    parts.fold(1, |hash: u64, part| (hash ^ part).wrapping_mul(FACTOR).rotate_left(31)) | 1
}

/// The address of the calling thread's innermost frame. `None` if the thread runs no Python code.
fn innermost_frame(layout: &FrameLayout) -> Option<u64> {
    let thread = own_thread(layout)?;
    let top = word(thread, layout.thread_frame)?;
    let frame = match layout.cframe_frame {
        Some(offset) => word(top, offset)?,
        None => top,
    };
    (frame != 0).then_some(frame)
}

/// The state of the calling thread, in the newest interpreter that has one. Other threads may start
/// and end during the search; then it may fail.
fn own_thread(layout: &FrameLayout) -> Option<u64> {
    // SAFETY: takes nothing and cannot fail.
    let own_id = unsafe { libc::pthread_self() };
    let mut interpreter = word(layout.runtime, layout.interpreters)?;
    for _ in 0..MOST_INTERPRETERS {
        if interpreter == 0 {
            return None;
        }
        let mut found = None;
        let mut thread = word(interpreter, layout.threads)?;
        for _ in 0..MOST_THREADS {
            if thread == 0 {
                break;
            }
            if word(thread, layout.thread_id)? == own_id {
                // A thread that is about to start has the id of the one that starts it, which has
                // an older state.
                found = Some(thread);
            }
            thread = word(thread, layout.thread_next)?;
        }
        if found.is_some() {
            return found;
        }
        interpreter = word(interpreter, layout.interpreter_next)?;
    }
    None
}

fn word(address: u64, offset: u16) -> Option<u64> {
    word_at(address.wrapping_add(offset.into()) as usize).ok().map(|word| word as u64)
}

/// A frame.
struct Frame {
    /// Its code object and its last instruction; `None` for a frame of C code.
    code: Option<(u64, u64)>,
    previous: Option<u64>,
}

fn frame_at(layout: &FrameLayout, address: u64) -> Option<Frame> {
    let fields = [
        (layout.frame_previous, 8),
        (layout.frame_code, 8),
        (layout.frame_instruction, layout.instruction_bytes),
        (layout.frame_owner.unwrap_or(0), 1),
    ];
    let length = fields.into_iter().map(|(offset, bytes)| usize::from(offset) + usize::from(bytes)).max()?;
    let mut buffer = [0; FRAME_BYTES];
    let bytes = buffer.get_mut(..length)?;
    read_memory(address as usize, bytes).ok()?;
    let number = |offset: u16, width: usize| {
        let mut number = [0; 8];
        number[..width].copy_from_slice(&bytes[usize::from(offset)..usize::from(offset) + width]);
        u64::from_le_bytes(number)
    };
    let is_of_c = layout.frame_owner.is_some_and(|offset| bytes[usize::from(offset)] >= FrameLayout::FIRST_C_OWNER);
    let instruction = number(layout.frame_instruction, usize::from(layout.instruction_bytes).min(8));
    let previous = number(layout.frame_previous, 8);
    Some(Frame {
        code: (!is_of_c).then(|| (number(layout.frame_code, 8) & !7, instruction)),
        previous: (previous != 0).then_some(previous),
    })
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        ring::{self, RawStack},
        v1::{CopyDirection, Op},
    };

    use super::*;

    /// An interpreter in this process: one interpreter, whose second thread is the calling one.
    struct Interpreter {
        words: Box<[u64; 64]>,
    }

    /// Indices of its structures in `words`.
    const RUNTIME: usize = 0;
    const INTERPRETER: usize = 4;
    const THREADS: [usize; 2] = [8, 16];
    const FRAMES: [usize; 4] = [24, 32, 40, 48];

    impl Interpreter {
        fn new() -> Self {
            let mut words = Box::new([0_u64; 64]);
            let base = words.as_ptr() as u64;
            let at = |index: usize| base + 8 * index as u64;
            // SAFETY: takes nothing and cannot fail.
            let own_id = unsafe { libc::pthread_self() };
            words[RUNTIME + 1] = at(INTERPRETER);
            words[INTERPRETER + 1] = at(THREADS[0]);
            for (thread, next, id) in [(THREADS[0], at(THREADS[1]), 5), (THREADS[1], 0, own_id)] {
                (words[thread], words[thread + 1], words[thread + 2]) = (next, id, at(FRAMES[0]));
            }
            for (number, frame) in FRAMES.into_iter().enumerate() {
                words[frame] = FRAMES.get(number + 1).map_or(0, |next| at(*next));
                words[frame + 1] = (0x1000 * (number as u64 + 1)) | 5;
                words[frame + 2] = 100 + number as u64;
                // The third one is of C code.
                words[frame + 3] = if number == 2 { 3 } else { 0 };
            }
            Interpreter { words }
        }

        fn layout(&self) -> FrameLayout {
            FrameLayout {
                runtime: self.words.as_ptr() as u64,
                interpreters: 8,
                interpreter_next: 0,
                threads: 8,
                thread_next: 0,
                thread_id: 8,
                thread_frame: 16,
                cframe_frame: None,
                frame_previous: 0,
                frame_code: 8,
                frame_instruction: 16,
                instruction_bytes: 4,
                frame_owner: Some(24),
            }
        }
    }

    fn tell(recorder: &Recorder, layout: &FrameLayout) {
        for (index, word) in layout.words().into_iter().enumerate() {
            recorder.ring.header(header::FRAME_LAYOUT + index).store(word, Ordering::Relaxed);
        }
    }

    fn stacks(recorder: &Recorder) -> Vec<RawStack> {
        let used = recorder.ring.header(header::STACKS).load(Ordering::Relaxed) as usize;
        let path = format!("/proc/self/fd/{}", recorder.ring.descriptor.get().unwrap());
        let file = std::fs::File::open(path).unwrap();
        let read_at = |at, buffer: &mut [u8]| std::os::unix::fs::FileExt::read_exact_at(&file, buffer, at);
        ring::read_stacks(read_at, 0, used).unwrap()
    }

    #[test]
    fn the_first_launch_of_each_kind_has_a_stack() {
        let recorder = Recorder::for_test();
        let copy = |bytes| NewOperation::copy(CopyDirection::HostToDevice, bytes);
        let reduce =
            |seq, communicator| NewOperation { seq, communicator, ..NewOperation::new(OpKind::Collective, Op::Reduce) };
        recorder.start_stacks(7);
        recorder.begin(&copy(1)).unwrap();
        assert_eq!(stacks(recorder), [], "the collector has not said where the frames are");
        let interpreter = Interpreter::new();
        tell(recorder, &interpreter.layout());
        recorder.start_stacks(7);
        let kinds = [copy(1), copy(2), reduce(1, 8), copy(1), reduce(2, 9)];
        assert!(kinds.iter().all(|what| recorder.begin(what).is_some()));
        recorder.begin(&NewOperation::new(OpKind::HostCall, Op::CommInit)).unwrap();
        // A thread without Python frames.
        std::thread::scope(|scope| scope.spawn(|| recorder.begin(&copy(3))).join().unwrap());
        recorder.begin(&copy(3)).unwrap();
        recorder.begin(&copy(4)).unwrap();
        let stacks = stacks(recorder);
        assert_eq!(stacks.iter().map(|stack| stack.ticket).collect::<Vec<_>>(), [1, 2, 3, 8], "seven launches");
        assert!(stacks.iter().all(|stack| stack.frames == [(0x1000, 100), (0x2000, 101), (0x4000, 103)]), "{stacks:?}");
        recorder.start_stacks(7);
        assert!(!recorder.stacks.are_wanted(), "it ends");
    }

    #[test]
    fn wrong_addresses_give_no_stack_or_a_part_of_one() {
        let mut interpreter = Interpreter::new();
        let good = interpreter.layout();
        let kept = |layout: &FrameLayout| {
            let recorder = Recorder::for_test();
            tell(recorder, layout);
            recorder.start_stacks(1);
            recorder.begin(&NewOperation::copy(CopyDirection::Fill, 1)).unwrap();
            stacks(recorder).pop().map(|stack| stack.frames.len())
        };
        assert_eq!(kept(&good), Some(3));
        assert_eq!(kept(&FrameLayout { runtime: 8, ..good }), None);
        assert_eq!(kept(&FrameLayout { thread_id: 0, ..good }), None);
        assert_eq!(kept(&FrameLayout { frame_code: u16::MAX, instruction_bytes: u16::MAX, ..good }), Some(0));
        interpreter.words[FRAMES[1]] = 8;
        assert_eq!(kept(&good), Some(2), "a frame that is not mapped");
        // A cycle.
        interpreter.words[FRAMES[1]] = &raw const interpreter.words[FRAMES[0]] as u64;
        assert_eq!(kept(&good), Some(stack::MOST_FRAMES));
        interpreter.words[THREADS[1]] = &raw const interpreter.words[THREADS[0]] as u64;
        interpreter.words[THREADS[1] + 1] = 5;
        assert_eq!(kept(&good), None, "threads in a cycle");
    }
}
