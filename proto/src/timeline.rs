//! The timeline of a rank: operations as blocks of columns, and files of blocks.
//!
//! The collector keeps the blocks of each rank in memory, and writes them unchanged into a file or
//! a response. `xpu_timer/v1/timeline.proto` describes the columns. A block of a training loop
//! takes about 15 bytes for an operation.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    path::Path,
};

use prost::Message;

use crate::{
    lenient, samples,
    v1::{OpStatus, Operation, TimelineBlock, TimelineChunk, TimelineHead, timeline_chunk::Part},
};

/// Version of the format.
pub const FORMAT: u32 = 2;
/// Extension of the files.
pub const EXTENSION: &str = "ops";
/// A file of an incident folder, as long as the timelines of its ranks are still being fetched or
/// written.
pub const PENDING: &str = "timelines.pending";
/// Number of operations of a full block. A reader accepts no larger block.
pub const BLOCK_OPERATIONS: usize = 4096;
/// A larger chunk is not read.
const MOST_CHUNK_BYTES: u64 = 64 << 20;
/// Bits of the status column below the error code.
const STATUS_BITS: u32 = 2;

/// Name of the file of one rank.
#[must_use]
pub fn file_name(rank: u32, world_size: u32) -> String {
    samples::name_of_rank(rank, world_size, EXTENSION)
}

/// A [`TimelineBlock`] as it is on the wire, where a column is a byte string: its values one after
/// the other, as varints. A column grows by a few bytes with each operation, and writing the block
/// copies the columns.
#[derive(Clone, PartialEq, prost::Message)]
struct EncodedBlock {
    #[prost(uint32, tag = "1")]
    operations: u32,
    #[prost(message, repeated, tag = "2")]
    shapes: Vec<Operation>,
    #[prost(bytes = "vec", tag = "3")]
    shape: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    ticket: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    seq: Vec<u8>,
    #[prost(bytes = "vec", tag = "6")]
    entered: Vec<u8>,
    #[prost(bytes = "vec", tag = "7")]
    returned: Vec<u8>,
    #[prost(bytes = "vec", tag = "8")]
    started: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    completed: Vec<u8>,
    #[prost(bytes = "vec", tag = "10")]
    device: Vec<u8>,
    #[prost(bytes = "vec", tag = "11")]
    status: Vec<u8>,
    #[prost(bytes = "vec", tag = "12")]
    group: Vec<u8>,
}

/// A [`TimelineChunk`] of such a block.
#[derive(Clone, PartialEq, prost::Message)]
struct EncodedChunk {
    #[prost(message, optional, tag = "2")]
    block: Option<EncodedBlock>,
}

/// Collects operations into a block.
#[derive(Debug, Default)]
pub struct BlockBuilder {
    block: EncodedBlock,
    /// Index of each shape, by its encoding.
    shapes: HashMap<Vec<u8>, u32>,
    /// Sequence number that is expected next for each shape.
    next_seq: Vec<u64>,
    /// The shape that last followed each shape: a training loop repeats its operations.
    successor: Vec<u32>,
    last_shape: u32,
    next_ticket: u64,
    entered_ns: u64,
    group: u64,
    scratch: Vec<u8>,
}

