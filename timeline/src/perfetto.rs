//! Perfetto's protobuf trace, encoded packet by packet: a process per rank, a track per stream and
//! per host thread, flows between them. Field numbers are those of Perfetto's `trace_packet.proto`
//! and `track_event.proto`. Each rank is one packet sequence with its own interned names.

pub mod tracks;

use hashbrown::HashMap;
use xpu_timer_analysis::{
    communicator_name,
    throughput::{algorithm, dtype_name, leading_dimensions, strides, transposes},
};
use xpu_timer_proto::{
    printable,
    timeline::Times,
    v1::{Matmul, MatmulSize, OpStatus, Operation, TimelineBlock},
};

use crate::{
    clocks::ClockMap,
    collectives::{Route, is_message, mixed},
    input::Format,
    job::{Job, Rank},
    operations::{Class, Meaning},
};

/// Fields of `TracePacket`.
mod packet {
    pub(super) const CLOCK_SNAPSHOT: u32 = 6;
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE: u32 = 10;
    pub(super) const TRACK_EVENT: u32 = 11;
    pub(super) const INTERNED_DATA: u32 = 12;
    pub(super) const SEQUENCE_FLAGS: u32 = 13;
    pub(super) const TRACK_DESCRIPTOR: u32 = 60;
}

/// Fields of `TrackEvent`, and values of its type.
mod event {
    pub(super) const CATEGORY_IIDS: u32 = 3;
    pub(super) const DEBUG_ANNOTATIONS: u32 = 4;
    pub(super) const TYPE: u32 = 9;
    pub(super) const NAME_IID: u32 = 10;
    pub(super) const TRACK_UUID: u32 = 11;
    pub(super) const NAME: u32 = 23;
    pub(super) const COUNTER_VALUE: u32 = 30;
    pub(super) const FLOW_IDS: u32 = 47;
    pub(super) const BEGIN: u64 = 1;
    pub(super) const END: u64 = 2;
    pub(super) const INSTANT: u64 = 3;
    pub(super) const COUNTER: u64 = 4;
}

/// Fields of `DebugAnnotation`.
mod annotation {
    pub(super) const NAME_IID: u32 = 1;
    pub(super) const UINT: u32 = 3;
    pub(super) const INT: u32 = 4;
    pub(super) const DOUBLE: u32 = 5;
    pub(super) const STRING: u32 = 6;
    pub(super) const NAME: u32 = 10;
    pub(super) const STRING_IID: u32 = 17;
}

/// Fields of `InternedData`.
mod interned_data {
    pub(super) const CATEGORIES: u32 = 1;
    pub(super) const EVENT_NAMES: u32 = 2;
    pub(super) const ANNOTATION_NAMES: u32 = 3;
    pub(super) const ANNOTATION_STRINGS: u32 = 29;
}

/// `SEQ_INCREMENTAL_STATE_CLEARED` and `SEQ_NEEDS_INCREMENTAL_STATE`.
const STATE_CLEARED: u64 = 1;
const NEEDS_STATE: u64 = 2;
/// Builtin clocks of Perfetto: `BUILTIN_CLOCK_REALTIME` and `BUILTIN_CLOCK_BOOTTIME`.
const REALTIME: u64 = 1;
const BOOTTIME: u64 = 6;
/// A longer name is cut.
const MOST_NAME_BYTES: usize = 4096;
/// Tracks of a rank, at most; its first one is that of the process.
const TRACK_BITS: u32 = 16;

/// Names of the annotations. The interned id is the index plus one.
const ANNOTATIONS: [&str; 35] = [
    "seq",
    "bytes",
    "dtype",
    "communicator",
    "group",
    "nranks",
    "peer",
    "tag",
    "bandwidth_gbps",
    "waiting_us",
    "delay_us",
    "tflops",
    "b",
    "m",
    "n",
    "k",
    "trans",
    "function",
    "grid",
    "block",
    "status",
    "error",
    "ticket",
    "root_cause",
    "generation",
    "collected",
    "uncollectable",
    "nodes",
    "algorithm",
    "channels",
    "lds",
    "strides",
    "algo",
    "members",
    "lost",
];

