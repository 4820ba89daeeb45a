//! Process groups of gloo, their tensors, and the store in which PyTorch's ranks find each other.
//! The creation of a group blocks until all members have met in the store. A rank that never
//! arrives blocks the others there, before there is any group.
//!
//! The identity of a group is the key under which its members find each other in the store, without
//! the part that names the member. PyTorch prefixes the key with the group's name or number, so it
//! is equal on all members and differs between groups.
//!
//! Many processes that are not ranks use stores, such as the agent of torchrun, so only calls of
//! ranks count. Other threads may legitimately wait in a store for as long as the job runs, so
//! `wait` counts on the main thread only.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int},
};

use xpu_timer_proto::v1::{CommunicatorState, DataType, Op, OpKind, OpStatus};

use crate::{
    backends::host_call::BlockingCall,
    interpose::hooked::AfterCall,
    runtime::{
        abi::Word,
        linker::function::Function,
        os::{clock, leaked_once::LeakedOnce, sys, thread_state},
        recorder::{
            self, NewOperation, Recorder,
            communicator_table::{hash, local_id},
            communicators::NewCommunicator,
            host_operations::{close, grant_startup_grace, named_host_call, open},
        },
    },
};

/// The group that a thread is creating.
#[derive(Clone, Copy)]
struct GroupInCreation {
    rank: i32,
    size: u32,
    /// Its entry and operation, once its identity is known.
    comm: Option<usize>,
    slot: Option<usize>,
}

thread_local! {
    static GROUP_IN_CREATION: Cell<Option<GroupInCreation>> = const { Cell::new(None) };
}

/// The entry and identity of a group. A group whose creation was not seen gets an identity that
/// only this process has.
pub fn known(recorder: &'static Recorder, group: Word) -> Option<(usize, u64)> {
    let index = recorder.comms.find(group).or_else(|| adopt(recorder, group, -1, 0))?;
    Some((index, recorder.comm_id(index)))
}

fn adopt(recorder: &'static Recorder, group: Word, rank: i32, size: u32) -> Option<usize> {
    let created_ns = clock::now_ns();
    let new = NewCommunicator { id: local_id(), size, rank, device: -1, parent: 0, created_ns };
    let index = recorder.create_comm(&new)?;
    ready(recorder, index, group);
    Some(index)
}

fn ready(recorder: &'static Recorder, index: usize, group: Word) {
    recorder.set_comm_handle(index, group);
    recorder.set_comm_state(index, CommunicatorState::Ready);
}

/// The constructor of a group.
pub struct Creating {
    recorder: &'static Recorder,
    group: Word,
    rank: i32,
    size: u32,
}

/// Called before the constructor.
pub fn creating(recorder: &'static Recorder, group: Word, rank: Word, size: Word) -> Creating {
    let (rank, size) = (rank as i32, size as u32);
    GROUP_IN_CREATION.set(Some(GroupInCreation { rank, size, comm: None, slot: None }));
    Creating { recorder, group, rank, size }
}

impl Creating {
    fn end(&self, made: bool) {
        let Some(creation) = GROUP_IN_CREATION.take() else { return };
        let recorder = self.recorder;
        if let Some(slot) = creation.slot {
            close(recorder, slot, if made { OpStatus::Completed } else { OpStatus::Failed }, 0);
        }
        match creation.comm {
            Some(index) if made => {
                forget(recorder, self.group);
                ready(recorder, index, self.group);
            }
            Some(index) => {
                recorder.set_comm_state(index, CommunicatorState::Failed);
                recorder.retire_comm(index);
            }
            None if made => {
                forget(recorder, self.group);
                adopt(recorder, self.group, self.rank, self.size);
            }
            None => {}
        }
    }
}

/// Forgets an earlier group at the same address.
fn forget(recorder: &'static Recorder, group: Word) {
    if let Some(old) = recorder.comms.find(group) {
        recorder.set_comm_state(old, CommunicatorState::Finalized);
        recorder.retire_comm(old);
    }
}

impl AfterCall for Creating {
    fn after(self, _: &'static Recorder, _: c_int) {
        self.end(true);
    }
}

impl Drop for Creating {
    fn drop(&mut self) {
        // The constructor threw. In a forked child the ring belongs to the parent.
        if recorder::running().is_some_and(|now| std::ptr::eq(now, self.recorder)) {
            self.end(false);
        }
    }
}

/// Whether the calling thread is creating a group whose identity is not known yet.
pub fn needs_identity() -> bool {
    GROUP_IN_CREATION.get().is_some_and(|creation| creation.comm.is_none())
}

