//! The node role: one poll loop owns the state; a small runtime beside it serves HTTP and waits for
//! signals.

mod captures;
mod cluster_member;
mod cluster_messages;
mod connections;
mod dump;
mod event_loop;
mod evidence;
mod exit_plugins;
pub mod failures;
mod folder_writer;
mod inbox;
mod incidents;
mod launched;
mod metrics_page;
mod monitor;
mod part_search;
mod plan;
mod registration;
mod registry;
mod related;
mod reports;
mod sharers;
mod socket;
mod state;
mod status;
pub(crate) mod supervisor;
mod tick;
mod timeline;
mod uplink;
mod verdict_actions;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};
use tracing::{error, info};
use xpu_timer_proto::socket::settings_file;

use crate::{
    config::Settings,
    error::{Error, chain},
    http::{
        self, NoEndpoint,
        access::{Token, read_token},
        server::Server,
        watch::Limits,
    },
    logging,
    node::{
        captures::Captures,
        connections::Connections,
        event_loop::EventLoop,
        inbox::{Command, Inbox},
        socket::Endpoint,
        state::NodeState,
        supervisor::SupervisorLink,
        uplink::Address,
    },
    os::resources,
};

/// Time between two cleanups of the hooks' logs.
const LOG_CLEANUP_INTERVAL: Duration = Duration::from_secs(60);

/// The kernel frees the ports of a killed collector within this time.
const PORT_RELEASE: Duration = Duration::from_millis(500);

/// Number of other port pairs to try, and the distance between them. The pair after the last one
/// would hold the cluster collector's port.
const OTHER_PAIRS: u16 = 8;
const PAIRS_APART: u16 = 10;

/// Runs the node collector until it receives a stop request or nobody needs it any longer.
///
/// With `tied`, standard input is the socket to the supervisor that started this process.
///
/// # Errors
/// When another collector holds this socket, or the socket cannot be opened.
pub fn run(settings: Settings, tied: bool) -> Result<(), Error> {
    let (supervised, endpoint) = match tied {
        true => SupervisorLink::begin(&settings).map(|(supervised, endpoint)| (Some(supervised), endpoint))?,
        false => (None, Endpoint::open(&settings.socket)?),
    };
    let descriptors = resources::raise_descriptor_limit();
    resources::limit_arenas(1);
    let (inbox, commands) = Inbox::new()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(4)
        .enable_all()
        .build()
        .map_err(Error::system("start the HTTP runtime"))?;
    let mut state = NodeState::new(settings, Captures::default(), inbox.clone());
    state.problems = runtime.block_on(start(&mut state.settings, &inbox, descriptors));
    if let Some(problem) = write_settings_file(&state.settings) {
        error!("{problem}");
        state.problems.push(problem);
    }
    if let Some(problem) = join_cluster(&state.settings, &runtime, &inbox) {
        error!("{problem}");
        state.problems.push(problem);
    }
    // An earlier collector may have been killed. Its commands still run, and their ranks may not
    // have registered yet.
    state.launched.find(&state.settings.socket);
    state.supervisor = supervised.as_ref().and_then(SupervisorLink::pid);
    info!("listening on {} as pid {}", state.settings.socket.display(), std::process::id());
    // The launcher looks for errors in the log after it has received the welcome.
    logging::flush();
    if let Some(supervised) = &supervised {
        supervised.up();
    }
    let mut event_loop =
        EventLoop { state, endpoint, supervised, connections: Connections::default(), inbox, commands };
    event_loop.run();
    if let Some(supervised) = &event_loop.supervised
        && !supervised.announce_end()
    {
        event_loop.endpoint.set_removes_file(true);
    }
    shut_down(runtime);
    Ok(())
}

/// Dials the cluster collector if one is configured. Without a usable address the node works alone,
/// and the returned text gives the reason.
fn join_cluster(settings: &Settings, runtime: &Runtime, inbox: &Inbox) -> Option<String> {
    let url = settings.cluster.as_ref()?;
    match Address::new(url, settings.token_file.as_deref(), settings.ca_file.as_deref()) {
        Ok(address) => {
            runtime.spawn(uplink::run(address, inbox.clone()));
            None
        }
        Err(problem) => Some(format!("{problem}; this node works alone")),
    }
}

/// Does not wait for connections that are still open.
fn shut_down(runtime: Runtime) {
    runtime.shutdown_background();
}

/// Limits the number of logs that hooks leave behind. A disk that does not answer blocks only this
/// task.
async fn clean_hook_logs(folder: PathBuf) {
    let mut turns = interval(LOG_CLEANUP_INTERVAL);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turns.tick().await;
        let folder = folder.clone();
        // The next cleanup starts after this one has ended.
        let _ = tokio::task::spawn_blocking(move || logging::remove_hook_logs(&folder)).await;
    }
}

