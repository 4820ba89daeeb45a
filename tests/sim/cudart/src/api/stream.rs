//! Streams, events, stream capture and graphs.

use sim_abi::{
    cuda::{EventHandle, ExecHandle, GraphHandle, StreamHandle, check},
    ffi::Out,
};

use super::runtime_api;

runtime_api! { with_context:
    fn cudaStreamCreate(d; stream: Out<StreamHandle>) {
        check((d.stream_create)(stream, 0, 0))
    }

    fn cudaStreamCreateWithFlags(d; stream: Out<StreamHandle>, flags: u32) {
        check((d.stream_create)(stream, flags, 0))
    }

    fn cudaStreamCreateWithPriority(d; stream: Out<StreamHandle>, flags: u32, priority: i32) {
        check((d.stream_create)(stream, flags, priority))
    }

    fn cudaStreamDestroy(d; stream: StreamHandle) {
        check((d.stream_destroy)(stream))
    }

    ptsz cudaStreamSynchronize_ptsz fn cudaStreamSynchronize(d; stream: StreamHandle) {
        check((d.stream_synchronize)(stream))
    }

    ptsz cudaStreamQuery_ptsz fn cudaStreamQuery(d; stream: StreamHandle) {
        check((d.stream_query)(stream))
    }

    ptsz cudaStreamWaitEvent_ptsz fn cudaStreamWaitEvent(d; stream: StreamHandle, event: EventHandle, flags: u32) {
        check((d.stream_wait_event)(stream, event, flags))
    }

    ptsz cudaStreamGetFlags_ptsz fn cudaStreamGetFlags(d; stream: StreamHandle, flags: Out<u32>) {
        check((d.stream_flags)(stream, flags))
    }

    ptsz cudaStreamGetPriority_ptsz fn cudaStreamGetPriority(d; stream: StreamHandle, priority: Out<i32>) {
        check((d.stream_priority)(stream, priority))
    }

    ptsz cudaStreamGetId_ptsz fn cudaStreamGetId(d; stream: StreamHandle, id: Out<u64>) {
        check((d.stream_id)(stream, id))
    }

    ptsz cudaStreamGetDevice_ptsz fn cudaStreamGetDevice(d; stream: StreamHandle, device: Out<i32>) {
        check((d.stream_device)(stream, device))
    }

    ptsz cudaStreamAddCallback_ptsz fn cudaStreamAddCallback(
        d; stream: StreamHandle, callback: usize, data: usize, flags: u32
    ) {
        check((d.stream_add_callback)(stream, callback, data, flags))
    }

    fn cudaEventCreate(d; event: Out<EventHandle>) {
        check((d.event_create)(event, 0))
    }

    fn cudaEventCreateWithFlags(d; event: Out<EventHandle>, flags: u32) {
        check((d.event_create)(event, flags))
    }

    fn cudaEventDestroy(d; event: EventHandle) {
        check((d.event_destroy)(event))
    }

    ptsz cudaEventRecord_ptsz fn cudaEventRecord(d; event: EventHandle, stream: StreamHandle) {
        check((d.event_record)(event, stream))
    }

    ptsz cudaEventRecordWithFlags_ptsz fn cudaEventRecordWithFlags(
        d; event: EventHandle, stream: StreamHandle, flags: u32
    ) {
        check((d.event_record_flags)(event, stream, flags))
    }

    fn cudaEventQuery(d; event: EventHandle) {
        check((d.event_query)(event))
    }

    fn cudaEventSynchronize(d; event: EventHandle) {
        check((d.event_synchronize)(event))
    }

    fn cudaEventElapsedTime(d; ms: Out<f32>, start: EventHandle, end: EventHandle) {
        check((d.event_elapsed)(ms, start, end))
    }

    fn cudaEventElapsedTime_v2(d; ms: Out<f32>, start: EventHandle, end: EventHandle) {
        check((d.event_elapsed)(ms, start, end))
    }

    ptsz cudaStreamBeginCapture_ptsz fn cudaStreamBeginCapture(d; stream: StreamHandle, mode: u32) {
        check((d.capture_begin)(stream, mode))
    }

    ptsz cudaStreamEndCapture_ptsz fn cudaStreamEndCapture(d; stream: StreamHandle, graph: Out<GraphHandle>) {
        check((d.capture_end)(stream, graph))
    }

    ptsz cudaStreamIsCapturing_ptsz fn cudaStreamIsCapturing(d; stream: StreamHandle, status: Out<i32>) {
        check((d.is_capturing)(stream, status))
    }

    ptsz cudaStreamGetCaptureInfo_v2_ptsz fn cudaStreamGetCaptureInfo_v2(
        d;
        stream: StreamHandle,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<GraphHandle>,
        dependencies: Out<usize>,
        count: Out<usize>
    ) {
        let mut edges = 0;
        check((d.capture_info)(stream, status, id, graph, dependencies, Out::to(&mut edges), count))
    }

    // In version 13 the plain name is the newest form; in version 12 it is the oldest.
    ptsz cudaStreamGetCaptureInfo_ptsz fn cudaStreamGetCaptureInfo(
        d;
        stream: StreamHandle,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<GraphHandle>,
        dependencies: Out<usize>,
        edges: Out<usize>,
        count: Out<usize>
    ) {
        let new = super::version() >= 13000;
        let graph = if new { graph } else { Out::null() };
        let [dependencies, edges, count] = if new { [dependencies, edges, count] } else { [Out::null(); 3] };
        check((d.capture_info)(stream, status, id, graph, dependencies, edges, count))
    }

    ptsz cudaStreamGetCaptureInfo_v3_ptsz fn cudaStreamGetCaptureInfo_v3(
        d;
        stream: StreamHandle,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<GraphHandle>,
        dependencies: Out<usize>,
        edges: Out<usize>,
        count: Out<usize>
    ) {
        check((d.capture_info)(stream, status, id, graph, dependencies, edges, count))
    }

    fn cudaThreadExchangeStreamCaptureMode(d; mode: Out<u32>) {
        check((d.exchange_capture_mode)(mode))
    }

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
