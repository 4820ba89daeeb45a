//! The node role: one poll loop owns the state; a small runtime beside it serves HTTP and waits for
//! signals.

mod captures;
mod cluster_messages;
mod commands;
mod comparing;
mod connections;
mod delivery;
mod dump;
mod ending;
mod evidence;
mod filters;
mod inbox;
mod judged;
mod launched;
mod link;
mod member;
mod metrics_page;
mod monitor;
mod plan;
mod registration;
mod registry;
mod socket;
mod state;
mod status;
mod subjects;
pub(crate) mod supervisor;
mod tick;
mod unwritten;
mod unwritten_verdicts;
mod uplink;
mod work;
mod writing;

use std::{
    os::fd::AsFd,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};
use tracing::{error, info, warn};
use xpu_timer_proto::socket::settings_file;

use crate::{
    config::Settings,
    error::{Error, chain},
    http::{
        self,
        server::Server,
        token::{Token, read_token},
        watch::Limits,
    },
    job::key::{ConnectionId, RankId},
    logging,
    node::{
        captures::Captures,
        connections::{Connections, Event},
        inbox::{Command, Inbox},
        socket::Endpoint,
        state::{NodeState, TICK},
        supervisor::{News, Supervised},
        uplink::Address,
    },
    os::{clock::Now, limits::raise_descriptor_limit, memory, process::Handle},
};

/// How long the collector waits for running dumps when it ends, after it has hurried them.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
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
        true => Supervised::begin(&settings).map(|(supervised, endpoint)| (Some(supervised), endpoint))?,
        false => (None, Endpoint::open(&settings.socket)?),
    };
    let descriptors = raise_descriptor_limit();
    memory::share_one_arena();
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
    state.supervisor = supervised.as_ref().and_then(Supervised::pid);
    info!("listening on {} as pid {}", state.settings.socket.display(), std::process::id());
    // The launcher looks for errors in the log after it has received the welcome.
    logging::flush();
    if let Some(supervised) = &supervised {
        supervised.up();
    }
    let mut node = Node { state, endpoint, supervised, connections: Connections::default(), inbox, commands };
    node.work();
    if let Some(supervised) = &node.supervised
        && !supervised.ends()
    {
        node.endpoint.set_removes_file(true);
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
        problems.push(format!("there is no metrics endpoint: no port is above the one of {variable}"));
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
            Err(error) => problems.push(format!("a signal cannot be watched for: {error}")),
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
        let why = taken.map_or("", |why| why.split_once(": ").map_or(why.as_str(), |(_, why)| why));
        problems.push(format!("{why}; until then control is on port {port} and metrics on port {}", port + 1));
        (settings.control_port, settings.metrics_port) = (port, Some(port + 1));
        return (Some(control_listener), Some(metrics_listener));
    }
    let mut keep = |listener: Result<TcpListener, String>| listener.map_err(|problem| problems.push(problem)).ok();
    (keep(one), other.and_then(keep))
}

type Listening = Result<TcpListener, String>;

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
    Some(format!("jobs with other settings cannot see it: {}: {error}", file.display()))
}

/// Whether Yama allows this process to read another one only if that one has named it, or an
/// ancestor of it.
fn is_tracing_restricted() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "1")
}

struct Node {
    state: NodeState,
    endpoint: Endpoint,
    supervised: Option<Supervised>,
    connections: Connections,
    inbox: Inbox,
    commands: mpsc::Receiver<Command>,
}

/// The result of one poll.
#[derive(Default)]
struct Ready {
    listener: bool,
    connections: Vec<ConnectionId>,
    processes: Vec<RankId>,
    // A rank that has not registered has ended.
    unregistered_ended: bool,
}

