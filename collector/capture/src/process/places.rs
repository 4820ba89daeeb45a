//! The places in the code of one process that its frames are at. A thousand frames share a few
//! dozen places, so the information about a place is kept once.

use std::{collections::HashMap, sync::Arc};

use crate::{
    native::{address_space::AddressSpace, frame::RawFrame},
    objects::image::Image,
};

/// The module of code that is in no file, because the process generated it at run time.
pub(crate) const JIT_MODULE: &str = "[jit]";

/// A place that frames are at, and the object that contains it.
pub(crate) struct RawPlace {
    pub frame: RawFrame,
    pub image: Option<Arc<Image>>,
    pub bias: u64,
    /// Path of the mapping if there is no image for it, or [`JIT_MODULE`].
    pub path: String,
    /// The name of a function that was generated at run time, from the process's perf map.
    pub name: Option<Arc<str>>,
}

impl RawPlace {
    /// The address in terms of the object's own tables.
    pub fn address(&self) -> u64 {
        self.frame.lookup().wrapping_sub(self.bias)
    }
}

/// Distinct places, each with an index.
#[derive(Default)]
pub(crate) struct Places {
    pub list: Vec<RawPlace>,
    numbers: HashMap<RawFrame, u32>,
}

impl Places {
    /// The indices of the places of a stack.
    pub fn of(&mut self, frames: &[RawFrame], space: Option<&AddressSpace<'_>>) -> Vec<u32> {
        frames.iter().map(|frame| self.number(*frame, space)).collect()
    }

    fn number(&mut self, frame: RawFrame, space: Option<&AddressSpace<'_>>) -> u32 {
        if let Some(number) = self.numbers.get(&frame) {
            return *number;
        }
        let object = space.and_then(|space| space.object_at(frame.lookup()));
        let mapping = space.filter(|_| object.is_none()).and_then(|space| space.mapping(frame.lookup()));
        let made = mapping.as_ref().is_some_and(|mapping| mapping.executable && mapping.is_memory());
        let path =
            if made { JIT_MODULE.into() } else { mapping.map_or_else(String::new, |mapping| mapping.path.clone()) };
        let name = space.filter(|_| made).and_then(|space| space.perf_map().find(frame.lookup()));
        let number = self.list.len() as u32;
        self.list.push(RawPlace {
            frame,
            image: object.as_ref().map(|object| Arc::clone(&object.image)),
            bias: object.map_or(0, |object| object.bias),
            path,
            name: name.map(Into::into),
        });
        self.numbers.insert(frame, number);
        number
    }
}
