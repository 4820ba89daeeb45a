//! Decodes the part of a `.stacktrace` file that the viewer shows, without copying it.
//!
//! The folder of a large job contains hundreds of megabytes, but the pictures need only two strings
//! of each frame. This decoder therefore reads the wire format itself and skips the rest. It
//! accepts everything that `prost` accepts, with equal strings; `tests/fuzz` checks that. Parts
//! that only the report shows (other samples, children, the flight record) stay encoded until
//! [`Sample::decode`].

use std::borrow::Cow;
use std::ops::Range;
use xpu_timer_proto::server::{
    ChildProcess, ProcessSample, PstackFrame, PstackStacktrace, PySpyStacktrace, PySuspended, Stacktrace,
};

/// One frame. Its names stay bytes until [`Frame::text`] converts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Function name.
    pub func: &'a [u8],
    /// `path:line`, or the shared object.
    pub file: &'a [u8],
}

impl<'a> Frame<'a> {
    /// A frame with names that are valid UTF-8.
    pub fn new(func: &'a str, file: &'a str) -> Frame<'a> {
        Frame { func: func.as_bytes(), file: file.as_bytes() }
    }

    /// Function and file as text, decoded as [`lenient`](xpu_timer_proto::lenient) does: invalid
    /// UTF-8 is replaced.
    pub fn text(&self) -> (Cow<'a, str>, Cow<'a, str>) {
        (String::from_utf8_lossy(self.func), String::from_utf8_lossy(self.file))
    }
}

/// One thread. Its texts are bytes, because the kernel cuts names after 15 bytes, perhaps within a
/// character.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Thread<'a> {
    /// Kernel thread id; 0 when unknown.
    pub tid: u32,
    /// Name of the thread.
    pub name: &'a [u8],
    /// Its frames, leaf first: a range of [`Threads::frames`].
    pub frames: Range<usize>,
    /// Such as `S (sleeping)`. This field and all below are set for native threads only,
    /// except the last two.
    pub state: &'a [u8],
    /// Kernel function in which it sleeps.
    pub wchan: &'a [u8],
    /// Kernel stack, leaf first.
    pub kernel_stack: Vec<&'a [u8]>,
    /// How the stack was captured: a number of `CaptureMethod`.
    pub capture: i32,
    /// Number of context switches so far.
    pub context_switches: u64,
    /// Why the stack is incomplete.
    pub incomplete: &'a [u8],
    /// Whether it holds the GIL; Python threads only.
    pub owns_gil: bool,
    /// Its tasks and greenlets that wait: a range of [`Threads::suspended`]; Python threads only.
    pub suspended: Range<usize>,
}

/// A task of asyncio that waits, or a greenlet that is switched away from.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Suspended<'a> {
    /// A number of `PySuspendedKind`.
    pub kind: i32,
    /// Its name.
    pub name: &'a [u8],
    /// Its frames, leaf first: a range of [`Threads::frames`].
    pub frames: Range<usize>,
    /// The object that it waits for.
    pub awaits: &'a [u8],
}

/// The threads of one process at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Threads<'a> {
    /// Native threads.
    pub native: Vec<Thread<'a>>,
    /// Python threads.
    pub python: Vec<Thread<'a>>,
    /// The frames of all threads, tasks and greenlets.
    pub frames: Vec<Frame<'a>>,
    /// The tasks and greenlets of all threads.
    pub suspended: Vec<Suspended<'a>>,
}

/// The contents of one file.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Dump<'a> {
    /// Process id.
    pub pid: i32,
    /// For example `S (sleeping)`.
    pub process_state: Cow<'a, str>,
    /// Errors of capturing native stacks.
    pub pstack_stderr: Cow<'a, str>,
    /// Errors of capturing Python stacks.
    pub pyspy_stderr: Cow<'a, str>,
    /// The last sample.
    pub threads: Threads<'a>,
    /// Encoded [`Sample`]: the first one.
    pub first_sample: Option<&'a [u8]>,
    /// Encoded [`Sample`]: the last one without its threads.
    pub last_sample: Option<&'a [u8]>,
    /// Encoded `ChildProcess` messages.
    pub children: Vec<&'a [u8]>,
    /// Encoded `FlightRecord`.
    pub flight_record: Option<&'a [u8]>,
    /// Host or pod.
    pub node: &'a [u8],
    /// Command line.
    pub command: &'a [u8],
}