fn annotation_iid(name: &str) -> u64 {
    ANNOTATIONS.iter().position(|known| *known == name).map_or(0, |index| index as u64 + 1)
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[inline]
fn uint(out: &mut Vec<u8>, field: u32, value: u64) {
    varint(out, u64::from(field << 3));
    varint(out, value);
}

#[inline]
fn fixed64(out: &mut Vec<u8>, field: u32, value: u64) {
    varint(out, u64::from(field << 3 | 1));
    out.extend_from_slice(&value.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    varint(out, u64::from(field << 3 | 2));
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// A message whose length is not yet known: three bytes of varint, as Perfetto's own encoder pads
/// them.
#[inline]
fn nested(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    varint(out, u64::from(field << 3 | 2));
    let at = out.len();
    out.extend_from_slice(&[0; 3]);
    write(out);
    let length = out.len() - at - 3;
    debug_assert!(length < 1 << 21, "names are cut");
    out[at..at + 3].copy_from_slice(&[length as u8 | 0x80, (length >> 7) as u8 | 0x80, (length >> 14) as u8 & 0x7f]);
}

/// A packet of a sequence.
#[inline]
fn packet(out: &mut Vec<u8>, sequence: u64, flags: u64, write: impl FnOnce(&mut Vec<u8>)) {
    nested(out, 1, |out| {
        uint(out, packet::SEQUENCE, sequence);
        uint(out, packet::SEQUENCE_FLAGS, flags);
        write(out);
    });
}

/// A packet with a `TrackEvent` on a track.
#[inline]
fn event(out: &mut Vec<u8>, sequence: u64, ns: u64, kind: u64, track: u64, write: impl FnOnce(&mut Vec<u8>)) {
    packet(out, sequence, NEEDS_STATE, |out| {
        uint(out, packet::TIMESTAMP, ns);
        nested(out, packet::TRACK_EVENT, |out| {
            uint(out, event::TYPE, kind);
            uint(out, event::TRACK_UUID, track);
            write(out);
        });
    });
}

/// Bytes of the varint of a time.
const TIME_BYTES: usize = 9;

/// A time as a varint of a fixed length, which has room for 63 bits.
#[inline]
fn fixed_varint(ns: u64) -> [u8; TIME_BYTES] {
    std::array::from_fn(|index| (ns >> (7 * index)) as u8 & 0x7f | if index < TIME_BYTES - 1 { 0x80 } else { 0 })
}

/// A packet with a `TrackEvent`, encoded up to its time and its last fields. A trace has eight
/// events an operation, so they are copied instead of encoded.
#[derive(Debug, Clone)]
struct Stamp {
    packet: Vec<u8>,
    /// Where the time begins in it.
    time_at: usize,
    /// Where the event begins in it.
    event_at: usize,
}

impl Stamp {
    /// Where the packet begins, after its tag and its length.
    const PACKET_AT: usize = 3;

    /// `fields` are the encoded fields of the event after its type and track.
    fn new(sequence: u64, kind: u64, track: u64, fields: &[u8]) -> Self {
        let mut packet = vec![1 << 3 | 2, 0, 0];
        uint(&mut packet, packet::SEQUENCE, sequence);
        uint(&mut packet, packet::SEQUENCE_FLAGS, NEEDS_STATE);
        varint(&mut packet, u64::from(packet::TIMESTAMP << 3));
        let time_at = packet.len();
        packet.extend_from_slice(&[0; TIME_BYTES]);
        varint(&mut packet, u64::from(packet::TRACK_EVENT << 3 | 2));
        packet.extend_from_slice(&[0; 2]);
        let event_at = packet.len();
        uint(&mut packet, event::TYPE, kind);
        uint(&mut packet, event::TRACK_UUID, track);
        packet.extend_from_slice(fields);
        Self::set_lengths(&mut packet, event_at);
        Stamp { packet, time_at, event_at }
    }

    /// Writes the event at this time.
    #[inline]
    fn write(&self, out: &mut Vec<u8>, ns: u64) {
        let at = out.len() + self.time_at;
        out.extend_from_slice(&self.packet);
        out[at..at + TIME_BYTES].copy_from_slice(&fixed_varint(ns));
    }

    /// Writes the event at this time with further fields.
    #[inline]
    fn write_with(&self, out: &mut Vec<u8>, ns: u64, more: impl FnOnce(&mut Vec<u8>)) {
        let at = out.len();
        self.write(out, ns);
        more(out);
        Self::set_lengths(&mut out[at..], self.event_at);
    }

    /// Sets the lengths of the packet and of its event: two bytes of varint each.
    #[inline]
    fn set_lengths(packet: &mut [u8], event_at: usize) {
        let end = packet.len();
        for from in [Self::PACKET_AT, event_at] {
            let length = end - from;
            debug_assert!(length < 1 << 14, "texts are interned");
            packet[from - 2] = length as u8 | 0x80;
            packet[from - 1] = (length >> 7) as u8;
        }
    }
}

/// An annotation with a number, which is an interned string for `STRING_IID`.
#[inline]
fn annotate(out: &mut Vec<u8>, name_iid: u64, field: u32, value: u64) {
    varint(out, u64::from(event::DEBUG_ANNOTATIONS << 3 | 2));
    let at = out.len();
    // Two numbers with their tags are shorter than 128 bytes.
    out.push(0);
    uint(out, annotation::NAME_IID, name_iid);
    uint(out, field, value);
    out[at] = (out.len() - at - 1) as u8;
}

fn annotate_uint(out: &mut Vec<u8>, name: &str, value: u64) {
    annotate(out, annotation_iid(name), annotation::UINT, value);
}

fn annotate_int(out: &mut Vec<u8>, name: &str, value: i64) {
    annotate(out, annotation_iid(name), annotation::INT, value as u64);
}

fn annotate_text(out: &mut Vec<u8>, name: &str, value: &str) {
    nested(out, event::DEBUG_ANNOTATIONS, |out| {
        uint(out, annotation::NAME_IID, annotation_iid(name));
        bytes(out, annotation::STRING, text(value).as_bytes());
    });
}

/// An annotation of an operation with the number of its name: on the hot path.
#[inline]
fn annotate_double(out: &mut Vec<u8>, name: Dynamic, value: f64) {
    // The tag of DEBUG_ANNOTATIONS, the length, NAME_IID, and DOUBLE.
    out.extend_from_slice(&[
        (event::DEBUG_ANNOTATIONS << 3 | 2) as u8,
        11,
        (annotation::NAME_IID << 3) as u8,
        name as u8,
    ]);
    fixed64(out, annotation::DOUBLE, value.to_bits());
}

/// Annotations that differ between operations of one shape: indices into [`ANNOTATIONS`] plus one.
#[derive(Clone, Copy)]
enum Dynamic {
    Seq = 1,
    Bandwidth = 9,
    Waiting = 10,
    Delay = 11,
    Tflops = 12,
}

/// Printable text of a bounded length.
fn text(value: &str) -> String {
    let mut end = value.len().min(MOST_NAME_BYTES);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    printable::line(&value[..end]).to_string()
}

/// A name with its interned id, as the messages in `InternedData` have them.
fn interned(out: &mut Vec<u8>, field: u32, iid: u64, name: &str) {
    nested(out, field, |out| {
        uint(out, 1, iid);
        bytes(out, 2, name.as_bytes());
    });
}

/// The interned id of a name, which is written before its first use.
fn intern(out: &mut Vec<u8>, sequence: u64, field: u32, known: &mut HashMap<String, u64>, name: &str) -> u64 {
    if let Some(iid) = known.get(name) {
        return *iid;
    }
    let iid = known.len() as u64 + 1;
    known.insert(name.to_string(), iid);
    packet(out, sequence, NEEDS_STATE, |out| {
        nested(out, packet::INTERNED_DATA, |out| interned(out, field, iid, &text(name)));
    });
    iid
}

/// A track of a rank, and its last slice: slices of one track may be nested but not overlap.
#[derive(Debug, Clone)]
struct Track {
    uuid: u64,
    /// The end of a slice.
    end: Stamp,
    from_ns: u64,
    until_ns: u64,
}

impl Track {
    /// The slice, cut so that it does not partly overlap the last one: clocks of the device and
    /// the host are compared to a microsecond only.
    fn fit(&mut self, mut from_ns: u64, mut until_ns: u64) -> (u64, u64) {
        until_ns = until_ns.max(from_ns);
        if from_ns > self.from_ns && from_ns < self.until_ns && until_ns > self.until_ns {
            from_ns = self.until_ns;
        } else if from_ns < self.from_ns && until_ns > self.from_ns && until_ns < self.until_ns {
            until_ns = self.from_ns;
        }
        if until_ns >= self.until_ns {
            (self.from_ns, self.until_ns) = (from_ns, until_ns);
        }
        (from_ns, until_ns)
    }
}

/// The parts that are equal for all operations of one shape of a block.
struct Template {
    /// The start of the event: name and category.
    named: Vec<u8>,
    /// The annotations of its slice.
    annotations: Vec<u8>,
    /// Its slice on the host.
    host: Option<Begin>,
    /// Its slice on the device.
    device: Option<Begin>,
    meaning: Meaning,
    communicator: u64,
    /// For a collective that shows how long it waited.
    wait: Option<Wait>,
    flow: Flow,
}

/// The begin of a slice, with its name.
struct Begin {
    /// Index of the track.
    track: usize,
    stamp: Stamp,
}

/// How a collective is divided into the wait for its last rank and the transfer.
struct Wait {
    /// Index of its communicator.
    group: usize,
    /// The begins of the two parts.
    parts: [Stamp; 2],
}

/// The flow that joins the slices of several ranks.
enum Flow {
    None,
    Collective,
    Message(Route, bool),
}

/// Options for the packets to write.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Leave out the calls on the host that launch something.
    pub no_launch_time: bool,
}

/// The number of packets of each kind that were written, for tests and the summary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Slices of devices and hosts, with the parts of collectives.
    pub slices: u64,
    /// Instants.
    pub instants: u64,
    /// Values of counters.
    pub counters: u64,
    /// Tracks, those of processes included.
    pub tracks: u64,
}

impl Counts {
    /// Adds those of another rank.
    pub fn add(&mut self, other: Counts) {
        self.slices += other.slices;
        self.instants += other.instants;
        self.counters += other.counters;
        self.tracks += other.tracks;
    }
}

/// Encodes the operations of one rank.
pub struct RankTrace<'a> {
    job: &'a Job,
    rank: &'a Rank,
    map: ClockMap,
    options: Options,
    sequence: u64,
    /// Encoded packets. The caller takes them away.
    pub out: Vec<u8>,
    /// The number of packets written.
    pub counts: Counts,
    names: HashMap<String, u64>,
    strings: HashMap<String, u64>,
    tracks: Vec<Track>,
    tracks_by_key: HashMap<(bool, u64), usize>,
    templates: Vec<Template>,
    messages: HashMap<(Route, bool), i64>,
    last_ns: u64,
}

