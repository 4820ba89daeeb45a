//! The deadlines of one HTTP connection, and the limits of all of them. No connection keeps its
//! descriptor and memory beyond these deadlines unless it makes progress.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::interval,
};
use tracing::debug;

/// Time limits for the steps of a connection, and maximum numbers of connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The TLS handshake.
    pub handshake: Duration,
    /// From the handshake to the end of the headers of the first request.
    pub head: Duration,
    /// Between two requests, including the headers of the second one.
    pub idle: Duration,
    /// In this time a peer must receive at least [`STALL_BYTES`] of the pending data.
    pub stall: Duration,
    /// Maximum number of connections of the owner and root.
    pub own: usize,
    /// Maximum number of unauthenticated connections of one other user or from one address.
    pub each: usize,
    /// Maximum number of all unauthenticated connections together.
    pub unauthenticated: usize,
    /// Maximum number of connections with the token, or with the stream of a node.
    pub trusted: usize,
}

/// About one kilobyte per second over [`Limits::stall`].
pub(crate) const STALL_BYTES: usize = 64 * 1024;

/// A peer whose machine vanished is noticed after twice this time.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(5);

impl Limits {
    /// Limits for a process with this descriptor limit: most descriptors are for ranks, captures
    /// and incidents.
    #[must_use]
    pub fn new(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let share = (descriptors / 8).clamp(16, 1024);
        Limits {
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(10),
            idle: Duration::from_secs(120),
            stall: Duration::from_secs(60),
            own: share / 2,
            each: (share / 16).max(4),
            unauthenticated: share / 4,
            trusted: descriptors / 2,
        }
    }

    /// Limits for a cluster collector: it has a connection with each node, and no ranks. 12,500
    /// nodes need 16,667 descriptors. An eighth is for other connections, and an eighth for
    /// incidents.
    #[must_use]
    pub fn of_cluster(descriptors: u64) -> Self {
        let trusted = usize::try_from(descriptors / 4 * 3).unwrap_or(usize::MAX);
        Limits { trusted, ..Self::new(descriptors) }
    }

    /// How often the deadlines are checked.
    #[must_use]
    pub fn tick(&self) -> Duration {
        (self.head.min(self.idle).min(self.stall) / 4).min(Duration::from_secs(1))
    }
}

/// The group in which a connection is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Connections of the owner and root.
    Own,
    /// Connections of another user; `None` if the user is unknown.
    User(Option<u32>),
    /// Connections from one address of another machine.
    Address(IpAddr),
    /// Connections with the token, and those with the stream of a node.
    Trusted,
}

impl Class {
    fn is_unauthenticated(self) -> bool {
        matches!(self, Class::User(_) | Class::Address(_))
    }
}

/// All connections of a process.
#[derive(Debug, Default)]
pub struct Slots {
    open: Mutex<Connections>,
    /// Wakes [`Slots::settle`] when a slot is freed.
    freed: Notify,
}

/// The connections by class. A cluster collector has some ten thousand, so no step of a new
/// connection looks at all of them while there is room.
#[derive(Debug, Default)]
struct Connections {
    // Connections without a request to end. No class is empty.
    classes: BTreeMap<Class, BTreeMap<u64, Arc<Watch>>>,
    // The class of each connection that has a descriptor.
    class_of: BTreeMap<u64, Class>,
}

/// Maximum number of connections that must end and still have their descriptors.
const MAX_ENDING: usize = 16;

impl Slots {
    /// Takes a slot for a connection. If its class is full, the connection that has waited longest
    /// for its next request is closed. `None` if all are busy.
    pub fn take(self: &Arc<Self>, class: Class, limits: &Limits) -> Option<Slot> {
        let mut open = lock(&self.open);
        if !open.make_room(class, limits) {
            return None;
        }
        let id = open.class_of.last_key_value().map_or(0, |(last, _)| last + 1);
        let watch = Arc::new(Watch::new(id, Arc::clone(self)));
        open.add(class, Arc::clone(&watch));
        Some(Slot { watch })
    }

    /// Moves a connection to the class of those with the token. If that class is full of busy
    /// connections, the connection stays in its class.
    pub fn promote(&self, watch: &Watch, limits: &Limits) {
        let mut open = lock(&self.open);
        let is_new = open.class_of.get(&watch.id).is_some_and(|class| *class != Class::Trusted);
        if is_new
            && open.make_room(Class::Trusted, limits)
            && let Some(watch) = open.remove(watch.id)
        {
            open.add(Class::Trusted, watch);
        }
    }

    /// Closes the connection that has waited longest for its next request, because the process is
    /// out of descriptors: one with the token only if there is no other.
    pub fn evict(&self) {
        let mut open = lock(&self.open);
        let groups: [fn(Class) -> bool; 3] =
            [Class::is_unauthenticated, |class| class == Class::Own, |class| class == Class::Trusted];
        // Without a waiting connection, the process waits for the end of a busy one.
        let _ = groups.into_iter().any(|may_go| open.evict(may_go));
    }

