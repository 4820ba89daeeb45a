//! `xpu_timer_dump_timeline`: the original tool's command that asks collectors to record a
//! timeline. Its options, its output and its request are those of the original tool.

use std::{
    io::Write,
    path::PathBuf,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, anyhow, bail, ensure};
use clap::{CommandFactory, Parser, error::ErrorKind};
use serde_json::{Value, json};
use xpu_timer_proto::printable;

use crate::client::{self, Peer};

/// Time limit of a request.
const DEADLINE: Duration = Duration::from_secs(60);
/// The bit of collectives in the kinds of a request. They are always recorded.
const COLLECTIVES: u32 = 2;
/// An answer has two short texts.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;

/// Asks collectors to record the next operations of their ranks in the original tool's format
///
/// The control port of a collector listens on loopback only, so this command runs on the node:
/// --host 127.0.0.1 --rank ''. For other nodes use `xpu_timer_collector timeline`, which fetches
/// the operations of all nodes through the cluster collector, in one call.
///
/// Exit codes: 0 if the requests were sent, whatever the answers say; 1 if there is nothing to
/// record; 2 for a wrong command line.
#[derive(Debug, Parser)]
#[command(name = "xpu_timer_dump_timeline", version)]
pub struct Arguments {
    /// Host of a collector; may be repeated, each time with a --rank
    #[arg(long, required = true)]
    host: Vec<String>,
    /// Number of the host, whose name is then HOST-R; R-S for several hosts; empty for HOST itself
    #[arg(long, required = true)]
    rank: Vec<String>,
    /// Control port of the collectors
    #[arg(long, default_value_t = 18888)]
    port: u16,
    /// Folder on the hosts, in the folder of XPU_TIMER_TIMELINE_PATH
    #[arg(long, default_value = "/root/timeline")]
    dump_path: PathBuf,
    /// Number of operations of each rank
    #[arg(long, default_value_t = 1000)]
    dump_count: u32,
    /// Seconds until the recording begins, so that it begins at once on all hosts
    #[arg(long, default_value_t = 5)]
    delay: u32,
    /// End what is being recorded
    #[arg(long)]
    reset: bool,
    /// Print the requests, and send none
    #[arg(long)]
    dry_run: bool,
    /// Record no collectives
    #[arg(long)]
    no_nccl: bool,
    /// Record no matrix products
    #[arg(long)]
    no_matmul: bool,
    /// Record no memory copies
    #[arg(long)]
    no_memory: bool,
    /// Not supported: xpu_timer uploads nothing
    #[arg(long, default_value = "", hide = true)]
    oss_path: String,
    /// Not supported
    #[arg(long, default_value = "", hide = true)]
    oss_ak: String,
    /// Not supported
    #[arg(long, default_value = "", hide = true)]
    oss_sk: String,
    /// Not supported
    #[arg(long, default_value = "", hide = true)]
    oss_endpoint: String,
}

/// Runs the command line.
///
/// # Errors
/// If there is nothing to record, or stdout cannot be written.
pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.host.len() != arguments.rank.len() {
        let why = "--host and --rank must be provided in pairs";
        Arguments::command().error(ErrorKind::WrongNumberOfValues, why).exit();
    }
    let oss = [&arguments.oss_path, &arguments.oss_ak, &arguments.oss_sk, &arguments.oss_endpoint];
    ensure!(
        oss.iter().all(|text| text.is_empty()),
        "--oss-* is not supported: xpu_timer uploads nothing; copy the files from --dump-path"
    );
    let mut kinds = 7;
    for (is_off, bit, name) in [
        (arguments.no_nccl, COLLECTIVES, "nccl"),
        (arguments.no_matmul, 1, "matmul"),
        (arguments.no_memory, 4, "memory"),
    ] {
        if is_off {
            kinds -= bit;
            print(&format!("Disable {name} traces"))?;
        }
    }
    ensure!(kinds != 0, "No Kernel to trace");
    let hosts = hosts(&arguments.host, &arguments.rank, arguments.port)?;
    let path = arguments.dump_path.display().to_string();
    print(&format!("dumping to {path}, with count {}", arguments.dump_count))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // In the order of the original tool.
    let data = [
        ("dump_path", json!(path)),
        ("dump_time", json!(now + u64::from(arguments.delay))),
        ("dump_count", json!(arguments.dump_count)),
        ("reset", json!(arguments.reset)),
        ("dump_kernel_type", json!(kinds)),
    ];
    let shown = as_python(&data);
    print(&shown)?;
    if arguments.dry_run {
        let list = hosts.iter().map(|host| format!("'{host}'")).collect::<Vec<_>>().join(", ");
        print(&format!("dump host [{list}]"))?;
        return print(&format!("other data {shown}"));
    }
    let body: Value = data.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
    let requests: Vec<thread::JoinHandle<Result<String>>> = hosts
        .into_iter()
        .map(|host| {
            let body = body.to_string();
            thread::spawn(move || request(&host, &body))
        })
        .collect();
    let mut has_failed = false;
    for request in requests {
        match request.join() {
            Ok(Ok(answer)) => print(&answer)?,
            Ok(Err(problem)) => {
                has_failed = true;
                print(&format!("{problem}\nNone"))?;
            }
            Err(_) => bail!("a request failed"),
        }
    }
    if has_failed { print(&advice(kinds, &path)) } else { Ok(()) }
}

