//! gloo inside PyTorch (layer E). The methods of `c10d::ProcessGroupGloo` are hooked where they are
//! called, and their work where a gloo thread executes it.
//!
//! All of them are reached through symbols: the methods through the relocations of the class's
//! virtual table, the others through the PLT. This holds for the libraries of PyPI and of Debian
//! from 1.13 to 2.15, so no code is patched. A method returns an intrusive pointer through its
//! hidden first argument. Exceptions pass through.

#[allow(unsafe_code)]
pub(crate) mod group;
use std::{cell::Cell, ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    family::Library,
    ring::{comm, header},
    v1::{Op, OpKind, OpStatus},
};

use crate::{
    backends::{
        gloo::group::{Keys, NEW_STRING, OLD_STRING, Tensors, creating, known, tensor_shape},
        host_call::BlockingCall,
        request_table::{RequestOperation, forget, recall, remember},
    },
    interpose::hooked::{AfterCall, around},
    runtime::{
        abi::{SUCCESS, Word},
        linker::function::{Function, Wrapper},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{
            self, NewOperation, Recorder,
            host_operations::{close, mark_started, queue, set_first_tag},
        },
    },
};

/// No root and no peer.
const NOBODY: i32 = -1;

thread_local! {
    /// The operation of the method that this thread is executing, as a slot plus one, until its
    /// work is queued.
    static LAUNCHING: Cell<usize> = const { Cell::new(0) };
}

/// The arguments of a method that are recorded.
#[derive(Clone, Copy)]
struct Call {
    op: Op,
    /// Root or peer.
    peer: i32,
    /// Reduce operation, in NCCL's numbers.
    reduce: u8,
    tensors: Tensors,
}

fn call(op: Op, tensors: Tensors) -> Call {
    Call { op, peer: NOBODY, reduce: 0, tensors }
}

impl Call {
    fn with_peer(self, peer: i32) -> Self {
        Call { peer, ..self }
    }

    /// A reduction with `AllreduceOptions` or `ReduceScatterOptions`.
    fn reduced_by(self, options: Word) -> Self {
        Call { reduce: reduce_kind(options), ..self }
    }

    /// A reduction with `ReduceOptions`.
    fn reduced_to_root(self, options: Word) -> Self {
        let (reduce, peer) = rooted_reduce(options);
        Call { reduce, peer, ..self }
    }
}

fn begin(recorder: &'static Recorder, group: Word, call: Call) -> Option<NewOperation> {
    let Call { op, peer, reduce, tensors } = call;
    let (index, communicator) = known(recorder, group)?;
    let transfer = matches!(op, Op::Send | Op::Recv);
    let counter = if transfer { comm::POINT_TO_POINT } else { comm::LAUNCHED };
    if !transfer {
        recorder.count(header::COLLECTIVES);
    }
    let seq = recorder.comm_word(index, counter).fetch_add(1, Ordering::Relaxed) + 1;
    let (count, dtype) = tensor_shape(allreduce(), tensors);
    Some(NewOperation {
        comm: Some(index),
        communicator,
        seq,
        count,
        dtype,
        peer,
        reduce,
        ..NewOperation::new(OpKind::Collective, op)
    })
}

/// A method that queues its work and returns.
struct Launched {
    recorder: &'static Recorder,
    slot: Option<usize>,
}

fn launched(recorder: &'static Recorder, group: Word, call: Call) -> Launched {
    let slot = begin(recorder, group, call).and_then(|what| queue(recorder, &what));
    LAUNCHING.set(slot.map_or(0, |slot| slot + 1));
    Launched { recorder, slot }
}

impl Launched {
    /// The method has returned. If its work was not queued, it is complete.
    fn end(&mut self, status: OpStatus) {
        let Some(slot) = self.slot.take() else { return };
        if LAUNCHING.take() == slot + 1 {
            close(self.recorder, slot, status, 0);
        }
    }
}

impl AfterCall for Launched {
    fn after(mut self, _: &'static Recorder, _: c_int) {
        self.end(OpStatus::Completed);
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // The method threw. In a forked child the ring belongs to the parent.
        if recorder::running().is_some_and(|now| std::ptr::eq(now, self.recorder)) {
            self.end(OpStatus::Failed);
        }
    }
}

