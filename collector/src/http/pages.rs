//! The pages about incidents on disk, common to both roles: the list, a verdict, and every file.

use std::{
    fs::File,
    io::{self, Read},
    path::PathBuf,
    time::Duration,
};

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, SemaphorePermit, mpsc},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    incident::records::{self, WithoutFolder},
    json::Json,
};

/// Roots of incident folders.
pub type Roots = Vec<PathBuf>;

/// `/incidents`: incidents on disk and others, sorted by name.
pub async fn list(roots: Roots, others: Vec<WithoutFolder>) -> Response {
    let mut all: Vec<Value> = apart(move || records::list(&roots)).await.unwrap_or_default();
    // An incident that is not on disk yet is newer.
    all.retain(|one| !one["incident"].as_str().is_some_and(|id| others.iter().any(|other| other.is(id))));
    all.extend(others.into_iter().map(|other| other.line));
    all.sort_by(|one, other| one["incident"].as_str().cmp(&other["incident"].as_str()));
    Json(all).into_response()
}

/// `/incidents/ID`: its `verdict.json`.
pub async fn verdict(roots: Roots, others: Vec<WithoutFolder>, id: String) -> Response {
    let name = "verdict.json";
    let found = apart(move || records::verdict_json(&roots, &id).or_else(|| file_of(&others, &id, name))).await;
    match found.flatten() {
        Some(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/files`: names and sizes.
pub async fn files(roots: Roots, others: Vec<WithoutFolder>, id: String) -> Response {
    let others = move |id: &str| {
        let files = others.iter().find(|other| other.is(id))?.files();
        Some(files.iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes.len() })).collect::<Vec<Value>>())
    };
    let found = move || {
        let mut all = records::files(&roots, &id);
        for other in others(&id).into_iter().flatten() {
            let all = all.get_or_insert_default();
            if all.iter().all(|file| file["name"] != other["name"]) {
                all.push(other);
            }
        }
        all
    };
    match apart(found).await.flatten() {
        Some(files) => Json(files).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/NAME`: one file, for example `report.html`.
pub async fn file(roots: Roots, others: Vec<WithoutFolder>, id: String, name: String) -> Response {
    let kind = match name.rsplit_once('.').map(|(_, end)| end) {
        Some("html") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        Some("stacktrace" | "bin") => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    };
    let Ok(Ok(reader)) = timeout(QUEUE, READERS.acquire()).await else {
        let busy = "too many files are being read";
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": busy }))).into_response();
    };
    let found = apart(move || {
        if let Some((file, length)) = records::file(&roots, &id, &name) {
            return Ok(Content::File(file, length));
        }
        let found = file_of(&others, &id, &name).map(Content::Bytes);
        found.ok_or_else(|| records::files(&roots, &id).is_some() || others.iter().any(|other| other.is(&id)))
    });
    match found.await {
        Some(Ok(Content::Bytes(bytes))) => ([(header::CONTENT_TYPE, kind)], bytes).into_response(),
        Some(Ok(Content::File(file, length))) => {
            let head = [(header::CONTENT_TYPE, kind.to_string()), (header::CONTENT_LENGTH, length.to_string())];
            (head, stream(file, length, reader)).into_response()
        }
        Some(Err(true)) => not_found("no such file"),
        _ => not_found("no such incident"),
    }
}

/// The content of a file, or a file to read it from.
enum Content {
    Bytes(Vec<u8>),
    File(File, u64),
}

/// Files that are read at a time; each has a descriptor.
static READERS: Semaphore = Semaphore::const_new(64);
/// How long a request waits for its turn.
const QUEUE: Duration = Duration::from_secs(10);
/// Memory used for a file while it is sent.
const PIECE_BYTES: u64 = 64 * 1024;

/// Reads a file as fast as the peer receives it. If the peer receives nothing for long, the
/// connection ends and the reading with it.
fn stream(mut file: File, length: u64, reader: SemaphorePermit<'static>) -> Body {
    let (sender, pieces) = mpsc::channel::<io::Result<Vec<u8>>>(1);
    tokio::spawn(async move {
        let _reader = reader;
        let mut left = length;
        while left > 0 {
            let bytes = left.min(PIECE_BYTES);
            let read = apart(move || {
                let mut piece = vec![0; bytes as usize];
                file.read_exact(&mut piece).map(|()| (file, piece))
            });
            let read = read.await.unwrap_or_else(|| Err(io::Error::other("the reader ended")));
            let (same, piece) = match read {
                Ok(read) => read,
                // The peer notices that the file is incomplete.
                Err(error) => return drop(sender.send(Err(error)).await),
            };
            (file, left) = (same, left - bytes);
            if sender.send(Ok(piece)).await.is_err() {
                return;
            }
        }
    });
    Body::from_stream(ReceiverStream::new(pieces))
}

/// A file of an incident without a folder.
fn file_of(others: &[WithoutFolder], id: &str, name: &str) -> Option<Vec<u8>> {
    let files = others.iter().find(|other| other.is(id))?.files();
    files.into_iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes)
}

/// Runs work on a blocking thread: disks may be slow.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

fn not_found(what: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": what }))).into_response()
}
