//! Graphs, and the user objects that they keep alive.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use sim_abi::{
    cuda::{CuError, ExecHandle, GraphHandle},
    handles::Handles,
};

use crate::queue::Work;

/// All live graphs.
pub static GRAPHS: Handles<Graph> = Handles::new();
/// All live instantiated graphs.
pub static EXECS: Handles<Exec> = Handles::new();
/// All live user objects.
pub static OBJECTS: Handles<UserObject> = Handles::new();

/// The work of a graph, in a valid order.
#[derive(Default)]
pub struct Graph {
    nodes: Mutex<Vec<Work>>,
    retained: Mutex<Vec<Retained>>,
}

/// An instantiated graph.
pub struct Exec {
    /// The work of a launch.
    pub nodes: Arc<[Work]>,
    _retained: Vec<Retained>,
}

impl Graph {
    /// The graph of a handle.
    pub fn find(handle: GraphHandle) -> Result<Arc<Self>, CuError> {
        GRAPHS.get(handle).ok_or(CuError::INVALID_VALUE)
    }

    /// Its work.
    pub fn nodes(&self) -> MutexGuard<'_, Vec<Work>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// cuGraphClone.
    pub fn duplicate(&self) -> Self {
        Graph { nodes: Mutex::new(self.nodes().clone()), retained: Mutex::new(self.retained().clone()) }
    }

    /// cuGraphInstantiate.
    pub fn instantiate(&self) -> ExecHandle {
        EXECS.insert(Arc::new(Exec { nodes: self.nodes().clone().into(), _retained: self.retained().clone() }))
    }

    /// cuGraphRetainUserObject: takes over `count` references that were counted already.
    pub fn retain(&self, object: &Arc<UserObject>, count: u32) {
        self.retained().push(Retained { object: Arc::clone(object), count });
    }

    /// cuGraphReleaseUserObject.
    pub fn release(&self, object: &Arc<UserObject>) -> Result<(), CuError> {
        let mut retained = self.retained();
        let place = retained.iter().position(|kept| Arc::ptr_eq(&kept.object, object)).ok_or(CuError::INVALID_VALUE)?;
        let kept = retained.swap_remove(place);
        drop(retained);
        drop(kept);
        Ok(())
    }

    fn retained(&self) -> MutexGuard<'_, Vec<Retained>> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host object that lives as long as it is referenced.
pub struct UserObject {
    destroy: extern "C" fn(usize),
    data: usize,
    references: AtomicU32,
}

impl UserObject {
    /// cuUserObjectCreate.
    pub fn create(data: usize, destroy: extern "C" fn(usize), references: u32) -> usize {
        OBJECTS.insert(Arc::new(UserObject { destroy, data, references: AtomicU32::new(references) }))
    }

    /// The object of a handle.
    pub fn find(handle: usize) -> Result<Arc<Self>, CuError> {
        OBJECTS.get(handle).ok_or(CuError::INVALID_VALUE)
    }

    /// cuUserObjectRetain.
    pub fn retain(&self, count: u32) {
        self.references.fetch_add(count, Ordering::Relaxed);
    }

    /// cuUserObjectRelease: the last one destroys it.
    pub fn release(self: &Arc<Self>, count: u32) -> Result<(), CuError> {
        let less = |references: u32| references.checked_sub(count);
        let before = self.references.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.map_err(|_| CuError::INVALID_VALUE)? == count {
            OBJECTS.remove(Arc::as_ptr(self) as usize);
            (self.destroy)(self.data);
        }
        Ok(())
    }
}

/// References of a graph, which it releases at its end.
struct Retained {
    object: Arc<UserObject>,
    count: u32,
}

impl Clone for Retained {
    fn clone(&self) -> Self {
        self.object.retain(self.count);
        Retained { object: Arc::clone(&self.object), count: self.count }
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // The object has at least as many references as are counted here.
        let _ = self.object.release(self.count);
    }
}