/// The object of an intrusive pointer.
fn pointee(pointer: Word) -> usize {
    // SAFETY: null, or the caller's pointer, which is one word.
    unsafe { (pointer as *const usize).as_ref() }.map_or(0, |object| *object)
}

/// The open operation with this work.
fn slot_of(recorder: &'static Recorder, work: usize) -> Option<usize> {
    let is_it = |slot: &usize| recorder.slots[*slot].context.load(Ordering::Acquire) == work;
    recorder.open_calls.slots().find(is_it).filter(|_| work != 0)
}

/// The work is queued. It identifies the operation from now on.
fn enqueued(recorder: &'static Recorder, work: Word) {
    if let Some(slot) = LAUNCHING.take().checked_sub(1) {
        recorder.slots[slot].context.store(pointee(work), Ordering::Release);
    }
}

/// The method takes a tag, by which the collectives of the members match. A method that takes
/// several uses them for one collective; the first counts.
struct Tagged;

impl AfterCall for Tagged {
    fn after(self, recorder: &'static Recorder, tag: c_int) {
        if let Some(slot) = LAUNCHING.get().checked_sub(1) {
            set_first_tag(recorder, slot, tag as u32);
        }
    }
}

/// A gloo thread executes a work object.
struct Executing(Option<(usize, usize)>);

fn executing(recorder: &'static Recorder, work: Word) -> Executing {
    let work = pointee(work);
    let slot = slot_of(recorder, work);
    if let Some(slot) = slot {
        mark_started(recorder, slot);
    }
    Executing(slot.map(|slot| (slot, work)))
}

impl AfterCall for Executing {
    fn after(self, recorder: &'static Recorder, _: c_int) {
        // Unless it has failed.
        if let Some((slot, work)) = self.0.filter(|(slot, work)| slot_of(recorder, *work) == Some(*slot)) {
            finished(recorder, slot, work, OpStatus::Completed);
        }
    }
}

fn finished(recorder: &'static Recorder, slot: usize, work: usize, status: OpStatus) {
    let context = &recorder.slots[slot].context;
    if context.compare_exchange(work, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        close(recorder, slot, status, 0);
    }
}

fn failed(recorder: &'static Recorder, work: usize) {
    if let Some(slot) = slot_of(recorder, work) {
        finished(recorder, slot, work, OpStatus::Failed);
    }
}

/// A send or receive, which is identified by the work that it returns.
struct Transfer {
    what: Option<NewOperation>,
    work: Word,
}

fn transfer(
    recorder: &'static Recorder,
    work: Word,
    group: Word,
    op: Op,
    (peer, tag): (Word, Word),
    tensors: Word,
) -> Transfer {
    let what = begin(recorder, group, call(op, Tensors::Many(tensors)).with_peer(peer as i32));
    Transfer { what: what.map(|what| NewOperation { tag: Some(tag as i32), ..what }), work }
}

impl AfterCall for Transfer {
    fn after(self, _: &'static Recorder, _: c_int) {
        let work = pointee(self.work);
        if let Some(meaning) = self.what.and_then(|what| RequestOperation::of(&what, false)).filter(|_| work != 0) {
            remember(work as u64, &meaning);
        }
    }
}

/// A thread waits for a send or receive.
struct Waited {
    running: BlockingCall,
    work: u64,
}

fn waited(recorder: &'static Recorder, work: Word) -> Waited {
    let running = BlockingCall::new(recorder);
    let meaning = recall(work as u64);
    Waited {
        running: meaning.map_or_else(|| BlockingCall::new(recorder), |meaning| running.with(&meaning.begin())),
        work: work as u64,
    }
}

impl AfterCall for Waited {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        forget(self.work);
        self.running.after(recorder, result);
    }
}

/// A method that finishes its work before it returns.
fn direct(recorder: &'static Recorder, group: Word, op: Op) -> BlockingCall {
    let what = begin(recorder, group, call(op, Tensors::None));
    what.map_or_else(|| BlockingCall::new(recorder), |what| BlockingCall::new(recorder).with(&what))
}