/// Opens the endpoints and watches for signals. An endpoint that cannot be opened is a problem, not
/// the end: the dumps matter more.
async fn start(settings: &mut Settings, inbox: &Inbox, descriptors: u64) -> Vec<String> {
    let mut problems = Vec::new();
    let server = Server { limits: Limits::new(descriptors), slots: Arc::default(), tls: None, http2: false };
    // Hooks write their log beside the socket when their own log folder is on a network file
    // system.
    for folder in [Some(settings.logging_dir.as_path()), settings.socket.parent()].into_iter().flatten() {
        tokio::spawn(clean_hook_logs(folder.to_path_buf()));
    }
    let token = settings.token_file.as_deref().map(read_token).transpose().unwrap_or_else(|error| {
        problems.push(format!("{}; the control port answers its owner and root only", chain(&error)));
        None
    });
    let variable = settings.port_variable;
    let (control, metrics) = listen(settings, &mut problems).await;
    if let Some(listener) = control {
        let token = Token::new(token);
        drop(tokio::spawn(http::serve_control(server.clone(), listener, inbox.clone(), token)));
    }
    if let Some(listener) = metrics {
        drop(tokio::spawn(http::serve_metrics(server, listener, inbox.clone())));
    }
    if settings.metrics_port.is_none() {
        problems.push(format!("there is no metrics endpoint: no port is above that of {variable}"));
    }
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        match signal(kind) {
            Ok(mut signals) => {
                let inbox = inbox.clone();
                tokio::spawn(async move {
                    while signals.recv().await.is_some() {
                        inbox.post(Command::Stop);
                    }
                });
            }
            Err(error) => problems.push(format!("cannot handle a signal: {error}")),
        }
    }
    for problem in &problems {
        error!("{problem}");
    }
    problems
}

/// Listens on the two ports, or on another pair when one of them is taken, for example by the
/// collector of a job with other settings. The ports of a collector that was just killed become
/// free as soon as the kernel has cleaned up its process.
async fn listen(settings: &mut Settings, problems: &mut Vec<String>) -> (Option<TcpListener>, Option<TcpListener>) {
    let (control, metrics) = (settings.control_port, settings.metrics_port);
    let begun = Instant::now();
    let (one, other) = loop {
        let pair = listen_pair(settings, control, metrics).await;
        match pair {
            (Ok(one), Some(Ok(other))) => return (Some(one), Some(other)),
            (Ok(one), None) => return (Some(one), None),
            _ if begun.elapsed() < PORT_RELEASE => {
                drop(pair);
                tokio::time::sleep(PORT_RELEASE / 20).await;
            }
            pair => break pair,
        }
    };
    for port in (1..=OTHER_PAIRS).filter_map(|pair| control.checked_add(pair * PAIRS_APART)) {
        let (Ok(control_listener), Some(Ok(metrics_listener))) = listen_pair(settings, port, port.checked_add(1)).await
        else {
            continue;
        };
        let taken = one.as_ref().err().or(other.as_ref().and_then(|other| other.as_ref().err()));
        let why = taken.map_or(String::new(), |missing| missing.problem.to_string());
        problems.push(format!("{why}; until then the control port is {port} and the metrics port {}", port + 1));
        (settings.control_port, settings.metrics_port) = (port, Some(port + 1));
        return (Some(control_listener), Some(metrics_listener));
    }
    let mut keep = |listener: Listening| listener.map_err(|missing| problems.push(missing.to_string())).ok();
    (keep(one), other.and_then(keep))
}

type Listening = Result<TcpListener, NoEndpoint>;

async fn listen_pair(settings: &Settings, control: u16, metrics: Option<u16>) -> (Listening, Option<Listening>) {
    let one = http::listen(control, "control", settings.port_variable).await;
    let other = match metrics {
        Some(port) => Some(http::listen(port, "metrics", settings.port_variable).await),
        None => None,
    };
    (one, other)
}

/// Writes the hashes of this collector's settings beside the socket, for launchers of jobs with
/// other settings. Returns the problem if that fails.
fn write_settings_file(settings: &Settings) -> Option<String> {
    let lines: String = settings.fingerprints.iter().map(|one| format!("{} {:016x}\n", one.name, one.hash)).collect();
    let file = settings_file(&settings.socket);
    let error = std::fs::write(&file, lines).err()?;
    Some(format!("{}: {error}; launchers cannot compare their settings with those of this collector", file.display()))
}
