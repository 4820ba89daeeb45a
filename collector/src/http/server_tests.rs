//! Slow, silent and greedy peers against a server with short deadlines.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::{body::Bytes, http::StatusCode, routing::get};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
    time::Instant,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

use super::*;

/// Longer than every deadline of a test, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const REQUEST: &[u8] = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n";

fn short() -> Limits {
    let milliseconds = Duration::from_millis;
    Limits {
        handshake: milliseconds(300),
        head: milliseconds(300),
        idle: milliseconds(500),
        stall: milliseconds(700),
        own: 8,
        each: 2,
        unauthenticated: 4,
        trusted: 8,
    }
}

/// A server with test pages, and a counter of the bytes that `/endless` has produced.
async fn served(limits: Limits, tls: Option<TlsAcceptor>, http2: bool) -> (SocketAddr, Arc<AtomicUsize>) {
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let endless = get(move || async move {
        let (sender, pieces) = mpsc::channel(1);
        tokio::spawn(async move {
            while sender.send(Bytes::from(vec![b'x'; 64 * 1024])).await.is_ok() {
                count.fetch_add(64 * 1024, Ordering::Relaxed);
            }
        });
        Body::from_stream(ReceiverStream::new(pieces).map(Ok::<_, Infallible>))
    });
    let router =
        Router::new().route("/x", get(|| async { "here\n" }).post(|| async { "taken\n" })).route("/endless", endless);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(Server { limits, slots: Arc::default(), tls, http2 }.run(listener, router));
    (address, made)
}

/// Reads until the connection ends.
async fn rest(mut stream: impl AsyncRead + Unpin) -> String {
    let mut all = Vec::new();
    // Any kind of end is fine.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut all)).await.expect("the server ends the connection");
    String::from_utf8_lossy(&all).into_owned()
}

async fn gets_answer(address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let asked = stream.write_all(b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    asked.is_ok() && rest(stream).await.contains("here")
}

#[tokio::test]
async fn silent_and_slow_senders_are_disconnected() {
    for http2 in [false, true] {
        let (address, _) = served(short(), None, http2).await;
        let silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(rest(silent).await, "");
        let (reads, mut writes) = TcpStream::connect(address).await.unwrap().into_split();
        let trickle = tokio::spawn(async move {
            for byte in b"GET /x HTTP/1.1\r\nX: ".iter().chain(std::iter::repeat(&b'x')) {
                if writes.write_all(&[*byte]).await.is_err() {
                    return;
                }
                sleep(Duration::from_millis(10)).await;
            }
        });
        assert_eq!(rest(reads).await, "");
        trickle.abort();
        assert!(gets_answer(address).await);
    }
}

#[tokio::test]
async fn idle_connections_and_missing_bodies_time_out() {
    let (address, _) = served(short(), None, false).await;
    let mut idle = TcpStream::connect(address).await.unwrap();
    for _ in 0..2 {
        idle.write_all(REQUEST).await.unwrap();
        let mut answer = vec![0; 1024];
        let length = timeout(PATIENCE, idle.read(&mut answer)).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&answer[..length]).ends_with("here\n"));
    }
    assert_eq!(rest(idle).await, "");
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\nx").await.unwrap();
    assert!(rest(slow).await.ends_with("taken\n"));
}

#[tokio::test]
async fn a_stalled_reader_is_disconnected_in_bounded_memory() {
    let (address, made) = served(short(), None, false).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut before = usize::MAX;
    let deadline = Instant::now() + PATIENCE;
    // After the end of the connection there is no receiver.
    loop {
        sleep(short().stall * 2).await;
        let now = made.load(Ordering::Relaxed);
        if now > 0 && now == before {
            break;
        }
        before = now;
        assert!(Instant::now() < deadline, "{now} bytes and no end");
    }
    assert!(
        before < 32 << 20,
        "{before} bytes were made for a reader that takes none: the kernel buffers some megabytes"
    );
    let got = rest(stream).await.len();
    assert!(got <= before + before / 1000 + 4096, "the connection ended before the next piece");
    assert!(gets_answer(address).await);
}

#[tokio::test]
async fn a_flood_of_idle_connections_leaves_room_for_the_next_request() {
    let (address, _) = served(Limits { head: PATIENCE, ..short() }, None, false).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    assert!(gets_answer(address).await);
    // All connections beyond the limit are closed long before their deadline.
    let mut closed = 0;
    for mut stream in idle.into_iter().take(90) {
        closed += usize::from(timeout(PATIENCE, stream.read(&mut [0])).await.is_ok());
    }
    assert_eq!(closed, 90);
}

