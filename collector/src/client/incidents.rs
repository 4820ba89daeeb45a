//! `xpu_timer_collector incidents`: lists, shows and fetches the incidents of a collector over
//! HTTP.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use ureq::Agent;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::{env::Source, file, printable, timeline};

use crate::{
    client::{self, Peer},
    error::chain,
    http::access::{check_url, read_token},
    incident::{
        folder::{Folder, folder_name, rank_of},
        part::ALL_FILES,
        records,
    },
};

/// A collector to query.
pub(crate) struct Remote {
    agent: Agent,
    url: String,
    // Advice for the user if the collector does not answer.
    advice: String,
    authorization: Option<String>,
    // The control port of a node's own collector.
    control_port: u16,
}

const DEADLINE: Duration = Duration::from_secs(60);
/// Enough for a `report.html` or a dump of a large job.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// A longer error body is not an error message.
const MAX_ERROR_BYTES: u64 = 64 * 1024;
/// A slower download is given up.
const SLOWEST_BYTES_A_SECOND: u64 = 16 * 1024;

impl Remote {
    /// The collector at `url`, otherwise the cluster collector of the environment, otherwise the
    /// collector of this node.
    ///
    /// # Errors
    /// If the address, the token file or the authority cannot be used.
    pub(crate) fn new(url: Option<String>, source: &Source) -> Result<Self> {
        let named = url.or_else(|| source.text("XPU_TIMER_COLLECTOR"));
        let advice = match &named {
            Some(_) => String::new(),
            None => format!(
                " (no job runs under xpu_timer_launch here? --url or XPU_TIMER_COLLECTOR names another collector; incidents of jobs \
                 that have ended: xpu_timer_stacktrace_viewer --list --path {})",
                source.path("XPU_TIMER_TIMELINE_PATH").unwrap_or_default().display()
            ),
        };
        let url = named.unwrap_or_else(|| format!("http://127.0.0.1:{}", source.control_port()));
        check_url(&url)?;
        let token = source.path("XPU_TIMER_COLLECTOR_TOKEN_FILE").map(|path| read_token(&path)).transpose();
        let token = token.map_err(|error| anyhow::Error::msg(chain(&error)))?;
        let authority = source.path("XPU_TIMER_COLLECTOR_CA_FILE");
        let read = |path: PathBuf| {
            let pem = file::read_within(&path).with_context(|| path.display().to_string())?;
            let certificates = client::certificates(&pem);
            ensure!(!certificates.is_empty(), "{} contains no certificate", path.display());
            Ok(certificates)
        };
        let authorities = authority.map(read).transpose()?.unwrap_or_default();
        Ok(Remote {
            agent: client::agent(DEADLINE, Peer::Collector(authorities)),
            advice,
            url: url.trim_end_matches('/').into(),
            authorization: token.map(|token| format!("Bearer {token}")),
            control_port: source.control_port(),
        })
    }

    /// Requests a page and returns its body as a stream.
    pub(super) fn open(&self, path: &str, deadline: Duration, most_bytes: u64) -> Result<impl Read + use<>> {
        let url = format!("{}{path}", self.url);
        let mut request = self.agent.get(&url).config().timeout_global(Some(deadline)).build();
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let answer = request.call().with_context(|| format!("{} does not answer{}", self.url, self.advice))?;
        let status = answer.status().as_u16();
        let mut body = answer.into_body().into_with_config().limit(most_bytes).reader();
        if status == 200 {
            return Ok(body);
        }
        let mut text = Vec::new();
        // An unreadable part of the body is only missing in the error text.
        let _ = body.by_ref().take(MAX_ERROR_BYTES).read_to_end(&mut text);
        let body = text;
        match status {
            401 => bail!("{}: the token is wrong or missing (XPU_TIMER_COLLECTOR_TOKEN_FILE)", self.url),
            404 => bail!("{url}: {}", error_of(&body)),
            code => bail!("{url} answers {code}: {}", error_of(&body)),
        }
    }

