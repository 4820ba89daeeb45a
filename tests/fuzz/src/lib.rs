//! Properties that must hold for any external bytes: from a disk, a socket, shared memory, the
//! environment. Each function panics if its property does not hold.
//!
//! `cargo xtask fuzz` runs them guided by coverage. The tests here run them, without a fuzzer, on
//! the kept corpus and on modified dumps of a real hang.

mod wire;

use std::convert::Infallible;
use std::ops::Range;

use xpu_timer_analysis::folded;
use xpu_timer_analysis::prefix_tree::PrefixTree;
use xpu_timer_proto::server::{PstackFrame, PySpyFrame, PySuspended, Stacktrace};
use xpu_timer_proto::{Message, lenient};
use xpu_timer_timeline::picture::Picture;
use xpu_timer_viewer::dump::{Child, DecodeError, Dump, Sample, Suspended, Thread, Threads};
use xpu_timer_viewer::merge::Merger;
use xpu_timer_viewer::report;

pub use wire::{cluster_message, command_line, failure, hook_message, http, ring, ring_of_words, settings, timeline};

/// A fuzzed function and the name of its corpus.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("decode", decode),
    ("folder", folder),
    ("object", object),
    ("perf_map", perf_map),
    ("hook_message", hook_message),
    ("cluster_message", cluster_message),
    ("ring", ring_of_words),
    ("http", http),
    ("settings", settings),
    ("command_line", command_line),
    ("timeline", timeline),
    ("failure", failure),
    ("planted", planted),
];

/// The viewer reads a file like the collector, or returns an error. The decoder skips parts that
/// are not drawn, so it may accept more files, never fewer. Files that `prost` accepts have equal
/// contents.
pub fn decode(bytes: &[u8]) {
    // Parts that only the report reads end in a value or an error, whatever their bytes are.
    let _ = (Sample::decode(bytes), Child::decode(bytes));
    let lenient = lenient::decode::<Stacktrace>(bytes);
    if let Ok(message) = Stacktrace::decode(bytes) {
        assert_eq!(lenient.as_ref(), Ok(&message));
    }
    match (drawn_here(bytes), lenient) {
        (Ok(ours), Ok(message)) => assert_eq!(ours, drawn_by_prost(&message)),
        (Err(DecodeError::NoDump), Ok(message)) => assert_eq!(message, Stacktrace::default()),
        (Err(error), Ok(_)) => panic!("the collector accepts it: {error}"),
        (_, Err(_)) => {}
    }
}

pub use xpu_timer_capture::fuzz::{object, perf_map};

/// Separates the files of a folder. No encoder writes a number in this form, so no real dump
/// contains it.
const NEXT_FILE: [u8; 2] = [0xff, 0];

/// A folder: the files of rank 0, 1, … are the parts between [`NEXT_FILE`], and one more rank is
/// absent. The viewer's output equals that of the collector's trees; the pictures are well-formed
/// and contain every frame; the report contains every rank.
pub fn folder(bytes: &[u8]) {
    let (mut files, mut from) = (Vec::new(), 0);
    while let Some(to) = bytes[from..].windows(2).position(|window| window == NEXT_FILE) {
        files.push(&bytes[from..from + to]);
        from += to + 2;
    }
    files.push(&bytes[from..]);
    files.truncate(24);
    let world = files.len() as u32 + 1;
    let (mut merger, mut builder) = (Merger::default(), report::Builder::default());
    let (mut native, mut python) = (PrefixTree::new(), PrefixTree::new());
    // Files that only this decoder accepts cannot be merged in the other way.
    let (mut ranks, mut alike) = (0, true);
    for (rank, file) in (0..).zip(&files) {
        let Ok(dump) = Dump::decode(file) else { continue };
        merger.add(rank, &dump);
        builder.add(rank, &dump, &mut merger);
        ranks += 1;
        match lenient::decode::<Stacktrace>(file) {
            Ok(message) => {
                folded::insert_native(&mut native, &message, rank);
                folded::insert_python(&mut python, &message, rank);
            }
            Err(_) => alike = false,
        }
    }
    let mut merged = merger.finish();
    assert_eq!(merged.ranks.len(), ranks);
    assert_eq!(merged.groups.iter().map(|group| group.ranks.len()).sum::<u64>(), ranks, "every rank is in one group");
    for (tree, expected) in [(&merged.native, &native), (&merged.python, &python)] {
        let picture = Picture::new(tree, world);
        if alike {
            assert_eq!(picture.folded(), folded::folded(expected, world));
        }
        let mut svg = Vec::new();
        picture.write_svg("merge stack in cpp", &mut svg).expect("writing to memory");
        let mut steps = 0;
        let walked: Result<(), Infallible> = folded::walk(tree, world, |_| {
            steps += 1;
            Ok(())
        });
        walked.unwrap_or_else(|never| match never {});
        assert_eq!(frames(&svg), steps, "every node is one frame");
    }
    let report = builder.finish(&report::ReportContext { world, ..report::ReportContext::default() }, &mut merged);
    let page = report::render(&report).expect("a page");
    let data = page.split_once("id=\"data\">").and_then(|(_, rest)| rest.split_once("</script>")).expect("data").0;
    let data: serde_json::Value = serde_json::from_str(data).expect("JSON");
    assert_eq!(data["ranks"].as_array().map(Vec::len), Some(ranks as usize));
}

