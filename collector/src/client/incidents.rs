//! `xpu_timer_collector incidents`: lists, shows and fetches the incidents of a collector over
//! HTTP.

mod table;

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
use xpu_timer_proto::{env::Source, file, printable};

use crate::{
    client::web_client::{self, Peer},
    error::chain,
    http::{address::check_url, token::read_token},
    incident::{
        folder::{Folder, folder_name, rank_of},
        part::ALL_FILES,
        records,
    },
};

/// A collector to query.
pub struct Remote {
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
    pub fn new(url: Option<String>, source: &Source) -> Result<Self> {
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
        check_url(&url).map_err(anyhow::Error::msg)?;
        let token = source.path("XPU_TIMER_COLLECTOR_TOKEN_FILE").map(|path| read_token(&path)).transpose();
        let token = token.map_err(|error| anyhow::Error::msg(chain(&error)))?;
        let authority = source.path("XPU_TIMER_COLLECTOR_CA_FILE");
        let read = |path: PathBuf| {
            let pem = file::read_within(&path).with_context(|| path.display().to_string())?;
            let certificates = web_client::certificates(&pem);
            ensure!(!certificates.is_empty(), "{}: there is no certificate in it", path.display());
            Ok(certificates)
        };
        let authorities = authority.map(read).transpose()?.unwrap_or_default();
        Ok(Remote {
            agent: web_client::agent(DEADLINE, Peer::Collector(authorities)),
            advice,
            url: url.trim_end_matches('/').into(),
            authorization: token.map(|token| format!("Bearer {token}")),
            control_port: source.control_port(),
        })
    }

