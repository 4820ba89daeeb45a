//! Graphs: made by capture, instantiated, launched.

use std::sync::{Arc, Mutex, PoisonError};

use sim_abi::{
    cuda::{CuError, ExecHandle, GraphHandle, StreamHandle},
    ffi::Out,
};

use super::driver_api;
use crate::{
    capture::{EXECS, Exec, GRAPHS, Graph},
    stream::Stream,
    work::Work,
};

driver_api! { call:
    fn cuGraphCreate(graph: Out<GraphHandle>, _flags: u32) {
        Ok(graph.set(GRAPHS.insert(Arc::new(Graph(Mutex::default()))))?)
    }

    fn cuGraphClone(clone: Out<GraphHandle>, graph: GraphHandle) {
        let nodes = nodes_of(graph)?;
        Ok(clone.set(GRAPHS.insert(Arc::new(Graph(Mutex::new(nodes)))))?)
    }

    fn cuGraphDestroy(graph: GraphHandle) {
        GRAPHS.remove(graph).map(drop).ok_or(CuError::INVALID_VALUE)
    }

    fn cuGraphGetNodes(graph: GraphHandle, nodes: Out<usize>, count: Out<usize>) {
        // Nodes have no handles here, so only their number can be asked for.
        if !nodes.is_null() {
            return Err(CuError::NOT_SUPPORTED);
        }
        Ok(count.set(nodes_of(graph)?.len())?)
    }

    since 12000 fn cuGraphInstantiate_v2(
        exec: Out<ExecHandle>, graph: GraphHandle, _node: usize, _log: usize, _log_bytes: usize
    ) {
        Ok(exec.set(instantiate(graph)?)?)
    }

    since 11040 fn cuGraphInstantiateWithFlags(exec: Out<ExecHandle>, graph: GraphHandle, _flags: u64) {
        Ok(exec.set(instantiate(graph)?)?)
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
        Stream::find(stream)?.submit(Work::Graph(Arc::clone(&exec.0)))
    }
}

fn nodes_of(graph: GraphHandle) -> Result<Vec<Work>, CuError> {
    let graph = GRAPHS.get(graph).ok_or(CuError::INVALID_VALUE)?;
    Ok(graph.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

fn instantiate(graph: GraphHandle) -> Result<ExecHandle, CuError> {
    Ok(EXECS.insert(Arc::new(Exec(nodes_of(graph)?.into()))))
}
