//! The watcher: sees operations start and complete, signals a hang, and talks to the node
//! collector.
//!
//! It calls only driver functions. Each call is stamped before it begins, because it may block
//! forever; then the collector sees the stamp and the stopped heartbeat. The host never waits for
//! this thread, except for a bounded time at its exit.

use std::{sync::atomic::Ordering, time::Duration};

use xpu_timer_proto::{
    ring::{comm, detail, header},
    v1::{HangSignal, hook_message::Message},
};

use crate::runtime::{
    lifecycle::{
        config::{Config, Environment},
        exit,
        panics::guarded,
    },
    lock_free::handoff::Handoff,
    os::{
        clock::{self, RateMeasurement},
        process, seccomp,
        sections::in_watcher_unless_filtered,
        sys, thread_state, wakeup,
    },
    recorder::{Recorder, host_operations},
    tracing::{self, Tracing},
    watcher::{
        connection::Connection,
        coverage,
        log::Log,
        tracker::{Outcome, Tracker},
    },
};

/// Pause between two turns while operations are pending, and while none are. Each turn takes a
/// processor away from the host for a moment. A thread that launches too much for such a pause
/// wakes the watcher early; see `wakeup`.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

const PAUSE_IDLE: Duration = Duration::from_millis(250);

/// Interval at which the spare events are counted. Counting a thread's events takes their cache
/// lines away from the thread.
const EVENTS_NS: u64 = 1_000_000_000;

/// A collector that has not read the ring for this long may have ended.
const COLLECTOR_NS: u64 = 2_500_000_000;

pub(crate) struct Watcher {
    pub recorder: &'static Recorder,
    pub config: Config,
    pub tracker: Tracker,
    connection: Connection,
    running_time: RunningTime,
    rate: RateMeasurement,
    pub log: Log,
    /// The rank comes from a communicator.
    rank_is_learned: bool,
    /// Slot and ticket of the operation that was signalled as hanging.
    signalled: Option<(usize, u64)>,
    panics: u64,
    /// Time of the next count of spare events.
    events_ns: u64,
    /// Time of the last check for other threads.
    thread_check_ns: u64,
    coverage: coverage::CoverageUpdater,
    tracing: Tracing,
}

/// Interval of the check for other threads.
const THREAD_CHECK_INTERVAL_NS: u64 = 1_000_000_000;

impl Watcher {
    pub(crate) fn new(recorder: &'static Recorder, environment: Environment) -> Self {
        let mut config = Config::read(environment);
        let (traced, problems) = tracing::parse(&config.traced_functions);
        config.problems.extend(problems);
        recorder.bracketed.set_mode(config.bracket);
        let mut tracker = Tracker::new(recorder);
        tracker.has_one_queue = config.has_one_queue;
        Watcher {
            recorder,
            tracker,
            connection: Connection::new(config.socket.clone()),
            running_time: RunningTime::default(),
            rate: RateMeasurement::default(),
            log: Log::new(config.log.clone(), config.local_log.clone(), config.log_mode),
            rank_is_learned: false,
            signalled: None,
            panics: 0,
            events_ns: 0,
            thread_check_ns: 0,
            coverage: coverage::CoverageUpdater::new(),
            tracing: Tracing::new(recorder, traced, config.has_exit_plugin),
            config,
        }
    }

    /// Runs first on a new thread. Returns false when the hook is disabled, and turns it off.
    pub(crate) fn begin(&mut self) -> bool {
        if self.config.disabled {
            process::turn_off();
            return false;
        }
        self.tracker.new_thread();
        thread_state::with(|thread| thread.is_watcher.set(true));
        let tid = thread_state::current().tid();
        self.recorder.ring.header(header::WATCHER_TID).store(tid.into(), Ordering::Relaxed);
        for problem in std::mem::take(&mut self.config.problems) {
            self.log.write_line(&problem);
        }
        true
    }

    /// The exit status of the program's first thread when no other thread is left. It is checked
    /// only after a second without a launch: a thread that launches exists, and an unknown filter
    /// may forbid the check.
    pub(crate) fn status_if_no_other_thread(&mut self) -> Option<i32> {
        let now = clock::now_ns();
        let last_ns = self.recorder.newest_launch_ns().max(self.thread_check_ns);
        if now.saturating_sub(last_ns) < THREAD_CHECK_INTERVAL_NS || !seccomp::watcher_may_call() {
            return None;
        }
        self.thread_check_ns = now;
        sys::first_threads_status_when_alone()
    }

    /// One turn and the following pause.
    pub(crate) fn turn_and_wait(&mut self) {
        self.update_heartbeat();
        self.rate.measure();
        if exit::is_ending() {
            // The remaining time belongs to the exit handlers.
            wakeup::wait(PAUSE_IDLE);
            return;
        }
        let moved = self.turn();
        let is_quiet = !moved && self.tracker.is_idle();
        let pause = if is_quiet { PAUSE_IDLE } else { PAUSE };
        self.running_time.mark(clock::now_ns(), 0);
        self.connection.wait(pause);
        self.running_time.mark(clock::now_ns(), pause.as_nanos() as u64);
    }

