//! The files of the ranks, in any format, as a head and blocks. They are opened by a function of
//! the caller, once for each pass, and read block by block.

use std::{
    collections::HashMap,
    fmt,
    io::{self, BufReader, Read},
};

use xpu_timer_proto::{
    samples, timeline,
    v1::{StackSamples, TimelineBlock, TimelineHead},
};

use crate::original;

/// Opens a file for one pass.
pub type Open = Box<dyn Fn() -> io::Result<Box<dyn Read + Send>> + Send + Sync>;

/// The formats of files.
#[derive(Debug)]
pub enum Format {
    /// `.ops`, see `xpu_timer/v1/timeline.proto`.
    Ops,
    /// `.timeline` of the original tool, with the names of its `.timeline.meta` file.
    Original(HashMap<u32, String>),
    /// `.samples`: stacks of a rank whose operations were not recorded.
    Samples,
}

/// The file of one rank.
pub struct RankFile {
    /// Its name, for messages.
    pub name: String,
    /// The rank in its name.
    pub rank: u32,
    /// The world size in its name.
    pub world_size: u32,
    /// Its format.
    pub format: Format,
    /// Opens it.
    pub open: Open,
}

impl fmt::Debug for RankFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RankFile").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Size of the buffer of an open file. All threads have one file open each.
const BUFFER_BYTES: usize = 64 * 1024;

type Input = BufReader<Box<dyn Read + Send>>;

/// The blocks of a file in one pass.
pub enum Blocks<'a> {
    /// A file `.ops`.
    Ops(timeline::Reader<Input>),
    /// A file of the original tool.
    Original(original::Reader<'a, Input>),
    /// A file of samples, which has a head only.
    Samples(Box<TimelineHead>),
}

impl RankFile {
    /// Begins a pass.
    ///
    /// # Errors
    /// The file cannot be opened, or it has no head.
    pub fn blocks(&self) -> io::Result<Blocks<'_>> {
        let input = BufReader::with_capacity(BUFFER_BYTES, (self.open)()?);
        Ok(match &self.format {
            Format::Ops => Blocks::Ops(timeline::Reader::new(input)?),
            Format::Original(names) => Blocks::Original(original::Reader::new(input, names)),
            Format::Samples => Blocks::Samples(Box::new(head_of_samples(input)?)),
        })
    }

    /// The head. That of the original tool is made from the whole file, as far as it can be read.
    ///
    /// # Errors
    /// The file cannot be opened, or it has no head and no operation.
    pub fn head(&self) -> io::Result<TimelineHead> {
        match self.blocks()? {
            Blocks::Ops(reader) => Ok(reader.head),
            Blocks::Samples(head) => Ok(*head),
            Blocks::Original(mut reader) => {
                let mut blocks = 0;
                loop {
                    match reader.next_block() {
                        Ok(Some(_)) => blocks += 1,
                        Err(error) if blocks == 0 => return Err(error),
                        Ok(None) | Err(_) => return Ok(reader.head()),
                    }
                }
            }
        }
    }
}

impl Blocks<'_> {
    /// The next block; `None` at the end.
    ///
    /// # Errors
    /// The errors of the file, or that it is broken or cut from here on.
    pub fn next_block(&mut self) -> io::Result<Option<TimelineBlock>> {
        match self {
            Blocks::Ops(reader) => reader.next_block(),
            Blocks::Original(reader) => reader.next_block(),
            Blocks::Samples(_) => Ok(None),
        }
    }
}

fn head_of_samples(input: Input) -> io::Result<TimelineHead> {
    let mut bytes = Vec::new();
    input.take(samples::MOST_BYTES).read_to_end(&mut bytes)?;
    let StackSamples { rank, writer, clock, from_ns, until_ns, .. } = samples::decode(&bytes)?;
    Ok(TimelineHead { format: timeline::FORMAT, rank, writer, clock, from_ns, until_ns, ..TimelineHead::default() })
}
