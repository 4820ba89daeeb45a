//! The mappings of one process and the objects behind them.

use std::{cell::OnceCell, sync::Arc};

use crate::{image::Image, images::Images, perf_map::PerfMap, procfs::Mapping};

/// The mappings of one process, at the time of the capture.
pub(crate) struct AddressSpace<'a> {
    images: &'a Images,
    pid: i32,
    /// A live thread; the leader may have ended.
    tid: i32,
    mappings: Vec<(Mapping, OnceCell<Option<Located>>)>,
    perf_map: OnceCell<PerfMap>,
}

/// An object, and where it is mapped.
#[derive(Clone)]
pub(crate) struct Located {
    pub image: Arc<Image>,
    /// Address in the process less address in the file.
    pub bias: u64,
}

impl<'a> AddressSpace<'a> {
    pub fn new(images: &'a Images, pid: i32, tid: i32, mut mappings: Vec<Mapping>) -> Self {
        mappings.sort_by_key(|mapping| mapping.start);
        let mappings = mappings.into_iter().map(|mapping| (mapping, OnceCell::new())).collect();
        AddressSpace { images, pid, tid, mappings, perf_map: OnceCell::new() }
    }

    fn entry(&self, address: u64) -> Option<&(Mapping, OnceCell<Option<Located>>)> {
        let after = self.mappings.partition_point(|(mapping, _)| mapping.start <= address);
        self.mappings.get(after.checked_sub(1)?).filter(|(mapping, _)| address < mapping.end)
    }

    /// The mapping that holds an address.
    pub fn mapping(&self, address: u64) -> Option<&Mapping> {
        self.entry(address).map(|(mapping, _)| mapping)
    }

    pub fn is_executable(&self, address: u64) -> bool {
        self.mapping(address).is_some_and(|mapping| mapping.executable)
    }

    /// The object that holds an address; `None` for anonymous memory and for files that cannot be had.
    pub fn located(&self, address: u64) -> Option<&Located> {
        let (mapping, located) = self.entry(address)?;
        let located = located.get_or_init(|| {
            let image = self.images.get(self.pid, self.tid, mapping, self.first(mapping))?;
            let bias = image.bias(mapping)?;
            Some(Located { image, bias })
        });
        located.as_ref()
    }

    /// The mapping of the first byte of the file that a mapping is of, the nearest one below it.
    fn first(&self, mapping: &Mapping) -> Option<&Mapping> {
        let below = self.mappings.partition_point(|(other, _)| other.start <= mapping.start);
        let same =
            |other: &&Mapping| (other.device, other.inode) == (mapping.device, mapping.inode) && other.offset == 0;
        self.mappings[..below].iter().rev().map(|(other, _)| other).find(same)
    }

    /// What the process tells of the code that it made at run time; read when it is first asked for.
    pub fn perf_map(&self) -> &PerfMap {
        self.perf_map.get_or_init(|| PerfMap::of(self.pid))
    }

    pub fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.iter().map(|(mapping, _)| mapping)
    }
}
