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
        gloo::group::{Tensors, creating, known, tensor_shape},
        host_call::BlockingCall,
        request_table::{RequestOperation, forget, recall, remember},
    },
    interpose::hooked::{AfterCall, around},
    runtime::{
        abi::Word,
        linker::function::{Function, Wrapper},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{
            self, NewOperation, Recorder,
            host_operations::{close, mark_started, queue},
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

fn begin(recorder: &'static Recorder, group: Word, op: Op, peer: i32, tensors: Tensors) -> Option<NewOperation> {
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
        ..NewOperation::new(OpKind::Collective, op)
    })
}

/// A method that queues its work and returns.
struct Launched {
    recorder: &'static Recorder,
    slot: Option<usize>,
}

fn launched(recorder: &'static Recorder, group: Word, op: Op, peer: i32, tensors: Tensors) -> Launched {
    let slot = begin(recorder, group, op, peer, tensors).and_then(|what| queue(recorder, &what));
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
    let what = begin(recorder, group, op, peer as i32, Tensors::Many(tensors));
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
    let what = begin(recorder, group, op, NOBODY, Tensors::None);
    what.map_or_else(|| BlockingCall::new(recorder), |what| BlockingCall::new(recorder).with(&what))
}

/// The root of `BroadcastOptions`, `GatherOptions` and `ScatterOptions`, which is their first
/// member.
fn root(options: Word) -> i32 {
    // SAFETY: the caller's options.
    unsafe { (options as *const i32).as_ref() }.map_or(NOBODY, |root| *root)
}

/// The root of `ReduceOptions`. Its first member is the reduce operation: an object of 32 bytes, or
/// of 40 where reference counts are two words. The last two words of that object are its kind and a
/// pointer. The root follows, then a number that is always 0, then the timeout in milliseconds, -1
/// for none. If the memory does not match this layout, the root is unknown.
fn reduce_root(options: Word) -> i32 {
    const KINDS: u64 = 16;
    const LIMITS_MS: std::ops::Range<u64> = 1000..1 << 48;
    // SAFETY: the caller's options. Words after those of the shorter object are read only if the
    // shorter layout does not match.
    let word = |index: usize| unsafe { (options as *const u64).add(index).read_unaligned() };
    let is_limit = |ms: u64| ms == u64::MAX || LIMITS_MS.contains(&ms);
    // The object begins with the address of its virtual table. Its own pointer may be null.
    let is_address = |word: u64| word >> 12 != 0;
    let is_object = |place: usize| {
        let pointer = word(place - 1);
        is_address(word(0)) && word(place - 2) & 0xff < KINDS && (pointer == 0 || is_address(pointer))
    };
    let root_at = |place: usize| {
        let fits = is_object(place) && word(place + 1) == 0 && is_limit(word(place + 2));
        i32::try_from(word(place)).ok().filter(|_| fits)
    };
    if options == 0 { NOBODY } else { [4, 5].into_iter().find_map(root_at).unwrap_or(NOBODY) }
}

/// The row whose original is in the library that has PyTorch's other functions.
fn allreduce() -> &'static Function {
    &_ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE::FUNCTION
}

