//! Graphs.

use sim_abi::{
    cuda::{ExecHandle, GraphHandle, StreamHandle, check},
    ffi::Out,
};

use super::runtime_api;

runtime_api! { with_context:
    fn cudaGraphCreate(d; graph: Out<GraphHandle>, flags: u32) {
        check((d.graph_create)(graph, flags))
    }

    fn cudaGraphDestroy(d; graph: GraphHandle) {
        check((d.graph_destroy)(graph))
    }

    fn cudaGraphGetNodes(d; graph: GraphHandle, nodes: Out<usize>, count: Out<usize>) {
        check((d.graph_nodes)(graph, nodes, count))
    }

    fn cudaGraphInstantiate(d; exec: Out<ExecHandle>, graph: GraphHandle, flags: u64) {
        check((d.graph_instantiate)(exec, graph, flags))
    }

    fn cudaGraphInstantiateWithFlags(d; exec: Out<ExecHandle>, graph: GraphHandle, flags: u64) {
        check((d.graph_instantiate)(exec, graph, flags))
    }

    fn cudaGraphExecDestroy(d; exec: ExecHandle) {
        check((d.graph_exec_destroy)(exec))
    }

    ptsz cudaGraphUpload_ptsz fn cudaGraphUpload(d; exec: ExecHandle, stream: StreamHandle) {
        check((d.graph_upload)(exec, stream))
    }

    ptsz cudaGraphLaunch_ptsz fn cudaGraphLaunch(d; exec: ExecHandle, stream: StreamHandle) {
        check((d.graph_launch)(exec, stream))
    }

    fn cudaUserObjectCreate(d; object: Out<usize>, data: usize, destroy: usize, references: u32, flags: u32) {
        check((d.object_create)(object, data, destroy, references, flags))
    }

    fn cudaUserObjectRetain(d; object: usize, count: u32) {
        check((d.object_retain)(object, count))
    }

    fn cudaUserObjectRelease(d; object: usize, count: u32) {
        check((d.object_release)(object, count))
    }

    fn cudaGraphRetainUserObject(d; graph: GraphHandle, object: usize, count: u32, flags: u32) {
        check((d.graph_retain_object)(graph, object, count, flags))
    }

    fn cudaGraphReleaseUserObject(d; graph: GraphHandle, object: usize, count: u32) {
        check((d.graph_release_object)(graph, object, count))
    }
}