impl Node {
    fn work(&mut self) {
        let mut next_tick = Instant::now();
        let mut used = Instant::now();
        let mut stopping: Option<Instant> = None;
        loop {
            let ready = self.wait(next_tick.saturating_duration_since(Instant::now()), stopping.is_none());
            let now = Now::get();
            // Goodbyes and last messages are handled before the end of their process.
            for id in ready.connections {
                self.read(id, now);
            }
            for id in ready.processes {
                self.state.ended(id, now);
            }
            if ready.unregistered_ended {
                self.state.note_ended_unregistered(now);
            }
            if ready.listener {
                self.connections.accept(&self.endpoint);
            }
            self.inbox.clear();
            while let Ok(command) = self.commands.try_recv() {
                if matches!(command, Command::Stop) && stopping.replace(Instant::now()).is_none() {
                    info!("told to end");
                }
                self.state.command(command, now);
            }
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + TICK;
                self.state.tick(now);
                self.connections.close_mute();
            }
            if let Some(supervised) = &mut self.supervised {
                let news = supervised.turn(&self.state.settings, &self.endpoint).filter(|_| stopping.is_none());
                self.state.supervisor = supervised.pid();
                match news {
                    Some(News::Stop) => self.inbox.post(Command::Stop),
                    Some(News::Alone) if is_tracing_restricted() => {
                        info!("the hooks connect again, so that they let this process look into theirs");
                        for id in self.connections.close_all() {
                            self.state.disconnected(id, now);
                        }
                    }
                    Some(News::Alone) | None => {}
                }
            }
            self.state.note_turn(now);
            if self.connections.are_used() || self.state.launched.is_needed() || self.state.is_busy() {
                used = Instant::now();
            }
            if let Some(since) = stopping
                && (!self.state.is_writing() || since.elapsed() > SHUTDOWN_GRACE)
            {
                info!("ended");
                return;
            }
            if self.state.settings.linger.is_some_and(|linger| used.elapsed() >= linger) {
                info!("nobody has needed this collector for {:.1?}: ended", used.elapsed());
                return;
            }
        }
    }

    fn read(&mut self, id: ConnectionId, now: Now) {
        let (pid, process) = (self.connections.pid(id), self.connections.process(id));
        for event in self.connections.read(id) {
            match event {
                Event::Message(message, descriptor) => {
                    if let Err(problem) = self.state.message(id, pid, process.as_ref(), *message, descriptor, now) {
                        self.connections.refuse(id, &problem);
                        self.state.disconnected(id, now);
                        return;
                    }
                }
                Event::End => {
                    if let Some(command) = self.connections.close(id) {
                        self.state.launched.add(command);
                    }
                    self.state.disconnected(id, now);
                }
            }
        }
    }

    /// Waits for an event, at most for `patience`.
    fn wait(&self, patience: Duration, accepting: bool) -> Ready {
        let processes: Vec<(RankId, Arc<Handle>)> = self
            .state
            .registry
            .ranks()
            .filter(|rank| !rank.gone)
            .filter_map(|rank| Some((rank.id, Arc::clone(rank.process.as_ref()?))))
            .collect();
        let connections: Vec<(ConnectionId, _)> =
            self.connections.iter().map(|(id, connection)| (id, connection.fd.as_fd())).collect();
        let listening = accepting && self.connections.accepts();
        let supervisor = self.supervised.as_ref().and_then(Supervised::fd);

        let mut fds = vec![PollFd::new(self.inbox.fd(), PollFlags::IN)];
        let flags = if listening { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::from_borrowed_fd(self.endpoint.as_fd(), flags));
        fds.extend(connections.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        fds.extend(processes.iter().map(|(_, process)| PollFd::new(process.fd(), PollFlags::IN)));
        fds.extend(self.state.launched.fds().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let launched = fds.len() - 1;
        // This descriptor only wakes the loop.
        fds.extend(supervisor.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
        if let Err(errno) = poll(&mut fds, Some(&timeout))
            && errno != rustix::io::Errno::INTR
        {
            // At worst the system is out of memory. The loop must neither end nor spin.
            warn!("poll: {errno}");
            std::thread::sleep(TICK);
        }
        let mut events = fds[1..=launched].iter().map(|fd| !fd.revents().is_empty());
        Ready {
            listener: events.next().unwrap_or(false),
            connections: connections
                .iter()
                .zip(&mut events)
                .filter(|(_, ready)| *ready)
                .map(|((id, _), _)| *id)
                .collect(),
            processes: processes.iter().zip(&mut events).filter(|(_, ready)| *ready).map(|((id, _), _)| *id).collect(),
            unregistered_ended: events.any(|ready| ready),
        }
    }
}