/// One sample of one process.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Sample<'a> {
    /// Its threads.
    pub threads: Threads<'a>,
    /// For example `S (sleeping)`.
    pub process_state: &'a [u8],
    /// Wall clock, nanoseconds since the Unix epoch.
    pub captured_unix_ns: u64,
    /// CPU time of the process.
    pub cpu_time_ns: u64,
    /// Bytes that read and write calls moved; 0 when unknown.
    pub io_bytes: u64,
    /// Bytes over TCP connections; 0 when unknown.
    pub tcp_bytes: u64,
    /// The parts that could not be captured, one sentence each.
    pub errors: Vec<&'a [u8]>,
}

/// A child process of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Child<'a> {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent.
    pub parent: i32,
    /// Command line.
    pub command: &'a [u8],
    /// One or two, in chronological order.
    pub samples: Vec<Sample<'a>>,
}

/// Why a file is not a dump.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The file ends within a field.
    #[error("it ends within a field at byte {offset}")]
    Truncated {
        /// Where the field begins.
        offset: usize,
    },
    /// These bytes are not a protobuf message.
    #[error("no protobuf field begins at byte {offset}")]
    NoField {
        /// Offset of these bytes.
        offset: usize,
    },
    /// A field has a type that differs from the schema.
    #[error("field {field} at byte {offset} has a wrong type")]
    WrongType {
        /// Number of the field.
        field: u32,
        /// Where it begins.
        offset: usize,
    },
    /// The file contains no field of a dump, or is empty.
    #[error("it contains no dump")]
    NoDump,
}

/// Wire types of protobuf.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const GROUP: u8 = 3;
const END_GROUP: u8 = 4;
const FIXED32: u8 = 5;

/// Maximum nesting of groups within unknown fields.
const MAX_GROUPS: usize = 100;

impl<'a> Dump<'a> {
    /// Decodes a file.
    pub fn decode(file: &'a [u8]) -> Result<Dump<'a>, DecodeError> {
        let mut dump = Dump::default();
        let mut known = false;
        let mut reader = Reader::new(file);
        while let Some(field) = reader.next_field()? {
            known |= matches!(field.number,
                Stacktrace::STACKTRACE_FIELD..=Stacktrace::PROCESS_STATE_FIELD
                    | Stacktrace::FIRST_SAMPLE_FIELD..=Stacktrace::COMMAND_FIELD);
            match field.number {
                Stacktrace::STACKTRACE_FIELD => {
                    let thread = dump.threads.native_thread(reader.message(field)?)?;
                    dump.threads.native.push(thread);
                }
                Stacktrace::PY_STACKTRACE_FIELD => {
                    let thread = dump.threads.python_thread(reader.message(field)?)?;
                    dump.threads.python.push(thread);
                }
                // An int32 is its varint truncated to 32 bits.
                Stacktrace::PID_FIELD => dump.pid = reader.varint(field)? as i32,
                Stacktrace::PSTACK_STDERR_FIELD => dump.pstack_stderr = String::from_utf8_lossy(reader.bytes(field)?),
                Stacktrace::PYSPY_STDERR_FIELD => dump.pyspy_stderr = String::from_utf8_lossy(reader.bytes(field)?),
                Stacktrace::PROCESS_STATE_FIELD => dump.process_state = String::from_utf8_lossy(reader.bytes(field)?),
                // The pictures do not need these fields, so errors inside them do not make the file
                // invalid.
                Stacktrace::FIRST_SAMPLE_FIELD if field.wire == BYTES => dump.first_sample = Some(reader.bytes(field)?),
                Stacktrace::LAST_SAMPLE_FIELD if field.wire == BYTES => dump.last_sample = Some(reader.bytes(field)?),
                Stacktrace::CHILDREN_FIELD if field.wire == BYTES => dump.children.push(reader.bytes(field)?),
                Stacktrace::FLIGHT_RECORD_FIELD if field.wire == BYTES => {
                    dump.flight_record = Some(reader.bytes(field)?)
                }
                Stacktrace::NODE_FIELD if field.wire == BYTES => dump.node = reader.bytes(field)?,
                Stacktrace::COMMAND_FIELD if field.wire == BYTES => dump.command = reader.bytes(field)?,
                _ => reader.skip(field)?,
            }
        }
        if known { Ok(dump) } else { Err(DecodeError::NoDump) }
    }
}

impl<'a> Threads<'a> {
    /// The frames of one thread, leaf first.
    pub fn frames_of(&self, thread: &Thread<'a>) -> &[Frame<'a>] {
        &self.frames[thread.frames.clone()]
    }