impl BlockBuilder {
    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.block.operations as usize
    }

    /// Whether it has no operation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.block.operations == 0
    }

    /// Whether it has [`BLOCK_OPERATIONS`].
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= BLOCK_OPERATIONS
    }

    /// Appends an operation.
    pub fn push(&mut self, operation: &Operation) {
        let shape = self.shape(operation);
        let block = &mut self.block;
        let before = block.operations as usize;
        let put_signed = |column: &mut Vec<u8>, value: i64| put_signed(column, before, value);
        block.operations += 1;
        put(&mut block.shape, u64::from(shape));
        put_signed(&mut block.ticket, difference(operation.ticket, self.next_ticket));
        self.next_ticket = operation.ticket.wrapping_add(1);
        let next_seq = &mut self.next_seq[shape as usize];
        put_signed(&mut block.seq, difference(operation.seq, *next_seq));
        *next_seq = operation.seq.wrapping_add(1);
        put_signed(&mut block.entered, difference(operation.entered_ns, self.entered_ns));
        self.entered_ns = operation.entered_ns;
        let since_entered = |ns: u64| if ns == 0 { 0 } else { difference(ns, operation.entered_ns).wrapping_add(1) };
        put_signed(&mut block.returned, since_entered(operation.returned_ns));
        put_signed(&mut block.started, since_entered(operation.started_ns));
        let ran_ns = difference(operation.completed_ns, begin_ns(operation));
        put_signed(&mut block.completed, ran_ns);
        put_signed(&mut block.device, (operation.device_ns as i64).wrapping_sub(ran_ns));
        let status = i64::from(operation.error) << STATUS_BITS | i64::from(operation.status);
        put_signed(&mut block.status, status ^ OpStatus::Completed as i64);
        put_signed(&mut block.group, difference(operation.group, self.group));
        self.group = operation.group;
    }

    /// Memory of its operations, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let EncodedBlock {
            operations: _,
            shapes,
            shape,
            ticket,
            seq,
            entered,
            returned,
            started,
            completed,
            device,
            status,
            group,
        } = &self.block;
        let columns = [shape, ticket, seq, entered, returned, started, completed, device, status, group];
        columns.into_iter().map(Vec::len).sum::<usize>() + shapes.len() * size_of::<Operation>()
    }

    /// The block. The builder is empty then.
    pub fn finish(&mut self) -> TimelineBlock {
        let bytes = self.block.encode_to_vec();
        self.clear();
        TimelineBlock::decode(&bytes[..]).expect("it was encoded here")
    }

    /// The block as a chunk of a file. The builder is empty then.
    pub fn finish_chunk(&mut self) -> Vec<u8> {
        let mut chunk = EncodedChunk { block: Some(std::mem::take(&mut self.block)) };
        let bytes = chunk.encode_length_delimited_to_vec();
        // The next block uses the memory of the columns.
        self.block = chunk.block.take().unwrap_or_default();
        self.clear();
        bytes
    }

    fn clear(&mut self) {
        let mut block = std::mem::take(&mut self.block);
        block.clear();
        *self = BlockBuilder { block, scratch: std::mem::take(&mut self.scratch), ..BlockBuilder::default() };
    }

    fn shape(&mut self, operation: &Operation) -> u32 {
        let followed = self.successor.get(self.last_shape as usize).copied();
        let expected = followed.filter(|index| is_of_shape(operation, &self.block.shapes[*index as usize]));
        let index = expected.unwrap_or_else(|| self.find_shape(operation));
        if let Some(successor) = self.successor.get_mut(self.last_shape as usize) {
            *successor = index;
        }
        self.last_shape = index;
        index
    }

    fn find_shape(&mut self, operation: &Operation) -> u32 {
        let shape = shape_of(operation);
        self.scratch.clear();
        shape.encode(&mut self.scratch).expect("a vector grows");
        if let Some(index) = self.shapes.get(&self.scratch) {
            return *index;
        }
        let index = self.block.shapes.len() as u32;
        self.shapes.insert(self.scratch.clone(), index);
        self.block.shapes.push(shape);
        self.next_seq.push(0);
        self.successor.push(index);
        index
    }
}

/// The description of an operation without what differs between operations of one kind: ticket,
/// sequence number, group, times and status.
#[must_use]
pub fn shape_of(operation: &Operation) -> Operation {
    Operation {
        ticket: 0,
        seq: 0,
        entered_ns: 0,
        returned_ns: 0,
        started_ns: 0,
        completed_ns: 0,
        device_ns: 0,
        status: 0,
        error: 0,
        group: 0,
        ..operation.clone()
    }
}

/// Whether an operation has this shape.
fn is_of_shape(operation: &Operation, shape: &Operation) -> bool {
    // All fields are named, so that a new one is not forgotten.
    let Operation {
        ticket: _,
        seq: _,
        entered_ns: _,
        returned_ns: _,
        started_ns: _,
        completed_ns: _,
        device_ns: _,
        status: _,
        error: _,
        group: _,
        kind,
        op,
        communicator,
        count,
        dtype,
        reduce_op,
        peer,
        stream,
        tid,
        function,
        matmul,
        tag,
        store_keys,
        store_key_count,
        launch,
        direction,
        collection,
    } = operation;
    let numbers = (*kind, *op, *communicator, *count, *dtype, *reduce_op, *peer, *stream, *tid);
    let of_shape = (
        shape.kind,
        shape.op,
        shape.communicator,
        shape.count,
        shape.dtype,
        shape.reduce_op,
        shape.peer,
        shape.stream,
        shape.tid,
    );
    numbers == of_shape
        && (*tag, *store_key_count, *direction) == (shape.tag, shape.store_key_count, shape.direction)
        && *matmul == shape.matmul
        && *launch == shape.launch
        && *collection == shape.collection
        && is_same_text(function, &shape.function)
        && *store_keys == shape.store_keys
}