impl<'a> RankTrace<'a> {
    /// Begins the trace of a rank with its process.
    #[must_use]
    pub fn new(job: &'a Job, index: usize, options: Options) -> Self {
        let rank = &job.ranks[index];
        let mut trace = RankTrace {
            job,
            rank,
            map: job.clocks[rank.node].map,
            options,
            sequence: index as u64 + 2,
            out: Vec::new(),
            counts: Counts::default(),
            names: HashMap::new(),
            strings: HashMap::new(),
            tracks: Vec::new(),
            tracks_by_key: HashMap::new(),
            templates: Vec::new(),
            messages: HashMap::new(),
            last_ns: 0,
        };
        let uuid = trace.new_track();
        let info = rank.head.rank.clone().unwrap_or_default();
        let node = &job.clocks[rank.node].node;
        let name = text(format!("{node} rank {} {}", rank.rank, job.coordinates(rank.rank)).trim_end());
        let lost = rank.lost().unwrap_or_default();
        let labels = [node.clone(), format!("pid {}", info.pid), rank.head.device.clone(), info.job, lost];
        packet(&mut trace.out, trace.sequence, STATE_CLEARED, |out| {
            nested(out, packet::TRACK_DESCRIPTOR, |out| {
                uint(out, 1, uuid);
                // Processes of several nodes may have one pid, so the trace has its own numbers, in
                // the order of nodes and ranks.
                nested(out, 3, |out| {
                    uint(out, 1, index as u64 + 1);
                    bytes(out, 2, text(&info.command).as_bytes());
                    bytes(out, 6, name.as_bytes());
                    labels
                        .iter()
                        .filter(|label| !label.is_empty())
                        .for_each(|label| bytes(out, 8, text(label).as_bytes()));
                });
            });
            nested(out, packet::INTERNED_DATA, |out| {
                for class in Class::ALL {
                    interned(out, interned_data::CATEGORIES, class as u64 + 1, class.name());
                }
                let names = (1..).zip(ANNOTATIONS);
                names.for_each(|(iid, name)| interned(out, interned_data::ANNOTATION_NAMES, iid, name));
            });
        });
        trace
    }

