//! Process groups of gloo, their tensors, and the store in which PyTorch's ranks find each other.
//! The creation of a group blocks until all members have met in the store. A rank that never
//! arrives blocks the others there, before there is any group.
//!
//! The identity of a group is the key under which its members find each other in the store, without
//! the part that names the member. PyTorch prefixes the key with the group's name or number, so it
//! is equal on all members and differs between groups.
//!
//! Many processes that are not ranks use stores, such as the agent of torchrun, so only calls of
//! ranks count: processes with a rank's variables, or with a communicator. Other threads may
//! legitimately wait in a store for as long as the job runs, so `wait` counts on the main thread
//! only.

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
        os::{clock, environment, leaked_once::LeakedOnce, thread_state},
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
pub(crate) fn known(recorder: &'static Recorder, group: Word) -> Option<(usize, u64)> {
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
pub(crate) struct Creating {
    recorder: &'static Recorder,
    group: Word,
    rank: i32,
    size: u32,
}

/// Called before the constructor.
pub(crate) fn creating(recorder: &'static Recorder, group: Word, rank: Word, size: Word) -> Creating {
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
pub(crate) fn needs_identity() -> bool {
    GROUP_IN_CREATION.get().is_some_and(|creation| creation.comm.is_none())
}

/// Called when a key is set in a store during the creation of a group. The first key identifies the
/// group.
pub(crate) fn store_key_set(recorder: &'static Recorder, key: Word) {
    let Some(creation) = GROUP_IN_CREATION.get().filter(|_| key != 0) else { return };
    let key = characters(key);
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
fn is_rank() -> bool {
    static IS_RANK: LeakedOnce<bool> = LeakedOnce::new();
    *IS_RANK.get_or_init(|| {
        let number = |name| String::from_utf8(environment::variable(name)?).ok()?.trim().parse::<u32>().ok();
        number(c"RANK").is_some() && number(c"WORLD_SIZE").is_some_and(|size| size > 1)
    })
}

/// Whether this process is a rank: by its variables, or because it has a communicator.
pub(crate) fn is_member() -> bool {
    is_rank() || recorder::running().is_some_and(|recorder| recorder.comms.used() > 0)
}

/// Whether this is the main thread of such a process.
pub(crate) fn is_main_thread_of_member() -> bool {
    thread_state::with(|thread| thread.tid()) == std::process::id() && is_member()
}

/// How an argument contains the keys that a call of a store waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Keys {
    /// There are none.
    None,
    /// `const std::string&`.
    One(Word),
    /// `const std::vector<std::string>&`, and the size of a string, which differs between the two
    /// ABIs of libstdc++.
    Many(Word, usize),
}

/// Size of a std::string in the old ABI of libstdc++ and in the new one.
pub(crate) const OLD_STRING: usize = 8;
pub(crate) const NEW_STRING: usize = 32;

/// The characters of a std::string: in both ABIs, it begins with a pointer to them, and they are
/// terminated.
fn characters<'a>(string: Word) -> &'a [u8] {
    // SAFETY: the caller's string, which lives during the call.
    unsafe { CStr::from_ptr(*(string as *const *const c_char)) }.to_bytes()
}

impl Keys {
    fn each<'a>(self) -> impl Iterator<Item = &'a [u8]> {
        let (first, end, size) = match self {
            Keys::One(key) if key != 0 => (key, key + 1, NEW_STRING),
            Keys::Many(keys, size) if keys != 0 => {
                // SAFETY: the caller's vector, which begins with the addresses of its first element
                // and of its end.
                let [first, end] = unsafe { *(keys as *const [Word; 2]) };
                (first, end, size)
            }
            _ => (0, 0, NEW_STRING),
        };
        (first..end).step_by(size).map(characters)
    }
}

/// Called before a call of the store that returns when other ranks have arrived.
pub(crate) fn waiting_in_store(recorder: &'static Recorder, name: &'static str, keys: Keys) -> BlockingCall {
    BlockingCall::new(recorder)
        .with(&named_host_call(recorder, name))
        .with_startup_grace(recorder, recorder.comms.used() == 0)
        .with_keys(recorder, keys.each())
}

/// How an argument contains the tensor that determines the size of an operation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tensors {
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

/// Element count and type of a tensor of PyTorch 1.13 or 2.0, from the words of its implementation
/// (`c10::TensorImpl`). `None` if the words do not fit together, as in another layout, or if the
/// tensor has more dimensions than fit into the implementation itself.
fn shape_in_memory(implementation: Word) -> Option<(u64, c_int)> {
    const DIMENSIONS: usize = 9;
    const SIZES: usize = 10;
    const MOST_DIMENSIONS: u64 = 5;
    const ELEMENTS: usize = 21;
    const TYPE: usize = 22;
    // SAFETY: the implementation of the caller's tensor. It has more than 22 words in all versions
    // without the C interface.
    let word = |index: usize| unsafe { *(implementation as *const u64).add(index) };
    let dimensions = Some(word(DIMENSIONS)).filter(|dimensions| *dimensions <= MOST_DIMENSIONS)?;
    let sizes = (0..dimensions as usize).map(|dimension| word(SIZES + dimension));
    let elements = sizes.into_iter().try_fold(1u64, u64::checked_mul)?;
    (elements == word(ELEMENTS)).then_some((elements, c_int::from(word(TYPE) as u16)))
}

/// Element count and type of a tensor: through PyTorch's stable C interface (from 2.1 on), which is
/// looked up in the library of the original of `beside`, or from the tensor's memory. Zero and
/// unspecified if unknown.
pub(crate) fn tensor_shape(beside: &Function, tensors: Tensors) -> (u64, DataType) {
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
    // SAFETY: null, or a tensor, which consists of a pointer to its implementation.
    let implementation = unsafe { (tensor as *const Word).as_ref() }.map_or(0, |pointer| *pointer);
    // Without an implementation there is nothing to query.
    if implementation == 0 {
        return Default::default();
    }
    let count: Option<i64> = tensor_property(beside, c"aoti_torch_get_numel", 0, tensor);
    let dtype: Option<c_int> = tensor_property(beside, c"aoti_torch_get_dtype", 1, tensor);
    let known = count.zip(dtype).map(|(count, dtype)| (count.max(0) as u64, dtype));
    let (count, number) = known.or_else(|| shape_in_memory(implementation)).unwrap_or((0, -1));
    let dtype = SCALAR_TYPES.iter().find(|(known, _)| *known == number);
    (count, dtype.map_or(DataType::Unspecified, |(_, dtype)| *dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_a_tensor_is_read_from_memory_only_if_it_fits() {
        let shape = |sizes: &[u64], elements: u64, dtype: u64| {
            let mut words = [0u64; 24];
            words[9] = sizes.len() as u64;
            words[10..10 + sizes.len().min(10)].copy_from_slice(&sizes[..sizes.len().min(10)]);
            // The bytes beside the type are flags.
            (words[21], words[22]) = (elements, 0x0001_41ff_0001_0000 | dtype);
            shape_in_memory(words.as_ptr() as Word)
        };
        assert_eq!(shape(&[3, 7, 5], 105, 6), Some((105, 6)));
        assert_eq!(shape(&[], 1, 7), Some((1, 7)));
        assert_eq!(shape(&[0], 0, 15), Some((0, 15)));
        assert_eq!(shape(&[3, 7, 5], 104, 6), None);
        assert_eq!(shape(&[u64::MAX, 2], u64::MAX - 1, 6), None);
        assert_eq!(shape(&[1, 1, 1, 1, 1, 1], 1, 6), None);
    }

    #[test]
    fn the_keys_of_a_wait_are_read_in_both_forms() {
        let texts = [c"done.0", c"done.1", c""];
        let read = |keys: Keys| -> Vec<Vec<u8>> { keys.each().map(<[u8]>::to_vec).collect() };
        let old: [Word; 3] = texts.map(|text| text.as_ptr() as Word);
        let mut new = [[0; NEW_STRING / 8]; 3];
        new.iter_mut().zip(old).for_each(|(string, pointer)| string[0] = pointer);
        let vector = |first: Word, bytes: usize| [first, first + bytes];
        let expected = texts.map(|text| text.to_bytes().to_vec());
        let of_old = vector(old.as_ptr() as Word, size_of_val(&old));
        assert_eq!(read(Keys::Many(of_old.as_ptr() as Word, OLD_STRING)), expected);
        let of_new = vector(new.as_ptr() as Word, size_of_val(&new));
        assert_eq!(read(Keys::Many(of_new.as_ptr() as Word, NEW_STRING)), expected);
        assert_eq!(read(Keys::One(old[1..].as_ptr() as Word)), [b"done.1"]);
        let empty: [Word; 2] = [0, 0];
        for none in
            [Keys::None, Keys::One(0), Keys::Many(0, NEW_STRING), Keys::Many(empty.as_ptr() as Word, OLD_STRING)]
        {
            assert!(read(none).is_empty(), "{none:?}");
        }
    }
}
