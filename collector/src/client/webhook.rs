//! Posts verdicts to a URL as JSON. Each post has its own thread, which retries a few times and
//! then gives up: a service that does not answer must not block the collector.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use tracing::{info, warn};
use xpu_timer_analysis::Verdict;
use xpu_timer_proto::{printable, secrets};

use crate::client::{self, Peer};

/// The destination of verdicts.
#[derive(Debug, Clone)]
pub(crate) struct Webhook {
    url: String,
    // One clone for each post in progress.
    posts: Arc<()>,
}

/// Maximum number of posts in progress, each on a thread. A service that does not answer is retried
/// for two minutes.
const MAX_POSTS: usize = 32;

const DEADLINE: Duration = Duration::from_secs(10);
/// Pauses between retries.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(20), Duration::from_secs(60)];

impl Webhook {
    /// Accepts any URL; the first verdict shows whether it answers.
    #[must_use]
    pub(crate) fn new(url: &str) -> Self {
        Webhook { url: url.into(), posts: Arc::default() }
    }

    /// Posts a verdict in the background and returns at once.
    pub(crate) fn post(&self, verdict: &Verdict, folder: Option<&Path>) {
        let (url, body) = (self.url.clone(), body(verdict, folder.map(Path::to_path_buf)));
        let incident = verdict.incident.clone();
        let post = Arc::clone(&self.posts);
        if Arc::strong_count(&post) > MAX_POSTS + 1 {
            warn!("incident {incident}: not posted to the webhook, which has not answered {MAX_POSTS} earlier posts");
            return;
        }
        let work = move || {
            send(&url, &incident, &body);
            drop(post);
        };
        if let Err(error) = thread::Builder::new().name("webhook".into()).spawn(work) {
            warn!("incident {}: cannot start a thread for the webhook: {error}", verdict.incident);
        }
    }
}

/// Replaces the characters that begin a mention or a link in a chat (`<!channel>`, `@here`,
/// `<https://…|text>`) with others of the same look: a job name must not call a whole channel.
fn without_mentions(text: &str) -> String {
    text.chars()
        .map(|letter| match letter {
            '<' => '‹',
            '>' => '›',
            '@' => '＠',
            other => other,
        })
        .collect()
}

/// Chat services show `text`; the other fields are for programs.
fn body(verdict: &Verdict, folder: Option<PathBuf>) -> Value {
    let text = format!("xpu_timer: job {}: {}", verdict.job, verdict.sentence);
    json!({
        "text": without_mentions(&printable::line(&text)),
        "incident": verdict.incident,
        "job": verdict.job,
        "attempt": verdict.attempt,
        "world_size": verdict.world_size,
        "cause": verdict.cause,
        "confidence": verdict.confidence,
        "probability": verdict.probability,
        "culprits": verdict.culprits,
        "culprit_processes": verdict.culprit_processes,
        "sentence": verdict.sentence,
        "opened_at": verdict.timing.opened_at,
        "path": folder,
    })
}

/// Removes the URL from an error text for the log: anyone who has the URL may post to it.
fn without_url(problem: &str, url: &str) -> String {
    let path = url.split_once("://").map_or(url, |(_, rest)| rest);
    let problem = if path.is_empty() { problem.into() } else { problem.replace(path, secrets::HIDDEN) };
    secrets::text(&problem).into_owned()
}

fn send(url: &str, incident: &str, body: &Value) {
    let agent = client::agent(DEADLINE, Peer::Service);
    let text = body.to_string();
    let text = printable::json(&text);
    let mut pauses = PAUSES.iter();
    loop {
        let answer = agent.post(url).header("content-type", "application/json").send(&*text);
        let problem = match answer {
            Ok(answer) if answer.status().is_success() => {
                info!("incident {incident}: posted to the webhook");
                return;
            }
            // Retrying does not help: the service rejects the request itself.
            Ok(answer) if answer.status().is_client_error() && answer.status() != 429 => {
                warn!("incident {incident}: the webhook answers {}", answer.status());
                return;
            }
            Ok(answer) => format!("it answers {}", answer.status()),
            Err(error) => without_url(&error.to_string(), url),
        };
        let Some(pause) = pauses.next() else {
            warn!("incident {incident}: gave up posting to the webhook: {problem}");
            return;
        };
        info!("incident {incident}: posting to the webhook failed, retry in {pause:?}: {problem}");
        thread::sleep(*pause);
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::Evidence;

    use super::*;

    #[test]
    fn a_job_name_cannot_mention_chat_users() {
        let mut verdict = xpu_timer_analysis::judge(&Evidence::default());
        verdict.job = "<!channel> @here <https://example.org|log>".into();
        let body = body(&verdict, None);
        let text = body["text"].as_str().unwrap();
        assert!(text.contains("job ‹!channel› ＠here ‹https://example.org|log›: "), "{text}");
        assert_eq!(body["job"], verdict.job, "programs get the name as it is");
    }

    #[test]
    fn no_error_contains_the_url() {
        for url in ["hooks.example/services/T0/s3cret", "https://hooks.example/T0/s3cret", "s3cret", "https://"] {
            let shown = without_url(&format!("bad uri: {url} is missing scheme"), url);
            assert!(shown.starts_with("bad uri: ") && !shown.contains("s3cret"), "{shown}");
        }
    }
}