/// Whether two texts that are often empty are equal. Comparing empty ones with `memcmp` takes a
/// hundred nanoseconds on processors with AVX-512: glibc loads from their dangling pointers under
/// an empty mask, and the processor has to suppress the page fault.
#[must_use]
pub fn is_same_text(one: &str, other: &str) -> bool {
    one.len() == other.len() && (one.is_empty() || one == other)
}

/// When an operation began on its device, else on its host.
fn begin_ns(operation: &Operation) -> u64 {
    if operation.started_ns == 0 { operation.entered_ns } else { operation.started_ns }
}

fn difference(value: u64, base: u64) -> i64 {
    value.wrapping_sub(base) as i64
}

/// Appends a number as a varint.
fn put(column: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        column.push(value as u8 | 0x80);
        value >>= 7;
    }
    column.push(value as u8);
}

/// Appends a number to a column of `before` numbers as `sint64` does: numbers near 0 are short. A
/// column is empty as long as all its numbers are 0.
fn put_signed(column: &mut Vec<u8>, before: usize, value: i64) {
    if column.is_empty() {
        if value == 0 {
            return;
        }
        column.resize(before, 0);
    }
    put(column, (value << 1 ^ value >> 63) as u64);
}

/// Iterates over the operations of a block, in the order in which they were added.
///
/// # Errors
/// If the block contradicts itself: a column of another length, or a shape that does not exist.
pub fn operations(block: &TimelineBlock) -> io::Result<impl Iterator<Item = Operation> + '_> {
    times(block).map(|times| times.map(|times| times.operation(block)))
}

/// The part of an operation that differs between operations of one shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Index into [`TimelineBlock::shapes`].
    pub shape: u32,
    /// See [`Operation::ticket`].
    pub ticket: u64,
    /// See [`Operation::seq`].
    pub seq: u64,
    /// See [`Operation::entered_ns`].
    pub entered_ns: u64,
    /// See [`Operation::returned_ns`].
    pub returned_ns: u64,
    /// See [`Operation::started_ns`].
    pub started_ns: u64,
    /// See [`Operation::completed_ns`].
    pub completed_ns: u64,
    /// See [`Operation::device_ns`].
    pub device_ns: u64,
    /// [`OpStatus`].
    pub status: i32,
    /// See [`Operation::error`].
    pub error: u32,
    /// See [`Operation::group`].
    pub group: u64,
}

impl Times {
    /// The whole operation.
    #[must_use]
    pub fn operation(&self, block: &TimelineBlock) -> Operation {
        Operation {
            ticket: self.ticket,
            seq: self.seq,
            entered_ns: self.entered_ns,
            returned_ns: self.returned_ns,
            started_ns: self.started_ns,
            completed_ns: self.completed_ns,
            device_ns: self.device_ns,
            status: self.status,
            error: self.error,
            group: self.group,
            ..block.shapes[self.shape as usize].clone()
        }
    }
}

/// Iterates over the operations of a block without copying their shapes.
///
/// # Errors
/// The errors of [`operations`].
pub fn times(block: &TimelineBlock) -> io::Result<impl Iterator<Item = Times> + '_> {
    let count = block.operations as usize;
    let is_complete = |length: usize| length == count || length == 0;
    let lengths = [
        block.ticket.len(),
        block.seq.len(),
        block.entered.len(),
        block.returned.len(),
        block.started.len(),
        block.completed.len(),
        block.device.len(),
        block.status.len(),
        block.group.len(),
    ];
    let shapes = block.shapes.len();
    if count > BLOCK_OPERATIONS
        || block.shape.len() != count
        || !lengths.into_iter().all(is_complete)
        || block.shape.iter().any(|shape| *shape as usize >= shapes)
    {
        return Err(invalid("a block of the timeline contradicts itself"));
    }
    let mut next_seq = vec![0_u64; shapes];
    let (mut next_ticket, mut entered_ns, mut group) = (0_u64, 0_u64, 0_u64);
    Ok((0..count).map(move |index| {
        let value = |column: &[i64]| column.get(index).copied().unwrap_or(0);
        let shape = block.shape[index];
        let ticket = next_ticket.wrapping_add_signed(value(&block.ticket));
        next_ticket = ticket.wrapping_add(1);
        let next_seq = &mut next_seq[shape as usize];
        let seq = next_seq.wrapping_add_signed(value(&block.seq));
        *next_seq = seq.wrapping_add(1);
        entered_ns = entered_ns.wrapping_add_signed(value(&block.entered));
        let since_entered = |value: i64| match value {
            0 => 0,
            value => entered_ns.wrapping_add_signed(value.wrapping_sub(1)),
        };
        let started_ns = since_entered(value(&block.started));
        let ran_ns = value(&block.completed);
        let status = value(&block.status) ^ OpStatus::Completed as i64;
        group = group.wrapping_add_signed(value(&block.group));
        Times {
            shape,
            ticket,
            seq,
            entered_ns,
            returned_ns: since_entered(value(&block.returned)),
            started_ns,
            completed_ns: if started_ns == 0 { entered_ns } else { started_ns }.wrapping_add_signed(ran_ns),
            device_ns: value(&block.device).wrapping_add(ran_ns) as u64,
            status: (status & ((1 << STATUS_BITS) - 1)) as i32,
            error: (status >> STATUS_BITS) as u32,
            group,
        }
    }))
}