    fn native_thread(&mut self, mut reader: Reader<'a>) -> Result<Thread<'a>, DecodeError> {
        let begin = self.frames.len();
        let mut thread = Thread::default();
        while let Some(field) = reader.next_field()? {
            match (field.number, field.wire) {
                (PstackStacktrace::FRAMES_FIELD, _) => self.frames.push(frame(reader.message(field)?)?),
                (PstackStacktrace::PID_FIELD, _) => thread.tid = reader.varint(field)? as u32,
                (PstackStacktrace::THREAD_NAME_FIELD, _) => thread.name = reader.bytes(field)?,
                (PstackStacktrace::STATE_FIELD, BYTES) => thread.state = reader.bytes(field)?,
                (PstackStacktrace::WCHAN_FIELD, BYTES) => thread.wchan = reader.bytes(field)?,
                (PstackStacktrace::KERNEL_STACK_FIELD, BYTES) => thread.kernel_stack.push(reader.bytes(field)?),
                (PstackStacktrace::CAPTURE_FIELD, VARINT) => thread.capture = reader.varint(field)? as i32,
                (PstackStacktrace::CONTEXT_SWITCHES_FIELD, VARINT) => thread.context_switches = reader.varint(field)?,
                (PstackStacktrace::INCOMPLETE_FIELD, BYTES) => thread.incomplete = reader.bytes(field)?,
                _ => reader.skip(field)?,
            }
        }
        thread.frames = begin..self.frames.len();
        Ok(thread)
    }

    fn python_thread(&mut self, mut reader: Reader<'a>) -> Result<Thread<'a>, DecodeError> {
        let begin = self.frames.len();
        let mut thread = Thread::default();
        let mut suspended = Vec::new();
        while let Some(field) = reader.next_field()? {
            match (field.number, field.wire) {
                (PySpyStacktrace::FRAMES_FIELD, _) => self.frames.push(frame(reader.message(field)?)?),
                (PySpyStacktrace::OS_THREAD_ID_FIELD, _) => thread.tid = reader.varint(field)? as u32,
                (PySpyStacktrace::THREAD_NAME_FIELD, _) => thread.name = reader.bytes(field)?,
                (PySpyStacktrace::OWNS_GIL_FIELD, VARINT) => thread.owns_gil = reader.varint(field)? != 0,
                // Their frames follow those of the thread, wherever they are in the file.
                (PySpyStacktrace::SUSPENDED_FIELD, BYTES) => suspended.push(reader.message(field)?),
                _ => reader.skip(field)?,
            }
        }
        thread.frames = begin..self.frames.len();
        let begin = self.suspended.len();
        for message in suspended {
            let suspended = self.one_suspended(message)?;
            self.suspended.push(suspended);
        }
        thread.suspended = begin..self.suspended.len();
        Ok(thread)
    }

    fn one_suspended(&mut self, mut reader: Reader<'a>) -> Result<Suspended<'a>, DecodeError> {
        let begin = self.frames.len();
        let mut suspended = Suspended::default();
        while let Some(field) = reader.next_field()? {
            match field.number {
                PySuspended::KIND_FIELD => suspended.kind = reader.varint(field)? as i32,
                PySuspended::NAME_FIELD => suspended.name = reader.bytes(field)?,
                PySuspended::FRAMES_FIELD => self.frames.push(frame(reader.message(field)?)?),
                PySuspended::AWAITS_FIELD => suspended.awaits = reader.bytes(field)?,
                _ => reader.skip(field)?,
            }
        }
        suspended.frames = begin..self.frames.len();
        Ok(suspended)
    }
}

impl<'a> Sample<'a> {
    /// Decodes a sample.
    pub fn decode(message: &'a [u8]) -> Result<Sample<'a>, DecodeError> {
        let mut sample = Sample::default();
        let mut reader = Reader::new(message);
        while let Some(field) = reader.next_field()? {
            match field.number {
                ProcessSample::STACKTRACE_FIELD => {
                    let thread = sample.threads.native_thread(reader.message(field)?)?;
                    sample.threads.native.push(thread);
                }
                ProcessSample::PY_STACKTRACE_FIELD => {
                    let thread = sample.threads.python_thread(reader.message(field)?)?;
                    sample.threads.python.push(thread);
                }
                ProcessSample::PROCESS_STATE_FIELD => sample.process_state = reader.bytes(field)?,
                ProcessSample::CAPTURED_UNIX_NS_FIELD => sample.captured_unix_ns = reader.varint(field)?,
                ProcessSample::CPU_TIME_NS_FIELD => sample.cpu_time_ns = reader.varint(field)?,
                ProcessSample::IO_BYTES_FIELD => sample.io_bytes = reader.varint(field)?,
                ProcessSample::ERRORS_FIELD => sample.errors.push(reader.bytes(field)?),
                ProcessSample::TCP_BYTES_FIELD => sample.tcp_bytes = reader.varint(field)?,
                _ => reader.skip(field)?,
            }
        }
        Ok(sample)
    }
}

impl<'a> Child<'a> {
    /// Decodes a child process.
    pub fn decode(message: &'a [u8]) -> Result<Child<'a>, DecodeError> {
        let mut child = Child::default();
        let mut reader = Reader::new(message);
        while let Some(field) = reader.next_field()? {
            match field.number {
                ChildProcess::PID_FIELD => child.pid = reader.varint(field)? as i32,
                ChildProcess::PARENT_PID_FIELD => child.parent = reader.varint(field)? as i32,
                ChildProcess::COMMAND_FIELD => child.command = reader.bytes(field)?,
                ChildProcess::SAMPLES_FIELD => child.samples.push(Sample::decode(reader.bytes(field)?)?),
                _ => reader.skip(field)?,
            }
        }
        Ok(child)
    }
}

/// A frame of either kind: both have equal numbers for these fields.
fn frame<'a>(mut reader: Reader<'a>) -> Result<Frame<'a>, DecodeError> {
    let mut frame = Frame { func: b"", file: b"" };
    while let Some(field) = reader.next_field()? {
        match field.number {
            PstackFrame::FUNC_NAME_FIELD => frame.func = reader.bytes(field)?,
            PstackFrame::FILE_NAME_FIELD => frame.file = reader.bytes(field)?,
            _ => reader.skip(field)?,
        }
    }
    Ok(frame)
}

/// The header of a field; its value follows.
#[derive(Clone, Copy)]
struct Field {
    number: u32,
    wire: u8,
    offset: usize,
}

impl Field {
    fn of_type(self, wire: u8) -> Result<(), DecodeError> {
        if self.wire == wire { Ok(()) } else { Err(DecodeError::WrongType { field: self.number, offset: self.offset }) }
    }
}

/// Reads one message at `at..end` of the file.
#[derive(Clone, Copy)]
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    fn new(file: &'a [u8]) -> Self {
        Reader { file, at: 0, end: file.len() }
    }

    #[inline]
    fn next_field(&mut self) -> Result<Option<Field>, DecodeError> {
        if self.at == self.end {
            return Ok(None);
        }
        let offset = self.at;
        let key = self.raw_varint()?;
        let wire = (key & 7) as u8;
        match u32::try_from(key >> 3) {
            Ok(number) if number > 0 && key <= u64::from(u32::MAX) && wire <= FIXED32 => {
                Ok(Some(Field { number, wire, offset }))
            }
            _ => Err(DecodeError::NoField { offset }),
        }
    }

    #[inline]
    fn raw_varint(&mut self) -> Result<u64, DecodeError> {
        let offset = self.at;
        let mut value = 0u64;
        for (i, &byte) in self.file[self.at..self.end].iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                self.at += i + 1;
                // The tenth byte has room for one bit.
                return if i == 9 && byte > 1 { Err(DecodeError::NoField { offset }) } else { Ok(value) };
            }
        }
        Err(if self.end - self.at < 10 { DecodeError::Truncated { offset } } else { DecodeError::NoField { offset } })
    }

