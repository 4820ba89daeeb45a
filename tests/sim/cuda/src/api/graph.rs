//! Graphs: created by capture, instantiated, launched.

use std::sync::Arc;

use sim_abi::{
    cuda::{CuError, ExecHandle, GraphHandle, StreamHandle},
    ffi::Out,
};

use super::entry::driver_api;
use crate::{
    graph::{EXECS, GRAPHS, Graph, UserObject},
    stream::Stream,
    work::Work,
};

/// CU_GRAPH_USER_OBJECT_MOVE: the graph takes over references of the caller.
const MOVE: u32 = 1;

driver_api! { call:
    fn cuGraphCreate(graph: Out<GraphHandle>, _flags: u32) {
        Ok(graph.set(GRAPHS.insert(Arc::default()))?)
    }

    fn cuGraphClone(clone: Out<GraphHandle>, graph: GraphHandle) {
        let copy = Graph::find(graph)?.duplicate();
        Ok(clone.set(GRAPHS.insert(Arc::new(copy)))?)
    }

    fn cuGraphDestroy(graph: GraphHandle) {
        GRAPHS.remove(graph).map(drop).ok_or(CuError::INVALID_VALUE)
    }

    fn cuGraphGetNodes(graph: GraphHandle, nodes: Out<usize>, count: Out<usize>) {
        // Nodes have no handles here, so only their number is available.
        if !nodes.is_null() {
            return Err(CuError::NOT_SUPPORTED);
        }
        Ok(count.set(Graph::find(graph)?.nodes().len())?)
    }

    since 12000 fn cuGraphInstantiate_v2(
        exec: Out<ExecHandle>, graph: GraphHandle, _node: usize, _log: usize, _log_bytes: usize
    ) {
        Ok(exec.set(Graph::find(graph)?.instantiate())?)
    }

    since 11040 fn cuGraphInstantiateWithFlags(exec: Out<ExecHandle>, graph: GraphHandle, _flags: u64) {
        Ok(exec.set(Graph::find(graph)?.instantiate())?)
    }

    fn cuGraphExecDestroy(exec: ExecHandle) {
        EXECS.remove(exec).map(drop).ok_or(CuError::INVALID_VALUE)
    }

    since 11010 ptsz cuGraphUpload_ptsz(stream) fn cuGraphUpload(exec: ExecHandle, stream: StreamHandle) {
        EXECS.get(exec).ok_or(CuError::INVALID_VALUE)?;
        Stream::find(stream).map(drop)
    }

    since 10000 ptsz cuGraphLaunch_ptsz(stream) fn cuGraphLaunch(exec: ExecHandle, stream: StreamHandle) {
        let exec = EXECS.get(exec).ok_or(CuError::INVALID_VALUE)?;
        Stream::find(stream)?.submit(Work::Graph(Arc::clone(&exec.nodes)))
    }

    since 11030 fn cuUserObjectCreate(
        object: Out<usize>, data: usize, destroy: Option<extern "C" fn(usize)>, references: u32, _flags: u32
    ) {
        let destroy = destroy.filter(|_| references > 0).ok_or(CuError::INVALID_VALUE)?;
        Ok(object.set(UserObject::create(data, destroy, references))?)
    }

    since 11030 fn cuUserObjectRetain(object: usize, count: u32) {
        UserObject::find(object)?.retain(count);
        Ok(())
    }

    since 11030 fn cuUserObjectRelease(object: usize, count: u32) {
        UserObject::find(object)?.release(count)
    }

    since 11030 fn cuGraphRetainUserObject(graph: GraphHandle, object: usize, count: u32, flags: u32) {
        let (graph, object) = (Graph::find(graph)?, UserObject::find(object)?);
        if flags & MOVE == 0 {
            object.retain(count);
        }
        graph.retain(&object, count);
        Ok(())
    }

    since 11030 fn cuGraphReleaseUserObject(graph: GraphHandle, object: usize, _count: u32) {
        Graph::find(graph)?.release(&UserObject::find(object)?)
    }
}