    fn new_track(&mut self) -> u64 {
        let uuid = (self.sequence << TRACK_BITS) + self.tracks.len() as u64;
        let end = Stamp::new(self.sequence, event::END, uuid, &[]);
        self.tracks.push(Track { uuid, end, from_ns: 0, until_ns: 0 });
        self.counts.tracks += 1;
        uuid
    }

    /// The track of a stream or a host thread.
    fn track(&mut self, is_host: bool, key: u64, class: Class) -> usize {
        if let Some(track) = self.tracks_by_key.get(&(is_host, key)) {
            return *track;
        }
        // A broken file could name any number of streams.
        if self.tracks.len() >= 1 << TRACK_BITS {
            return self.tracks.len() - 1;
        }
        let parent = self.tracks[0].uuid;
        let uuid = self.new_track();
        let (pid, has_no_streams) = (self.sequence - 1, matches!(self.rank.file.format, Format::Original(_)));
        packet(&mut self.out, self.sequence, NEEDS_STATE, |out| {
            nested(out, packet::TRACK_DESCRIPTOR, |out| {
                uint(out, 1, uuid);
                uint(out, 5, parent);
                if is_host && key != 0 {
                    nested(out, 4, |out| {
                        uint(out, 1, pid);
                        uint(out, 2, key);
                        bytes(out, 5, format!("host thread {key}").as_bytes());
                    });
                } else if is_host {
                    bytes(out, 2, b"host");
                } else if has_no_streams {
                    bytes(out, 2, class.name().as_bytes());
                } else if key == 0 {
                    bytes(out, 2, b"default stream");
                } else {
                    bytes(out, 2, format!("stream {key:#x}").as_bytes());
                }
            });
        });
        self.tracks_by_key.insert((is_host, key), self.tracks.len() - 1);
        self.tracks.len() - 1
    }

