//! The `.ops` file of a rank, and its `.samples` file: what is known when they are requested, and
//! how they are written and sent.

use std::{
    io::{self, Write},
    sync::Arc,
};

use xpu_timer_proto::{
    Message as _, samples,
    timeline::{self, BlockBuilder, FORMAT},
    v1::{
        ClockReading, FlightRecord, OpStatus, RankInfo, StackSamples, TimelineChunk, TimelineFile, TimelineHead,
        timeline_chunk::Part,
    },
};

use crate::{
    incident::part::CHUNK_BYTES,
    os::{clock::Now, ring_file::RingFile},
    timeline::store::{Block, Window, end_ns},
};

/// The timeline of one rank, ready to be written by another thread. The recorder of operations and
/// the sampler of stacks do not depend on each other.
#[derive(Debug, Clone)]
pub(crate) struct RankTimeline {
    /// Its operations; `None` if they are not recorded.
    pub operations: Option<RankOperations>,
    /// The stacks of its main thread; `None` if there are none.
    pub samples: Option<StackSamples>,
}

/// The operations of one rank.
#[derive(Debug, Clone)]
pub(crate) struct RankOperations {
    /// The rank.
    pub info: RankInfo,
    /// Its operations.
    pub window: Window,
    /// When it was requested.
    pub until: Now,
    /// Readings of the clocks before that, oldest first.
    pub clock: Arc<[Now]>,
    /// Its ring, for its pending operations.
    pub ring: Option<Arc<RingFile>>,
    /// Name of the device; empty if unknown.
    pub device: String,
}

impl RankOperations {
    /// Name of the file.
    #[must_use]
    pub(crate) fn name(&self) -> String {
        timeline::file_name(self.info.rank.max(0).unsigned_abs(), self.info.world_size)
    }

    /// Writes the file. Returns the number of its operations.
    ///
    /// # Errors
    /// The errors of `out`.
    pub(crate) fn write(&self, mut out: &mut dyn Write) -> io::Result<u64> {
        timeline::write(&mut out, Part::Head(self.head()))?;
        let mut operations = 0;
        for block in &self.window.blocks {
            if block.ended_ns.0 >= self.window.from_ns {
                out.write_all(&block.bytes)?;
                operations += block.operations;
                continue;
            }
            let mut rest = ended_since(block, self.window.from_ns)?;
            operations += rest.len() as u64;
            if !rest.is_empty() {
                out.write_all(&rest.finish_chunk())?;
            }
        }
        Ok(operations)
    }

    fn head(&self) -> TimelineHead {
        let flight = self.ring.as_ref().and_then(|ring| ring.read(self.info.clone()).ok()).unwrap_or_default();
        let FlightRecord { operations, communicators, .. } = flight;
        let is_known = !communicators.is_empty();
        let readings = self.clock.iter().filter(|reading| reading.mono_ns < self.until.mono_ns);
        TimelineHead {
            format: FORMAT,
            rank: Some(self.info.clone()),
            writer: env!("CARGO_PKG_VERSION").into(),
            clock: readings.chain([&self.until]).map(reading).collect(),
            from_ns: self.window.from_ns,
            until_ns: self.until.mono_ns,
            communicators: if is_known { communicators } else { self.window.communicators.to_vec() },
            lost: self.window.lost,
            pending: operations.into_iter().filter(|one| one.status() == OpStatus::Pending).collect(),
            device: self.device.clone(),
            stacks: self.window.stacks.stacks.clone(),
            frames: self.window.stacks.frames.clone(),
            memory: self.window.memory.clone(),
        }
    }
}

fn reading(now: &Now) -> ClockReading {
    ClockReading { monotonic_ns: now.mono_ns, realtime_ns: now.unix_ns }
}