/// The root of `BroadcastOptions`, `GatherOptions` and `ScatterOptions`, which is their first
/// member.
fn root(options: Word) -> i32 {
    // SAFETY: the caller's options.
    unsafe { (options as *const i32).as_ref() }.map_or(NOBODY, |root| *root)
}

/// The reduce operation of some options, and the place of the word behind it. It is the first
/// member of the options: an object of 32 bytes, or of 40 where reference counts are two words. The
/// last two words of that object are its kind and a pointer. `None` if the memory does not match
/// this layout; older versions had only the kind. `fits` checks the words behind the object.
fn reduce_operation(options: Word, fits: impl Fn(&dyn Fn(usize) -> u64, usize) -> bool) -> Option<(u8, usize)> {
    const KINDS: u64 = 16;
    if options == 0 {
        return None;
    }
    // SAFETY: the caller's options. Words after those of the shorter object are read only if the
    // shorter layout does not match.
    let word = |index: usize| unsafe { (options as *const u64).add(index).read_unaligned() };
    // The object begins with the address of its virtual table. Its own pointer may be null.
    let is_address = |word: u64| word >> 12 != 0;
    let is_object = |place: usize| {
        let pointer = word(place - 1);
        is_address(word(0)) && word(place - 2) & 0xff < KINDS && (pointer == 0 || is_address(pointer))
    };
    let place = [4, 5].into_iter().find(|place| is_object(*place) && fits(&word, *place))?;
    Some((word(place - 2) as u8, place))
}

/// Whether a word is a timeout in milliseconds, -1 for none.
fn is_limit(ms: u64) -> bool {
    const LIMITS_MS: std::ops::Range<u64> = 1000..1 << 48;
    ms == u64::MAX || LIMITS_MS.contains(&ms)
}

/// The operation of a reduction with a root, and the root. In its options, the root, a number that
/// is always 0 and the timeout follow the operation. If the layout is not known: a sum without a
/// known root.
fn rooted_reduce(options: Word) -> (u8, i32) {
    let fits = |word: &dyn Fn(usize) -> u64, place: usize| {
        i32::try_from(word(place)).is_ok() && word(place + 1) == 0 && is_limit(word(place + 2))
    };
    let Some((kind, place)) = reduce_operation(options, fits) else { return (0, NOBODY) };
    // SAFETY: the caller's options, which have this word.
    let root = unsafe { (options as *const u64).add(place).read_unaligned() };
    (reduce_number(kind), root as i32)
}

/// The number of a `c10d::ReduceOp`, in NCCL's numbers as far as NCCL has it.
fn reduce_number(kind: u8) -> u8 {
    /// Sum, average, product, minimum, maximum, the bitwise and, or and xor, sum with a factor.
    const NUMBERS: [u8; 9] = [0, 4, 1, 3, 2, 5, 6, 7, 8];
    NUMBERS.get(usize::from(kind)).copied().unwrap_or(u8::MAX)
}

/// The operation of a reduction without a root. In its options, the timeout follows the operation.
/// If the layout is not known: a sum.
fn reduce_kind(options: Word) -> u8 {
    reduce_operation(options, |word, place| is_limit(word(place))).map_or(0, |(kind, _)| reduce_number(kind))
}

/// The tensors of an all-to-all. Without split sizes, all members exchange equal parts.
fn exchanged(input: Word, splits: [Word; 2]) -> Tensors {
    let is_empty = |vector: Word| {
        // SAFETY: the caller's vector, which begins with the addresses of its first element and of
        // its end.
        unsafe { (vector as *const [Word; 2]).as_ref() }.is_some_and(|[first, end]| first == end)
    };
    if splits.into_iter().all(is_empty) { Tensors::One(input) } else { Tensors::None }
}

/// The row whose original is in the library that has PyTorch's other functions.
fn allreduce() -> &'static Function {
    &_ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE::FUNCTION
}

/// The functions report no errors. They throw.
fn succeeded(_: Word) -> c_int {
    SUCCESS
}