/// Appends one chunk.
///
/// # Errors
/// The errors of `out`.
pub fn write(out: &mut impl Write, part: Part) -> io::Result<()> {
    out.write_all(&TimelineChunk { part: Some(part) }.encode_length_delimited_to_vec())
}

/// Reads a file chunk by chunk.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    /// The first chunk.
    pub head: TimelineHead,
}

impl<R: Read> Reader<R> {
    /// Reads the head.
    ///
    /// # Errors
    /// The errors of `input`, or that it is not a timeline of this or an earlier version.
    pub fn new(mut input: R) -> io::Result<Self> {
        match next_part(&mut input)? {
            Some(Part::Head(head)) if head.format == FORMAT => Ok(Reader { input, head }),
            Some(Part::Head(head)) => Err(invalid(&format!(
                "the timeline has format {}, and this program reads format {FORMAT}: update xpu_timer",
                head.format
            ))),
            _ => Err(invalid("this is not a timeline of xpu_timer: it has no head")),
        }
    }

    /// The next block; `None` at the end.
    ///
    /// # Errors
    /// The errors of the input, or that it ends within a chunk.
    pub fn next_block(&mut self) -> io::Result<Option<TimelineBlock>> {
        match next_part(&mut self.input)? {
            Some(Part::Block(block)) => Ok(Some(block)),
            Some(Part::Head(_)) => Err(invalid("the timeline has two heads")),
            None => Ok(None),
        }
    }
}

/// The rank and the world size in the name of a file of operations or of stack samples; `None` for
/// other files.
#[must_use]
pub fn rank_of_file(path: &Path) -> Option<(u32, u32)> {
    let (stem, extension) = path.file_name()?.to_str()?.rsplit_once('.')?;
    let (rank, world) = stem.split_once('-').filter(|_| [EXTENSION, samples::EXTENSION].contains(&extension))?;
    Some((rank.parse().ok()?, world.parse().ok()?))
}

fn next_part(input: &mut impl Read) -> io::Result<Option<Part>> {
    let Some(length) = length(input)? else { return Ok(None) };
    if length > MOST_CHUNK_BYTES {
        return Err(invalid("a chunk of the timeline is larger than 64 MiB"));
    }
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the timeline ends within a chunk"));
    }
    let chunk: TimelineChunk = lenient::decode(&bytes).map_err(|error| invalid(&error.to_string()))?;
    chunk.part.map(Some).ok_or_else(|| invalid("a chunk of the timeline is of an unknown kind"))
}