    /// The begin of a slice with these fields.
    fn begin(&self, track: usize, fields: &[u8]) -> Stamp {
        Stamp::new(self.sequence, event::BEGIN, self.tracks[track].uuid, fields)
    }

    fn name_iid(&mut self, name: &str) -> u64 {
        intern(&mut self.out, self.sequence, interned_data::EVENT_NAMES, &mut self.names, name)
    }

    fn annotate_text(&mut self, out: &mut Vec<u8>, name: &str, value: &str) {
        let strings = &mut self.strings;
        let iid = intern(&mut self.out, self.sequence, interned_data::ANNOTATION_STRINGS, strings, value);
        annotate(out, annotation_iid(name), annotation::STRING_IID, iid);
    }

    /// Prepares the shapes of a block. [`RankTrace::operation`] encodes its operations.
    pub fn begin_block(&mut self, block: &TimelineBlock) {
        self.templates.clear();
        for shape in &block.shapes {
            let template = self.template(shape);
            self.templates.push(template);
        }
    }

    fn template(&mut self, shape: &Operation) -> Template {
        let group = self.job.group_of(self.rank, shape);
        let meaning = Meaning::of(shape, group.map(|(index, _)| &self.job.groups[index]));
        let is_host = meaning.class == Class::Host;
        let mut named = Vec::new();
        uint(&mut named, event::NAME_IID, self.name_iid(&meaning.name));
        uint(&mut named, event::CATEGORY_IIDS, meaning.class as u64 + 1);
        let launches = is_host || !self.options.no_launch_time;
        let is_shared = |(index, _): &(usize, i32)| self.job.groups[*index].members.len() > 1;
        let flow = match group.filter(is_shared) {
            Some((index, own)) if is_message(shape) => {
                Route::of(shape, index, own).map_or(Flow::None, |(route, receives)| Flow::Message(route, receives))
            }
            Some(_) if meaning.class == Class::Communication => Flow::Collective,
            _ => Flow::None,
        };
        let mut begin = |is_host: bool, key: u64, class: Class| {
            let track = self.track(is_host, key, class);
            Begin { track, stamp: self.begin(track, &named) }
        };
        let host = launches.then(|| begin(true, shape.tid.into(), Class::Host));
        let device = (!is_host).then(|| begin(false, shape.stream, meaning.class));
        let wait = device.as_ref().zip(self.job.complete_group(self.rank, shape)).map(|(device, group)| {
            let parts = ["waiting", "transfer"].map(|name| {
                let mut named = Vec::new();
                uint(&mut named, event::NAME_IID, self.name_iid(name));
                self.begin(device.track, &named)
            });
            Wait { group, parts }
        });
        Template {
            host,
            device,
            named,
            annotations: self.annotations(shape, &meaning, group),
            communicator: shape.communicator,
            wait,
            meaning,
            flow,
        }
    }