    /// Waits while more than [`MAX_ENDING`] connections must end and have not ended yet. Such a
    /// connection no longer counts in its class, but it still has a descriptor. Without this wait,
    /// a server that accepts faster than connections end runs out of descriptors.
    pub async fn settle(&self) {
        loop {
            let freed = self.freed.notified();
            if lock(&self.open).ending() <= MAX_ENDING {
                return;
            }
            freed.await;
        }
    }

    /// Tells the connections to end that have missed a deadline.
    fn end_overdue(&self, limits: &Limits, now: Instant) {
        let watches: Vec<Arc<Watch>> = lock(&self.open).classes.values().flat_map(BTreeMap::values).cloned().collect();
        for watch in watches {
            if let Some(why) = watch.overdue(limits, now) {
                debug!("connection {} {why}", watch.id);
                watch.kill();
            }
        }
    }

    /// Number of connections that have a descriptor.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        lock(&self.open).class_of.len()
    }

    #[cfg(test)]
    fn is_ending(&self, watch: &Watch) -> bool {
        let open = lock(&self.open);
        open.class_of
            .get(&watch.id)
            .is_some_and(|class| open.classes.get(class).is_none_or(|all| !all.contains_key(&watch.id)))
    }

    /// A connection must end: it no longer counts in its class.
    fn end(&self, id: u64) {
        let _ = lock(&self.open).remove(id);
    }
}

/// Checks the deadlines of all connections until there is no server and no connection. With a timer
/// of its own, each idle connection of a cluster collector would wake up once a second.
pub(crate) async fn end_overdue(slots: Weak<Slots>, limits: Limits) {
    let mut ticks = interval(limits.tick());
    loop {
        ticks.tick().await;
        let Some(slots) = slots.upgrade() else { return };
        slots.end_overdue(&limits, Instant::now());
    }
}

impl Connections {
    fn add(&mut self, class: Class, watch: Arc<Watch>) {
        self.class_of.insert(watch.id, class);
        self.classes.entry(class).or_default().insert(watch.id, watch);
    }

    /// Removes a connection from its class; `None` if it must end.
    fn remove(&mut self, id: u64) -> Option<Arc<Watch>> {
        let class = self.class_of.get(&id)?;
        let of_class = self.classes.get_mut(class)?;
        let watch = of_class.remove(&id);
        if of_class.is_empty() {
            self.classes.remove(class);
        }
        watch
    }

    /// Number of connections that must end and still have their descriptors.
    fn ending(&self) -> usize {
        self.class_of.len() - self.count(|_| true)
    }

    fn count(&self, is_counted: impl Fn(Class) -> bool) -> usize {
        self.classes.iter().filter(|(class, _)| is_counted(**class)).map(|(_, of_class)| of_class.len()).sum()
    }

    fn make_room(&mut self, class: Class, limits: &Limits) -> bool {
        let most = match class {
            Class::Own => limits.own,
            Class::User(_) | Class::Address(_) => limits.each,
            Class::Trusted => limits.trusted,
        };
        if self.count(|other| other == class) >= most && !self.evict(|other| other == class) {
            return false;
        }
        !class.is_unauthenticated()
            || self.count(Class::is_unauthenticated) < limits.unauthenticated
            || self.evict(Class::is_unauthenticated)
    }

    /// Tells the connection to end that has waited longest for its next request.
    fn evict(&mut self, may_go: impl Fn(Class) -> bool) -> bool {
        let of_classes = self.classes.iter().filter(|(class, _)| may_go(**class));
        let waiting = of_classes.flat_map(|(_, of_class)| of_class.values());
        let longest = waiting.filter_map(|watch| Some((watch.waiting_since()?, watch.id))).min();
        let Some(watch) = longest.and_then(|(_, id)| self.remove(id)) else { return false };
        watch.tell_to_end();
        true
    }
}

/// The activity of one connection.
#[derive(Debug)]
pub struct Watch {
    id: u64,
    slots: Arc<Slots>,
    state: Mutex<State>,
    killed: Notify,
    /// Failed logins; the lock answers them one by one.
    pub failures: tokio::sync::Mutex<u32>,
}

#[derive(Debug)]
struct State {
    requests: u64,
    in_flight: usize,
    /// Since when no request is in flight.
    quiet_since: Instant,
    /// Since when the socket accepts no data, and how much it has accepted since.
    blocked: Option<(Instant, usize)>,
    /// Response bodies that are being sent, and when each last made progress.
    bodies: BTreeMap<u64, Instant>,
}