/// Advice for the case that a collector does not take the request.
fn advice(kinds: u32, path: &str) -> String {
    let detail = if kinds == COLLECTIVES { "" } else { "--kernels all " };
    let path = path.replace('\'', r"'\''");
    format!(
        "The control port of a collector listens on loopback only: on the node itself, use --host 127.0.0.1 --rank ''. \
         The timelines of all nodes come through the cluster collector (that of XPU_TIMER_COLLECTOR, or --url URL):\n\
         xpu_timer_collector timeline {detail}--seconds 20 --output '{path}'"
    )
}

/// Sends a request. Returns the answer as the original tool prints it.
fn request(host: &str, body: &str) -> Result<String> {
    let url = format!("http://{host}/HostingService/DumpKernelTrace");
    let agent = client::agent(DEADLINE, Peer::Collector(Vec::new()));
    let sent = agent.post(&url).header("content-type", "application/json").send(body);
    let answer = sent.map_err(|error| anyhow!("{host}: {error}"))?;
    let status = answer.status().as_u16();
    let text = answer.into_body().into_with_config().limit(MAX_ANSWER_BYTES).read_to_string();
    let text = text.map_err(|error| anyhow!("{host}: {error}"))?;
    let json: Value = serde_json::from_str(&text).map_err(|_| anyhow!("{host} answers {status}: {}", text.trim()))?;
    match (&json["node"], &json["msg"]) {
        (Value::Null, _) | (_, Value::Null) => bail!("{host} answers {status}: {}", json["error"]),
        (node, message) => Ok(as_python(&[("node", node.clone()), ("msg", message.clone())])),
    }
}

/// The hosts, with their port.
fn hosts(hosts: &[String], ranks: &[String], port: u16) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for (host, rank) in hosts.iter().zip(ranks) {
        if rank.is_empty() {
            all.push(format!("{host}:{port}"));
            continue;
        }
        let (first, last) = rank.split_once('-').unwrap_or((rank, rank));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            bail!("--rank {rank:?} is neither a number nor two numbers with a dash between them");
        };
        all.extend((first..=last).map(|number| format!("{host}-{number}:{port}")));
    }
    Ok(all)
}

/// As Python prints a dictionary.
fn as_python(pairs: &[(&str, Value)]) -> String {
    let value = |value: &Value| match value {
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::String(text) => format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'")),
        other => other.to_string(),
    };
    let pairs: Vec<String> = pairs.iter().map(|(name, of_name)| format!("'{name}': {}", value(of_name))).collect();
    format!("{{{}}}", pairs.join(", "))
}

fn print(line: &str) -> Result<()> {
    match std::io::stdout().write_all(format!("{}\n", printable::text(line)).as_bytes()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_as_in_the_original_tool() {
        let texts = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let of = |names: &[&str], ranks: &[&str]| hosts(&texts(names), &texts(ranks), 18888).ok();
        assert_eq!(of(&["h"], &["0-2"]).unwrap(), ["h-0:18888", "h-1:18888", "h-2:18888"]);
        assert_eq!(of(&["h", "127.0.0.1"], &["7", ""]).unwrap(), ["h-7:18888", "127.0.0.1:18888"]);
        assert_eq!(of(&["h"], &["a"]), None);
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_advice_is_a_command_that_fetches_from_all_nodes() {
        let advised = advice(7, "/it's");
        let (_, command) = advised.split_once('\n').unwrap();
        assert_eq!(command, r"xpu_timer_collector timeline --kernels all --seconds 20 --output '/it'\''s'");
        assert!(!advice(COLLECTIVES, "/t").contains("--kernels"));
    }

    #[test]
    fn dictionaries_look_as_in_python() {
        let pairs = [("dump_path", json!("/it's")), ("dump_count", json!(3)), ("reset", json!(false))];
        assert_eq!(as_python(&pairs), r"{'dump_path': '/it\'s', 'dump_count': 3, 'reset': False}");
    }
}
