//! Streams, events, stream capture, and the graphs that it creates.

use std::sync::Arc;

use sim_abi::{
    cuda::{ContextHandle, CuError, EventHandle, ExecHandle, GraphHandle, StreamHandle},
    ffi::Out,
};

use super::{device::green_handle_of, driver_api};
use crate::{
    capture::{self, Capture, EXECS, GRAPHS, Graph, Mode, UserObject},
    context::Context,
    queue::{HostCall, Work},
    stream::{EVENTS, Event, NON_BLOCKING, Stream, blocking_streams},
};

/// CU_EVENT_RECORD_EXTERNAL.
const RECORD_EXTERNAL: u32 = 1;
/// CU_GRAPH_USER_OBJECT_MOVE: the graph takes over references of the caller.
const MOVE: u32 = 1;

driver_api! { call:
    fn cuStreamCreate(stream: Out<StreamHandle>, flags: u32) {
        if flags & !NON_BLOCKING != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(stream.set(Stream::create(&Context::current()?, flags, 0))?)
    }

    fn cuStreamCreateWithPriority(stream: Out<StreamHandle>, flags: u32, priority: i32) {
        if flags & !NON_BLOCKING != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(stream.set(Stream::create(&Context::current()?, flags, priority))?)
    }

    fn cuStreamDestroy_v2(stream: StreamHandle) {
        if let Some(capture) = Stream::find(stream)?.capture() {
            capture.invalidate();
            capture.finish();
        }
        Stream::destroy(stream)
    }

    ptsz cuStreamGetCtx_ptsz(stream) fn cuStreamGetCtx(stream: StreamHandle, context: Out<ContextHandle>) {
        Ok(context.set(Stream::find(stream)?.context.handle())?)
    }

    since 12050 ptsz cuStreamGetCtx_v2_ptsz(stream) fn cuStreamGetCtx_v2(
        stream: StreamHandle, context: Out<ContextHandle>, green: Out<usize>
    ) {
        let of = Arc::clone(&Stream::find(stream)?.context);
        green.set(green_handle_of(&of))?;
        Ok(context.set(of.of_events().handle())?)
    }

    since 12080 ptsz cuStreamGetDevice_ptsz(stream) fn cuStreamGetDevice(stream: StreamHandle, device: Out<i32>) {
        Ok(device.set(Stream::find(stream)?.context.device)?)
    }

    ptsz cuStreamGetFlags_ptsz(stream) fn cuStreamGetFlags(stream: StreamHandle, flags: Out<u32>) {
        Ok(flags.set(Stream::find(stream)?.flags)?)
    }

    ptsz cuStreamGetPriority_ptsz(stream) fn cuStreamGetPriority(stream: StreamHandle, priority: Out<i32>) {
        Ok(priority.set(Stream::find(stream)?.priority)?)
    }

    ptsz cuStreamGetId_ptsz(stream) fn cuStreamGetId(stream: StreamHandle, id: Out<u64>) {
        Ok(id.set(Stream::find(stream)?.queue.id)?)
    }

    ptsz cuStreamQuery_ptsz(stream) fn cuStreamQuery(stream: StreamHandle) {
        Stream::find(stream)?.query()
    }

    ptsz cuStreamSynchronize_ptsz(stream) fn cuStreamSynchronize(stream: StreamHandle) {
        Stream::find(stream)?.synchronize()
    }

    ptsz cuStreamWaitEvent_ptsz(stream) fn cuStreamWaitEvent(stream: StreamHandle, event: EventHandle, _flags: u32) {
        Event::find(event)?.awaited_by(&Stream::find(stream)?)
    }

    ptsz cuStreamAddCallback_ptsz(stream) fn cuStreamAddCallback(
        stream: StreamHandle, callback: Option<extern "C" fn(usize, i32, usize)>, data: usize, _flags: u32
    ) {
        let callback = callback.ok_or(CuError::INVALID_VALUE)?;
        Stream::find(stream)?.submit(Work::Host(HostCall::Callback(callback, stream, data)))
    }

    ptsz cuLaunchHostFunc_ptsz(stream) fn cuLaunchHostFunc(
        stream: StreamHandle, function: Option<extern "C" fn(usize)>, data: usize
    ) {
        let function = function.ok_or(CuError::INVALID_VALUE)?;
        Stream::find(stream)?.submit(Work::Host(HostCall::Plain(function, data)))
    }

    fn cuEventCreate(event: Out<EventHandle>, flags: u32) {
        Ok(event.set(Event::create(&Context::current()?, flags))?)
    }

    fn cuEventDestroy_v2(event: EventHandle) {
        Event::find(event)?;
        EVENTS.remove(event).map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    ptsz cuEventRecord_ptsz(stream) fn cuEventRecord(event: EventHandle, stream: StreamHandle) {
        Event::find(event)?.record(&Stream::find(stream)?, false)
    }

    since 11010 ptsz cuEventRecordWithFlags_ptsz(stream) fn cuEventRecordWithFlags(
        event: EventHandle, stream: StreamHandle, flags: u32
    ) {
        Event::find(event)?.record(&Stream::find(stream)?, flags & RECORD_EXTERNAL != 0)
    }

    fn cuEventQuery(event: EventHandle) {
        Event::find(event)?.query()
    }

    fn cuEventSynchronize(event: EventHandle) {
        Event::find(event)?.synchronize()
    }

    fn cuEventElapsedTime(ms: Out<f32>, start: EventHandle, end: EventHandle) {
        Ok(ms.set(Event::find(start)?.elapsed_ms(&*Event::find(end)?)?)?)
    }

    since 12080 fn cuEventElapsedTime_v2(ms: Out<f32>, start: EventHandle, end: EventHandle) {
        let (start, end) = (Event::find(start)?, Event::find(end)?);
        Ok(ms.set(start.elapsed_ms(&end)?)?)
    }

    since 10010 ptsz cuStreamBeginCapture_v2_ptsz(stream) fn cuStreamBeginCapture_v2(stream: StreamHandle, mode: u32) {
        Capture::begin(&Stream::find(stream)?.participant, Mode::new(mode)?)
    }

    ptsz cuStreamEndCapture_ptsz(stream) fn cuStreamEndCapture(stream: StreamHandle, graph: Out<GraphHandle>) {
        let captured = Capture::end(&Stream::find(stream)?.participant);
        // After a failed capture, there is no graph.
        graph.set(*captured.as_ref().unwrap_or(&0))?;
        captured.map(drop)
    }

    ptsz cuStreamIsCapturing_ptsz(stream) fn cuStreamIsCapturing(stream: StreamHandle, status: Out<i32>) {
        let stream = Stream::find(stream)?;
        check_legacy_meaning(&stream)?;
        Ok(status.set(status_of(stream.capture().as_ref()))?)
    }

    since 11030 ptsz cuStreamGetCaptureInfo_v2_ptsz(stream) fn cuStreamGetCaptureInfo_v2(
        stream: StreamHandle,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<GraphHandle>,
        dependencies: Out<usize>,
        dependency_count: Out<usize>
    ) {
        capture_info(stream, status, id, graph)?;
        dependencies.set_if_wanted(0);
        dependency_count.set_if_wanted(0);
        Ok(())
    }

    since 12030 ptsz cuStreamGetCaptureInfo_v3_ptsz(stream) fn cuStreamGetCaptureInfo_v3(
        stream: StreamHandle,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<GraphHandle>,
        dependencies: Out<usize>,
        edges: Out<usize>,
        dependency_count: Out<usize>
    ) {
        capture_info(stream, status, id, graph)?;
        dependencies.set_if_wanted(0);
        edges.set_if_wanted(0);
        dependency_count.set_if_wanted(0);
        Ok(())
    }

    since 10010 fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        if mode.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let new = Mode::new(sim_abi::ffi::read(mode.address(), 0))?;
        Ok(mode.set(capture::exchange_thread_mode(new) as u32)?)
    }

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

/// CUstreamCaptureStatus.
fn status_of(capture: Option<&Arc<Capture>>) -> i32 {
    capture.map_or(0, |capture| if capture.is_valid() { 1 } else { 2 })
}

/// Nodes have no handles here, so the dependencies of the next node are not returned.
fn capture_info(stream: StreamHandle, status: Out<i32>, id: Out<u64>, graph: Out<GraphHandle>) -> Result<(), CuError> {
    let stream = Stream::find(stream)?;
    check_legacy_meaning(&stream)?;
    let capture = stream.capture();
    status.set(status_of(capture.as_ref()))?;
    graph.set_if_wanted(capture.as_ref().map_or(0, |capture| capture.graph()));
    if let Some(capture) = capture {
        id.set_if_wanted(capture.id);
    }
    Ok(())
}

/// While a blocking stream captures, the state of the legacy stream is undefined. The query has no
/// effect.
fn check_legacy_meaning(stream: &Stream) -> Result<(), CuError> {
    let capturing = |stream: &Arc<Stream>| stream.capture().is_some();
    if stream.is_legacy() && blocking_streams(&stream.context).iter().any(capturing) {
        return Err(CuError::CAPTURE_IMPLICIT);
    }
    Ok(())
}
