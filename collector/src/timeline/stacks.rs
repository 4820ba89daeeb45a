//! The Python stacks of a rank's launches, which it keeps if `XPU_TIMER_DUMP_STACK_COUNT` is set.
//! The hook stores addresses; another thread reads the names from the memory of the process. Pure:
//! the caller reads the ring.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use xpu_timer_capture::NamedStack;
use xpu_timer_proto::{
    ring::RawStack,
    server::{NamedFrames, PySpyFrame, PySpyFrameList, PythonStackInTimeline},
    timeline,
    v1::{LaunchStack, Operation},
};

/// Complete stacks, and their distinct frames.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Stacks {
    /// In the order in which they were completed.
    pub stacks: Vec<LaunchStack>,
    /// The frames that their indices refer to.
    pub frames: Vec<PySpyFrame>,
}

/// The state of the launch stacks of one rank.
#[derive(Debug, Default)]
pub(crate) struct LaunchStacks {
    /// Number of entries of the ring that were read.
    pub read: usize,
    /// Stacks whose frames must be named.
    unnamed: Vec<RawStack>,
    /// Stacks that are not complete, by the tickets of their operations.
    open: HashMap<u64, Open>,
    complete: Arc<Stacks>,
    frames: HashMap<PySpyFrame, u32>,
}

#[derive(Debug, Default)]
struct Open {
    operation: Option<Operation>,
    frames: Option<Vec<PySpyFrame>>,
}

impl LaunchStacks {
    /// Adds what was read from the ring.
    pub(crate) fn add(&mut self, stacks: Vec<RawStack>) {
        self.read += stacks.len();
        self.open.extend(stacks.iter().map(|stack| (stack.ticket, Open::default())));
        self.unnamed.extend(stacks);
    }

    /// Adds completed operations. Those that were read together with a stack come after it.
    pub(crate) fn see(&mut self, operations: &[Operation]) {
        if self.open.is_empty() {
            return;
        }
        for operation in operations {
            if let Some(open) = self.open.get_mut(&operation.ticket) {
                open.operation = Some(timeline::shape_of(operation));
                self.close(operation.ticket);
            }
        }
    }

    /// Takes the stacks whose frames must be named.
    pub(crate) fn take_unnamed(&mut self) -> Vec<RawStack> {
        std::mem::take(&mut self.unnamed)
    }

    /// Takes back what could not be named now.
    pub(crate) fn give_back(&mut self, unnamed: Vec<RawStack>) {
        self.unnamed.extend(unnamed);
    }

    /// Adds a stack with names.
    pub(crate) fn name(&mut self, stack: NamedStack) {
        if let Some(open) = self.open.get_mut(&stack.ticket) {
            open.frames = Some(stack.frames);
            self.close(stack.ticket);
        }
    }

    /// The complete stacks.
    #[must_use]
    pub(crate) fn complete(&self) -> &Arc<Stacks> {
        &self.complete
    }

    fn close(&mut self, ticket: u64) {
        let Some(Open { operation: Some(_), frames: Some(_) }) = self.open.get(&ticket) else { return };
        let Some(Open { operation, frames }) = self.open.remove(&ticket) else { return };
        let complete = Arc::make_mut(&mut self.complete);
        let mut index = |frame: PySpyFrame| {
            *self.frames.entry(frame).or_insert_with_key(|frame| {
                complete.frames.push(frame.clone());
                complete.frames.len() as u32 - 1
            })
        };
        let frames: Vec<u32> = frames.into_iter().flatten().map(&mut index).collect();
        if !frames.is_empty() {
            complete.stacks.push(LaunchStack { operation, frames });
        }
    }
}

impl Stacks {
    /// The file of the original tool, with the names that `name` gives the operations. `None` if no
    /// operation has one.
    #[must_use]
    pub(crate) fn of_original(
        &self,
        rank: i32,
        name: impl Fn(&Operation) -> Option<String>,
    ) -> Option<PythonStackInTimeline> {
        let mut named: BTreeMap<String, PySpyFrameList> = BTreeMap::new();
        for stack in &self.stacks {
            let Some(name) = stack.operation.as_ref().and_then(&name) else { continue };
            let frames = stack.frames.iter().rev().filter_map(|index| self.frames.get(*index as usize)).cloned();
            // The first launch of a name counts.
            named.entry(name).or_insert_with(|| PySpyFrameList { frames: frames.collect() });
        }
        let named_frames: Vec<NamedFrames> =
            named.into_iter().map(|(name, frames)| NamedFrames { name, frames: Some(frames) }).collect();
        (!named_frames.is_empty()).then_some(PythonStackInTimeline { named_frames, rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(ticket: u64) -> RawStack {
        RawStack { ticket, frames: vec![(1, 2)] }
    }

    fn named(ticket: u64, names: &[&str]) -> NamedStack {
        let frame =
            |name: &&str| PySpyFrame { func_name: (*name).into(), file_name: "a.py:1".into(), ..Default::default() };
        NamedStack { ticket, frames: names.iter().map(frame).collect() }
    }

    fn operation(ticket: u64, function: &str) -> Operation {
        Operation { ticket, seq: 9, started_ns: 5, function: function.into(), ..Default::default() }
    }

    #[test]
    fn a_stack_is_complete_with_its_operation_and_its_names() {
        let mut stacks = LaunchStacks::default();
        stacks.add(vec![raw(7), raw(8), raw(9)]);
        assert_eq!((stacks.read, stacks.take_unnamed().len(), stacks.take_unnamed().len()), (3, 3, 0));
        stacks.name(named(8, &["step", "main"]));
        stacks.see(&[operation(6, "other"), operation(7, "gemm")]);
        assert_eq!(stacks.complete().stacks.len(), 0);
        stacks.see(&[operation(8, "gelu")]);
        stacks.name(named(7, &["forward", "step", "main"]));
        stacks.name(named(9, &[]));
        stacks.see(&[operation(9, "no frames")]);
        let complete = Arc::clone(stacks.complete());
        let found: Vec<(&str, Vec<&str>)> = complete
            .stacks
            .iter()
            .map(|stack| {
                let operation = stack.operation.as_ref().unwrap();
                assert_eq!((operation.ticket, operation.seq, operation.started_ns), (0, 0, 0));
                let names = stack.frames.iter().map(|index| complete.frames[*index as usize].func_name.as_str());
                (operation.function.as_str(), names.collect())
            })
            .collect();
        assert_eq!(found, [("gelu", vec!["step", "main"]), ("gemm", vec!["forward", "step", "main"])]);
        assert_eq!((complete.frames.len(), stacks.open.len()), (3, 0));
    }

    #[test]
    fn the_file_of_the_original_has_the_first_stack_of_each_name_from_its_root() {
        let mut stacks = LaunchStacks::default();
        stacks.add((0..3).map(raw).collect());
        stacks.see(&[operation(0, "a"), operation(1, "a"), operation(2, "")]);
        for ticket in 0..3 {
            stacks.name(named(ticket, &[["x", "y", "z"][ticket as usize], "main"]));
        }
        let name = |operation: &Operation| Some(operation.function.clone()).filter(|name| !name.is_empty());
        let file = stacks.complete().of_original(3, name).unwrap();
        let [NamedFrames { name, frames: Some(frames) }] = &file.named_frames[..] else { panic!("{file:?}") };
        let names: Vec<&str> = frames.frames.iter().map(|frame| frame.func_name.as_str()).collect();
        assert_eq!((file.rank, name.as_str(), names), (3, "a", vec!["main", "x"]));
        assert_eq!(Stacks::default().of_original(3, |_| Some("a".into())), None);
    }
}