    fn get(&self, path: &str) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        let read = self.open(path, DEADLINE, MAX_FILE_BYTES)?.read_to_end(&mut body);
        read.with_context(|| format!("{}{path}: the answer ended early", self.url))?;
        Ok(body)
    }

    fn json(&self, path: &str) -> Result<Value> {
        serde_json::from_slice(&self.get(path)?).with_context(|| format!("{}{path} is not JSON", self.url))
    }

    /// All incidents as text, oldest first, in lines of at most `width` characters if given,
    /// followed by the slow ranks of running jobs. As JSON, the incidents only. With `all`, the
    /// list contains the mild captures.
    ///
    /// # Errors
    /// If the collector does not answer.
    pub(crate) fn list(&self, all: bool, as_json: bool, width: Option<usize>) -> Result<String> {
        let list = self.json(if all { "/incidents?all=true" } else { "/incidents" })?;
        if as_json {
            return Ok(format!("{list:#}\n"));
        }
        let mut text = match list.as_array() {
            Some(incidents) if !incidents.is_empty() => table(incidents, width),
            _ => "no incidents\n".into(),
        };
        let slow = self.slow_list()?;
        if !slow.is_empty() {
            text.push_str("\nslow ranks, without a hang:\n");
            slow.iter().for_each(|slow| text.push_str(&Remote::slow_line(slow)));
        }
        Ok(text)
    }

    /// The ranks that slow their job down, as `/slow_ranks` has them.
    ///
    /// # Errors
    /// If the collector does not answer.
    pub(super) fn slow_list(&self) -> Result<Vec<Value>> {
        match self.json("/slow_ranks")? {
            Value::Array(list) => Ok(list),
            _ => bail!("{}/slow_ranks is not a list", self.url),
        }
    }

    /// The line of one of them.
    pub(super) fn slow_line(slow: &Value) -> String {
        let text = |name: &str| slow[name].as_str().unwrap_or_default();
        let line = format!("{}  rank {} on {}: {}", text("job"), slow["rank"], text("node"), text("sentence"));
        format!("{}\n", printable::line(&line))
    }

    /// The verdict of one incident as text.
    ///
    /// # Errors
    /// If there is no such incident or the collector does not answer.
    pub(crate) fn show(&self, id: &str, as_json: bool) -> Result<String> {
        let id = plain(id)?;
        let path = if as_json { format!("/incidents/{id}") } else { format!("/incidents/{id}/verdict.txt") };
        String::from_utf8(self.get(&path)?).context("the verdict is not UTF-8 text")
    }

    /// Copies the files of an incident to `incident-ID` below a folder. If `ranks` is not empty,
    /// copies only the dumps of these ranks. Returns the path and a description of what is missing,
    /// if anything.
    ///
    /// # Errors
    /// If there is no such incident or no dump of such a rank, the collector does not answer, or
    /// the folder cannot be written.
    pub(crate) fn fetch(&self, id: &str, to: &Path, ranks: &[u32]) -> Result<(PathBuf, Option<String>)> {
        let id = plain(id)?;
        let files = self.json(&format!("/incidents/{id}/files"))?;
        let sizes: BTreeMap<&str, u64> = files
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|file| Some((file["name"].as_str()?, file["bytes"].as_u64()?)))
            .collect();
        let mut names: Vec<&str> =
            files.as_array().into_iter().flatten().map(|file| file["name"].as_str().unwrap_or_default()).collect();
        // This file goes away when the timelines are there.
        let is_unfinished = names.contains(&timeline::PENDING);
        names.retain(|name| *name != timeline::PENDING);
        let wanted = if ranks.is_empty() {
            names
        } else {
            dumps_of(ranks, &names).map_err(|(missing, there)| self.no_dump(id, &missing, &there))?
        };
        // Accept only names that we would choose ourselves, whatever the collector sends.
        let is_ours = |name: &str| {
            folder_name("", Some(name)) == format!("-{name}") && !name.is_empty() && !name.starts_with(['.', '-'])
        };
        if let Some(name) = wanted.iter().copied().find(|name| !is_ours(name)) {
            bail!("{name:?} is not a file of an incident");
        }
        let folder = Folder::create_copy(to, id).map_err(|error| anyhow::Error::msg(chain(&error)))?;
        for name in wanted {
            let size = sizes.get(name).copied().unwrap_or(0);
            let deadline = DEADLINE + Duration::from_secs(size / SLOWEST_BYTES_A_SECOND);
            let mut body = self.open(&format!("/incidents/{id}/{name}"), deadline, MAX_FILE_BYTES)?;
            let written = folder.write_with(name, |file| io::copy(&mut body, file).map(drop));
            written.map_err(|error| anyhow::Error::msg(chain(&error)))?;
        }
        let remark = if ranks.is_empty() { missing_dumps(&folder.path, id) } else { None };
        let unfinished = || format!("the timelines of incident {id} are still coming; fetch it again to have them");
        Ok((folder.path, remark.or_else(|| is_unfinished.then(unfinished))))
    }

    fn no_dump(&self, id: &str, missing: &RankSet, there: &RankSet) -> anyhow::Error {
        let (of, ranks) = (list_of(missing), list_of(there));
        let there = if there.is_empty() {
            "it has no dump at all".into()
        } else {
            format!("it has those of {} ranks: {ranks}", there.len())
        };
        let rank = missing.first().unwrap_or_default();
        anyhow::anyhow!(
            "{} has no dump of rank {of} of incident {id}; {there}; on the node of that rank, run: \
             xpu_timer_collector incidents --url http://127.0.0.1:{} fetch {id} --rank {rank}",
            self.url,
            self.control_port
        )
    }
}

