//! NCCL's types and codes.

use crate::ffi::NullPointer;

/// ncclComm_t.
pub type CommHandle = usize;

/// ncclUniqueId, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    /// Opaque.
    pub internal: [u8; 128],
}

/// The head of ncclConfig_t. The rest differs between versions and is not read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Bytes of the caller's structure.
    pub size: usize,
    /// 0xcafebeef.
    pub magic: u32,
    /// The caller's NCCL version.
    pub version: u32,
    /// 0 for a nonblocking communicator; i32::MIN if the caller did not set it.
    pub blocking: i32,
}

/// The value of `Config::magic`.
pub const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The color of a rank that takes part in a split without getting a communicator.
pub const SPLIT_NO_COLOR: i32 = -1;
/// The version that the simulated library reports: 2.30.3.
pub const NCCL_VERSION: i32 = 23003;

/// An ncclResult_t other than ncclSuccess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclError(pub i32);

impl NcclError {
    /// A call into the driver failed.
    pub const UNHANDLED_CUDA: NcclError = NcclError(1);
    /// The operating system refused something.
    pub const SYSTEM: NcclError = NcclError(2);
    /// A bug of the library.
    pub const INTERNAL: NcclError = NcclError(3);
    /// An argument is not valid.
    pub const INVALID_ARGUMENT: NcclError = NcclError(4);
    /// A call is not valid here.
    pub const INVALID_USAGE: NcclError = NcclError(5);
    /// Another rank failed.
    pub const REMOTE: NcclError = NcclError(6);
    /// Not an error: a nonblocking communicator is still working.
    pub const IN_PROGRESS: NcclError = NcclError(7);
}

impl From<NullPointer> for NcclError {
    fn from(_: NullPointer) -> Self {
        NcclError::INVALID_ARGUMENT
    }
}

/// ncclDataType_t.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// ncclInt8, ncclChar.
    I8 = 0,
    /// ncclUint8.
    U8 = 1,
    /// ncclInt32.
    I32 = 2,
    /// ncclUint32.
    U32 = 3,
    /// ncclInt64.
    I64 = 4,
    /// ncclUint64.
    U64 = 5,
    /// ncclFloat16.
    F16 = 6,
    /// ncclFloat32.
    F32 = 7,
    /// ncclFloat64.
    F64 = 8,
    /// ncclBfloat16.
    Bf16 = 9,
    /// ncclFloat8e4m3.
    F8E4M3 = 10,
    /// ncclFloat8e5m2.
    F8E5M2 = 11,
}

impl DataType {
    const ALL: [DataType; 12] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::Bf16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ];

    /// The type of NCCL's number.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// Bytes of one element.
    #[must_use]
    pub fn width(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }

    /// Its name in the names of NCCL's kernels, which do not distinguish signed types.
    #[must_use]
    pub fn kernel_name(self) -> &'static str {
        match self {
            DataType::I8 | DataType::U8 => "u8",
            DataType::I32 | DataType::U32 => "u32",
            DataType::I64 | DataType::U64 => "u64",
            DataType::F16 => "f16",
            DataType::F32 => "f32",
            DataType::F64 => "f64",
            DataType::Bf16 => "bf16",
            DataType::F8E4M3 => "f8e4m3",
            DataType::F8E5M2 => "f8e5m2",
        }
    }
}

/// ncclRedOp_t of the predefined operations.
pub const SUM: u32 = 0;
/// Product.
pub const PROD: u32 = 1;
/// Maximum.
pub const MAX: u32 = 2;
/// Minimum.
pub const MIN: u32 = 3;
/// Sum divided by the number of ranks.
pub const AVG: u32 = 4;