/// The operations of a block that ended at or after a time.
fn ended_since(block: &Block, from_ns: u64) -> io::Result<BlockBuilder> {
    let chunk = TimelineChunk::decode_length_delimited(&*block.bytes).map_err(io::Error::other)?;
    let mut rest = BlockBuilder::default();
    if let Some(Part::Block(all)) = chunk.part {
        timeline::operations(&all)?.filter(|one| end_ns(one) >= from_ns).for_each(|one| rest.push(&one));
    }
    Ok(rest)
}

/// Sends the files of some ranks in chunks, until `send` returns false. The last chunk has no name.
pub(crate) fn send_all(ranks: &[RankTimeline], send: &mut dyn FnMut(TimelineFile) -> bool) {
    if ranks.iter().all(|rank| rank.operations.is_none()) {
        let problem = "nothing is recorded of these ranks (XPU_TIMER_TIMELINE_SECONDS)".into();
        // If nobody receives, the next one fails, too.
        send(TimelineFile { problem, ..Default::default() });
    }
    let is_received = ranks.iter().all(|RankTimeline { operations, samples }| {
        operations.iter().all(|operations| send_operations_of_rank(operations, send))
            && samples.iter().all(|samples| send_samples_of_rank(samples, send))
    });
    if is_received {
        send(TimelineFile::default());
    }
}

/// Sends the operations of one rank. Returns whether somebody still receives.
fn send_operations_of_rank(rank: &RankOperations, send: &mut dyn FnMut(TimelineFile) -> bool) -> bool {
    let Some((last, operations)) = send_file(rank.name(), |out| rank.write(out), send) else { return false };
    match operations {
        Ok(operations) => send(TimelineFile { operations, lost: rank.window.lost, ..last }),
        Err(error) => {
            let problem = format!("the timeline of rank {} cannot be read: {error}", rank.info.rank);
            send(TimelineFile { problem, ..Default::default() })
        }
    }
}

/// Sends recorded stacks in chunks, until `send` returns false. The last chunk has no name.
pub(crate) fn send_samples(ranks: &[StackSamples], send: &mut dyn FnMut(TimelineFile) -> bool) {
    if ranks.is_empty() {
        let problem = "no process of these ranks is on this node, so nothing is recorded".into();
        send(TimelineFile { problem, ..Default::default() });
    }
    if ranks.iter().all(|samples| send_samples_of_rank(samples, send)) {
        send(TimelineFile::default());
    }
}

/// Sends the file of one rank, and what happened to its process. Returns whether somebody still
/// receives.
fn send_samples_of_rank(samples: &StackSamples, send: &mut dyn FnMut(TimelineFile) -> bool) -> bool {
    let write = |out: &mut dyn Write| out.write_all(&samples.encode_to_vec()).map(|()| 0);
    send_file(name_of_samples(samples), write, send).is_some_and(|(last, _)| send(last))
}

/// Name of the file of samples.
fn name_of_samples(samples: &StackSamples) -> String {
    let info = samples.rank.as_ref();
    let rank = info.map_or(0, |info| info.rank.max(0).unsigned_abs());
    samples::file_name(rank, info.map_or(0, |info| info.world_size))
}

/// Sends a file in chunks. Returns the last chunk, which is not sent yet, and the result of
/// `write`. `None` if nobody receives any more.
fn send_file(
    name: String,
    write: impl FnOnce(&mut dyn Write) -> io::Result<u64>,
    send: &mut dyn FnMut(TimelineFile) -> bool,
) -> Option<(TimelineFile, io::Result<u64>)> {
    let mut sender = Chunks { name, data: Vec::new(), send, is_open: true };
    let result = write(&mut sender);
    let Chunks { name, data, is_open, .. } = sender;
    is_open.then(|| (TimelineFile { name, data, last: true, ..Default::default() }, result))
}

/// Cuts a file into chunks.
struct Chunks<'a> {
    name: String,
    data: Vec<u8>,
    send: &'a mut dyn FnMut(TimelineFile) -> bool,
    // Whether somebody still receives.
    is_open: bool,
}