/// A function that returns a number.
fn number(answer: Word) -> c_int {
    answer as c_int
}

/// Defines hooked C++ functions from rows: the symbol, its arguments as words, and the code that
/// runs before it. `bypass` determines whether calls inside other hooked collectives are recorded
/// too. If `when` is false, a call goes straight to the original and does not start the hook.
/// `result` converts the value that the original returned to the result that the code after it
/// gets.
macro_rules! symbols {
    ($(bypass $bypass:expr, when $when:expr, result $result:expr => { $($name:ident($($arg:ident),*) => $before:expr;)* })*) => {
        $($(
            #[allow(non_snake_case, missing_docs)]
            pub(crate) mod $name {
                use super::*;

                #[used]
                #[unsafe(link_section = "xpu_timer_functions")]
                pub(crate) static FUNCTION: Function = Function::new(
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => unreachable!(),
                    },
                    Library::Gloo,
                    [
                        Wrapper($name as *const ()),
                        Wrapper(from_slot::<1> as *const ()),
                        Wrapper(from_slot::<2> as *const ()),
                        Wrapper(from_slot::<3> as *const ()),
                    ],
                );

                type Real = unsafe extern "C-unwind" fn($(symbols!(@word $arg)),*) -> Word;

                #[cfg_attr(not(test), unsafe(no_mangle))]
                pub(crate) unsafe extern "C-unwind" fn $name($($arg: Word),*) -> Word {
                    // SAFETY: the caller's arguments go unchanged to a function with the ABI of the
                    // original.
                    unsafe { wrapper($($arg),*) }
                }

                unsafe extern "C-unwind" fn from_slot<const SLOT: usize>($($arg: Word),*) -> Word {
                    FUNCTION.set_entry_slot(SLOT);
                    // SAFETY: the caller's arguments go unchanged to a function with the ABI of the
                    // original.
                    unsafe { wrapper($($arg),*) }
                }

                #[inline(never)]
                unsafe extern "C-unwind" fn wrapper($($arg: Word),*) -> Word {
                    let slot = FUNCTION.take_entry_slot();
                    let real = FUNCTION.real(slot);
                    if real.is_null() {
                        // Unreachable, because the caller used a table of the library that has the
                        // original.
                        return 0;
                    }
                    // SAFETY: the address of this row's original, whose arguments are words and
                    // whose result fits into one.
                    let real = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>(real) };
                    let mut answer = 0;
                    let mut call = || {
                        // SAFETY: the original gets the arguments that its caller gave.
                        answer = unsafe { real($($arg),*) };
                        $result(answer)
                    };
                    if $when {
                        around((&FUNCTION, slot), (IN_COLLECTIVES, $bypass), $before, call);
                    } else {
                        call();
                    }
                    answer
                }
            }
        )*)*
    };
    (@word $arg:ident) => { Word };
}