/// The names of the dumps of some ranks. If some have none: the ranks without a dump and those with
/// one.
fn dumps_of<'a>(ranks: &[u32], names: &[&'a str]) -> Result<Vec<&'a str>, (RankSet, RankSet)> {
    let dumps: BTreeMap<u32, &str> = names.iter().filter_map(|name| Some((rank_of(name)?, *name))).collect();
    let missing: RankSet = ranks.iter().filter(|rank| !dumps.contains_key(rank)).copied().collect();
    if missing.is_empty() {
        Ok(ranks.iter().filter_map(|rank| dumps.get(rank).copied()).collect())
    } else {
        Err((missing, dumps.keys().copied().collect()))
    }
}

fn list_of(ranks: &RankSet) -> String {
    ranks.to_string().replace('/', ",")
}

/// Describes missing dumps; `None` if the folder has a dump of every rank.
fn missing_dumps(folder: &Path, id: &str) -> Option<String> {
    let verdict = records::verdict(folder)?;
    let names = fs::read_dir(folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let dumps = names.filter(|name| rank_of(name).is_some()).count();
    let world = verdict.world_size as usize;
    if dumps >= world {
        return None;
    }
    let why = if world > ALL_FILES {
        format!(
            "in a job with more than {ALL_FILES} ranks, the cluster collector fetches only the dumps of the culprits and of one rank \
             of each group; stacks.bin has the stacks of all ranks, and the other dumps are on the nodes, in incident-{id}-NODE \
             below XPU_TIMER_TIMELINE_PATH"
        )
    } else {
        "the verdict gives the reason for the others".to_string()
    };
    Some(format!("dumps of {dumps} of {world} ranks: {why}"))
}

fn error_of(body: &[u8]) -> String {
    let json: Option<Value> = serde_json::from_slice(body).ok();
    let message = json.as_ref().and_then(|json| json["error"].as_str()).map(str::to_string);
    message.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_string())
}

fn plain(id: &str) -> Result<&str> {
    let good = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    ensure!(good, "{id:?} is not the name of an incident; `xpu_timer_collector incidents` lists them");
    Ok(id.strip_prefix("incident-").unwrap_or(id))
}

// The list of incidents for people: one row each in aligned columns, followed by the sentence.

const HEADER: [&str; 7] = ["INCIDENT", "OPENED (UTC)", "JOB", "STATUS", "CAUSE", "CONF.", "CULPRITS"];
/// This column is optional: the name of an incident also contains its time.
const OPENED: usize = 1;
/// Index after the column `OPENED` was removed.
const JOB: usize = 1;
/// A job name is never shortened below this.
const SHORTEST_JOB: usize = 8;
const GAP: &str = "  ";
/// Number of processes that are shown of one incident; the rest is counted.
const MAX_PROCESSES: usize = 4;

