//! The event loop of a node: polls the sockets, the processes and the inbox, and runs the checks of
//! each second.

use std::{
    io,
    os::fd::AsFd,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
};
use tracing::{info, warn};
use xpu_timer_proto::procfs;

use crate::{
    http::questions::Question,
    job::{ConnectionId, RankId},
    node::{
        connections::{Connections, Event},
        inbox::{Command, Inbox},
        metrics_page,
        socket::Endpoint,
        state::{NodeState, TICK},
        status,
        supervisor::{SupervisorEvent, SupervisorLink},
    },
    os::{clock::Now, process::Handle},
};

/// How long the collector waits for running dumps when it ends, after it has hurried them.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Whether Yama allows this process to read another one only if that one has named it, or an
/// ancestor of it.
fn is_tracing_restricted() -> bool {
    procfs::ptrace_scope() == Some(1)
}

/// The event loop of a node, with all it owns.
pub(super) struct EventLoop {
    pub(super) state: NodeState,
    pub(super) endpoint: Endpoint,
    pub(super) supervised: Option<SupervisorLink>,
    pub(super) connections: Connections,
    pub(super) inbox: Inbox,
    pub(super) commands: mpsc::Receiver<Command>,
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

impl EventLoop {
    /// Handles events until the collector ends.
    pub(super) fn run(&mut self) {
        let mut next_tick = Instant::now();
        let mut used = Instant::now();
        let mut stopping: Option<Instant> = None;
        loop {
            let patience = next_tick.saturating_duration_since(Instant::now()).min(self.state.next_peek());
            let ready = self.wait(patience, stopping.is_none());
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
                    info!("received a signal to end");
                }
                self.state.command(command, now);
            }
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + TICK;
                self.state.tick(now);
                self.connections.close_mute();
            } else {
                self.state.follow_rings(now);
            }
            if let Some(supervised) = &mut self.supervised {
                let event = supervised.turn(&self.state.settings, &self.endpoint).filter(|_| stopping.is_none());
                self.state.supervisor = supervised.pid();
                match event {
                    Some(SupervisorEvent::Stop) => self.inbox.post(Command::Stop),
                    Some(SupervisorEvent::Alone) if is_tracing_restricted() => {
                        info!("asking the hooks to reconnect, so that they permit this process to inspect theirs");
                        for id in self.connections.close_all() {
                            self.state.disconnected(id, now);
                        }
                    }
                    Some(SupervisorEvent::Alone) | None => {}
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
                info!("unused for {:.1?}: ended", used.elapsed());
                return;
            }
        }
    }

    fn read(&mut self, id: ConnectionId, now: Now) {
        let (pid, process) = (self.connections.pid(id), self.connections.process(id));
        for event in self.connections.read(id) {
            match event {
                Event::Message(message, descriptor) => {
                    if let Err(error) = self.state.message(id, pid, process.as_ref(), *message, descriptor, now) {
                        self.connections.refuse(id, &error.to_string());
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
        let supervisor = self.supervised.as_ref().and_then(SupervisorLink::fd);

        let mut fds = vec![PollFd::new(self.inbox.fd(), PollFlags::POLLIN)];
        let flags = if listening { PollFlags::POLLIN } else { PollFlags::empty() };
        fds.push(PollFd::new(self.endpoint.as_fd(), flags));
        fds.extend(connections.iter().map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN)));
        fds.extend(processes.iter().map(|(_, process)| PollFd::new(process.fd().as_fd(), PollFlags::POLLIN)));
        fds.extend(self.state.launched.fds().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        let launched = fds.len() - 1;
        // This descriptor only wakes the loop.
        fds.extend(supervisor.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        if let Err(errno) = ppoll(&mut fds, Some(patience.into()), None)
            && errno != Errno::EINTR
        {
            // At worst the system is out of memory. The loop must neither end nor spin.
            warn!("poll: {}", io::Error::from(errno));
            std::thread::sleep(TICK);
        }
        // `any` returns `None` for an event that nix does not know.
        let mut events = fds[1..=launched].iter().map(|fd| fd.any().unwrap_or(true));
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

impl NodeState {
    /// Handles a message from another thread.
    pub(super) fn command(&mut self, command: Command, now: Now) {
        match command {
            // The requester may be gone by now; that does no harm.
            Command::Question(Question::Status(reply)) => drop(reply.send(status::status(self, now))),
            Command::Question(Question::Metrics(reply)) => drop(reply.send(metrics_page::text(self, now))),
            Command::Question(Question::Folders(reply)) => drop(reply.send(self.folders())),
            Command::Question(Question::WithoutFolder(reply)) => {
                drop(reply.send(status::without_folder(self)));
            }
            Command::Question(Question::SlowRanks(reply)) => drop(reply.send(self.slow.json())),
            Command::Question(Question::Dump { job, reply }) => self.dump_by_hand(job.as_deref(), reply, now),
            Command::Question(Question::Timeline { wanted, reply }) => self.timeline_asked(wanted, reply, now),
            Command::Question(Question::KernelTrace { request, reply }) => {
                drop(reply.send(self.kernel_trace_asked(request, now)));
            }
            Command::Finished(outcome) => self.dump_finished(*outcome, now),
            Command::TimelinesWritten(written) => self.timelines_written(written),
            Command::Written(id, result) => self.verdict_written(&id, result, now),
            Command::IncidentsFound { root, found, wait_ns } => self.incidents_found(&root, found, wait_ns, now),
            Command::PartsFound { search, root, found } => self.parts_found(search, &root, found, now),
            Command::Uplink(event) => self.uplink(event, now),
            Command::Stop => self.shutdown.set(),
        }
    }
}