/// Defines hooked C++ functions from rows: the symbol, its arguments as words, and the code that
/// runs before it. `bypass` determines whether calls inside other hooked collectives are recorded
/// too. If `when` is false, a call goes straight to the original and does not start the hook.
macro_rules! symbols {
    ($(bypass $bypass:expr, when $when:expr => { $($name:ident($($arg:ident),*) => $before:expr;)* })*) => {
        $($(
            #[allow(non_snake_case, missing_docs)]
            pub mod $name {
                use super::*;

                #[used]
                #[unsafe(link_section = "xpu_timer_functions")]
                pub static FUNCTION: Function = Function::new(
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
                pub unsafe extern "C-unwind" fn $name($($arg: Word),*) -> Word {
                    // SAFETY: the caller's arguments.
                    unsafe { wrapper($($arg),*) }
                }

                unsafe extern "C-unwind" fn from_slot<const SLOT: usize>($($arg: Word),*) -> Word {
                    FUNCTION.set_entry_slot(SLOT);
                    // SAFETY: the caller's arguments.
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
                        // SAFETY: the caller's arguments.
                        answer = unsafe { real($($arg),*) };
                        0
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
    bypass IN_COLLECTIVES | IN_HOOK, when true => {
        _ZN4c10d16ProcessGroupGlooC1ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE(this, store, rank, size, options)
            => |recorder, _| creating(recorder, this, rank, size);
        _ZN4c10d16ProcessGroupGlooC2ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE(this, store, rank, size, options)
            => |recorder, _| creating(recorder, this, rank, size);

        _ZN4c10d16ProcessGroupGloo9allreduceERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, Op::AllReduce, NOBODY, Tensors::Many(tensors));
        _ZN4c10d16ProcessGroupGloo16allreduce_sparseERSt6vectorIN2at6TensorESaIS3_EERKNS_16AllreduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, Op::AllReduce, NOBODY, Tensors::None);
        _ZN4c10d16ProcessGroupGloo19allreduce_coalescedERSt6vectorIN2at6TensorESaIS3_EERKNS_25AllreduceCoalescedOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, Op::AllReduce, NOBODY, Tensors::Many(tensors));
        _ZN4c10d16ProcessGroupGloo9broadcastERSt6vectorIN2at6TensorESaIS3_EERKNS_16BroadcastOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, Op::Broadcast, root(options), Tensors::Many(tensors));
        _ZN4c10d16ProcessGroupGloo6reduceERSt6vectorIN2at6TensorESaIS3_EERKNS_13ReduceOptionsE(work, this, tensors, options)
            => |recorder, _| launched(recorder, this, Op::Reduce, reduce_root(options), Tensors::Many(tensors));
        _ZN4c10d16ProcessGroupGloo9allgatherERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::Many(inputs));
        _ZN4c10d16ProcessGroupGloo15_allgather_baseERN2at6TensorES3_RKNS_16AllgatherOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::One(input));
        _ZN4c10d16ProcessGroupGloo17all_gather_singleERN2at6TensorES3_RKNS_16AllgatherOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::One(input));
        _ZN4c10d16ProcessGroupGloo19allgather_coalescedERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::Many(inputs));
        _ZN4c10d16ProcessGroupGloo31allgather_into_tensor_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::Many(inputs));
        _ZN4c10d16ProcessGroupGloo27all_gather_single_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_16AllgatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllGather, NOBODY, Tensors::Many(inputs));
        _ZN4c10d16ProcessGroupGloo6gatherERSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EERS5_RKNS_13GatherOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::Gather, root(options), Tensors::Many(inputs));
        _ZN4c10d16ProcessGroupGloo7scatterERSt6vectorIN2at6TensorESaIS3_EERS1_IS5_SaIS5_EERKNS_14ScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::Scatter, root(options), Tensors::Many(outputs));
        _ZN4c10d16ProcessGroupGloo14reduce_scatterERSt6vectorIN2at6TensorESaIS3_EERS1_IS5_SaIS5_EERKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::ReduceScatter, NOBODY, Tensors::Many(outputs));
        _ZN4c10d16ProcessGroupGloo20_reduce_scatter_baseERN2at6TensorES3_RKNS_20ReduceScatterOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, Op::ReduceScatter, NOBODY, Tensors::One(output));
        _ZN4c10d16ProcessGroupGloo21reduce_scatter_singleERN2at6TensorES3_RKNS_20ReduceScatterOptionsE(work, this, output, input, options)
            => |recorder, _| launched(recorder, this, Op::ReduceScatter, NOBODY, Tensors::One(output));
        _ZN4c10d16ProcessGroupGloo31reduce_scatter_tensor_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::ReduceScatter, NOBODY, Tensors::Many(outputs));
        _ZN4c10d16ProcessGroupGloo31reduce_scatter_single_coalescedERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_20ReduceScatterOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::ReduceScatter, NOBODY, Tensors::Many(outputs));
        _ZN4c10d16ProcessGroupGloo13alltoall_baseERN2at6TensorES3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE(work, this, output, input, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllToAll, NOBODY, Tensors::None);
        _ZN4c10d16ProcessGroupGloo17all_to_all_singleERN2at6TensorES3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE(work, this, output, input, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllToAll, NOBODY, Tensors::None);
        _ZN4c10d16ProcessGroupGloo8alltoallERSt6vectorIN2at6TensorESaIS3_EES6_RKNS_15AllToAllOptionsE(work, this, outputs, inputs, options)
            => |recorder, _| launched(recorder, this, Op::AllToAll, NOBODY, Tensors::None);
        _ZN4c10d16ProcessGroupGloo7barrierERKNS_14BarrierOptionsE(work, this, options)
            => |recorder, _| launched(recorder, this, Op::Barrier, NOBODY, Tensors::None);
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

    // Called inside the methods above, and on gloo threads.
    bypass IN_HOOK, when true => {
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
    bypass IN_HOOK, when group::needs_identity() => {
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

    bypass IN_COLLECTIVES | IN_HOOK, when group::is_rank() => {
        _ZN4c10d8TCPStoreC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKNS_15TCPStoreOptionsE(this, host, options)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore");
        _ZN4c10d8TCPStoreC1ESsRKNS_15TCPStoreOptionsE(this, host, options)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore");
        _ZN4c10d8TCPStore3getERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::get");
        _ZN4c10d8TCPStore3getERKSs(answer, this, key)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::get");
    }

    bypass IN_COLLECTIVES | IN_HOOK, when group::is_main_thread_of_rank() => {
        _ZN4c10d8TCPStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait");
        _ZN4c10d8TCPStore4waitERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait");
        _ZN4c10d8TCPStore4waitERKSt6vectorISsSaISsEE(this, keys)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait");
        _ZN4c10d8TCPStore4waitERKSt6vectorISsSaISsEERKNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE(this, keys, timeout)
            => |recorder, _| group::waiting_in_store(recorder, "c10d::TCPStore::wait");
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
        reduce_root(words.as_ptr() as Word)
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
        assert_eq!(reduce_root(0), NOBODY);
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
