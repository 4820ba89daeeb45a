//! What ranks wait in, and where a chain of waiting ends.

/// Something that ranks wait in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Event {
    /// A collective of the communicator with this index, by its sequence number.
    Collective { comm: usize, seq: u64 },
    /// The oldest pending send or receive of a rank on a communicator with a peer.
    PointToPoint { comm: usize, rank_index: usize, peer: i32, recv: bool },
    /// The creation of a communicator.
    Init { comm: usize },
    /// The split of a communicator.
    Split { comm: usize },
}

/// The end of a chain of waiting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Suspect {
    /// A rank has not made the call that others wait for, and nothing shows that it waits itself.
    Host {
        /// Index of the rank.
        rank_index: usize,
        /// What the others wait in. Empty if nobody waits.
        events: Vec<Event>,
        /// No record shows that the rank is absent. It is suspected only because no other rank is.
        guess: bool,
    },
    /// A rank has launched what others wait for (or waits for its own device), and its device has
    /// not begun it.
    Device {
        /// Index of the rank.
        rank_index: usize,
        /// What the others wait in.
        events: Vec<Event>,
    },
    /// All ranks have entered the event, and it does not complete.
    Complete(Event),
    /// Ranks wait for each other in a cycle.
    Cycle(Vec<Event>),
}