/// The runtime of this test has one thread. Without a wait, the server accepts connections until
/// tokio's budget is used up, before the tasks of the connections that it ended run. On a busy
/// machine, a runtime with two threads does the same.
#[tokio::test]
async fn ended_connections_close_before_more_are_accepted() {
    let limits = Limits { head: PATIENCE, ..short() };
    let slots = Arc::new(Slots::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let idle: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let router = Router::new().route("/x", get(|| async { "here\n" }));
    tokio::spawn(Server { limits, slots: Arc::clone(&slots), tls: None, http2: false }.run(listener, router));
    let asked = tokio::spawn(gets_answer(address));
    let mut most = 0;
    while !asked.is_finished() {
        most = most.max(slots.count());
        tokio::task::yield_now().await;
    }
    assert!(asked.await.unwrap());
    assert!(most >= limits.own && most <= limits.own + 20, "{most} connections were open at once");
    drop(idle);
}

#[tokio::test]
async fn half_a_tls_handshake_has_a_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
    let [cert_file, key_file] = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
    std::fs::write(&cert_file, certificate.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let acceptor = tls_acceptor(&cert_file, &key_file).unwrap();
    let limits = Limits { head: PATIENCE * 2, ..short() };
    let (address, _) = served(limits, Some(acceptor), true).await;
    let mut half = TcpStream::connect(address).await.unwrap();
    // A handshake record whose rest never arrives.
    half.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
    let begun = Instant::now();
    rest(half).await;
    assert!(begun.elapsed() < PATIENCE, "by the deadline of the handshake");
    let wrong = tls_acceptor(&key_file, &key_file).map(drop).unwrap_err();
    assert!(crate::error::chain(&wrong).contains("it contains no certificate"), "{wrong:?}");
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The preface with these settings, and the headers of a request for a path.
fn http2(settings: &[u8], path: &str) -> (Vec<u8>, Vec<u8>) {
    let start = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, settings)].concat();
    // GET, http, then path and authority as literals behind their names in the static table.
    let mut headers = vec![0x82, 0x86, 0x04, path.len() as u8];
    headers.extend(path.as_bytes());
    headers.extend([0x01, 9]);
    headers.extend(b"localhost");
    (start, headers)
}

#[tokio::test]
async fn a_stream_of_http2_without_a_window_ends_its_connection() {
    let (address, made) = served(short(), None, true).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0: no byte of a body may be sent.
    let (start, headers) = http2(&[0, 4, 0, 0, 0, 0], "/endless");
    stream.write_all(&[start, frame(1, 5, 1, &headers)].concat()).await.unwrap();
    rest(stream).await;
    assert!(made.load(Ordering::Relaxed) < 1 << 20, "{made:?}");
    assert!(gets_answer(address).await);
}

#[tokio::test]
async fn a_flood_of_resets_is_ended() {
    let (address, _) = served(short(), None, true).await;
    let (reads, mut writes) = TcpStream::connect(address).await.unwrap().into_split();
    let flood = tokio::spawn(async move {
        let (start, headers) = http2(&[], "/x");
        writes.write_all(&start).await.unwrap();
        for stream in (1..2_000_001).step_by(2) {
            // HEADERS, and at once RST_STREAM with CANCEL.
            let both = [frame(1, 5, stream, &headers), frame(3, 0, stream, &[0, 0, 0, 8])].concat();
            if writes.write_all(&both).await.is_err() {
                return true;
            }
        }
        false
    });
    let (ended, _) = tokio::join!(flood, rest(reads));
    assert!(ended.unwrap(), "a million resets went through");
    assert!(gets_answer(address).await);
}

#[tokio::test]
async fn headers_without_end_are_refused() {
    let (address, _) = served(Limits { head: PATIENCE * 2, ..short() }, None, false).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = [b"GET /x HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 2 * MAX_HEADER_BYTES]].concat();
    let _ = stream.write_all(&head).await;
    let begun = Instant::now();
    let answer = rest(stream).await;
    assert!(begun.elapsed() < PATIENCE);
    let refused = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE.as_str();
    assert!(answer.is_empty() || answer.contains(refused), "{answer}");
}