    fn annotate_product(&mut self, out: &mut Vec<u8>, of: &Matmul) {
        if of.members.is_empty() {
            [("b", of.batch), ("m", of.m), ("n", of.n), ("k", of.k)]
                .into_iter()
                .for_each(|(name, value)| annotate_uint(out, name, value.into()));
            self.annotate_text(out, "trans", &transposes(of));
        } else {
            let sizes = |of: &MatmulSize| format!("{}x{}x{}x{}", of.batch, of.m, of.n, of.k);
            let members: Vec<String> = of.members.iter().map(sizes).collect();
            self.annotate_text(out, "members", &members.join(" "));
        }
        for (name, numbers) in [("lds", leading_dimensions(of)), ("strides", strides(of))] {
            if let Some([a, b, c]) = numbers {
                self.annotate_text(out, name, &format!("{a} {b} {c}"));
            }
        }
        if let Some(number) = of.algorithm {
            annotate_int(out, "algo", number.into());
        }
    }

    fn annotations(&mut self, shape: &Operation, meaning: &Meaning, group: Option<(usize, i32)>) -> Vec<u8> {
        let mut out = Vec::new();
        if meaning.bytes != 0 {
            annotate_uint(&mut out, "bytes", meaning.bytes);
        }
        if shape.dtype != 0 {
            self.annotate_text(&mut out, "dtype", dtype_name(shape.dtype()));
        }
        if meaning.class == Class::Communication {
            self.annotate_text(&mut out, "communicator", &communicator_name(shape.communicator));
            if shape.peer >= 0 {
                annotate_int(&mut out, "peer", shape.peer.into());
            }
            if let Some(algorithm) = algorithm(&shape.function, shape.op()) {
                self.annotate_text(&mut out, "algorithm", &algorithm.name());
            }
            if let Some(of) = &shape.launch {
                annotate_uint(&mut out, "channels", of.grid_x.into());
            }
        }
        if let Some((index, _)) = group {
            let group = &self.job.groups[index];
            self.annotate_text(&mut out, "group", &group.name);
            annotate_uint(&mut out, "nranks", group.size.into());
            if let Some(nodes) = group.nodes() {
                annotate_uint(&mut out, "nodes", nodes.into());
            }
        }
        if let Some(tag) = shape.tag {
            annotate_int(&mut out, "tag", tag.into());
        }
        if let Some(of) = &shape.matmul {
            self.annotate_product(&mut out, of);
        }
        if !shape.function.is_empty() && shape.function != meaning.name {
            self.annotate_text(&mut out, "function", &shape.function);
        }
        if let Some(of) = &shape.collection {
            let numbers = [
                ("generation", of.generation),
                ("collected", Some(of.collected)),
                ("uncollectable", Some(of.uncollectable)),
            ];
            for (name, value) in numbers {
                value.into_iter().for_each(|value| annotate_uint(&mut out, name, value.into()));
            }
        }
        if let Some(of) = &shape.launch {
            self.annotate_text(&mut out, "grid", &format!("{} {} {}", of.grid_x, of.grid_y, of.grid_z));
            self.annotate_text(&mut out, "block", &format!("{} {} {}", of.block_x, of.block_y, of.block_z));
        }
        out
    }