symbols! {
    bypass IN_COLLECTIVES | IN_HOOK, when true, result succeeded => {
        _ZN4c10d16ProcessGroupGlooC1ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE(this, store, rank, size, options)
            => |recorder, _| creating(recorder, this, rank, size);
        _ZN4c10d16ProcessGroupGlooC2ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE(this, store, rank, size, options)
            => |recorder, _| creating(recorder, this, rank, size);

        _ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, call(Op::AllReduce, Tensors::Many(tensors)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo16allreduce_sparseERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, call(Op::AllReduce, Tensors::None).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo19allreduce_coalescedERSt6vectorIN2at6TensorESaIS3_EERKNS_25AllreduceCoalescedOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, call(Op::AllReduce, Tensors::Many(tensors)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo9broadcastERSt6vectorIN2at6TensorESaIS3_EERKNS_16BroadcastOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, call(Op::Broadcast, Tensors::Many(tensors)).with_peer(root(options)));
        _ZN4c10d16ProcessGroupGloo6reduceERSt6vectorIN2at6TensorESaIS3_EERKNS_13ReduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, call(Op::Reduce, Tensors::Many(tensors)).reduced_to_root(options));
        _ZN4c10d16ProcessGroupGloo9allgatherERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::Many(inputs)));
        _ZN4c10d16ProcessGroupGloo15_allgather_baseERN2at6TensorES3_RKNS_16AllgatherOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::One(input)));
        _ZN4c10d16ProcessGroupGloo17all_gather_singleERN2at6TensorES3_RKNS_16AllgatherOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::One(input)));
        _ZN4c10d16ProcessGroupGloo19allgather_coalescedERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::Many(inputs)));
        _ZN4c10d16ProcessGroupGloo31allgather_into_tensor_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::Many(inputs)));
        _ZN4c10d16ProcessGroupGloo27all_gather_single_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllGather, Tensors::Many(inputs)));
        _ZN4c10d16ProcessGroupGloo6gatherERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_13GatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::Gather, Tensors::Many(inputs)).with_peer(root(options)));
        _ZN4c10d16ProcessGroupGloo7scatterERSt6vectorIN2at6TensorESaIS3_EERS1_IS5_SaIS5_EERKNS_14ScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::Scatter, Tensors::Many(outputs)).with_peer(root(options)));
        _ZN4c10d16ProcessGroupGloo14reduce_scatterERSt6vectorIN2at6TensorESaIS3_EERS1_IS5_SaIS5_EERKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::ReduceScatter, Tensors::Many(outputs)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo20_reduce_scatter_baseERN2at6TensorES3_RKNS_20ReduceScatterOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, call(Op::ReduceScatter, Tensors::One(output)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo21reduce_scatter_singleERN2at6TensorES3_RKNS_20ReduceScatterOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, call(Op::ReduceScatter, Tensors::One(output)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo31reduce_scatter_tensor_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::ReduceScatter, Tensors::Many(outputs)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo31reduce_scatter_single_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::ReduceScatter, Tensors::Many(outputs)).reduced_by(options));
        _ZN4c10d16ProcessGroupGloo13alltoall_baseERN2at6TensorES3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE(work, this, output, input, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllToAll, exchanged(input, [outputs, inputs])));
        _ZN4c10d16ProcessGroupGloo17all_to_all_singleERN2at6TensorES3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE(work, this, output, input, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllToAll, exchanged(input, [outputs, inputs])));
        _ZN4c10d16ProcessGroupGloo8alltoallERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_15AllToAllOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, call(Op::AllToAll, Tensors::None));
        _ZN4c10d16ProcessGroupGloo7barrierERKNS_14BarrierOptionsE(work, this, options)
            => |recorder, _| launched(recorder, this, call(Op::Barrier, Tensors::None));
        _ZN4c10d16ProcessGroupGloo16monitoredBarrierERKNS_14BarrierOptionsEb(this, options, all)
            => |recorder, _| direct(recorder, this, Op::Barrier);

        _ZN4c10d16ProcessGroupGloo4sendERSt6vectorIN2at6TensorESaIS3_EEii(work, this, tensors, peer, tag)
            => |recorder, _| transfer(recorder, work, this, Op::Send, (peer, tag), tensors);
        _ZN4c10d16ProcessGroupGloo4recvERSt6vectorIN2at6TensorESaIS3_EEii(work, this, tensors, peer, tag)
            => |recorder, _| transfer(recorder, work, this, Op::Recv, (peer, tag), tensors);
        _ZN4c10d16ProcessGroupGloo13recvAnysourceERSt6vectorIN2at6TensorESaIS3_EEi(work, this, tensors, tag)
            => |recorder, _| transfer(recorder, work, this, Op::Recv, (NOBODY as Word, tag), tensors);
        _ZN4c10d16ProcessGroupGloo8SendWork4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, timeout)
            => |recorder, _| waited(recorder, this);
        _ZN4c10d16ProcessGroupGloo8RecvWork4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, timeout)
            => |recorder, _| waited(recorder, this);

    }

    // Called inside the methods above.
    bypass IN_HOOK, when LAUNCHING.get() != 0, result number => {
        _ZN4c10d16ProcessGroupGloo7nextTagEv(this)
            => |_, _| Tagged;
    }

    // Called inside the methods above, and on gloo threads.
    bypass IN_HOOK, when true, result succeeded => {
        _ZN4c10d16ProcessGroupGloo7enqueueEN3c1013intrusive_ptrINS0_9AsyncWorkENS1_6detail34intrusive_target_default_null_typeIS3_EEEE(this, work)
            => |recorder, _| enqueued(recorder, work);
        _ZN4c10d16ProcessGroupGloo9AsyncWork7executeERKN3c1013intrusive_ptrIS1_NS2_6detail34intrusive_target_default_null_typeIS1_EEEE(work)
            => |recorder, _| executing(recorder, work);
        _ZN4c10d16ProcessGroupGloo9AsyncWork7executeEN3c1013intrusive_ptrIS1_NS2_6detail34intrusive_target_default_null_typeIS1_EEEE(work)
            => |recorder, _| executing(recorder, work);
        _ZN4c10d16ProcessGroupGloo9AsyncWork19finishWorkGlooErrorERKNSt15__exception_ptr13exception_ptrE(this, error)
            => |recorder, _| failed(recorder, this);
        _ZN4c10d16ProcessGroupGloo9AsyncWork19finishWorkGlooErrorENSt15__exception_ptr13exception_ptrE(this, error)
            => |recorder, _| failed(recorder, this);

    }

    // Many processes that are not ranks use stores, such as the agent of torchrun.
    bypass IN_HOOK, when group::needs_identity(), result succeeded => {
        _ZN4c10d8TCPStore3setERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
        _ZN4c10d9FileStore3setERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
        _ZN4c10d9HashStore3setERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
        _ZN4c10d8TCPStore3setERKSsRKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
        _ZN4c10d9FileStore3setERKSsRKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
        _ZN4c10d9HashStore3setERKSsRKSt6vectorIhSaIhEE(this, key, value)
            => |recorder, _| group::store_key_set(recorder, key);
    }

    bypass IN_COLLECTIVES | IN_HOOK, when group::is_member(), result succeeded => {
        _ZN4c10d8TCPStoreC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKNS_15TCPStoreOptionsE(this, host, options)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore", Keys::None);
        _ZN4c10d8TCPStoreC1ESsRKNS_15TCPStoreOptionsE(this, host, options)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore", Keys::None);
        _ZN4c10d8TCPStore3getERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::get", Keys::One(key));
        _ZN4c10d8TCPStore3getERKSs(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::get", Keys::One(key));
        _ZN4c10d9FileStore3getERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::get", Keys::One(key));
        _ZN4c10d9FileStore3getERKSs(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::get", Keys::One(key));
        _ZN4c10d8TCPStore8queuePopERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEb(answer, this, key, block)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::queuePop", Keys::One(key));
        _ZN4c10d8TCPStore7barrierERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEElRKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, key, size, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::barrier", Keys::One(key));
        _ZN4c10d8TCPStore8multiGetERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE(answer, this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::multiGet", Keys::Many(keys, NEW_STRING));
    }

    bypass IN_COLLECTIVES | IN_HOOK, when group::is_main_thread_of_member(), result succeeded => {
        _ZN4c10d8TCPStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait", Keys::Many(keys, NEW_STRING));
        _ZN4c10d8TCPStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait", Keys::Many(keys, NEW_STRING));
        _ZN4c10d8TCPStore4waitERKSt6vectorISsSaISsEE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait", Keys::Many(keys, OLD_STRING));
        _ZN4c10d8TCPStore4waitERKSt6vectorISsSaISsEERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait", Keys::Many(keys, OLD_STRING));
        _ZN4c10d9FileStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::wait", Keys::Many(keys, NEW_STRING));
        _ZN4c10d9FileStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::wait", Keys::Many(keys, NEW_STRING));
        _ZN4c10d9FileStore4waitERKSt6vectorISsSaISsEE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::wait", Keys::Many(keys, OLD_STRING));
        _ZN4c10d9FileStore4waitERKSt6vectorISsSaISsEERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::FileStore::wait", Keys::Many(keys, OLD_STRING));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: u64 = 0x7f00_1234_5678;
    const NO_LIMIT: u64 = u64::MAX;

    fn root_of(options: &[u64]) -> i32 {
        // As many words as the longest layout has.
        let mut words = [0xdead_beef_dead_beef; 10];
        words[..options.len()].copy_from_slice(options);
        rooted_reduce(words.as_ptr() as Word).1
    }

    #[test]
    fn what_a_reduction_computes_is_read_behind_either_object() {
        let of = |options: &[u64], rooted: bool| {
            let mut words = [0xdead_beef_dead_beef; 10];
            words[..options.len()].copy_from_slice(options);
            let options = words.as_ptr() as Word;
            if rooted { rooted_reduce(options).0 } else { reduce_kind(options) }
        };
        // c10d counts sum, average, product, minimum, maximum, the bitwise and, or and xor.
        for (kind, number) in [0, 4, 1, 3, 2, 5, 6, 7].into_iter().enumerate() {
            let kind = kind as u64;
            for count in [0, 1] {
                assert_eq!(of(&[TABLE, count, kind, 0, NO_LIMIT], false), number);
                assert_eq!(of(&[TABLE, count, count, kind, 0, 30_000], false), number);
                assert_eq!(of(&[TABLE, count, kind, 0, 3, 0, NO_LIMIT], true), number);
                assert_eq!(of(&[TABLE, count, count, kind, 0, 3, 0, NO_LIMIT], true), number);
            }
        }
        // Another layout.
        assert_eq!(of(&[3, NO_LIMIT], false), 0);
        assert_eq!((of(&[TABLE, 1, 4, 0, 5], false), reduce_kind(0)), (0, 0));
    }

    #[test]
    fn an_exchange_has_a_size_if_all_parts_are_equal() {
        let (empty, filled) = ([0x100usize, 0x100], [0x100usize, 0x110]);
        let exchanged_size = |splits: [&[usize; 2]; 2]| {
            matches!(exchanged(0x200, splits.map(|split| split.as_ptr() as Word)), Tensors::One(0x200))
        };
        assert!(exchanged_size([&empty, &empty]));
        assert!(!exchanged_size([&empty, &filled]) && !exchanged_size([&filled, &empty]));
    }

    #[test]
    fn the_root_of_a_reduce_is_found_behind_either_object() {
        for (root, limit) in [(0, NO_LIMIT), (3, NO_LIMIT), (1, 1_800_000), (0, 30_000)] {
            // Virtual table, count, kind, null pointer; root, 0, timeout.
            assert_eq!(root_of(&[TABLE, 1, 0, 0, root, 0, limit]), root as i32);
            // Virtual table, two counts, kind, null pointer. The bytes beside the kind are
            // arbitrary.
            assert_eq!(root_of(&[TABLE, 1, 1, 0xabcd_ef03, 0, root, 0, limit]), root as i32);
            // A premultiplied sum has a factor.
            assert_eq!(root_of(&[TABLE, 1, 1, 8, TABLE + 64, root, 0, limit]), root as i32);
            assert_eq!(root_of(&[TABLE, 1, 8, TABLE + 64, root, 0, limit]), root as i32);
        }
    }

    #[test]
    fn the_root_of_a_reduce_in_another_layout_is_unknown() {
        assert_eq!(rooted_reduce(0), (0, NOBODY));
        // Older versions had only the kind.
        assert_eq!(root_of(&[0, 3, 0, NO_LIMIT]), NOBODY);
        // A longer object, a root of another type, an additional member, a timeout in another unit.
        assert_eq!(root_of(&[TABLE, 1, 1, 1, 0, 0, 3, 0, NO_LIMIT]), NOBODY);
        assert_eq!(root_of(&[TABLE, 1, 0, 0, TABLE + 64, 0, NO_LIMIT]), NOBODY);
        assert_eq!(root_of(&[TABLE, 1, 0, 0, 3, 7, 0, NO_LIMIT]), NOBODY);
        assert_eq!(root_of(&[TABLE, 1, 0, 0, 3, 0, u64::MAX - 5]), NOBODY);
        assert_eq!(root_of(&[TABLE, 1, 0x7f, 0, 3, 0, NO_LIMIT]), NOBODY);
    }
}