/// Called when a key is set in a store during the creation of a group. The first key identifies the
/// group.
pub fn store_key_set(recorder: &'static Recorder, key: Word) {
    let Some(creation) = GROUP_IN_CREATION.get().filter(|_| key != 0) else { return };
    // SAFETY: in both ABIs of libstdc++, a std::string begins with a pointer to its terminated
    // characters.
    let key = unsafe { CStr::from_ptr(*(key as *const *const c_char)) }.to_bytes();
    let common = key.iter().rposition(|byte| *byte == b'/').map_or(&key[..0], |slash| &key[..slash]);
    let id = if common.is_empty() { local_id() } else { hash(&[b"gloo", common]) };
    let comm = recorder.create_comm(&NewCommunicator {
        id,
        size: creation.size,
        rank: creation.rank,
        device: -1,
        parent: 0,
        created_ns: clock::now_ns(),
    });
    let name = named_host_call(recorder, "c10d::ProcessGroupGloo");
    let what = NewOperation { kind: OpKind::HostCall, op: Op::CommInit, comm, communicator: id, ..name };
    let slot = open(recorder, &what);
    if let Some(slot) = slot.filter(|_| comm == Some(0)) {
        grant_startup_grace(recorder, slot);
    }
    GROUP_IN_CREATION.set(Some(GroupInCreation { comm, slot, ..creation }));
}

/// Whether torchrun's variables make this process one of several ranks. Determined at the first
/// call.
pub fn is_rank() -> bool {
    static IS_RANK: LeakedOnce<bool> = LeakedOnce::new();
    *IS_RANK.get_or_init(|| {
        let number = |name| String::from_utf8(sys::variable(name)?).ok()?.trim().parse::<u32>().ok();
        number(c"RANK").is_some() && number(c"WORLD_SIZE").is_some_and(|size| size > 1)
    })
}

/// Whether this is the main thread of such a process.
pub fn is_main_thread_of_rank() -> bool {
    thread_state::with(|thread| thread.tid()) == std::process::id() && is_rank()
}

/// Called before a call of the store that returns when other ranks have arrived.
pub fn waiting_in_store(recorder: &'static Recorder, name: &'static str) -> BlockingCall {
    BlockingCall::new(recorder)
        .with(&named_host_call(recorder, name))
        .with_startup_grace(recorder, recorder.comms.used() == 0)
}

/// How an argument contains the tensor that determines the size of an operation.
#[derive(Debug, Clone, Copy)]
pub enum Tensors {
    /// It does not, or it differs between ranks.
    None,
    /// `at::Tensor&`.
    One(Word),
    /// `std::vector<at::Tensor>&`; the first tensor counts.
    Many(Word),
}

/// `c10::ScalarType` by number.
const SCALAR_TYPES: [(c_int, DataType); 13] = [
    (0, DataType::Uint8),
    (1, DataType::Int8),
    (3, DataType::Int32),
    (4, DataType::Int64),
    (5, DataType::Float16),
    (6, DataType::Float32),
    (7, DataType::Float64),
    (9, DataType::Complex64),
    (10, DataType::Complex128),
    (11, DataType::Uint8),
    (15, DataType::Bfloat16),
    (23, DataType::Float8E5m2),
    (24, DataType::Float8E4m3),
];

fn tensor_property<T>(beside: &Function, name: &'static CStr, number: usize, tensor: Word) -> Option<T>
where
    T: Default,
{
    let getter = beside.companion(0, number, &[name])?;
    // SAFETY: aoti_torch_get_numel and aoti_torch_get_dtype have this type, with a 64-bit and a
    // 32-bit `T`. They catch exceptions.
    let getter =
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn(Word, *mut T) -> c_int>(getter) };
    let mut answer = T::default();
    // SAFETY: the caller's tensor, which lives during the call, and a place for the result.
    (unsafe { getter(tensor, &mut answer) } == 0).then_some(answer)
}

/// Element count and type of a tensor, through PyTorch's stable C interface (from 2.1 on). Zero and
/// unspecified if unknown, as in older versions. The interface is looked up in the
/// library of the original of `beside`.
pub fn tensor_shape(beside: &Function, tensors: Tensors) -> (u64, DataType) {
    let tensor = match tensors {
        Tensors::None => 0,
        Tensors::One(tensor) => tensor,
        // SAFETY: the caller's vector, which begins with the addresses of its first element and of
        // its end.
        Tensors::Many(vector) if vector != 0 => unsafe {
            let [first, end] = *(vector as *const [Word; 2]);
            if first < end { first } else { 0 }
        },
        Tensors::Many(_) => 0,
    };
    // SAFETY: a tensor consists of a pointer to its implementation. Without an implementation there
    // is nothing to query.
    if tensor == 0 || unsafe { *(tensor as *const Word) } == 0 {
        return Default::default();
    }
    let count: Option<i64> = tensor_property(beside, c"aoti_torch_get_numel", 0, tensor);
    let dtype: Option<c_int> = tensor_property(beside, c"aoti_torch_get_dtype", 1, tensor);
    let dtype = SCALAR_TYPES
        .iter()
        .find(|(number, _)| Some(*number) == dtype)
        .map_or(DataType::Unspecified, |(_, dtype)| *dtype);
    (count.unwrap_or(0).max(0) as u64, dtype)
}