/// The incidents of `/incidents` in lines of at most `width` characters. `None` shortens nothing,
/// so that the output can be searched.
fn table(incidents: &[Value], width: Option<usize>) -> String {
    let mut rows: Vec<Vec<String>> = incidents.iter().map(table_row).collect();
    rows.insert(0, HEADER.map(String::from).to_vec());
    let width = width.unwrap_or(usize::MAX);
    if table_width(&rows) > width {
        rows.iter_mut().for_each(|row| drop(row.remove(OPENED)));
        let excess = table_width(&rows).saturating_sub(width);
        let job = widest(&rows, JOB).saturating_sub(excess).max(SHORTEST_JOB);
        rows.iter_mut().for_each(|row| row[JOB] = clipped(&row[JOB], job));
    }
    let widths: Vec<usize> = (0..rows[0].len()).map(|column| widest(&rows, column)).collect();
    let clip = |line: &str| format!("{}\n", clipped(line.trim_end(), width));
    let line = |row: &[String]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        clip(&cells.join(GAP))
    };
    let mut text = line(&rows[0]);
    for (row, incident) in rows[1..].iter().zip(incidents) {
        text.push_str(&line(row));
        let sentence = incident["sentence"].as_str().unwrap_or("no verdict yet");
        text.push_str(&clip(&format!("  {}", printable::line(sentence))));
        process_lines(incident).iter().for_each(|line| text.push_str(&clip(&format!("    {line}"))));
    }
    text
}

/// The processes of the culprits, one per line.
fn process_lines(incident: &Value) -> Vec<String> {
    let all = incident["culprit_processes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |process: &Value| {
        let text = |name: &str| process[name].as_str().filter(|text| !text.is_empty());
        let rank = process["rank"].as_u64().map(|rank| format!("rank {rank}: ")).unwrap_or_default();
        let node = text("node").map(|node| format!(" on {node}")).unwrap_or_default();
        let command = text("command").map(|command| format!(": {command}")).unwrap_or_default();
        printable::line(&format!("{rank}pid {}{node}{command}", process["pid"])).into_owned()
    };
    let mut lines: Vec<String> = all.iter().take(MAX_PROCESSES).map(line).collect();
    if let Some(more) = all.len().checked_sub(MAX_PROCESSES).filter(|more| *more > 0) {
        lines.push(format!("and {more} more processes; `show` lists their ranks, `--json` all of them"));
    }
    lines
}

fn widest(rows: &[Vec<String>], column: usize) -> usize {
    rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
}

fn table_width(rows: &[Vec<String>]) -> usize {
    let columns = rows[0].len();
    (0..columns).map(|column| widest(rows, column)).sum::<usize>() + (columns - 1) * GAP.len()
}

fn table_row(incident: &Value) -> Vec<String> {
    let text = |name: &str| match incident[name].as_str() {
        Some(text) if !text.is_empty() => printable::line(text).into_owned(),
        _ => "-".into(),
    };
    let opened = text("opened_at");
    // 2026-11-21T13:20:19.123Z
    let opened = opened.get(..16).map_or(opened.clone(), |minute| minute.replace('T', " "));
    vec![text("incident"), opened, text("job"), text("status"), text("cause"), text("confidence"), culprits(incident)]
}

fn culprits(incident: &Value) -> String {
    let ranks = incident["culprits"].as_array().into_iter().flatten();
    let ranks: RankSet = ranks.filter_map(|rank| rank.as_u64()?.try_into().ok()).collect();
    let others = incident["culprit_processes"].as_array().into_iter().flatten();
    let others = others.filter(|process| process["rank"].is_null());
    let others = others.take(MAX_PROCESSES).map(|process| format!("pid {}", process["pid"]));
    let ranks = Some(list_of(&ranks)).filter(|_| !ranks.is_empty());
    let names: Vec<String> = ranks.into_iter().chain(others).collect();
    if names.is_empty() { "-".into() } else { names.join(", ") }
}

