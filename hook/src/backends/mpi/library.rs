//! The loaded MPI library: its ABI, and the few functions of it that the hook calls.
//!
//! No header is used. A handle is a pointer in Open MPI and in the standard ABI of MPI 5, where
//! predefined handles are small numbers. It is a 32-bit number in MPICH and in libraries with its
//! ABI (Intel MPI, MVAPICH, Cray MPICH). The special numbers differ too; see [`Abi`]. The hook
//! calls the `PMPI_` names, so that no profiling library sees its calls.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::{family, v1::DataType};

use crate::runtime::{
    abi::Word,
    linker::{
        dynamic::{self, forget_linker_error, look_up},
        originals,
    },
    os::leaked_once::LeakedOnce,
};

/// The differences between the ABIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abi {
    /// The bits of a word that belong to a handle. The other bits are arbitrary.
    mask: u64,
    /// `MPI_COMM_WORLD`.
    pub world: u64,
    /// `MPI_COMM_NULL`.
    pub comm_null: u64,
    /// `MPI_REQUEST_NULL`.
    pub request_null: u64,
    /// `MPI_ANY_SOURCE`.
    pub any_source: c_int,
    /// `MPI_PROC_NULL`.
    pub proc_null: c_int,
    /// `MPI_ANY_TAG`.
    pub any_tag: c_int,
}

type Getter = unsafe extern "C" fn(Word, *mut c_int) -> c_int;
type GroupOf = unsafe extern "C" fn(Word, *mut u64) -> c_int;
type Translate = unsafe extern "C" fn(Word, c_int, *const c_int, Word, *mut c_int) -> c_int;
type GroupFromSession = unsafe extern "C" fn(Word, *const c_char, *mut u64) -> c_int;
type FreeGroup = unsafe extern "C" fn(*mut u64) -> c_int;

/// The MPI library.
pub(crate) struct Library {
    /// Its interface.
    pub abi: Abi,
    types: Vec<(u64, DataType)>,
    comm_rank: Getter,
    comm_size: Getter,
    comm_test_inter: Getter,
    type_size: Getter,
    comm_group: GroupOf,
    group_size: Getter,
    group_translate: Translate,
    group_free: FreeGroup,
    comm_remote_group: GroupOf,
    group_rank: Getter,
    initialized: unsafe extern "C" fn(*mut c_int) -> c_int,
    /// Only MPI 4 and newer have sessions.
    group_of_session: Option<GroupFromSession>,
    /// Open sessions, 0 for none. One open session is enough, so further ones are ignored.
    sessions: [AtomicU64; 8],
}

/// `MPI_IN_PLACE`: 1, but -1 in MPICH.
const IN_PLACE: [isize; 2] = [1, -1];

/// Predefined types: symbol in Open MPI, number in MPICH, number in the standard ABI, and element
/// type.
const TYPES: [(&CStr, u64, u64, DataType); 23] = [
    (c"ompi_mpi_byte", 0x4c00_010d, 0x247, DataType::Uint8),
    (c"ompi_mpi_char", 0x4c00_0101, 0x243, DataType::Int8),
    (c"ompi_mpi_signed_char", 0x4c00_0118, 0x244, DataType::Int8),
    (c"ompi_mpi_unsigned_char", 0x4c00_0102, 0x245, DataType::Uint8),
    (c"ompi_mpi_int8_t", 0x4c00_0137, 0x240, DataType::Int8),
    (c"ompi_mpi_uint8_t", 0x4c00_013b, 0x241, DataType::Uint8),
    (c"ompi_mpi_int", 0x4c00_0405, 0x209, DataType::Int32),
    (c"ompi_mpi_unsigned", 0x4c00_0406, 0x20d, DataType::Uint32),
    (c"ompi_mpi_int32_t", 0x4c00_0439, 0x250, DataType::Int32),
    (c"ompi_mpi_uint32_t", 0x4c00_043d, 0x251, DataType::Uint32),
    (c"ompi_mpi_long", 0x4c00_0807, 0x20a, DataType::Int64),
    (c"ompi_mpi_unsigned_long", 0x4c00_0808, 0x20e, DataType::Uint64),
    (c"ompi_mpi_long_long_int", 0x4c00_0809, 0x20b, DataType::Int64),
    (c"ompi_mpi_unsigned_long_long", 0x4c00_0819, 0x20f, DataType::Uint64),
    (c"ompi_mpi_int64_t", 0x4c00_083a, 0x258, DataType::Int64),
    (c"ompi_mpi_uint64_t", 0x4c00_083e, 0x259, DataType::Uint64),
    (c"ompi_mpi_float", 0x4c00_040a, 0x210, DataType::Float32),
    (c"ompi_mpi_double", 0x4c00_080b, 0x214, DataType::Float64),
    (c"ompi_mpi_real", 0x4c00_041c, 0x21a, DataType::Float32),
    (c"ompi_mpi_dblprec", 0x4c00_081f, 0x21c, DataType::Float64),
    (c"ompi_mpi_integer", 0x4c00_041b, 0x219, DataType::Int32),
    (c"ompi_mpi_c_float_complex", 0x4c00_0840, 0x211, DataType::Complex64),
    (c"ompi_mpi_c_double_complex", 0x4c00_1041, 0x215, DataType::Complex128),
];

