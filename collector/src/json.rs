//! JSON for people and programs. [`printable::json`] removes everything that a terminal or a page
//! would act on.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use xpu_timer_proto::printable;

/// An answer over HTTP.
#[derive(Debug)]
pub(crate) struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], safe(serde_json::to_string(&self.0))).into_response()
    }
}

/// The content of a file, with line breaks.
#[must_use]
pub(crate) fn pretty(value: &impl Serialize) -> Vec<u8> {
    safe(serde_json::to_string_pretty(value)).into_bytes()
}

fn safe(json: serde_json::Result<String>) -> String {
    match json {
        Ok(json) => printable::json(&json).into_owned(),
        // No known type of ours causes this.
        Err(error) => serde_json::json!({ "error": error.to_string() }).to_string(),
    }
}
