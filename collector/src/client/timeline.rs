//! `xpu_timer_collector timeline`: fetches the timeline of a job over HTTP into a folder.

use std::{
    io::{self, BufReader, Read},
    path::Path,
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use xpu_timer_capture::sampling::Threads;
use xpu_timer_proto::{lenient, v1::TimelineFile};

use crate::{
    client::incidents::Remote,
    error::chain,
    http::questions::{WantedRecording, WantedTimeline},
    incident::part::MAX_MESSAGE_BYTES,
    timeline::folder::{self, Written},
};

/// Time for the transfer, beyond the time of a recording.
const DEADLINE: Duration = Duration::from_secs(600);

/// Fetches the files into a new folder of `output`, chunk by chunk.
///
/// # Errors
/// If there is no such job, the collector does not answer, or the folder cannot be written.
pub(crate) fn fetch(remote: &Remote, wanted: &WantedTimeline, output: &Path) -> Result<Written> {
    folder::write(output, chunks(remote, wanted)?).map_err(|error| anyhow::Error::msg(chain(&error)))
}

/// Fetches the file of one rank into memory.
///
/// # Errors
/// If there is no such rank, the collector does not answer, or the file is incomplete or larger
/// than `most_bytes`.
pub(crate) fn fetch_rank(remote: &Remote, wanted: &WantedTimeline, most_bytes: usize) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    for chunk in chunks(remote, wanted)? {
        ensure!(chunk.problem.is_empty(), "{}", chunk.problem);
        ensure!(file.len() + chunk.data.len() <= most_bytes, "the timeline has more than {} MB", most_bytes >> 20);
        file.extend(chunk.data);
        if chunk.last {
            return Ok(file);
        }
    }
    bail!("the timeline was cut off")
}

/// The files in chunks. A transfer that fails ends with its problem.
fn chunks(remote: &Remote, wanted: &WantedTimeline) -> Result<impl Iterator<Item = TimelineFile> + use<>> {
    let WantedTimeline { job, ranks, window, detail, recording } = wanted;
    let page = if recording.is_some() { "record" } else { "timeline" };
    let mut path = format!("/{page}?seconds={}", window.as_secs_f64());
    if let Some(job) = job {
        path.push_str("&job=");
        path.push_str(&escaped(job));
    }
    if let Some(ranks) = ranks {
        path.push_str("&rank=");
        path.push_str(&escaped(&ranks.to_string()));
    }
    if *detail {
        path.push_str("&kernels=all");
    }
    if let Some(WantedRecording { period, threads, native }) = recording {
        let threads = if *threads == Threads::Main { "main" } else { "all" };
        let (rate, native) = (period.as_secs_f64().recip(), u8::from(*native));
        path.push_str(&format!("&rate={rate}&threads={threads}&native={native}"));
    }
    let deadline = if wanted.records() { DEADLINE + *window } else { DEADLINE };
    let mut body = BufReader::new(remote.open(&path, deadline, u64::MAX)?);
    let chunks = std::iter::from_fn(move || next_chunk(&mut body).unwrap_or_else(|error| Some(problem(&error))));
    let mut has_failed = false;
    Ok(chunks.take_while(move |chunk| !std::mem::replace(&mut has_failed, is_failure(chunk))))
}

const FAILED: &str = "the transfer failed";

fn problem(error: &io::Error) -> TimelineFile {
    TimelineFile { problem: format!("{FAILED}: {error}"), ..Default::default() }
}

fn is_failure(chunk: &TimelineFile) -> bool {
    chunk.problem.starts_with(FAILED)
}

/// The next message; `None` at the end.
fn next_chunk(body: &mut impl Read) -> io::Result<Option<TimelineFile>> {
    let mut length = 0_u64;
    for shift in (0..35).step_by(7) {
        let mut byte = [0];
        if body.read(&mut byte)? == 0 {
            return if shift == 0 { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        length |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] & 0x80 == 0 {
            break;
        }
    }
    if length > MAX_MESSAGE_BYTES as u64 {
        return Err(io::Error::other("a chunk is too large"));
    }
    let mut bytes = Vec::new();
    body.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    lenient::decode(&bytes).map(Some).map_err(io::Error::other)
}

/// A text as part of a query.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let escape = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::Message as _;

    use super::*;

    #[test]
    fn chunks_are_read_one_by_one_and_a_cut_one_is_an_error() {
        let chunk = |name: &str| TimelineFile { name: name.into(), data: vec![7; 300], ..Default::default() };
        let bytes: Vec<u8> = ["a", "b"].iter().flat_map(|name| chunk(name).encode_length_delimited_to_vec()).collect();
        let mut body = &bytes[..];
        assert_eq!(next_chunk(&mut body).unwrap(), Some(chunk("a")));
        assert_eq!(next_chunk(&mut body).unwrap(), Some(chunk("b")));
        assert_eq!(next_chunk(&mut body).unwrap(), None);
        let mut cut = &bytes[..bytes.len() - 1];
        next_chunk(&mut cut).unwrap();
        assert!(next_chunk(&mut cut).is_err());
        assert!(next_chunk(&mut &[0xff, 0xff, 0xff, 0x7f][..]).is_err());
    }

    #[test]
    fn names_of_jobs_are_escaped() {
        assert_eq!(escaped("a b&c=d/é"), "a%20b%26c%3Dd%2F%C3%A9");
    }
}