impl Watch {
    fn new(id: u64, slots: Arc<Slots>) -> Self {
        let state =
            State { requests: 0, in_flight: 0, quiet_since: Instant::now(), blocked: None, bodies: BTreeMap::new() };
        Watch { id, slots, state: Mutex::new(state), killed: Notify::new(), failures: tokio::sync::Mutex::default() }
    }

    /// Tells the connection to end.
    pub fn kill(&self) {
        self.slots.end(self.id);
        self.tell_to_end();
    }

    fn tell_to_end(&self) {
        self.killed.notify_one();
    }

    /// Waits until the connection must end.
    pub async fn killed(&self) {
        self.killed.notified().await;
    }

    /// The handshake is done: the time for the first request begins.
    pub fn secured(&self) {
        lock(&self.state).quiet_since = Instant::now();
    }

    fn waiting_since(&self) -> Option<Instant> {
        let state = lock(&self.state);
        (state.in_flight == 0 && state.blocked.is_none()).then_some(state.quiet_since)
    }

    /// Notes that it has the token, or the stream of a node.
    pub fn promote(&self, limits: &Limits) {
        self.slots.promote(self, limits);
    }

    /// Begins a request, which ends when the guard is dropped.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> InFlight {
        let mut state = lock(&self.state);
        state.requests += 1;
        state.in_flight += 1;
        InFlight { watch: Arc::clone(self), number: state.requests }
    }

    /// The deadline that it has missed, if any.
    #[must_use]
    pub fn overdue(&self, limits: &Limits, now: Instant) -> Option<&'static str> {
        let state = lock(&self.state);
        let since = |time: Instant| now.saturating_duration_since(time);
        if state.blocked.is_some_and(|(begun, _)| since(begun) > limits.stall) {
            return Some("does not read its answer");
        }
        if state.bodies.values().any(|moved| since(*moved) > limits.stall) {
            return Some("does not take its answer");
        }
        let patience = if state.requests == 0 { limits.head } else { limits.idle };
        let waits = state.in_flight == 0 && state.blocked.is_none() && since(state.quiet_since) > patience;
        waits.then_some("sends no request")
    }

    fn wrote(&self, result: &Poll<std::io::Result<usize>>) {
        let mut state = lock(&self.state);
        match (result, &mut state.blocked) {
            (Poll::Pending, blocked) => _ = blocked.get_or_insert((Instant::now(), 0)),
            (Poll::Ready(Ok(bytes)), Some((_, taken))) => {
                *taken += bytes;
                if *taken >= STALL_BYTES {
                    state.unblock();
                }
            }
            _ => {}
        }
    }

    fn flushed(&self) {
        let mut state = lock(&self.state);
        if state.blocked.is_some() {
            state.unblock();
        }
    }
}

/// The slot of a connection; dropping it frees the slot.
#[derive(Debug)]
pub struct Slot {
    /// The activity of the connection.
    pub watch: Arc<Watch>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = lock(&self.watch.slots.open);
        let _ = open.remove(self.watch.id);
        open.class_of.remove(&self.watch.id);
        drop(open);
        self.watch.slots.freed.notify_waiters();
    }
}

impl State {
    fn unblock(&mut self) {
        self.blocked = None;
        self.quiet_since = Instant::now();
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub struct InFlight {
    watch: Arc<Watch>,
    number: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = lock(&self.watch.state);
        state.in_flight -= 1;
        state.quiet_since = Instant::now();
        state.bodies.remove(&self.number);
    }
}

/// A response body. Its request is in flight while it is sent.
pub(crate) struct Answer {
    body: Body,
    request: InFlight,
    has_deadline: bool,
}

impl Answer {
    /// Removes the deadline of a message stream: it may be silent for long, and pings check the
    /// peer.
    #[must_use]
    pub(crate) fn new(body: Body, request: InFlight, is_stream: bool) -> Self {
        let answer = Answer { body, request, has_deadline: !is_stream };
        answer.moved();
        answer
    }