    /// Encodes an operation of the current block. Returns its class and the time of its device, in
    /// times of the trace, if it has completed there.
    pub fn operation(&mut self, time: &Times) -> Option<(Class, u64, u64)> {
        let template = &self.templates[time.shape as usize];
        let on_trace = |ns: u64| if ns == 0 { 0 } else { self.map.apply(ns) };
        let (entered, returned) = (on_trace(time.entered_ns), on_trace(time.returned_ns));
        let (started, completed) = (on_trace(time.started_ns), on_trace(time.completed_ns));
        self.last_ns = self.last_ns.max(returned).max(completed);
        let (out, sequence) = (&mut self.out, self.sequence);
        let launch = mixed(&[sequence, time.ticket]);
        let is_launched = entered != 0 && time.returned_ns != 0;
        if let (Some(begin), true) = (&template.host, is_launched) {
            let track = &mut self.tracks[begin.track];
            let (from, until) = track.fit(entered, returned);
            begin.stamp.write_with(out, from, |out| match template.device {
                Some(_) => fixed64(out, event::FLOW_IDS, launch),
                None => out.extend_from_slice(&template.annotations),
            });
            track.end.write(out, until);
            self.counts.slices += 1;
        }
        let begin = template.device.as_ref()?;
        let track = &mut self.tracks[begin.track];
        if completed == 0 {
            return None;
        }
        let (from, until) = track.fit(if started == 0 { entered } else { started }, completed);
        let wait = template.wait.as_ref().filter(|_| started != 0);
        let wait = wait.and_then(|wait| Some((self.job.last_start(wait.group, time.seq)?.clamp(from, until), wait)));
        begin.stamp.write_with(out, from, |out| {
            if template.host.is_some() && is_launched {
                fixed64(out, event::FLOW_IDS, launch);
            }
            match &template.flow {
                Flow::None => {}
                Flow::Collective => fixed64(out, event::FLOW_IDS, mixed(&[template.communicator, time.seq])),
                Flow::Message(route, receives) => {
                    let number = self.messages.entry((*route, *receives)).or_default();
                    let first = if *receives { self.job.first_send(route) } else { Some(0) };
                    if let Some(first) = first {
                        let ends = (route.from as u64) << 32 | route.to as u64;
                        let message = (*number + first) as u64;
                        fixed64(out, event::FLOW_IDS, mixed(&[template.communicator, ends, message]));
                    }
                    *number += 1;
                }
            }
            out.extend_from_slice(&template.annotations);
            dynamic_annotations(out, template, time, (entered, started), wait.map(|(split, _)| split - from));
        });
        let mut slices = 1;
        if let Some((split, Wait { parts: [waiting, transfer], .. })) = wait
            && from < split
            && split < until
        {
            for (part, from, until) in [(waiting, from, split), (transfer, split, until)] {
                part.write(out, from);
                track.end.write(out, until);
            }
            slices += 2;
        }
        track.end.write(out, until);
        self.counts.slices += slices;
        Some((template.meaning.class, from, until))
    }

    /// Ends the trace with the operations that are pending, and what the verdict says of the rank.
    pub fn finish(&mut self) {
        let head = &self.rank.head;
        for operation in &self.rank.head.pending {
            let template = self.template(operation);
            let begin = if operation.started_ns == 0 { operation.entered_ns } else { operation.started_ns };
            let slice = template.device.as_ref().or(template.host.as_ref()).filter(|_| begin != 0);
            let Some(Begin { track, .. }) = slice else { continue };
            event(&mut self.out, self.sequence, self.map.apply(begin), event::BEGIN, self.tracks[*track].uuid, |out| {
                out.extend_from_slice(&template.named);
                annotate_text(out, "status", "pending");
                annotate_uint(out, "seq", operation.seq);
                if let Flow::Collective = template.flow {
                    fixed64(out, event::FLOW_IDS, mixed(&[operation.communicator, operation.seq]));
                }
                out.extend_from_slice(&template.annotations);
            });
            self.counts.slices += 1;
        }
        if let Some(lost) = self.rank.lost() {
            self.instant(self.map.apply(head.from_ns), &lost, |out| annotate_uint(out, "lost", head.lost));
        }
        let Some(verdict) = &self.job.verdict else { return };
        if verdict.culprits.contains(&self.rank.rank) {
            let at = if self.last_ns == 0 { self.map.apply(self.rank.head.until_ns) } else { self.last_ns };
            let cause = |out: &mut Vec<u8>| annotate_text(out, "root_cause", &verdict.sentence);
            self.instant(at, "culprit: its last operation ends", cause);
        }
    }

    /// An instant of the process.
    fn instant(&mut self, ns: u64, name: &str, annotate: impl FnOnce(&mut Vec<u8>)) {
        event(&mut self.out, self.sequence, ns, event::INSTANT, self.tracks[0].uuid, |out| {
            bytes(out, event::NAME, name.as_bytes());
            annotate(out);
        });
        self.counts.instants += 1;
    }
}