/// The process's MPI library. `None` if its ABI is unknown; then its calls are recorded as host
/// calls that may block.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: LeakedOnce<Option<Library>> = LeakedOnce::new();
    let find = || {
        let found = Library::find();
        forget_linker_error();
        found
    };
    LIBRARY.get_or_init(find).as_ref()
}

/// Whether a function belongs to a library with the standard ABI, which has a file name of its own.
fn is_standard(function: *mut c_void) -> bool {
    let file = dynamic::path_of(function).and_then(|path| path.to_bytes().rsplit(|byte| *byte == b'/').next());
    file.is_some_and(|name| name.starts_with(b"libmpi_abi.so"))
}

impl Library {
    fn find() -> Option<Self> {
        // The next library in the global scope, as for the exported functions; else one that was
        // loaded with local scope.
        let next = std::iter::once(libc::RTLD_NEXT);
        let known = originals::host_libraries(family::Library::Mpi);
        next.chain(known).find_map(Self::of)
    }

    fn of(handle: *mut c_void) -> Option<Self> {
        // The executable may contain a copy that the process uses. Only a lookup in the global
        // scope finds it.
        let at = |name: &CStr| match look_up(libc::RTLD_DEFAULT, name) as u64 {
            0 => look_up(handle, name) as u64,
            found => found,
        };
        let open_mpi = at(c"ompi_mpi_comm_world");
        let (abi, types) = if is_standard(look_up(handle, c"PMPI_Comm_rank")) {
            (Abi::STANDARD, TYPES.iter().map(|(_, _, number, dtype)| (*number, *dtype)).collect())
        } else if open_mpi != 0 {
            let types = TYPES.iter().map(|(name, _, _, dtype)| (at(name), *dtype));
            (Abi::open_mpi(open_mpi, at(c"ompi_mpi_comm_null"), at(c"ompi_request_null")), types.collect())
        } else if at(c"MPIR_Dup_fn") != 0 {
            (Abi::MPICH, TYPES.iter().map(|(_, number, _, dtype)| (*number, *dtype)).collect())
        } else {
            return None;
        };
        macro_rules! own {
            ($name:literal as $type:ty) => {{
                let found = look_up(handle, $name);
                if found.is_null() {
                    return None;
                }
                // SAFETY: by the MPI standard, the function of this name has the type of its field.
                unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
            }};
        }
        Some(Library {
            abi,
            types,
            comm_rank: own!(c"PMPI_Comm_rank" as Getter),
            comm_size: own!(c"PMPI_Comm_size" as Getter),
            comm_test_inter: own!(c"PMPI_Comm_test_inter" as Getter),
            type_size: own!(c"PMPI_Type_size" as Getter),
            comm_group: own!(c"PMPI_Comm_group" as GroupOf),
            group_size: own!(c"PMPI_Group_size" as Getter),
            group_translate: own!(c"PMPI_Group_translate_ranks" as Translate),
            group_free: own!(c"PMPI_Group_free" as FreeGroup),
            comm_remote_group: own!(c"PMPI_Comm_remote_group" as GroupOf),
            group_rank: own!(c"PMPI_Group_rank" as Getter),
            initialized: own!(c"PMPI_Initialized" as unsafe extern "C" fn(*mut c_int) -> c_int),
            group_of_session: {
                let found = look_up(handle, c"PMPI_Group_from_session_pset");
                // SAFETY: by the MPI standard, the function of this name has this type.
                (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, GroupFromSession>(found) })
            },
            sessions: [const { AtomicU64::new(0) }; 8],
        })
    }

    fn ask(&self, getter: Getter, handle: u64) -> Option<c_int> {
        let mut number = 0;
        // SAFETY: a valid handle that the host passed to a hooked function, and a place for the
        // result.
        (unsafe { getter(handle as Word, &mut number) } == 0).then_some(number)
    }

    /// This process's rank in a communicator and its size.
    pub(crate) fn rank_and_size(&self, comm: u64) -> Option<(i32, u32)> {
        Some((self.ask(self.comm_rank, comm)?, self.ask(self.comm_size, comm)? as u32))
    }

    /// Whether a communicator is an intercommunicator.
    pub(crate) fn is_inter(&self, comm: u64) -> bool {
        self.ask(self.comm_test_inter, comm).is_none_or(|flag| flag != 0)
    }

    /// The ranks of a communicator's members in the world, in order. `None` when they cannot be
    /// translated.
    pub(crate) fn world_ranks(&self, comm: u64) -> Option<Vec<c_int>> {
        self.with_group(self.comm_group, comm, |group| self.world_ranks_of(group))?
    }

    /// The ranks of the remote group of an intercommunicator.
    pub(crate) fn remote_ranks(&self, comm: u64) -> Option<Vec<c_int>> {
        self.with_group(self.comm_remote_group, comm, |group| self.world_ranks_of(group))?
    }

    /// The ranks of a group. Members that are not in the world, such as spawned processes, cannot
    /// be translated.
    pub(crate) fn world_ranks_of(&self, group: u64) -> Option<Vec<c_int>> {
        let size = self.ask(self.group_size, group)?;
        let own: Vec<c_int> = (0..size).collect();
        let mut ranks = vec![0; own.len()];
        let translated = self.with_world(|world| {
            // SAFETY: two valid groups, and arrays of `size` numbers.
            unsafe { (self.group_translate)(group as Word, size, own.as_ptr(), world as Word, ranks.as_mut_ptr()) }
        })?;
        (translated == 0 && ranks.iter().all(|rank| *rank >= 0)).then_some(ranks)
    }

    /// This process's rank in a group.
    pub(crate) fn rank_in_group(&self, group: u64) -> Option<c_int> {
        self.ask(self.group_rank, group).filter(|rank| *rank >= 0)
    }

    /// Records a new session.
    pub(crate) fn set_session(&self, session: u64) {
        let free =
            |place: &&AtomicU64| place.compare_exchange(0, session, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let _ = self.sessions.iter().find(free);
    }

    /// Removes a finalized session.
    pub(crate) fn forget_session(&self, session: u64) {
        for place in self.sessions.iter().filter(|_| session != 0) {
            let _ = place.compare_exchange(session, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Calls a closure with the group of all processes: that of `MPI_COMM_WORLD`, or of a session
    /// in a program that only uses sessions, where `MPI_COMM_WORLD` must not be used.
    fn with_world<R>(&self, use_it: impl FnOnce(u64) -> R) -> Option<R> {
        let mut flag = 0;
        // SAFETY: a place for an int. The function may be called at any time.
        if unsafe { (self.initialized)(&mut flag) } == 0 && flag != 0 {
            return self.with_group(self.comm_group, self.abi.world, use_it);
        }
        let of_session = self.group_of_session?;
        let session = self.sessions.iter().map(|place| place.load(Ordering::Relaxed)).find(|session| *session != 0)?;
        let mut group = 0;
        // SAFETY: an open session, the standard's name for the set of all processes, and a place
        // for a handle.
        let result = unsafe { of_session(session as Word, c"mpi://WORLD".as_ptr(), &mut group) };
        (result == 0).then(|| self.and_free(group, use_it))
    }

    fn with_group<R>(&self, group_of: GroupOf, comm: u64, use_it: impl FnOnce(u64) -> R) -> Option<R> {
        let mut group = 0;
        // SAFETY: a valid communicator, and a place that is large enough for a handle of each ABI.
        let result = unsafe { group_of(comm as Word, &mut group) };
        (result == 0).then(|| self.and_free(group, use_it))
    }

    fn and_free<R>(&self, mut group: u64, use_it: impl FnOnce(u64) -> R) -> R {
        let result = use_it(self.abi.handle(group as Word));
        // SAFETY: a group that was created above and that nothing else uses.
        unsafe { (self.group_free)(&mut group) };
        result
    }

    /// Element count and type. For a type that is not predefined, it is the number of bytes and an
    /// unspecified type.
    pub(crate) fn shape(&self, count: i64, dtype: Word) -> (u64, DataType) {
        let handle = self.abi.handle(dtype);
        let count = count.max(0) as u64;
        if let Some((_, dtype)) = self.types.iter().find(|(known, _)| *known == handle) {
            return (count, *dtype);
        }
        let bytes = self.ask(self.type_size, handle).unwrap_or(0).max(0) as u64;
        (count * bytes, DataType::Unspecified)
    }
}

impl Abi {
    const MPICH: Abi = Abi {
        mask: 0xffff_ffff,
        world: 0x4400_0000,
        comm_null: 0x0400_0000,
        request_null: 0x2c00_0000,
        any_source: -2,
        proc_null: -1,
        any_tag: -1,
    };
    /// The standard ABI of MPI 5.
    const STANDARD: Abi = Abi {
        mask: u64::MAX,
        world: 0x101,
        comm_null: 0x100,
        request_null: 0x180,
        any_source: -1,
        proc_null: -3,
        any_tag: -2,
    };

    fn open_mpi(world: u64, comm_null: u64, request_null: u64) -> Abi {
        Abi { mask: u64::MAX, world, comm_null, request_null, any_source: -1, proc_null: -2, any_tag: -1 }
    }

    /// The handle in a word.
    pub(crate) fn handle(&self, word: Word) -> u64 {
        word as u64 & self.mask
    }

    /// A handle in memory that the library wrote or that the host keeps in an array.
    ///
    /// # Safety
    /// `place` is null or points to `index + 1` handles.
    pub(crate) unsafe fn handle_at(&self, place: Word, index: usize) -> u64 {
        match (place, self.mask) {
            (0, _) => 0,
            // SAFETY: by the contract of this function, `index` lies in the array; these handles
            // are 64 bits.
            (_, u64::MAX) => unsafe { *(place as *const u64).add(index) },
            // SAFETY: by the contract of this function, `index` lies in the array; these handles
            // are 32 bits.
            _ => u64::from(unsafe { *(place as *const u32).add(index) }),
        }
    }
}

/// Whether a buffer argument is `MPI_IN_PLACE`.
pub(crate) fn is_in_place(buffer: Word) -> bool {
    IN_PLACE.contains(&(buffer as isize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_with_the_width_of_its_abi() {
        let pair: [u32; 4] = [0x4400_0000, 0x8400_0001, 7, 0];
        let place = pair.as_ptr() as Word;
        let open_mpi = Abi::open_mpi(1, 2, 3);
        // SAFETY: four 32-bit or two 64-bit handles.
        unsafe {
            assert_eq!(Abi::MPICH.handle_at(place, 1), 0x8400_0001);
            assert_eq!(open_mpi.handle_at(place, 0), 0x8400_0001_4400_0000);
            assert_eq!(open_mpi.handle_at(place, 1), 7);
            assert_eq!(open_mpi.handle_at(0, 0), 0);
        }
        assert_eq!(Abi::MPICH.handle(0xdead_beef_4400_0000), Abi::MPICH.world);
    }

    #[test]
    fn a_process_without_mpi_has_no_library() {
        assert!(library().is_none());
    }

    #[test]
    fn in_place_is_recognized_in_every_abi() {
        assert!(is_in_place(1) && is_in_place(usize::MAX) && !is_in_place(0) && !is_in_place(0x1000));
    }
}