    /// Requests a page and returns its body as a stream.
    fn open(&self, path: &str, deadline: Duration) -> Result<impl Read + use<>> {
        let url = format!("{}{path}", self.url);
        let mut request = self.agent.get(&url).config().timeout_global(Some(deadline)).build();
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization);
        }
        let answer = request.call().with_context(|| format!("{} does not answer{}", self.url, self.advice))?;
        let status = answer.status().as_u16();
        let mut body = answer.into_body().into_with_config().limit(MAX_FILE_BYTES).reader();
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
        let read = self.open(path, DEADLINE)?.read_to_end(&mut body);
        read.with_context(|| format!("{}{path}: the answer ended early", self.url))?;
        Ok(body)
    }

    fn json(&self, path: &str) -> Result<Value> {
        serde_json::from_slice(&self.get(path)?).with_context(|| format!("{}{path} is no JSON", self.url))
    }

    /// All incidents as text, oldest first, in lines of at most `width` characters if given,
    /// followed by the slow ranks of running jobs. As JSON, the incidents only.
    ///
    /// # Errors
    /// If the collector does not answer.
    pub fn list(&self, as_json: bool, width: Option<usize>) -> Result<String> {
        let list = self.json("/incidents")?;
        if as_json {
            return Ok(format!("{list:#}\n"));
        }
        let mut text = match list.as_array() {
            Some(incidents) if !incidents.is_empty() => table::of(incidents, width),
            _ => "no incidents\n".into(),
        };
        let slow = self.slow_ranks(false)?;
        if !slow.is_empty() {
            text.push_str("\nslow ranks, without a hang:\n");
            text.push_str(&slow);
        }
        Ok(text)
    }

    /// The ranks that slow their job down, one per line; empty if there are none.
    ///
    /// # Errors
    /// If the collector does not answer.
    pub fn slow_ranks(&self, as_json: bool) -> Result<String> {
        let list = self.json("/slow_ranks")?;
        if as_json {
            return Ok(format!("{list:#}\n"));
        }
        let line = |slow: &Value| {
            let text = |name: &str| slow[name].as_str().unwrap_or_default();
            let line = format!("{}  rank {} on {}: {}", text("job"), slow["rank"], text("node"), text("sentence"));
            format!("{}\n", printable::line(&line))
        };
        Ok(list.as_array().into_iter().flatten().map(line).collect())
    }

    /// The verdict of one incident as text.
    ///
    /// # Errors
    /// If there is no such incident or the collector does not answer.
    pub fn show(&self, id: &str, as_json: bool) -> Result<String> {
        let id = plain(id)?;
        let path = if as_json { format!("/incidents/{id}") } else { format!("/incidents/{id}/verdict.txt") };
        String::from_utf8(self.get(&path)?).context("the verdict is no text")
    }

    /// Copies the files of an incident to `incident-ID` below a folder. If `ranks` is not empty,
    /// copies only the dumps of these ranks. Returns the path and a description of what is missing,
    /// if anything.
    ///
    /// # Errors
    /// If there is no such incident or no dump of such a rank, the collector does not answer, or
    /// the folder cannot be written.
    pub fn fetch(&self, id: &str, to: &Path, ranks: &[u32]) -> Result<(PathBuf, Option<String>)> {
        let id = plain(id)?;
        let files = self.json(&format!("/incidents/{id}/files"))?;
        let sizes: BTreeMap<&str, u64> = files
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|file| Some((file["name"].as_str()?, file["bytes"].as_u64()?)))
            .collect();
        let names: Vec<&str> =
            files.as_array().into_iter().flatten().map(|file| file["name"].as_str().unwrap_or_default()).collect();
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
            bail!("{name:?} is no file of an incident");
        }
        let folder = Folder::create_copy(to, id).map_err(|error| anyhow::Error::msg(chain(&error)))?;
        for name in wanted {
            let size = sizes.get(name).copied().unwrap_or(0);
            let deadline = DEADLINE + Duration::from_secs(size / SLOWEST_BYTES_A_SECOND);
            let mut body = self.open(&format!("/incidents/{id}/{name}"), deadline)?;
            let written = folder.write_with(name, |file| io::copy(&mut body, file).map(drop));
            written.map_err(|error| anyhow::Error::msg(chain(&error)))?;
        }
        let remark = if ranks.is_empty() { missing_dumps(&folder.path, id) } else { None };
        Ok((folder.path, remark))
    }

    fn no_dump(&self, id: &str, missing: &RankSet, there: &RankSet) -> anyhow::Error {
        let (of, ranks) = (list_of(missing), list_of(there));
        let there =
            if there.is_empty() { "none of any".into() } else { format!("those of {} ranks: {ranks}", there.len()) };
        let rank = missing.first().unwrap_or_default();
        anyhow::anyhow!(
            "{} has no dump of rank {of} of incident {id}, but {there}; on the node of that rank, where its own collector runs: \
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
            "of a job beyond {ALL_FILES} ranks those of the culprits and of one rank of each group are fetched, stacks.bin has the \
             stacks of all; the other dumps are on the nodes, in incident-{id}-NODE below XPU_TIMER_TIMELINE_PATH"
        )
    } else {
        "the verdict says what became of the others".to_string()
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
    ensure!(good, "{id:?} is no name of an incident");
    Ok(id.strip_prefix("incident-").unwrap_or(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_dump_is_reported_with_the_existing_ones() {
        let names = ["00000-08192.stacktrace", "00001-08192.stacktrace", "00007-08192.stacktrace", "verdict.json"];
        assert_eq!(dumps_of(&[7, 0], &names).unwrap(), ["00007-08192.stacktrace", "00000-08192.stacktrace"]);
        let (missing, there) = dumps_of(&[7, 12, 13], &names).unwrap_err();
        assert_eq!((list_of(&missing), list_of(&there)), ("12-13".into(), "0-1,7".into()));
        let remote = Remote::new(Some("http://localhost:1".into()), &Source::new(|_| None, "")).unwrap();
        let error = remote.no_dump("x", &missing, &there).to_string();
        assert!(error.contains("no dump of rank 12-13 of incident x, but those of 3 ranks: 0-1,7;"), "{error}");
        assert!(error.ends_with("--url http://127.0.0.1:18888 fetch x --rank 12"), "{error}");
        assert!(remote.no_dump("x", &missing, &RankSet::default()).to_string().contains("but none of any;"));
    }

    #[test]
    fn names_are_plain() {
        assert_eq!(plain("incident-20261121T132019Z-0e0c1f66").unwrap(), "20261121T132019Z-0e0c1f66");
        for bad in ["", "../x", "a/b", "a b", "a?b"] {
            assert!(plain(bad).is_err(), "{bad}");
        }
    }
}