fn dynamic_annotations(
    out: &mut Vec<u8>,
    template: &Template,
    time: &Times,
    (entered, started): (u64, u64),
    waited_ns: Option<u64>,
) {
    if time.seq != 0 {
        annotate(out, Dynamic::Seq as u64, annotation::UINT, time.seq);
    }
    if entered != 0 && started >= entered {
        annotate_double(out, Dynamic::Delay, (started - entered) as f64 / 1e3);
    }
    if let Some(waited) = waited_ns {
        annotate_double(out, Dynamic::Waiting, waited as f64 / 1e3);
    }
    if let (Some(bytes), true) = (template.meaning.bus_bytes, time.device_ns > 0) {
        annotate_double(out, Dynamic::Bandwidth, bytes * 8.0 / time.device_ns as f64);
    }
    if let (Some(flops), true) = (template.meaning.flops, time.device_ns > 0) {
        annotate_double(out, Dynamic::Tflops, flops / time.device_ns as f64 / 1e3);
    }
    if time.status != OpStatus::Completed as i32 {
        let status = OpStatus::try_from(time.status).unwrap_or_default();
        annotate_text(out, "status", status.as_str_name().trim_start_matches("OP_STATUS_"));
        annotate_uint(out, "error", time.error.into());
    }
}

/// The packets that belong to no rank: the clocks, their alignment, and the hang.
#[must_use]
pub fn preamble(job: &Job) -> (Vec<u8>, Counts) {
    const SEQUENCE: u64 = 1;
    const TRACK: u64 = 1;
    let (mut out, mut counts) = (Vec::new(), Counts { tracks: 1, ..Counts::default() });
    let on_trace = |rank: &Rank, ns| job.clocks[rank.node].map.apply(ns);
    let from = job.ranks.iter().map(|rank| on_trace(rank, rank.head.from_ns)).min().unwrap_or(0);
    let until = job.ranks.iter().map(|rank| on_trace(rank, rank.head.until_ns)).max().unwrap_or(0);
    packet(&mut out, SEQUENCE, STATE_CLEARED, |out| {
        // The time of the trace is the realtime clock of the reference node.
        nested(out, packet::CLOCK_SNAPSHOT, |out| {
            for clock in [BOOTTIME, REALTIME] {
                nested(out, 1, |out| {
                    uint(out, 1, clock);
                    uint(out, 2, from);
                });
            }
        });
    });
    packet(&mut out, SEQUENCE, NEEDS_STATE, |out| {
        nested(out, packet::TRACK_DESCRIPTOR, |out| {
            uint(out, 1, TRACK);
            bytes(out, 2, b"xpu_timer");
        });
    });
    let mut instant = |ns: u64, name: &str, annotations: &[(&str, String)]| {
        event(&mut out, SEQUENCE, ns, event::INSTANT, TRACK, |out| {
            bytes(out, event::NAME, text(name).as_bytes());
            for (name, value) in annotations {
                nested(out, event::DEBUG_ANNOTATIONS, |out| {
                    bytes(out, annotation::NAME, name.as_bytes());
                    bytes(out, annotation::STRING, text(value).as_bytes());
                });
            }
        });
        counts.instants += 1;
    };
    for clock in &job.clocks {
        let mut facts = vec![
            ("offset_ns", clock.map.offset_ns.to_string()),
            ("drift_ppm", format!("{:.3}", clock.map.drift * 1e6)),
            ("realtime_error_us", format!("{:.3}", clock.realtime_error_ns as f64 / 1e3)),
        ];
        if let (Some(with), Some(residual)) = (&clock.aligned_with, &clock.residual) {
            facts.push(("aligned_with", with.clone()));
            facts.push(("residual_median_us", format!("{:.3}", residual.median_us)));
            facts.push(("residual_p99_us", format!("{:.3}", residual.p99_us)));
            facts.push(("common_collectives", residual.ends.to_string()));
        }
        if !clock.refused.is_empty() {
            facts.push(("not_aligned", clock.refused.clone()));
        }
        instant(from, &format!("clock of {}", clock.node), &facts);
    }
    if let Some(verdict) = job.verdict.as_ref().filter(|verdict| !verdict.victims.is_empty()) {
        let facts = [
            ("cause", verdict.cause.to_string()),
            ("verdict", verdict.sentence.clone()),
            ("incident", verdict.incident.clone()),
        ];
        instant(until, "hang", &facts);
    }
    (out, counts)
}