    fn update_heartbeat(&self) {
        self.recorder.ring.header(header::HEARTBEAT_NS).store(clock::now_ns(), Ordering::Relaxed);
    }

    /// One turn. Returns whether any operation began or ended.
    fn turn(&mut self) -> bool {
        // A panic in one part must not stop the other parts.
        let is_last = exit::wants_final_turn();
        let detail = self.recorder.ring.header(detail::HEADER).load(Ordering::Relaxed);
        self.recorder.bracketed.set_detail(detail, clock::now_ns());
        if self.config.stack_launches > 0 {
            self.recorder.start_stacks(self.config.stack_launches);
        }
        let moved = guarded(|| self.tracker.turn()).unwrap_or(false);
        self.running_time.mark_driver(clock::now_ns());
        if is_last {
            if seccomp::watcher_may_call() {
                guarded(|| self.trace(true));
            }
            exit::final_turn_done();
        }
        if !seccomp::watcher_may_call() {
            // The watcher continues to record completions, and makes no system call but the one in
            // which it sleeps.
            return moved;
        }
        guarded(|| self.check_for_hang());
        guarded(|| self.exchange_messages());
        guarded(|| self.do_housekeeping());
        guarded(|| self.trace(false));
        guarded(|| host_operations::expire_polled(self.recorder));
        moved
    }

    /// Signals the oldest pending operation when its timeout has expired, and later its recovery.
    fn check_for_hang(&mut self) {
        let now = clock::now_ns();
        if let Some((slot, ticket)) = self.signalled {
            match self.tracker.outcome(slot, ticket) {
                Outcome::Pending => return,
                Outcome::Completed => {
                    self.connection.send(Message::Resolved(xpu_timer_proto::v1::HangResolved { ticket }));
                }
                // The collector reads a failure or an abort in the ring. Neither is a recovery.
                Outcome::Ended => {}
            }
            self.signalled = None;
        }
        let Some((slot, since_ns)) = self.tracker.oldest() else { return };
        if u128::from(self.running_time.between(since_ns, now)) > self.config.hang_timeout.as_nanos() {
            let operation = self.recorder.operation(slot);
            self.signalled = Some((slot, operation.ticket));
            in_watcher_unless_filtered(|| self.coverage.refresh(self.recorder, now));
            self.connection.send(self.hang(slot));
        }
    }

    fn hang(&self, slot: usize) -> Message {
        let since_ns = self.recorder.slots[slot].since_ns.load(Ordering::Relaxed);
        let operation = self.recorder.operation(slot);
        let pending_ns = self.running_time.between(since_ns, clock::now_ns());
        Message::Hang(HangSignal { operation: Some(operation), pending_ns })
    }

    fn exchange_messages(&mut self) {
        // A collector that reads the ring is alive, so the socket need not be checked.
        let looked_ns = self.recorder.ring.header(header::COLLECTOR_NS).load(Ordering::Relaxed);
        let is_there = looked_ns != 0 && clock::now_ns().saturating_sub(looked_ns) < COLLECTOR_NS;
        let connected =
            self.connection.turn(&self.config.hello, self.recorder.ring.descriptor, &mut self.log, is_there);
        if connected && let Some((slot, _)) = self.signalled {
            // A new collector does not know of a hang that is still pending.
            self.connection.send(self.hang(slot));
        }
    }

    fn do_housekeeping(&mut self) {
        let now = clock::now_ns();
        self.learn_rank();
        let panics = self.recorder.ring.header(header::PANICS).load(Ordering::Relaxed);
        if panics != self.panics {
            self.log.write_line(&format!("{panics} panics were caught inside hooked calls; the calls went through"));
            self.panics = panics;
        }
        if now >= self.events_ns {
            self.events_ns = now + EVENTS_NS;
            let pools = self.recorder.pools.contexts().map(|(_, events)| events.len());
            let spare: usize = pools.chain(self.recorder.handoffs_in_use().map(Handoff::events)).sum();
            self.recorder.ring.header(header::SPARE_EVENTS).store(spare as u64, Ordering::Relaxed);
        }
        if self.coverage.is_due(now) {
            in_watcher_unless_filtered(|| self.coverage.refresh(self.recorder, now));
        }
    }

    /// Traces Python functions, if the user asks for that.
    fn trace(&mut self, is_last: bool) {
        for message in self.tracing.turn(is_last) {
            self.log.write_line(&message);
        }
    }

