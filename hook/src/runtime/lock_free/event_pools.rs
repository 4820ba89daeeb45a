//! Spare events, by context.

use super::{
    atomic::{AtomicUsize, CONTEXTS, Ordering, POOL_EVENTS},
    queue::Queue,
};

/// The watcher keeps at least this many per context.
pub const LOW: usize = 32;

/// Spare events, by context.
pub struct EventPools {
    contexts: [AtomicUsize; CONTEXTS],
    events: [Queue<POOL_EVENTS>; CONTEXTS],
}

impl EventPools {
    /// Empty pools.
    pub fn new() -> Self {
        EventPools {
            contexts: std::array::from_fn(|_| AtomicUsize::new(0)),
            events: std::array::from_fn(|_| Queue::new()),
        }
    }

    /// The spare events of a context. A new context gets a pool, if one is left.
    pub fn of(&self, context: usize) -> Option<&Queue<POOL_EVENTS>> {
        for (known, events) in self.contexts.iter().zip(&self.events) {
            let found = known.load(Ordering::Relaxed);
            let ours = found == context
                || found == 0
                    && match known.compare_exchange(0, context, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        Err(other) => other == context,
                    };
            if ours {
                return Some(events);
            }
        }
        None
    }

    /// Contexts that have a pool.
    pub fn contexts(&self) -> impl Iterator<Item = (usize, &Queue<POOL_EVENTS>)> {
        let known = self.contexts.iter().map(|context| context.load(Ordering::Relaxed));
        known.zip(&self.events).take_while(|(context, _)| *context != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_keeps_its_pool_and_the_seventeenth_gets_none() {
        let pools = EventPools::new();
        pools.of(0x10).unwrap().push(7).unwrap();
        for context in 2..=CONTEXTS {
            assert_eq!(pools.of(context * 0x10).unwrap().len(), 0);
        }
        assert!(pools.of(0xfff0).is_none());
        assert_eq!(pools.of(0x10).unwrap().pop(), Some(7));
        assert_eq!(pools.contexts().count(), CONTEXTS);
    }
}
