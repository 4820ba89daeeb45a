//! Models of the hook's lock-free parts. They explore all interleavings of their threads, with at
//! most two preemptions of a thread here, and without a limit in `cargo xtask model`.

#![allow(clippy::unwrap_used, reason = "all of this is test code, its helper functions too")]

use loom::{
    sync::{Arc, atomic::fence},
    thread,
};
use xpu_timer_models::{
    atomic::{AtomicU64, CONTEXTS, Ordering},
    check,
    event_pools::{EventPools, Queue},
    explore,
    handoff::{Handoff, add, claim},
    slot::{Slot, publish, state},
};
use xpu_timer_proto::ring::op;

type Words = [AtomicU64; op::WORDS];

fn words() -> Words {
    std::array::from_fn(|_| AtomicU64::new(0))
}

/// Reads like the collector: all words, and the first one again. The collector reads the file in
/// order, which the fence models.
fn read(words: &Words) -> Option<(u64, [u64; 2])> {
    let before = words[op::TICKET].load(Ordering::Acquire);
    let found = [op::SEQ, op::COUNT].map(|word| words[word].load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    let again = words[op::TICKET].load(Ordering::Relaxed);
    (before != 0 && before == again).then(|| (before - 1, found))
}

#[test]
fn slots() {
    check("slots", "slot.rs", &[a_reader_takes_whole_operations, a_slot_is_one_threads]);
}

#[test]
fn hand_off() {
    check("hand_off", "handoff.rs", &[the_watcher_gets_every_slot_once, events_come_back_once]);
}

#[test]
fn event_pools() {
    check(
        "event_pools",
        "event_pools.rs",
        &[a_pool_gives_each_event_to_one_thread, a_cell_is_used_again_when_it_is_empty],
    );
}

/// The slot is reused meanwhile.
fn a_reader_takes_whole_operations() {
    let ring = Arc::new((Slot::default(), words()));
    let writer = {
        let ring = Arc::clone(&ring);
        thread::spawn(move || {
            for ticket in [1, 2] {
                publish(&ring.1, ticket, [(op::SEQ, 10 * ticket), (op::COUNT, 10 * ticket)]);
            }
        })
    };
    if let Some((ticket, found)) = read(&ring.1) {
        assert_eq!(found, [10 * ticket; 2]);
    }
    writer.join().unwrap();
}

/// The next owner of a slot sees its contents.
fn a_slot_is_one_threads() {
    let slot = Arc::new(Slot::default());
    let launch = |slot: &Slot, since: u64| {
        if slot.claim() {
            // The slot still contains the last operation's data, and no other thread writes it.
            let last = slot.since_ns.load(Ordering::Relaxed);
            assert_eq!(slot.stream.load(Ordering::Relaxed) as u64, last);
            slot.since_ns.store(since, Ordering::Relaxed);
            slot.stream.store(since as usize, Ordering::Relaxed);
            slot.become_state(state::ARMED);
        }
    };
    let launcher = {
        let slot = Arc::clone(&slot);
        thread::spawn(move || {
            launch(&slot, 1);
            launch(&slot, 2);
        })
    };
    // The watcher.
    if slot.state() == state::ARMED {
        let since = slot.since_ns.load(Ordering::Relaxed);
        assert_eq!(slot.stream.load(Ordering::Relaxed) as u64, since);
        assert_eq!(since, 1, "it is not used again before it is free");
        slot.since_ns.store(7, Ordering::Relaxed);
        slot.stream.store(7, Ordering::Relaxed);
        slot.become_state(state::FREE);
    }
    launcher.join().unwrap();
}

/// Two threads without a lane share one list, while the watcher empties it. The watcher sees
/// everything written before.
fn the_watcher_gets_every_slot_once() {
    let shared = Arc::new((Handoff::new(), [Slot::default(), Slot::default()]));
    let push = |(handoff, slots): &(Handoff, [Slot; 2]), index: usize| {
        slots[index].since_ns.store(5, Ordering::Relaxed);
        handoff.push(slots, index);
    };
    let launchers = [0, 1].map(|index| {
        let shared = Arc::clone(&shared);
        thread::spawn(move || push(&shared, index))
    });
    let mut taken = Vec::new();
    let mut take = || {
        let (handoff, slots) = &*shared;
        handoff.take(slots, |index| {
            assert_eq!(slots[index].since_ns.load(Ordering::Relaxed), 5);
            taken.push(index);
        });
    };
    take();
    for launcher in launchers {
        launcher.join().unwrap();
    }
    take();
    taken.sort_unstable();
    assert_eq!(taken, [0, 1]);
}

/// The holder of an event destroys or records it, so all accesses of the previous holder must be
/// finished.
fn events_come_back_once() {
    const CONTEXT: usize = 1;
    let shared = Arc::new((Handoff::new(), words()));
    // The lane already has a context.
    assert_eq!(shared.0.take_event(CONTEXT), None);
    let watcher = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            let mut refused = Vec::new();
            for event in 1..=3 {
                shared.1[event].store(event as u64, Ordering::Relaxed);
                if !shared.0.give_event(CONTEXT, event) {
                    refused.push(event);
                } else if event == 3 {
                    // The lane's thread has emptied the cell, so its earlier writes are visible
                    // here.
                    assert_eq!(shared.1[op::TICKET].load(Ordering::Relaxed), 1);
                }
            }
            refused
        })
    };
    let mut taken = Vec::new();
    for _ in 0..2 {
        shared.1[op::TICKET].store(1, Ordering::Relaxed);
        if let Some(event) = shared.0.take_event(CONTEXT) {
            assert_eq!(shared.1[event].load(Ordering::Relaxed), event as u64);
            taken.push(event);
        }
    }
    let mut all = watcher.join().unwrap();
    while let Some(event) = shared.0.take_event(CONTEXT) {
        taken.push(event);
    }
    assert!(taken.is_sorted(), "{taken:?}");
    all.extend(taken);
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3]);
}