/// Panics on an input that begins with a certain word. Guessing it takes 2^64 attempts, but
/// coverage leads to it letter by letter. This shows `cargo xtask fuzz` that its fuzzer is guided.
pub fn planted(bytes: &[u8]) {
    assert!(!matches!(bytes, [b'p', b'l', b'a', b'n', b't', b'e', b'd', b'!', ..]), "the planted word was found");
}

type Frames = Vec<(String, String)>;

/// The drawn parts of a dump: process id, state, the frames of the native and the Python threads,
/// and for each Python thread the tasks and greenlets: kind, name, what it awaits, frames.
type Drawn = (i32, String, Vec<Frames>, Vec<Frames>, Vec<Vec<(i32, String, String, Frames)>>);

fn drawn_by_prost(message: &Stacktrace) -> Drawn {
    let native = |frame: &PstackFrame| (frame.func_name.clone(), frame.file_name.clone());
    let python = |frame: &PySpyFrame| (frame.func_name.clone(), frame.file_name.clone());
    let suspended =
        |of: &PySuspended| (of.kind, of.name.clone(), of.awaits.clone(), of.frames.iter().map(python).collect());
    (
        message.pid,
        message.process_state.clone(),
        message.stacktrace.iter().map(|thread| thread.frames.iter().map(native).collect()).collect(),
        message.py_stacktrace.iter().map(|thread| thread.frames.iter().map(python).collect()).collect(),
        message.py_stacktrace.iter().map(|thread| thread.suspended.iter().map(suspended).collect()).collect(),
    )
}

fn drawn_here(file: &[u8]) -> Result<Drawn, DecodeError> {
    let dump = Dump::decode(file)?;
    let Threads { native, python, frames, suspended } = &dump.threads;
    let texts = |range: &Range<usize>| -> Frames {
        let frames = frames[range.clone()].iter().map(|frame| frame.text());
        frames.map(|(func, file)| (func.into_owned(), file.into_owned())).collect()
    };
    let of_threads = |threads: &[Thread<'_>]| threads.iter().map(|thread| texts(&thread.frames)).collect();
    let one_suspended = |of: &Suspended<'_>| {
        let [name, awaits] = [of.name, of.awaits].map(|text| String::from_utf8_lossy(text).into_owned());
        (of.kind, name, awaits, texts(&of.frames))
    };
    let suspended = |thread: &Thread<'_>| suspended[thread.suspended.clone()].iter().map(one_suspended).collect();
    let suspended = python.iter().map(suspended).collect();
    Ok((dump.pid, dump.process_state.to_string(), of_threads(native), of_threads(python), suspended))
}

