//! Properties that must hold in the collector and the hook for any bytes that a peer sends or a
//! process leaves behind.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use clap::Parser;
use prost::encoding::decode_varint;
use xpu_timer_analysis::Exit;
use xpu_timer_collector::{
    cluster::{
        self,
        engine::{Action, Engine},
        gather::{GatherEvent, GatherTask},
        service::Credit,
        status,
    },
    config, http,
    http::access::Token,
    incident::folder::Folder,
    node::failures,
    os::clock::Now,
};
use xpu_timer_proto::{
    Message,
    env::Source,
    printable, ring, secrets,
    v1::{
        ClusterMessage, Delivery, Evidence, Failure, FlightRecord, HookMessage, NodeDump, NodeHello, NodeMessage,
        NodeReply, RankInfo, cluster_message, delivery, node_message,
    },
};
use xpu_timer_timeline::{
    input::{Format, Open, RankFile},
    job::{Job, Settings},
    operations::Busy,
    perfetto::{self, RankTrace, tracks},
};

/// A packet between hook and node collector is a message or an error. A decoded message is equal
/// after encoding and decoding.
pub fn hook_message(bytes: &[u8]) {
    reads_what_it_writes::<HookMessage>(bytes);
    reads_what_it_writes::<NodeReply>(bytes);
}

/// The file of a rank, in the format that its first byte selects, is read as blocks up to its end
/// or an error. Each block can be turned into a trace: packets that any decoder of protobuf
/// accepts.
pub fn timeline(bytes: &[u8]) {
    let (format, bytes) = match bytes.split_first() {
        Some((0, rest)) => (Format::Ops, rest),
        Some((2, rest)) => (Format::Samples, rest),
        Some((_, rest)) => (Format::Original([(0, "kernel".to_string())].into()), rest),
        None => return,
    };
    let file = bytes.to_vec();
    let open: Open = Box::new(move || Ok(Box::new(io::Cursor::new(file.clone())) as Box<dyn io::Read + Send>));
    let file = RankFile { name: "fuzz".into(), rank: 1, world_size: 2, format, open };
    let job = Job::read(vec![file], None, Settings { threads: 1, ..Settings::default() });
    let Some(rank) = job.ranks.first() else { return };
    let mut trace = RankTrace::new(&job, 0, perfetto::Options::default());
    let (mut operations, mut busy) = (0, Busy::default());
    let _ = Job::each_block(rank, |block, times| {
        trace.begin_block(block);
        times.for_each(|time| {
            operations += 1;
            if let Some((class, from, until)) = trace.operation(&time) {
                busy.add(class, from, until);
            }
        });
    });
    assert_eq!(operations, rank.operations);
    tracks::write_counters(&mut trace, &busy.finish().1);
    trace.finish();
    let mut rest = &trace.out[..];
    while !rest.is_empty() {
        assert_eq!(decode_varint(&mut rest), Ok(0x0a), "a packet");
        let length = decode_varint(&mut rest).expect("a length") as usize;
        rest = &rest[length..];
    }
}

/// Encodings are compared, because NaN is not equal to itself.
fn reads_what_it_writes<M: Message + Default>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        let written = message.encode_to_vec();
        let again = M::decode(&written[..]).expect("a message that was written");
        assert_eq!(again.encode_to_vec(), written);
    }
}

/// Messages of nodes, concatenated with their lengths in front, lead the cluster collector through
/// incidents. The stored state depends on the entries that were sent, not on the world size that
/// they name, and every message causes a limited number of actions.
pub fn cluster_message(bytes: &[u8]) {
    reads_what_it_writes::<ClusterMessage>(bytes);
    reads_what_it_writes::<Delivery>(bytes);
    reads_what_it_writes::<NodeMessage>(bytes);
    let at = |seconds: u64| Now { mono_ns: seconds * 1_000_000_000, unix_ns: seconds * 1_000_000_000 };
    let mut engine = Engine::new(next_key, at(1));
    engine.node_joined(0, NodeHello { node: "fuzz".into(), ..Default::default() }, at(1));
    let (mut stream, mut rest) = (0, bytes);
    for second in 2.. {
        let Ok(NodeMessage { message }) = NodeMessage::decode_length_delimited(&mut rest) else { break };
        match message {
            Some(node_message::Message::Hello(hello)) => {
                stream += 1;
                engine.node_joined(stream, hello, at(second));
            }
            Some(message) => engine.message(stream, message, at(second)),
            None => engine.stream_ended(stream, "the fuzzer ends it", at(second)),
        }
        engine.tick(at(second));
        let mut actions = 0;
        while let Some(action) = engine.next_action() {
            actions += 1;
            assert!(actions < 10_000 + 100 * bytes.len(), "one message causes endless actions");
            execute(&mut engine, action, at(second));
        }
        let _ = (status::status(&engine, ([127, 0, 0, 1], 1).into(), at(second)), status::metrics(&engine, at(second)));
        if rest.is_empty() {
            break;
        }
    }
}