    fn varint(&mut self, field: Field) -> Result<u64, DecodeError> {
        field.of_type(VARINT)?;
        self.raw_varint()
    }

    #[inline]
    fn advance(&mut self, bytes: u64, offset: usize) -> Result<Range<usize>, DecodeError> {
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= self.end - self.at => {
                let range = self.at..self.at + bytes;
                self.at = range.end;
                Ok(range)
            }
            _ => Err(DecodeError::Truncated { offset }),
        }
    }

    #[inline]
    fn message(&mut self, field: Field) -> Result<Reader<'a>, DecodeError> {
        field.of_type(BYTES)?;
        let length = self.raw_varint()?;
        let range = self.advance(length, field.offset)?;
        Ok(Reader { file: self.file, at: range.start, end: range.end })
    }

    #[inline]
    fn bytes(&mut self, field: Field) -> Result<&'a [u8], DecodeError> {
        let inner = self.message(field)?;
        Ok(&self.file[inner.at..inner.end])
    }

    #[inline]
    fn skip(&mut self, field: Field) -> Result<(), DecodeError> {
        self.skip_nested(field, MAX_GROUPS)
    }

    fn skip_nested(&mut self, field: Field, groups: usize) -> Result<(), DecodeError> {
        match field.wire {
            VARINT => {
                self.raw_varint()?;
            }
            FIXED64 => {
                self.advance(8, field.offset)?;
            }
            FIXED32 => {
                self.advance(4, field.offset)?;
            }
            BYTES => {
                self.message(field)?;
            }
            GROUP if groups > 0 => loop {
                match self.next_field()? {
                    None => return Err(DecodeError::Truncated { offset: field.offset }),
                    Some(end) if end.wire == END_GROUP && end.number == field.number => break,
                    Some(inner) => self.skip_nested(inner, groups - 1)?,
                }
            },
            _ => return Err(DecodeError::NoField { offset: field.offset }),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_dumps_are_rejected() {
        assert_eq!(Dump::decode(b""), Err(DecodeError::NoDump));
        assert_eq!(Dump::decode(&[0; 64]), Err(DecodeError::NoField { offset: 0 }));
        // Only field 90: a message of some other program.
        assert_eq!(Dump::decode(&[0xd0, 0x05, 0x01]), Err(DecodeError::NoDump));
        assert!(Dump::decode(b"\x7fELF\x02\x01\x01").is_err());
        assert!(Dump::decode(b"{\"json\": true}").is_err());
        assert_eq!(
            Dump::decode(&[0x5a, 2, b'a', 0xff]),
            Ok(Dump { process_state: "a\u{fffd}".into(), ..Dump::default() })
        );
        assert_eq!(Dump::decode(&[0x58, 2]), Err(DecodeError::WrongType { field: 11, offset: 0 }));
        assert_eq!(Dump::decode(&[0x5a, 200, 1]), Err(DecodeError::Truncated { offset: 0 }));
    }

    #[test]
    fn tasks_before_the_frames_of_their_thread_keep_their_own() {
        // A Python thread whose task `a` comes before the thread's frame `f`, and whose task `b`
        // follows it.
        let task = |name: u8, frame: u8| [0xba, 0x06, 8, 0x12, 1, name, 0x1a, 3, 0x0a, 1, frame];
        let thread = [&task(b'a', b'g')[..], &[0x3a, 3, 0x0a, 1, b'f'], &task(b'b', b'h')].concat();
        let file = [&[0x12, thread.len() as u8][..], &thread].concat();
        let threads = Dump::decode(&file).unwrap().threads;
        let frames = |range: &Range<usize>| threads.frames[range.clone()].iter().map(|frame| frame.func[0]).collect();
        let of_tasks: Vec<(u8, Vec<u8>)> =
            threads.suspended.iter().map(|task| (task.name[0], frames(&task.frames))).collect();
        assert_eq!(of_tasks, [(b'a', vec![b'g']), (b'b', vec![b'h'])]);
        assert_eq!((frames(&threads.python[0].frames), threads.python[0].suspended.clone()), (vec![b'f'], 0..2));
    }

    #[test]
    fn a_thread_name_cut_within_a_character_keeps_the_rank() {
        let thread = [0x12, 2, b'a', 0xe6];
        let mut file = vec![0x0a, thread.len() as u8];
        file.extend(thread);
        assert_eq!(Dump::decode(&file).unwrap().threads.native[0].name, [b'a', 0xe6]);
    }
}
