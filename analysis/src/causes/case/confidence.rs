//! How far a suspect can be trusted.

use super::Case;
use crate::{
    graph::{Event, Suspect},
    stacks::{self, StuckHelper},
    verdict::{Activity, Confidence},
};

impl<'a> Case<'a> {
    /// Whether the activity of a rank may end by itself. Its main thread runs (however little
    /// processor time a busy machine gives it), sleeps for a time, or waits for a peer, a child
    /// process or a loader that is not known to be stuck.
    fn may_finish(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let host = &view.host;
        let helper = self.stuck_helper(rank_index);
        let stuck = helper.as_ref().is_some_and(StuckHelper::is_stuck);
        let ran = host.moved.is_some_and(|moved| moved.main_ran);
        let goes_on = match host.observed.activity {
            Activity::Sleep | Activity::Running => true,
            Activity::DataLoader => !stuck && host.awaited.is_none(),
            Activity::Unknown => ran || self.waits_for_peer(rank_index) || helper.is_some() && !stuck,
            Activity::Io => ran,
            _ => false,
        };
        goes_on || stacks::is_sleep(self.native_function(rank_index))
    }

    /// The main thread of a rank did not run at all between the samples, in a call that neither
    /// ends by itself nor waits for the work of another thread. Other threads do not matter, such
    /// as those of a library that polls.
    pub fn blocked(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let stands = host.moved.is_some_and(|moved| !moved.io && !moved.own_frame && !moved.main_ran);
        stands && host.stack && self.does(rank_index, Activity::Unknown) && !self.may_finish(rank_index)
    }

    /// Confidence in a suspect of the host kind. High only if its stacks and the records of all
    /// members of its events are there, both samples agree, and its activity cannot end by itself.
    pub fn host_confidence(&self, suspect: &Suspect) -> Confidence {
        let Suspect::Host { rank_index, events, guess } = suspect else { return Confidence::Medium };
        let host = &self.view(*rank_index).host;
        if *guess || events.is_empty() || !host.stack || host.moved.is_none() || !host.same_in_both || !host.frozen() {
            return Confidence::Medium;
        }
        if !self.view(*rank_index).halted() && self.may_finish(*rank_index) {
            return Confidence::Medium;
        }
        // A rank that is not a member of the new communicator is late for the split only by a count
        // of splits.
        let by_count = |event: &Event| {
            matches!(*event, Event::Init { comm }
                if self.comms[comm].member(*rank_index).is_none() && !self.comms[comm].silent.contains(rank_index))
        };
        if events.iter().any(by_count) {
            return Confidence::Medium;
        }
        self.members_confidence(events)
    }

    /// High if every member of the events' communicators is known, else medium.
    pub fn members_confidence(&self, events: &[Event]) -> Confidence {
        let known = |event: &Event| {
            let (Event::Collective { comm, .. }
            | Event::PointToPoint { comm, .. }
            | Event::Init { comm }
            | Event::Split { comm }) = *event;
            self.fully_recorded[comm]
        };
        if events.iter().all(known) { Confidence::High } else { Confidence::Medium }
    }
}