/// The key of a delivery.
fn next_key() -> String {
    static KEYS: AtomicU64 = AtomicU64::new(0);
    KEYS.fetch_add(1, Ordering::Relaxed).to_string()
}

/// Executes an action without threads and disks: every node delivers an empty part, and every
/// transfer of files is interrupted.
fn execute(engine: &mut Engine, action: Action, now: Now) {
    match action {
        Action::MakeFolder(record) => {
            let folder = Folder { path: format!("/incident-{}", record.id).into() };
            engine.folder_made(&record.id, Ok((folder, None)), now);
        }
        Action::Send(_, cluster_message::Message::Deliver(wanted)) => {
            let part = delivery::Message::Dump(NodeDump { last: true, ..Default::default() });
            engine.delivery_piece(&wanted.key, part, Credit::default(), now);
            engine.delivery_ended(&wanted.key, now);
        }
        Action::Send(_, cluster_message::Message::Fetch(wanted)) => engine.delivery_ended(&wanted.key, now),
        Action::Gather(id, _, GatherTask::Part(node, ..)) => engine.gathered(&id, GatherEvent::Merged(node), now),
        Action::Gather(id, _, GatherTask::Judge(..)) => {
            let verdict = Box::new(xpu_timer_analysis::judge(&Evidence::default()));
            engine.gathered(&id, GatherEvent::Judged(verdict), now);
        }
        Action::Gather(id, _, GatherTask::Draw { .. }) => engine.gathered(&id, GatherEvent::Drawn, now),
        _ => {}
    }
}

/// A ring of any contents and length is a record of limited size, or an error.
pub fn ring(bytes: &[u8]) {
    // The file continues with zeros after the bytes, like a memory file, so that short inputs reach
    // the last table.
    let read_at = |at: u64, buffer: &mut [u8]| -> io::Result<()> {
        let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
        let part = &bytes[at..bytes.len().min(at + buffer.len())];
        buffer[..part.len()].copy_from_slice(part);
        buffer[part.len()..].fill(0);
        Ok(())
    };
    let Ok(record) = ring::read(read_at, RankInfo::default(), u64::MAX) else { return };
    assert!(record.operations.len() <= ring::op::SLOTS);
    reads_what_it_writes::<FlightRecord>(&record.encode_to_vec());
    let _ = (ring::read_names(read_at), ring::read_functions(read_at), ring::lane::calls(&read_at));
    let _ = ring::read_fault(read_at).expect("reading memory");
    for entry in [ring::stderr::OWN, ring::stderr::CHILDREN] {
        let last = ring::read_last_text(read_at, entry).expect("reading memory");
        assert!(last.is_none_or(|last| last.text.len() <= ring::stderr::TEXT_BYTES));
    }
    let mut cursor = ring::span::SpanCursor::default();
    let functions = ring::span::read_functions(read_at).expect("reading memory");
    for _ in 0..2 {
        let calls = cursor.read(read_at, &functions).expect("reading memory");
        assert!(calls.len() <= ring::span::SLOTS);
    }
    for from in [0, 1, u64::MAX - 3, u64::MAX] {
        let mut slots = Vec::new();
        ring::read_slots(read_at, from, ring::op::SLOTS, &mut slots).expect("reading memory");
        assert_eq!(slots.len(), ring::op::SLOTS);
    }
}