impl Write for Chunks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.data.extend_from_slice(bytes);
        if self.data.len() >= CHUNK_BYTES {
            let data = std::mem::take(&mut self.data);
            self.is_open = (self.send)(TimelineFile { name: self.name.clone(), data, ..Default::default() });
            if !self.is_open {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{timeline::Reader, v1::Operation};

    use super::*;
    use crate::{job::JobKey, timeline::store::Store};

    const SECOND: u64 = 1_000_000_000;

    /// A rank with an operation at each second.
    fn recorded(seconds: u64, from_s: u64) -> RankOperations {
        let mut store = Store::new(seconds * SECOND, usize::MAX);
        let job = JobKey { name: "j".into(), instance: String::new() };
        let operations: Vec<Operation> = (1..=seconds)
            .map(|second| Operation {
                ticket: second,
                function: format!("kernel_{second}_{}", "x".repeat(100)),
                completed_ns: second * SECOND,
                status: OpStatus::Completed.into(),
                ..Default::default()
            })
            .collect();
        store.add(1, &job, &operations);
        store.add_lost(1, 3, seconds * SECOND);
        let until = Now { mono_ns: seconds * SECOND, unix_ns: 2_000_000 * SECOND };
        let earlier = Now { mono_ns: SECOND, unix_ns: (2_000_000 - seconds + 1) * SECOND };
        RankOperations {
            info: RankInfo { rank: 3, world_size: 8, ..Default::default() },
            window: store.window(1, from_s * SECOND),
            until,
            clock: [earlier, until].into(),
            ring: None,
            device: "H100".into(),
        }
    }

    fn tickets(file: &[u8]) -> (TimelineHead, Vec<u64>) {
        let mut reader = Reader::new(file).unwrap();
        let mut tickets = Vec::new();
        while let Some(block) = reader.next_block().unwrap() {
            tickets.extend(timeline::operations(&block).unwrap().map(|operation| operation.ticket));
        }
        (reader.head, tickets)
    }

    #[test]
    fn a_file_has_exactly_the_operations_of_its_window() {
        let rank = recorded(10_000, 7_777);
        let mut file = Vec::new();
        let operations = rank.write(&mut file).unwrap();
        let (head, tickets) = tickets(&file);
        assert_eq!(tickets, (7_777..=10_000).collect::<Vec<_>>());
        assert_eq!((operations, head.lost, head.device.as_str()), (10_000 - 7_776, 3, "H100"));
        assert_eq!((head.from_ns, head.until_ns), (7_777 * SECOND, 10_000 * SECOND));
        let clock: Vec<u64> = head.clock.iter().map(|reading| reading.monotonic_ns / SECOND).collect();
        assert_eq!(clock, [1, 10_000]);
        assert_eq!(rank.name(), "00003-00008.ops");
    }

    #[test]
    fn chunks_make_the_same_file() {
        let ranks = [recorded(8_000, 0), recorded(10, 0)];
        let timelines = ranks.clone().map(|rank| RankTimeline { operations: Some(rank), samples: None });
        let (mut files, mut chunks, mut counted) = (Vec::new(), 0, Vec::new());
        send_all(&timelines, &mut |chunk| {
            chunks += 1;
            if chunk.last {
                counted.push((chunk.operations, chunk.lost));
            }
            files.push(chunk);
            true
        });
        assert!(chunks > 4 && files.iter().all(|file| file.data.len() < 2 * CHUNK_BYTES), "{chunks}");
        assert_eq!(files.pop().unwrap(), TimelineFile::default());
        let sent: Vec<u8> = files.iter().flat_map(|file| file.data.clone()).collect();
        let mut written = Vec::new();
        let operations: Vec<u64> = ranks.iter().map(|rank| rank.write(&mut written).unwrap()).collect();
        assert!(sent == written && operations == [8_000, 10]);
        assert_eq!(counted, [(8_000, 3), (10, 3)]);
        let mut calls = 0;
        send_all(&timelines, &mut |_| {
            calls += 1;
            false
        });
        assert_eq!(calls, 1, "nobody receives");
    }
}