    /// Takes rank and world size from the largest communicator so far when no scheduler has set
    /// them. The world's communicator may come after smaller ones.
    fn learn_rank(&mut self) {
        let known = self.config.hello.rank.get_or_insert_default();
        if known.rank >= 0 && !self.rank_is_learned {
            return;
        }
        let place = |index: usize| {
            let [id, size_rank] =
                [comm::ID, comm::SIZE_RANK].map(|word| self.recorder.comm_word(index, word).load(Ordering::Acquire));
            let (size, rank) = (size_rank as u32, (size_rank >> 32) as i32);
            (id != 0 && rank >= 0).then_some((size, rank))
        };
        let places = (0..self.recorder.comms.used()).filter_map(place);
        let larger = places.filter(|(size, _)| *size > known.world_size);
        // The first of several equally large ones.
        if let Some((size, rank)) = larger.reduce(|one, other| if other.0 > one.0 { other } else { one }) {
            (known.rank, known.world_size) = (rank, size);
            self.rank_is_learned = true;
            self.connection.send(Message::Rank(known.clone()));
        }
    }
}

/// A turn that takes this much longer than expected was interrupted: the process did not run.
const STOPPED_NS: u64 = 500_000_000;

/// Number of stops that are kept. Older ones count as running time.
const STOPS: usize = 16;

/// Records when the process did not run, to measure how long an operation has been pending while it
/// did. While the process is stopped or its machine is suspended, nothing can complete, so that
/// time does not count.
#[derive(Debug, Default)]
pub(crate) struct RunningTime {
    // Time of the last mark.
    marked_ns: u64,
    // Begin and end of each stop, oldest first.
    stops: Vec<(u64, u64)>,
    // The newest stop during a driver call.
    in_driver: Option<(u64, u64)>,
}

impl RunningTime {
    /// The watcher has slept for `asked_ns` since the last mark, or has done work that takes no
    /// time.
    pub(crate) fn mark(&mut self, now_ns: u64, asked_ns: u64) {
        let Some(stop) = self.stop(now_ns, asked_ns) else { return };
        if self.stops.len() == STOPS {
            self.stops.remove(0);
        }
        self.stops.push(stop);
    }

    /// The watcher has called the driver since the last mark, which may have blocked. Only the
    /// newest such stop counts, so that a driver that is always slow does not hide a hang.
    pub(crate) fn mark_driver(&mut self, now_ns: u64) {
        self.in_driver = self.stop(now_ns, 0).or(self.in_driver);
    }

    fn stop(&mut self, now_ns: u64, asked_ns: u64) -> Option<(u64, u64)> {
        let before_ns = std::mem::replace(&mut self.marked_ns, now_ns);
        let meant_ns = before_ns.saturating_add(asked_ns);
        (before_ns > 0 && now_ns > meant_ns.saturating_add(STOPPED_NS)).then_some((meant_ns, now_ns))
    }

    /// Running time between two moments.
    pub(crate) fn between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let overlap = |(begin, end): &(u64, u64)| (*end).min(to_ns).saturating_sub((*begin).max(from_ns));
        let stopped: u64 = self.stops.iter().chain(&self.in_driver).map(overlap).sum();
        to_ns.saturating_sub(from_ns).saturating_sub(stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn only_running_time_counts() {
        let mut clock = RunningTime::default();
        clock.mark(10 * SECOND, 0);
        clock.mark(10 * SECOND + SECOND / 4, SECOND / 10);
        assert_eq!(
            clock.between(0, 20 * SECOND),
            20 * SECOND,
            "a late turn does not count as a stop, and neither does the start"
        );
        clock.mark(20 * SECOND, 10 * SECOND);
        clock.mark(50 * SECOND, SECOND);
        assert_eq!(clock.between(10 * SECOND, 60 * SECOND), 50 * SECOND - 29 * SECOND);
        assert_eq!(clock.between(30 * SECOND, 60 * SECOND), 10 * SECOND, "begun in the middle of it");
        assert_eq!(clock.between(55 * SECOND, 60 * SECOND), 5 * SECOND);
        assert_eq!(clock.between(60 * SECOND, 55 * SECOND), 0);
    }

    #[test]
    fn a_slow_driver_does_not_stop_the_running_time() {
        let mut clock = RunningTime::default();
        for turn in 1..=100 {
            clock.mark_driver(turn * SECOND);
        }
        assert_eq!(clock.between(0, 100 * SECOND), 99 * SECOND);
    }

    #[test]
    fn only_the_newest_stops_are_remembered() {
        let mut clock = RunningTime::default();
        for stop in 1..100 {
            clock.mark(10 * stop * SECOND, 10 * SECOND);
            clock.mark((10 * stop + 9) * SECOND, 0);
        }
        assert_eq!(clock.stops.len(), STOPS);
        assert_eq!(clock.between(990 * SECOND, 1000 * SECOND), SECOND);
    }
}