/// A varint; `None` at the end of the input.
fn length(input: &mut impl Read) -> io::Result<Option<u64>> {
    let mut length = 0_u64;
    for shift in (0..63).step_by(7) {
        let mut byte = [0];
        match input.read_exact(&mut byte) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && shift == 0 => return Ok(None),
            Err(error) => return Err(error),
        }
        length |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] & 0x80 == 0 {
            return Ok(Some(length));
        }
    }
    Err(invalid("the length of a chunk of the timeline is not a varint"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Op, OpKind};

    fn steps(count: u64) -> Vec<Operation> {
        (0..count)
            .map(|step| Operation {
                ticket: 100 + step,
                kind: OpKind::Collective.into(),
                op: if step % 3 == 0 { Op::AllReduce } else { Op::AllGather }.into(),
                communicator: 0xfeed_beef_0000_0001,
                seq: step + 1,
                count: 1 << 20,
                stream: 0x7f00_1234_5678,
                tid: 4321,
                entered_ns: 5_000_000_000 + step * 1_000_017,
                returned_ns: 5_000_004_000 + step * 1_000_017,
                started_ns: if step % 7 == 0 { 0 } else { 5_000_030_000 + step * 1_000_019 },
                completed_ns: 5_000_900_000 + step * 1_000_021,
                device_ns: 870_001,
                status: OpStatus::Completed.into(),
                ..Default::default()
            })
            .collect()
    }

    fn block(operations: &[Operation]) -> TimelineBlock {
        let mut builder = BlockBuilder::default();
        operations.iter().for_each(|operation| builder.push(operation));
        builder.finish()
    }

    #[test]
    fn operations_are_read_as_they_were_added() {
        let mut given = steps(500);
        given[7] = Operation { status: OpStatus::Failed.into(), error: 700, ..given[7].clone() };
        given[8] = Operation { status: OpStatus::Aborted.into(), returned_ns: 0, ..given[8].clone() };
        given[9] = Operation::default();
        given[10] = Operation { ticket: u64::MAX, seq: u64::MAX, entered_ns: u64::MAX, ..given[10].clone() };
        let block = block(&given);
        let read: Vec<Operation> = operations(&block).unwrap().collect();
        assert_eq!(read.len(), given.len());
        read.iter().zip(&given).for_each(|(read, given)| assert_eq!(read, given));
    }

    #[test]
    fn a_new_group_is_not_a_new_shape() {
        let mut given = steps(500);
        for (index, operation) in given.iter_mut().enumerate().filter(|(index, _)| index % 5 < 2) {
            operation.group = 1 + index as u64 / 5;
        }
        given[9].group = u64::MAX;
        let block = block(&given);
        assert_eq!(block.shapes.len(), 2);
        let read: Vec<u64> = times(&block).unwrap().map(|times| times.group).collect();
        assert_eq!(read, given.iter().map(|operation| operation.group).collect::<Vec<_>>());
        assert_eq!(operations(&block).unwrap().collect::<Vec<_>>(), given);
    }

    #[test]
    fn an_operation_takes_few_bytes() {
        let bytes = block(&steps(4096)).encoded_len();
        assert!(bytes < 4096 * 20, "{} bytes for an operation", bytes / 4096);
    }

    #[test]
    fn a_file_is_read_chunk_by_chunk_and_a_cut_one_is_an_error() {
        let mut file = Vec::new();
        let head = TimelineHead { format: FORMAT, lost: 3, ..Default::default() };
        write(&mut file, Part::Head(head.clone())).unwrap();
        for _ in 0..2 {
            write(&mut file, Part::Block(block(&steps(100)))).unwrap();
        }
        let mut reader = Reader::new(&file[..]).unwrap();
        assert_eq!(reader.head, head);
        assert!(reader.next_block().unwrap().is_some() && reader.next_block().unwrap().is_some());
        assert_eq!(reader.next_block().unwrap(), None);

        let mut reader = Reader::new(&file[..file.len() - 1]).unwrap();
        reader.next_block().unwrap();
        assert_eq!(reader.next_block().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(Reader::new(&b"\x02\x0a\x00"[..]).unwrap_err().to_string().contains("format 0"));
        assert!(Reader::new(&b""[..]).is_err());
    }

    #[test]
    fn a_block_that_contradicts_itself_is_an_error() {
        let good = block(&steps(10));
        let wrong = [
            TimelineBlock { operations: 11, ..good.clone() },
            TimelineBlock { shape: vec![9; 10], ..good.clone() },
            TimelineBlock { started: vec![1; 9], ..good.clone() },
            TimelineBlock { operations: u32::MAX, ..good },
        ];
        for block in wrong {
            assert!(operations(&block).is_err());
        }
    }

    #[test]
    fn the_name_of_a_file_has_rank_and_world() {
        assert_eq!(file_name(3, 8), "00003-00008.ops");
        assert_eq!(rank_of_file(Path::new("/x/00003-00008.ops")), Some((3, 8)));
        assert_eq!(rank_of_file(Path::new("/x/00003-00008.samples")), Some((3, 8)));
        assert_eq!(rank_of_file(Path::new("/x/00003-00008.stacktrace")), None);
    }
}