fn a_pool_gives_each_event_to_one_thread() {
    let queue = Arc::new(Queue::<2>::new());
    let threads = [1, 2].map(|event| {
        let queue = Arc::clone(&queue);
        thread::spawn(move || {
            let refused = queue.push(event).err();
            (refused, queue.pop())
        })
    });
    let mut all: Vec<usize> = Vec::new();
    for thread in threads {
        let (refused, taken) = thread.join().unwrap();
        all.extend(refused.into_iter().chain(taken));
    }
    while let Some(event) = queue.pop() {
        all.push(event);
    }
    all.sort_unstable();
    assert_eq!(all, [1, 2]);
    // After several laps, a full queue still rejects elements, and an empty one returns none.
    assert_eq!((queue.push(7), queue.push(8), queue.push(9)), (Ok(()), Ok(()), Err(9)));
    assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(7), Some(8), None));
}

fn a_cell_is_used_again_when_it_is_empty() {
    let queue = Arc::new(Queue::<2>::new());
    assert!(queue.push(1).is_ok() && queue.push(2).is_ok());
    let taker = {
        let queue = Arc::clone(&queue);
        thread::spawn(move || queue.pop())
    };
    let pushed = queue.push(3).is_ok();
    assert_eq!(taker.join().unwrap(), Some(1));
    assert_eq!(queue.pop(), Some(2));
    assert_eq!(queue.pop(), pushed.then_some(3));
}

/// No ordering is needed here: a context's pool exists before any thread.
#[test]
fn a_context_has_one_pool_whoever_comes_first() {
    explore(|| {
        let pools = Arc::new(EventPools::new());
        let threads = [1, 2].map(|event: usize| {
            let pools = Arc::clone(&pools);
            thread::spawn(move || {
                let pool = pools.of(0x10).unwrap();
                pool.push(event).unwrap();
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(pools.of(0x10).unwrap().len(), 2, "both threads got one pool");
        let others = (2..=CONTEXTS + 1).filter(|context| pools.of(context * 0x10).is_some()).count();
        assert_eq!(others, CONTEXTS - 1);
    });
}

/// No ordering is needed here either: a counter has one writer, and a lane is taken over when the
/// kernel shows that its owner has ended.
#[test]
fn lanes_have_one_owner_each_and_lose_no_count() {
    explore(|| {
        let lanes = Arc::new([(AtomicU64::new(0), AtomicU64::new(0)), (AtomicU64::new(0), AtomicU64::new(0))]);
        let launch = |lanes: &[(AtomicU64, AtomicU64); 2], me: u64| {
            let lane = (0..2).find(|lane| claim(&lanes[*lane].0, 0, me));
            let (_, counter) = &lanes[lane.expect("there is one for each")];
            add(counter, 1);
            add(counter, 1);
        };
        let threads = [1, 2].map(|me| {
            let lanes = Arc::clone(&lanes);
            thread::spawn(move || launch(&lanes, me))
        });
        // A concurrent reader never sees more than the total, or less than before.
        let sum = || lanes.iter().map(|lane| lane.1.load(Ordering::Relaxed)).sum::<u64>();
        let (first, second) = (sum(), sum());
        assert!(first <= second && second <= 4);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(sum(), 4);
        assert!(claim(&lanes[0].0, lanes[0].0.load(Ordering::Relaxed), 3), "the lane of a thread that ended");
        add(&lanes[0].1, 1);
        assert_eq!(sum(), 5);
    });
}