/// The beginning of a text, with an ellipsis if it was cut.
fn clipped(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_missing_dump_is_reported_with_the_existing_ones() {
        let names = ["00000-08192.stacktrace", "00001-08192.stacktrace", "00007-08192.stacktrace", "verdict.json"];
        assert_eq!(dumps_of(&[7, 0], &names).unwrap(), ["00007-08192.stacktrace", "00000-08192.stacktrace"]);
        let (missing, there) = dumps_of(&[7, 12, 13], &names).unwrap_err();
        assert_eq!((list_of(&missing), list_of(&there)), ("12-13".into(), "0-1,7".into()));
        let remote = Remote::new(Some("http://localhost:1".into()), &Source::new(|_| None, "")).unwrap();
        let error = remote.no_dump("x", &missing, &there).to_string();
        assert!(error.contains("no dump of rank 12-13 of incident x; it has those of 3 ranks: 0-1,7;"), "{error}");
        assert!(error.ends_with("--url http://127.0.0.1:18888 fetch x --rank 12"), "{error}");
        assert!(remote.no_dump("x", &missing, &RankSet::default()).to_string().contains("; it has no dump at all;"));
    }

    #[test]
    fn incident_names_must_be_plain() {
        assert_eq!(plain("incident-20261121T132019Z-0e0c1f66").unwrap(), "20261121T132019Z-0e0c1f66");
        for bad in ["", "../x", "a/b", "a b", "a?b"] {
            assert!(plain(bad).is_err(), "{bad}");
        }
    }

    fn incidents() -> Vec<Value> {
        vec![
            json!({
                "incident": "20261121T132019Z-0e0c1f66", "opened_at": "2026-11-21T13:20:19.5Z", "job": "llama-70b-pretrain-run-17",
                "status": "open", "cause": "data_loader", "confidence": "high", "culprits": [2, 3, 4, 9],
                "sentence": format!("Rank 2 waits for its data loader{}", " and so on".repeat(20)),
            }),
            json!({ "incident": "20261121T140000Z-00000001", "job": "", "status": "resolved", "cause": "unknown", "culprits": [] }),
        ]
    }

    #[test]
    fn columns_are_aligned_with_their_headers() {
        let text = table(&incidents(), None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..2],
            [
                "INCIDENT                   OPENED (UTC)      JOB                        STATUS    CAUSE        CONF.  CULPRITS",
                "20261121T132019Z-0e0c1f66  2026-11-21 13:20  llama-70b-pretrain-run-17  open      data_loader  high   2-4,9",
            ]
        );
        assert!(lines[2].starts_with("  Rank 2 waits for its data loader and") && lines[2].ends_with("so on"));
        assert_eq!(lines[3].split_whitespace().last(), Some("-"));
        assert_eq!(lines[4], "  no verdict yet");
    }

    #[test]
    fn the_processes_of_the_culprits_have_lines_of_their_own() {
        let process = |rank: Option<u32>, pid: i32, node: &str, command: &str| json!({ "rank": rank, "pid": pid, "node": node, "command": command });
        let mut incident = json!({
            "incident": "1", "culprits": [2], "sentence": "Both stand.",
            "culprit_processes": [process(Some(2), 10, "a", "python3 train.py"), process(None, 8176, "", "")],
        });
        let lines = |incident: &Value| {
            table(std::slice::from_ref(incident), None).lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        let found = lines(&incident);
        assert!(found[0].ends_with("2, pid 8176"), "{found:?}");
        assert_eq!(found[1..], ["  Both stand.", "    rank 2: pid 10 on a: python3 train.py", "    pid 8176"]);
        incident["culprit_processes"] = (0..9).map(|pid| process(Some(0), pid, "a", "x")).collect();
        let found = lines(&incident);
        assert!(found.len() == 7 && found[6].starts_with("    and 5 more"), "{found:?}");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [40, 80, 100, 200] {
            let text = table(&incidents(), Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            assert_eq!(text.lines().count(), 5);
        }
        let of_a_plain_terminal = table(&incidents(), Some(80));
        let row = of_a_plain_terminal.lines().nth(1).unwrap();
        assert_eq!(row, "20261121T132019Z-0e0c1f66  llama-70b-pr…  open      data_loader  high   2-4,9");
    }
}
