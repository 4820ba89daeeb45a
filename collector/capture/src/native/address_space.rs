//! The mappings of one process, and the objects behind them.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    ops::Range,
    rc::Rc,
    sync::Arc,
};

use xpu_timer_proto::procfs::Mapping;

use crate::{
    error::Error,
    kernel::mappings::Mappings,
    memory,
    objects::{Images, image::Image, perf_map::PerfMap},
};

use super::{
    RawFrame,
    prologue::{self, FrameLayout},
};

/// `None` for anonymous memory and for files that are not available.
type Object = Option<Rc<MappedObject>>;

/// The mappings of one process at the time of the capture.
pub(crate) struct AddressSpace<'a> {
    images: &'a Images,
    pid: i32,
    /// A live thread. The main thread may have ended.
    tid: i32,
    mappings: Mappings,
    /// Objects by the start of their mapping.
    objects: RefCell<HashMap<u64, Object>>,
    /// The last result: a caller is often in the object of its callee.
    last_lookup: RefCell<Option<(Rc<Mapping>, Object)>>,
    perf_map: OnceCell<PerfMap>,
    /// Frame layouts that were computed.
    frame_layouts: RefCell<HashMap<RawFrame, Option<FrameLayout>>>,
}

/// An object and where it is mapped.
pub(crate) struct MappedObject {
    pub image: Arc<Image>,
    /// Address in the process less address in the file.
    pub bias: u64,
}

impl<'a> AddressSpace<'a> {
    /// Opens the address space of a process through one of its live threads.
    pub(crate) fn open(images: &'a Images, pid: i32, tid: i32) -> Result<Self, Error> {
        let mappings = Mappings::open(pid, tid)?;
        Ok(AddressSpace {
            images,
            pid,
            tid,
            mappings,
            objects: RefCell::default(),
            last_lookup: RefCell::default(),
            perf_map: OnceCell::new(),
            frame_layouts: RefCell::default(),
        })
    }

    /// The mapping that contains an address.
    pub(crate) fn mapping(&self, address: u64) -> Option<Rc<Mapping>> {
        self.mappings.at(address)
    }

    /// The mapping that contains an address, if it was looked up before. While a thread is stopped,
    /// no mapping is looked up.
    pub(crate) fn known_mapping(&self, address: u64) -> Option<Rc<Mapping>> {
        self.mappings.known(address)
    }

    pub(crate) fn is_executable(&self, address: u64) -> bool {
        self.mapping(address).is_some_and(|mapping| mapping.executable)
    }

    /// The object that contains an address. `None` for anonymous memory and for files that are not
    /// available.
    pub(crate) fn object_at(&self, address: u64) -> Object {
        if let Some((mapping, object)) = &*self.last_lookup.borrow()
            && mapping.start <= address
            && address < mapping.end
        {
            return object.clone();
        }
        let mapping = self.mapping(address)?;
        let known = self.objects.borrow().get(&mapping.start).cloned();
        let object = known.unwrap_or_else(|| {
            let object = self.locate(&mapping).map(Rc::new);
            self.objects.borrow_mut().insert(mapping.start, object.clone());
            object
        });
        *self.last_lookup.borrow_mut() = Some((mapping, object.clone()));
        object
    }

    fn locate(&self, mapping: &Mapping) -> Option<MappedObject> {
        let image = self.images.get(self.pid, self.tid, mapping, || self.first_of_file(mapping))?;
        let bias = image.bias(mapping)?;
        Some(MappedObject { image, bias })
    }

    /// The nearest mapping at or below a mapping that has the first byte of the same file.
    fn first_of_file(&self, mapping: &Mapping) -> Option<Rc<Mapping>> {
        let below = self.mappings.all().iter().rev().filter(|other| other.start <= mapping.start);
        let same =
            |other: &&Rc<Mapping>| (other.device, other.inode) == (mapping.device, mapping.inode) && other.offset == 0;
        below.into_iter().find(same).cloned()
    }

    /// Reads code from the memory of the process. Code of a file that is not available is not read,
    /// because its file system may not answer.
    pub(crate) fn instructions(&self, address: u64, length: usize) -> Option<Vec<u8>> {
        let mapping = self.mapping(address).filter(|mapping| mapping.executable && mapping.readable)?;
        if !mapping.is_memory() {
            self.object_at(address)?;
        }
        let length = length.min(usize::try_from(mapping.end - address).unwrap_or(length));
        memory::read_exact(self.tid, address, length).ok()
    }

    /// The layout of a frame, computed from the code of its function.
    pub(crate) fn frame_layout(&self, frame: RawFrame) -> Option<FrameLayout> {
        if let Some(known) = self.frame_layouts.borrow().get(&frame) {
            return *known;
        }
        let layout = self.function(frame.lookup()).and_then(|function| {
            let length = (function.end - function.start).min(prologue::MAX_CODE_BYTES) as usize;
            let code = self.instructions(function.start, length)?;
            prologue::layout(&code, function.start, frame.pc, frame.exact)
        });
        self.frame_layouts.borrow_mut().insert(frame, layout);
        layout
    }

    /// The range of the function that contains an address.
    fn function(&self, address: u64) -> Option<Range<u64>> {
        let Some(object) = self.object_at(address) else { return self.perf_map().function(address) };
        let within = address.wrapping_sub(object.bias);
        let found = object.image.function(within).or_else(|| object.image.symbol(within))?;
        Some(found.start.wrapping_add(object.bias)..found.end.wrapping_add(object.bias))
    }

    /// Names of the code that the process generated at run time. They are read on first use.
    pub(crate) fn perf_map(&self) -> &PerfMap {
        self.perf_map.get_or_init(|| self.images.perf_map(self.pid).unwrap_or_default())
    }

    /// The executable mappings of files, ascending.
    pub(crate) fn executables(&self) -> Vec<Rc<Mapping>> {
        self.mappings.executables()
    }

    /// The lowest executable mapping of a file. Usually it belongs to the program itself.
    pub(crate) fn first_executable(&self) -> Option<Rc<Mapping>> {
        self.mappings.next_executable(0)
    }
}
