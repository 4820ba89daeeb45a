//! The node role: one loop around poll that owns the state, and a small runtime beside it for HTTP and signals.

use std::{
    os::fd::AsFd,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
};
use tracing::{error, info, warn};

use crate::{
    captures::Captures,
    clock::Now,
    config::Settings,
    connections::{Connections, Event},
    core::Core,
    error::{Error, chain},
    http::{self, server::Server, watch::Limits},
    inbox::{Command, Inbox},
    process::Handle,
    registry::{ConnectionId, RankId},
    socket::Endpoint,
    token::{Token, read_token},
    uplink::{self, Address},
};

/// The loop turns at least once in so long.
pub const TICK: Duration = Duration::from_secs(1);
/// At the end, dumps in work are hurried and then given this long.
const LAST_WORK: Duration = Duration::from_secs(10);

/// Runs the node collector until it is told to end, or nobody needs it any longer.
///
/// # Errors
/// When there is another one for this socket, or the socket cannot be had.
pub fn run(settings: Settings) -> Result<(), Error> {
    let endpoint = Endpoint::open(&settings.socket)?;
    let descriptors = raise_descriptor_limit();
    let (inbox, commands) = Inbox::new()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(4)
        .enable_all()
        .build()
        .map_err(Error::system("start the HTTP runtime"))?;
    let mut core = Core::new(settings, Captures::default(), inbox.clone());
    core.problems = runtime.block_on(start(&core.settings, &inbox, descriptors));
    if let Some(problem) = join_cluster(&core.settings, &runtime, &inbox) {
        error!("{problem}");
        core.problems.push(problem);
    }
    info!("listening on {} as pid {}", core.settings.socket.display(), std::process::id());
    let mut node = Node { core, endpoint, connections: Connections::default(), inbox, commands };
    node.work();
    end(runtime);
    Ok(())
}

/// Dials the cluster collector, if there is to be one. Without a usable address the node works alone, and says why.
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

/// Connections that are still open are not waited for.
fn end(runtime: Runtime) {
    runtime.shutdown_background();
}

/// Opens the endpoints and watches for signals. An endpoint that cannot be opened is a problem, not the end: the dumps matter more.
async fn start(settings: &Settings, inbox: &Inbox, descriptors: u64) -> Vec<String> {
    let mut problems = Vec::new();
    let server = Server { limits: Limits::new(descriptors), slots: Arc::default(), tls: None, http2: false };
    let token = settings.token_file.as_deref().map(read_token).transpose().unwrap_or_else(|error| {
        problems.push(format!("{}; the control port answers its owner and root only", chain(&error)));
        None
    });
    let variable = settings.port_variable;
    match http::listen(settings.control_port, "control", variable).await {
        Ok(listener) => {
            let token = Token::new(token);
            drop(tokio::spawn(http::serve_control(server.clone(), listener, inbox.clone(), token)));
        }
        Err(problem) => problems.push(problem),
    }
    match settings.metrics_port {
        Some(port) => match http::listen(port, "metrics", variable).await {
            Ok(listener) => drop(tokio::spawn(http::serve_metrics(server, listener, inbox.clone()))),
            Err(problem) => problems.push(problem),
        },
        None => problems.push(format!("there is no metrics endpoint: no port is above the one of {variable}")),
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

/// Three descriptors a rank: the usual soft limit of 1,024 is for programs that use select. Returns how many there may be.
pub fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        warn!("the limit of open files stays at {:?}: {error}", limit.current);
        return limit.current.unwrap_or(u64::MAX);
    }
    limit.maximum.unwrap_or(u64::MAX)
}

struct Node {
    core: Core,
    endpoint: Endpoint,
    connections: Connections,
    inbox: Inbox,
    commands: mpsc::Receiver<Command>,
}

/// What poll found.
#[derive(Default)]
struct Ready {
    listener: bool,
    connections: Vec<ConnectionId>,
    processes: Vec<RankId>,
    // Some rank that has not registered.
    silent: bool,
}

impl Node {
    fn work(&mut self) {
        let mut next_tick = Instant::now();
        let mut used = Instant::now();
        let mut stopping: Option<Instant> = None;
        loop {
            let ready = self.wait(next_tick.saturating_duration_since(Instant::now()), stopping.is_none());
            let now = Now::get();
            // Goodbyes and last words come before the news of the death.
            for id in ready.connections {
                self.read(id, now);
            }
            for id in ready.processes {
                self.core.ended(id, now);
            }
            if ready.silent {
                self.core.note_silent(now);
            }
            if ready.listener {
                self.connections.accept(&self.endpoint);
            }
            self.inbox.clear();
            while let Ok(command) = self.commands.try_recv() {
                if matches!(command, Command::Stop) && stopping.replace(Instant::now()).is_none() {
                    info!("told to end");
                }
                self.core.command(command, now);
            }
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + TICK;
                self.core.tick(now);
                self.connections.close_silent();
            }
            self.core.turned(now);
            if self.connections.are_used() || self.core.launched.is_needed() || self.core.is_busy() {
                used = Instant::now();
            }
            if let Some(since) = stopping
                && (!self.core.is_writing() || since.elapsed() > LAST_WORK)
            {
                info!("ended");
                return;
            }
            if self.core.settings.linger.is_some_and(|linger| used.elapsed() >= linger) {
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
                    if let Err(problem) = self.core.message(id, pid, process.as_ref(), *message, descriptor, now) {
                        self.connections.refuse(id, &problem);
                        self.core.disconnected(id, now);
                        return;
                    }
                }
                Event::End => {
                    if let Some(command) = self.connections.close(id) {
                        self.core.launched.add(command);
                    }
                    self.core.disconnected(id, now);
                }
            }
        }
    }

    /// Waits until something happens.
    fn wait(&self, patience: Duration, accepting: bool) -> Ready {
        let processes: Vec<(RankId, Arc<Handle>)> = self
            .core
            .registry
            .ranks()
            .filter(|rank| !rank.gone)
            .filter_map(|rank| Some((rank.id, Arc::clone(rank.process.as_ref()?))))
            .collect();
        let connections: Vec<(ConnectionId, _)> =
            self.connections.iter().map(|(id, connection)| (id, connection.fd.as_fd())).collect();
        let listening = accepting && self.connections.accepts();

        let mut fds = vec![PollFd::new(self.inbox.fd(), PollFlags::IN)];
        let flags = if listening { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::from_borrowed_fd(self.endpoint.as_fd(), flags));
        fds.extend(connections.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        fds.extend(processes.iter().map(|(_, process)| PollFd::new(process.fd(), PollFlags::IN)));
        fds.extend(self.core.launched.fds().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
        if let Err(errno) = poll(&mut fds, Some(&timeout))
            && errno != rustix::io::Errno::INTR
        {
            // Out of memory at worst. The loop must neither end nor spin.
            warn!("poll: {errno}");
            std::thread::sleep(TICK);
        }
        let mut events = fds[1..].iter().map(|fd| !fd.revents().is_empty());
        Ready {
            listener: events.next().unwrap_or(false),
            connections: connections
                .iter()
                .zip(&mut events)
                .filter(|(_, ready)| *ready)
                .map(|((id, _), _)| *id)
                .collect(),
            processes: processes.iter().zip(&mut events).filter(|(_, ready)| *ready).map(|((id, _), _)| *id).collect(),
            silent: events.any(|ready| ready),
        }
    }
}
