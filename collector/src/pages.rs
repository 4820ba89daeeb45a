//! The pages about incidents on disk, which both roles have: the list, a verdict, and every file.

use std::path::PathBuf;

use axum::{
    Json,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::records;

/// Folders of the incident folders.
pub type Roots = Vec<PathBuf>;

/// `/incidents`: those on disk, and others, in the order of their names.
pub async fn list(roots: Roots, others: Vec<Value>) -> Response {
    let mut all = apart(move || records::list(&roots)).await.unwrap_or_default();
    all.extend(others);
    all.sort_by(|one, other| one["incident"].as_str().cmp(&other["incident"].as_str()));
    Json(all).into_response()
}

/// `/incidents/ID`: its `verdict.json`.
pub async fn verdict(roots: Roots, id: String) -> Response {
    match apart(move || records::verdict_json(&roots, &id)).await.flatten() {
        Some(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/files`: names and sizes.
pub async fn files(roots: Roots, id: String) -> Response {
    match apart(move || records::files(&roots, &id)).await.flatten() {
        Some(files) => Json(files).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/NAME`: one file, for example `report.html`.
pub async fn file(roots: Roots, id: String, name: String) -> Response {
    let kind = match name.rsplit_once('.').map(|(_, end)| end) {
        Some("html") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        Some("stacktrace" | "bin") => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    };
    let found = apart(move || records::file(&roots, &id, &name).ok_or_else(|| records::files(&roots, &id).is_some()));
    match found.await {
        Some(Ok(bytes)) => ([(header::CONTENT_TYPE, kind)], bytes).into_response(),
        Some(Err(true)) => not_found("no such file"),
        _ => not_found("no such incident"),
    }
}

/// Disks may be slow.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

fn not_found(what: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": what }))).into_response()
}