/// The last text of a process, and an error file of torchelastic, show failures whose texts are
/// short and safe to print.
pub fn failure(bytes: &[u8]) {
    let mut failures = failures::of_text(&String::from_utf8_lossy(bytes), 0, Exit::of("exit code 1"), &[]);
    assert!(failures.len() <= 2, "{failures:?}");
    failures.extend(failures::of_error_file(bytes));
    for failure in &failures {
        let Failure { r#type, message, place, thread, frames, .. } = failure;
        for text in [r#type, message, place, thread].into_iter().chain(frames) {
            assert!(text.len() <= failures::MOST_TEXT + "process ".len(), "{text}");
            assert_eq!(printable::line(text), *text);
        }
        let _ = failures::summary(failure);
    }
}

/// A ring with these words: each is its position in the file, in four bytes, and its value. A ring
/// is large and mostly zero, so this reaches all its tables with few bytes.
pub fn ring_of_words(bytes: &[u8]) {
    let mut file = vec![0; ring::offset::END];
    let mut set = |place: usize, word: u64| file[place * 8..][..8].copy_from_slice(&word.to_le_bytes());
    set(ring::header::MAGIC, ring::MAGIC);
    set(ring::header::VERSION, u64::from(ring::VERSION));
    let (words, rest) = bytes.as_chunks::<12>();
    for [a, b, c, d, word @ ..] in words {
        set(u32::from_le_bytes([*a, *b, *c, *d]) as usize % (ring::offset::END / 8), u64::from_le_bytes(*word));
    }
    // The remaining bytes truncate the file.
    file.truncate(file.len() - rest.iter().map(|byte| usize::from(*byte) * 4096).sum::<usize>().min(file.len()));
    ring(&file);
}

/// An environment of a process and an INI file, separated by two zero bytes, are settings.
pub fn settings(bytes: &[u8]) {
    let end = bytes.windows(2).position(|pair| pair == [0, 0]);
    let (environ, ini) = bytes.split_at(end.unwrap_or(bytes.len()));
    let text = String::from_utf8_lossy(ini).into_owned();
    let _ = Source::of_environ(environ).rank_info();
    let environment = environ.to_vec();
    let lookup = move |name: &str| {
        let entry = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        entry.map(|value| String::from_utf8_lossy(value).into_owned())
    };
    let source = Source::new(lookup, &text);
    let node = config::Settings::new(&source, None, 0);
    assert!(node.control_port > 0, "a port");
    let timeout = source.seconds("XPU_TIMER_HANG_TIMEOUT").expect("it has a default");
    assert!(!timeout.is_zero() && timeout <= xpu_timer_proto::env::LONGEST, "{timeout:?}");
    let _ = cluster::config::Settings::new(&source, Some("127.0.0.1:1".into()), "/tmp".into(), 0);
    let _ = (source.rank_info(), source.without_effect());
    for problem in source.all_problems() {
        assert!(!problem.to_string().contains(['\n', '\u{1b}']), "{problem}");
    }
}

/// Arguments of a command line, separated by zero bytes, are a request or an error. When displayed,
/// a secret in them is hidden.
pub fn command_line(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let words = || std::iter::once("program").chain(text.split('\0'));
    let _ = xpu_timer_collector::cli::Arguments::try_parse_from(words());
    let _ = xpu_timer_capture::dump::Arguments::try_parse_from(words());
    let _ = xpu_timer_viewer::Args::try_parse_from(words());
    // Arguments are joined by spaces, so a secret with a space could come from two of them.
    const SECRET: &str = "planted-secret";
    let shown = secrets::cmdline(&[bytes, b"\0--api-key=", SECRET.as_bytes()].concat());
    // A guided fuzzer learns the words with which it is compared, and inserts them where they are
    // not a secret.
    assert!(shown.matches(SECRET).count() <= text.matches(SECRET).count(), "{shown}");
    let _ = (secrets::text(&text), secrets::host_of(&text));
}

/// The head of an HTTP request, its lines concatenated. A request without the token is never
/// accepted as one with it.
pub fn http(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut headers = HeaderMap::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        if let (Ok(name), Ok(value)) = (name.trim().parse::<HeaderName>(), value.trim().parse::<HeaderValue>()) {
            headers.append(name, value);
        }
    }
    let _ = (http::is_local(&headers), http::authority(&text));
    let shown = Token::new(Some(TOKEN.into())).is_shown(&headers);
    assert!(!shown || carries_the_token(&text), "a request without the token is let in");
    assert!(!Token::new(None).is_shown(&headers), "nothing shows a token that is not set");
}

/// No input contains it by chance.
const TOKEN: &str = "2e8c8f6f0f0f4a6fb9f1d6";

/// Whether a text contains the token, plain or as a password in base64 with any of three shifts.
fn carries_the_token(text: &str) -> bool {
    text.contains(TOKEN) || text.to_ascii_lowercase().contains("basic")
}