    fn moved(&self) {
        if self.has_deadline {
            lock(&self.request.watch.state).bodies.insert(self.request.number, Instant::now());
        }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_ready() {
            self.moved();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection that notes when its peer receives nothing.
pub(crate) struct Watched<Io> {
    io: Io,
    watch: Arc<Watch>,
}

impl<Io> Watched<Io> {
    /// Watches a connection.
    pub(crate) fn new(io: Io, watch: Arc<Watch>) -> Self {
        Watched { io, watch }
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Watched<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Watched<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        self.watch.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(context, bytes);
        self.watch.wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(context);
        if result.is_ready() {
            self.watch.flushed();
        }
        result
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { own: 3, each: 2, unauthenticated: 3, trusted: 2, ..Limits::new(1024) }
    }

    #[test]
    fn only_the_longest_idle_connection_is_closed_for_room() {
        let slots = Arc::new(Slots::default());
        let limits = limits();
        let taken: Vec<Slot> = (0..3).map(|_| slots.take(Class::Own, &limits).unwrap()).collect();
        let busy = taken[0].watch.begin();
        let fourth = slots.take(Class::Own, &limits).unwrap();
        let is_ending = |index: usize| slots.is_ending(&taken[index].watch);
        assert!(!is_ending(0) && is_ending(1) && !is_ending(2));
        let (second, third) = (taken[2].watch.begin(), fourth.watch.begin());
        assert!(slots.take(Class::Own, &limits).is_none(), "all of them are busy");
        drop((busy, second, third));
        assert!(slots.take(Class::Own, &limits).is_some());
    }

    #[test]
    fn unauthenticated_connections_never_take_slots_of_the_owner() {
        let slots = Arc::new(Slots::default());
        let limits = limits();
        let busy = |uid| slots.take(Class::User(Some(uid)), &limits).map(|slot| (slot.watch.begin(), slot));
        let taken: Vec<_> = [1, 1, 2].into_iter().map(|uid| busy(uid).unwrap()).collect();
        assert!(busy(1).is_none(), "two of one user");
        assert!(busy(3).is_none(), "three of all");
        assert!(slots.take(Class::Own, &limits).is_some());
        taken[0].1.watch.promote(&limits);
        assert!(busy(3).is_some(), "one of them has shown the token");
        drop(taken);
        assert_eq!(slots.count(), 0);
        assert!(lock(&slots.open).classes.is_empty());
    }

    #[test]
    fn connections_with_the_token_are_evicted_by_their_own_kind_only() {
        let slots = Arc::new(Slots::default());
        let limits = Limits { trusted: 5, ..limits() };
        let take = |class| slots.take(class, &limits).unwrap();
        // More than the owner may have without the token; all wait for their next request.
        let mut trusted: Vec<Slot> = (0..5)
            .map(|number| {
                let slot = take(if number < 3 { Class::Own } else { Class::User(Some(1)) });
                slot.watch.promote(&limits);
                slot
            })
            .collect();
        let alive = |trusted: &[Slot]| trusted.iter().filter(|slot| !slots.is_ending(&slot.watch)).count();
        let address = |last| Class::Address([10, 0, 0, last].into());
        let flood = |class: fn(u8) -> Class| (0..50).map(|number| take(class(number))).collect::<Vec<Slot>>();
        let attackers =
            [flood(|_| Class::Own), flood(|last| Class::User(Some(last.into()))), flood(|_| Class::User(None))];
        let more: Vec<Slot> = (0..50).map(|last| take(address(last))).collect();
        assert_eq!(alive(&trusted), 5);
        // Without descriptors, all others go first.
        for _ in 0..200 {
            slots.evict();
            if lock(&slots.open).count(|class| class != Class::Trusted) == 0 {
                break;
            }
            assert_eq!(alive(&trusted), 5);
        }
        drop((attackers, more));
        let next = take(Class::User(Some(1)));
        next.watch.promote(&limits);
        assert_eq!(alive(&trusted), 4);
        trusted.push(next);
        // A busy one is not closed, and the next one stays where it is.
        let busy: Vec<InFlight> = trusted.iter().map(|slot| slot.watch.begin()).collect();
        let late = take(Class::Own);
        late.watch.promote(&limits);
        assert_eq!((alive(&trusted), lock(&slots.open).count(|class| class == Class::Own)), (5, 1));
        drop((busy, trusted, late));
        assert_eq!(slots.count(), 0);
    }

    #[test]
    fn every_step_has_its_deadline() {
        let slots = Arc::new(Slots::default());
        let limits = Limits::new(1024);
        let late = |more: Duration| Instant::now() + more + Duration::from_secs(1);
        let slot = slots.take(Class::Own, &limits).unwrap();
        let watch = &slot.watch;
        assert_eq!(watch.overdue(&limits, Instant::now()), None);
        assert_eq!(watch.overdue(&limits, late(limits.head)), Some("sends no request"));
        let request = watch.begin();
        assert_eq!(watch.overdue(&limits, late(limits.idle * 100)), None, "a dump takes its time");
        let answer = Answer::new(Body::from("x"), request, false);
        assert_eq!(watch.overdue(&limits, late(limits.stall)), Some("does not take its answer"));
        drop(answer);
        assert_eq!(watch.overdue(&limits, late(limits.head)), None);
        assert_eq!(watch.overdue(&limits, late(limits.idle)), Some("sends no request"));
        drop(Answer::new(Body::from("x"), watch.begin(), true));
        watch.wrote(&Poll::Pending);
        assert_eq!(watch.overdue(&limits, late(limits.stall)), Some("does not read its answer"));
        watch.wrote(&Poll::Ready(Ok(STALL_BYTES)));
        assert_eq!(watch.overdue(&limits, late(limits.stall)), None, "slow, but it reads");
    }
}