/// Number of frames in a picture, without the frame of all stacks, according to an XML parser.
fn frames(svg: &[u8]) -> usize {
    let svg = std::str::from_utf8(svg).expect("text");
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(svg, options).expect("well-formed XML");
    let titles = document.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "title")));
    titles.filter(|title| title.text().is_some_and(|text| !text.starts_with("all ("))).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use proptest::prelude::*;
    use xpu_timer_proto::hook::{HostTrace, KernelTrace, KernelTraces, NcclDebugData, kernel_trace::DebugData};
    use xpu_timer_proto::server::{PstackStacktrace, PySpyStacktrace};
    use xpu_timer_tests::Timelines;

    /// The dumps of a real hang.
    fn real_dumps() -> Vec<Vec<u8>> {
        xpu_timer_tests::rank6_dumps().unwrap().into_values().collect()
    }

    /// The kept corpus of a target.
    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let inputs = xpu_timer_tests::fuzz_corpus(name).unwrap();
        assert!(!inputs.is_empty(), "{name}");
        inputs.into_values().collect()
    }

    fn sample() -> Stacktrace {
        let native = |name: &str| PstackStacktrace {
            pid: 77,
            thread_name: name.into(),
            frames: vec![
                PstackFrame {
                    func_name: "poll".into(),
                    file_name: "/lib/libc.so.6".into(),
                    pc: 1 << 60,
                    ..Default::default()
                },
                PstackFrame { func_name: "main".into(), origin: "#1 main".into(), ..Default::default() },
            ],
            syscall: Some(-1),
            ..Default::default()
        };
        Stacktrace {
            stacktrace: vec![native("a"), native("b")],
            py_stacktrace: vec![PySpyStacktrace {
                os_thread_id: 9,
                thread_name: "MainThread".into(),
                frames: vec![PySpyFrame { func_name: "f".into(), file_name: "x.py:3".into(), module: "m".into() }],
                suspended: vec![PySuspended {
                    kind: 2,
                    name: "Greenlet".into(),
                    frames: vec![PySpyFrame { func_name: "g".into(), ..Default::default() }; 2],
                    awaits: "a future".into(),
                }],
                ..Default::default()
            }],
            pid: -5,
            rank: 3,
            process_state: "D (disk sleep)".into(),
            pyspy_stderr: "no such process".into(),
            command: "python".into(),
            ..Default::default()
        }
    }

    #[test]
    fn reads_what_prost_writes() {
        let message = sample();
        let bytes = message.encode_to_vec();
        let dump = Dump::decode(&bytes).unwrap();
        assert_eq!(drawn_here(&bytes).unwrap(), drawn_by_prost(&message));
        assert_eq!(dump.pyspy_stderr, "no such process");
        assert_eq!((dump.threads.python[0].tid, dump.threads.python[0].name), (9, &b"MainThread"[..]));
        assert_eq!(dump.threads.native[1].tid, 77);
    }

    #[test]
    fn every_cut_is_an_error_or_a_shorter_message_as_for_prost() {
        let bytes = sample().encode_to_vec();
        let mut errors = 0;
        for cut in 1..bytes.len() {
            let (ours, theirs) = (drawn_here(&bytes[..cut]), Stacktrace::decode(&bytes[..cut]));
            assert_eq!(ours.is_ok(), theirs.is_ok(), "cut at {cut}");
            errors += usize::from(ours.is_err());
        }
        assert!(errors > bytes.len() / 2);
    }

    #[test]
    fn groups_of_unknown_fields_are_skipped_as_deep_as_prost_does() {
        for depth in [1, 50, 99, 100, 101, 102, 5_000] {
            // Field 20, a group, followed by field 11.
            let mut file = [0xa3, 0x01].repeat(depth);
            file.extend([0xa4, 0x01].repeat(depth));
            file.extend([0x5a, 1, b'S']);
            assert_eq!(Dump::decode(&file).is_ok(), Stacktrace::decode(&file[..]).is_ok(), "depth {depth}");
        }
    }

    #[test]
    fn the_kept_corpus_holds() {
        for (name, target) in TARGETS.iter().filter(|(name, _)| *name != "planted") {
            corpus(name).iter().for_each(|bytes| target(bytes));
        }
    }

    #[test]
    fn a_real_hang_is_the_same_both_ways() {
        let real = real_dumps();
        assert!(real.iter().all(|file| !file.windows(2).any(|window| window == NEXT_FILE)), "no file of it is split");
        folder(&real.join(&NEXT_FILE[..]));
        real.iter().for_each(|bytes| decode(bytes));
    }

    #[test]
    #[should_panic(expected = "the planted word was found")]
    fn the_planted_word_is_there_to_be_found() {
        planted(b"planted!");
    }

    /// A file of each format, behind the byte that selects it.
    fn timelines() -> Vec<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let timelines = Timelines { ranks: 1, ranks_per_node: 1, operations: 16, ..Timelines::default() };
        timelines.write(folder.path()).unwrap();
        let ours = fs::read(folder.path().join("00000-00001.ops")).unwrap();
        let collective = NcclDebugData { comm_hash: 7, ranks: 2, seq: 1, ..Default::default() };
        let trace = KernelTrace {
            kernel_type: 1,
            start_us: 1 << 50,
            dur_us: 9,
            debug_data: Some(DebugData::NcclDebug(collective)),
            ..Default::default()
        };
        let host = HostTrace { start_us: 1 << 50, dur_us: 5, name: "GC".into(), ..Default::default() };
        let original = KernelTraces { traces: vec![trace; 3], host_traces: vec![host], pid: 3, rank: 1 };
        vec![[&[0], &ours[..]].concat(), [&[1], &original.encode_to_vec()[..]].concat()]
    }

    #[test]
    fn timelines_of_both_formats_are_read() {
        timelines().iter().for_each(|bytes| timeline(bytes));
    }

    /// Truncates bytes and changes some of them.
    fn changed(mut bytes: Vec<u8>, cut: Option<prop::sample::Index>, changes: &[(prop::sample::Index, u8)]) -> Vec<u8> {
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if !bytes.is_empty() {
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
        }
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn arbitrary_bytes_hold(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
            ring(&bytes);
        }

        /// Small object files of a compiler, truncated and modified: their line tables, packed or
        /// not, and their unwind rules.
        #[test]
        fn a_changed_object_is_read_or_refused(
            which in any::<prop::sample::Index>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut objects = corpus("object");
            let bytes = objects.swap_remove(which.index(objects.len()));
            object(&changed(bytes, cut, &changes));
        }

        #[test]
        fn any_perf_map_holds(text in "[0-9a-fx \\n]{0,80}([a-z:é]{0,5}[ \\n]){0,5}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            perf_map(text.as_bytes());
            perf_map(&bytes);
        }

        /// A timeline of either format, truncated and modified.
        #[test]
        fn a_changed_timeline_is_read_or_refused(
            which in 0usize..2,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            timeline(&changed(timelines().swap_remove(which), cut, &changes));
        }

        /// A real dump of the original tool, truncated and modified.
        #[test]
        fn a_changed_dump_of_a_real_hang_is_read_as_prost_reads_it(
            rank in 0usize..8,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let bytes = real_dumps().swap_remove(rank);
            decode(&changed(bytes, cut, &changes));
        }
    }
}
