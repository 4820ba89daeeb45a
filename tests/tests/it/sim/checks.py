"""Checks of the simulated device: `checks.py NAME` runs the function NAME, in one
process or as one of several ranks, and prints `ok` at its end. Everything goes through the public
API of the libraries, without the hook.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

import cuda

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PATIENCE = 30.0


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.002)


def stays_pending(event, seconds=0.3):
    """Whether the event is still not ready after a while that is long for the simulated device."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if event.query():
            return False
        time.sleep(0.01)
    return True


def code_of(function, *arguments):
    try:
        function(*arguments)
    except (cuda.CudaError, cuda.NcclError) as error:
        return error.code
    return 0


def recorded(stream):
    event = cuda.Event()
    event.record(stream)
    return event


def in_thread(function):
    """Runs it in another thread and returns its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(PATIENCE)
    return result[0]


def workers():
    """Name, CPU ticks and wait channel of the device's threads."""
    found = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            with open(f"/proc/self/task/{tid}/comm") as file:
                name = file.read().strip()
            if name.startswith("sim-"):
                with open(f"/proc/self/task/{tid}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                with open(f"/proc/self/task/{tid}/wchan") as file:
                    found.append((name, int(fields[11]) + int(fields[12]), fields[0], file.read()))
    return found


def assert_hung_quietly():
    """A hung stream sleeps in the kernel and burns no CPU."""
    before = workers()
    assert before, "the worker thread exists"
    time.sleep(0.3)
    after = workers()
    assert [w[1] for w in after] == [w[1] for w in before], (before, after)
    assert all(w[2] == "S" for w in after), after
    assert all("futex" in w[3] or w[3] == "0" for w in after), after


# One process: streams, events, capture, modules, memory


def streams_and_events():
    stream, other = cuda.Stream(), cuda.Stream()
    assert cuda.Event().query(), "an event without a record is complete"
    slow = cuda.Kernel("slow", 100_000)
    start = recorded(stream)
    slow.launch(stream)
    end = recorded(stream)
    assert not end.query() and not stream.query() and other.query()
    assert code_of(start.elapsed_ms, end) == cuda.NOT_READY
    other.wait(end)
    after = recorded(other)
    assert not after.query(), "a stream waits for another's event"
    after.synchronize()
    assert start.query() and end.query() and stream.query()
    assert 99 < start.elapsed_ms(end) < 5000, start.elapsed_ms(end)
    assert code_of(cuda.Event(timing=False).elapsed_ms, end) == 400
    end.destroy()
    assert code_of(end.query) == 400, "a destroyed event is not known any more"
    assert any(w[0].startswith("sim-stream-") for w in workers()), workers()


def legacy_stream_waits_for_blocking_streams():
    blocking, free = cuda.Stream(non_blocking=False), cuda.Stream()
    slow = cuda.Kernel("slow", 100_000)
    slow.launch(blocking)
    legacy = recorded(cuda.Stream.default())
    assert not legacy.query() and free.query()
    recorded(free).synchronize()
    assert not legacy.query(), "a non-blocking stream has nothing to do with it"
    legacy.synchronize()
    assert blocking.query()
    slow.launch(None)
    late = recorded(blocking)
    assert not late.query(), "a blocking stream waits for the legacy one"
    late.synchronize()


def full_queue_blocks():
    """XPU_SIM_QUEUE_DEPTH=8 and the first kernel stuck."""
    stream, launched = cuda.Stream(), []
    kernel = cuda.Kernel("any", 0)
    thread = threading.Thread(target=lambda: [(kernel.launch(stream), launched.append(1)) for _ in range(20)], daemon=True)
    thread.start()
    until(lambda: len(launched) == 8, "the queue is full")
    thread.join(0.3)
    assert thread.is_alive() and len(launched) == 8, len(launched)
    # The driver answers everybody else meanwhile.
    assert not stream.query()
    other = recorded(cuda.Stream())
    other.synchronize()
    assert_hung_quietly()


def user_objects():
    """As PyTorch uses them: a graph takes over an object while it is captured, and its last holder
    destroys it.
    """
    stream, destroyed = cuda.Stream(), []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda data: destroyed.append(data))
    runtime, handle = cuda.runtime, c_void_p

    def new(data):
        created = handle()
        assert runtime.cudaUserObjectCreate(byref(created), c_void_p(data), callback, 1, 1) == 0
        return created

    own = new(1)
    assert runtime.cudaUserObjectRetain(own, 1) == 0 and runtime.cudaUserObjectRelease(own, 1) == 0 and destroyed == []
    assert runtime.cudaUserObjectRelease(own, 1) == 0 and destroyed == [1]
    assert runtime.cudaUserObjectRelease(own, 1) != 0, "it is gone"

    cuda._cuda("cudaStreamBeginCapture", stream.handle, cuda.CAPTURE_GLOBAL)
    status, id_, captured, nothing = c_int(), ctypes.c_uint64(), handle(), c_void_p()
    info = runtime.cudaStreamGetCaptureInfo
    assert info(stream.handle, byref(status), byref(id_), byref(captured), byref(nothing), byref(nothing), byref(nothing)) == 0
    assert (status.value, nothing.value) == (1, None) and captured.value
    assert runtime.cudaGraphRetainUserObject(captured, new(2), 1, 1) == 0
    graph, launchable = handle(), handle()
    cuda._cuda("cudaStreamEndCapture", stream.handle, byref(graph))
    assert graph.value == captured.value, "the graph has its handle from the beginning"
    cuda._cuda("cudaGraphInstantiateWithFlags", byref(launchable), graph, 0)
    cuda._cuda("cudaGraphDestroy", graph)
    assert destroyed == [1], "what was instantiated holds it, too"
    cuda._cuda("cudaGraphExecDestroy", launchable)
    assert destroyed == [1, 2]


def capture_rules():
    stream, event, ready = cuda.Stream(), cuda.Event(), cuda.Event()
    kernel = cuda.Kernel("any", 0)
    hits = []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: hits.append(1))
    launch_host = cuda.driver.cuLaunchHostFunc
    launch_host.argtypes = (c_void_p, type(callback), c_void_p)

    def capturing(status_of):
        status = c_int(-1)
        code = cuda.driver.cuStreamIsCapturing(status_of.handle, byref(status))
        return code, status.value

    def exchange(mode):
        mode = c_uint(mode)
        assert cuda.driver.cuThreadExchangeStreamCaptureMode(byref(mode)) == 0
        return mode.value

    # A captured graph runs only when launched, each time.
    side = cuda.Stream()
    with cuda.capture(stream) as graph:
        kernel.launch(stream)
        event.record(stream)
        side.wait(event)
        assert capturing(side) == (0, 1), "a stream that waits for a captured event takes part"
        assert launch_host(side.handle, callback, None) == 0
        event.record(side)
        stream.wait(event)
        assert in_thread(lambda: (exchange(cuda.CAPTURE_RELAXED), ready.query()))[1], "a relaxed thread may query"
    assert capturing(stream) == (0, 0) and hits == []
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    assert hits == [1, 1], hits
    graph.destroy()

    def broken(body, end=901, mode=cuda.CAPTURE_GLOBAL):
        """`body` fails with its code, and the capture then with `end`."""
        cuda._cuda("cudaStreamBeginCapture", stream.handle, mode)
        kernel.launch(stream)
        result = body()
        graph = c_void_p(1)
        assert cuda.runtime.cudaStreamEndCapture(stream.handle, byref(graph)) == end
        assert (graph.value is None) == (end != 0)
        assert capturing(stream) == (0, 0)
        return result

    assert broken(lambda: in_thread(lambda: code_of(ready.query))) == 900, "another thread's query kills a global capture"
    assert broken(lambda: in_thread(lambda: code_of(ready.query)), 0, cuda.CAPTURE_THREAD_LOCAL) == 0
    assert broken(lambda: code_of(ready.query), 901, cuda.CAPTURE_THREAD_LOCAL) == 900
    assert broken(lambda: code_of(ready.query), 0, cuda.CAPTURE_RELAXED) == 0
    assert broken(lambda: (event.record(stream), code_of(event.query))[1]) == 907
    assert broken(lambda: code_of(stream.synchronize)) == 900
    assert broken(lambda: code_of(cuda.Buffer, 4)) == 900, "an allocation may disturb"
    assert broken(lambda: code_of(cuda.synchronize)) == 900

    def forked():
        event.record(stream)
        side.wait(event)
        kernel.launch(side)

    broken(forked, 904)
    assert broken(lambda: in_thread(lambda: cuda.runtime.cudaStreamEndCapture(stream.handle, byref(c_void_p()))), 0) == 908

    # The legacy stream would depend on a blocking stream that captures; asking about it alone harms
    # nothing.
    blocking = cuda.Stream(non_blocking=False)
    cuda._cuda("cudaStreamBeginCapture", blocking.handle, cuda.CAPTURE_RELAXED)
    assert capturing(cuda.Stream.default())[0] == 906 and capturing(blocking) == (0, 1)
    assert code_of(kernel.launch, None) == 906 and capturing(blocking) == (0, 2)
    assert cuda.runtime.cudaStreamEndCapture(blocking.handle, byref(c_void_p())) == 901
    assert cuda.runtime.cudaStreamBeginCapture(None, 0) == 900, "the legacy stream cannot capture"
    assert ready.query()


def proc_addresses():
    cuda.set_device(0)
    get = cuda.driver.cuGetProcAddress_v2
    get.argtypes = (c_char_p, c_void_p, c_int, c_uint64, c_void_p)

    def find(name, version=13020, flags=0):
        address, status = c_void_p(), c_int(-1)
        code = get(name, byref(address), version, flags, byref(status))
        return code, address.value, status.value

    for name in (b"cuLaunchKernel", b"cuLaunchKernelEx", b"cuLaunchCooperativeKernel", b"cuGraphLaunch", b"cuEventRecord"):
        legacy, own = find(name)[1], find(name, flags=2)[1]
        assert legacy and own and legacy != own, name
        assert legacy == ctypes.cast(getattr(cuda.driver, name.decode()), c_void_p).value
        assert own == ctypes.cast(getattr(cuda.driver, name.decode() + "_ptsz"), c_void_p).value
    assert find(b"cuMemAlloc")[1] == ctypes.cast(cuda.driver.cuMemAlloc_v2, c_void_p).value
    assert find(b"cuLaunchKernelEx", 11050) == (0, None, 2), "the version is not sufficient"
    assert find(b"cuNothing") == (0, None, 1)
    assert cuda.driver.cuGetProcAddress(b"cuNothing", byref(c_void_p()), 13020, c_uint64(0)) == 500

    # XPU_SIM_FAULT holds the first kernel forever: the legacy stream is stuck, the thread's own
    # one is not.
    kernel = cuda.Kernel("any", 0)
    kernel.launch(None)
    launch = ctypes.CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)(find(b"cuLaunchKernel", flags=2)[1])
    stream = cuda.Stream.default()
    stream.handle = c_void_p(2)
    assert not cuda.Stream.default().query()
    # As a blocking stream it waits for the legacy one; on another context it is alone.
    context = c_void_p()
    assert cuda.driver.cuCtxCreate_v2(byref(context), 0, 1) == 0
    other = cuda.Kernel("any", 0)
    assert launch(other.function, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    stream.synchronize()
    assert cuda.Stream.default().query(), "nothing went to the legacy stream of the new context"


def modules():
    cuda.set_device(0)
    load, handle = cuda.driver.cuModuleLoadData, c_void_p()
    image = ctypes.create_string_buffer(b"//xpu_sim\n// two kernels\nkernel first 5\nkernel second 10\n")
    assert load(byref(handle), image) == 0
    function, name = c_void_p(), c_char_p()
    assert cuda.driver.cuModuleGetFunction(byref(function), handle, b"second") == 0
    assert cuda.driver.cuFuncGetName(byref(name), function) == 0 and name.value == b"second"
    assert cuda.driver.cuModuleGetFunction(byref(function), handle, b"third") == 500
    assert load(byref(handle), ctypes.create_string_buffer(b"//xpu_sim\nkernel nothing\n")) == 200
    assert load(byref(handle), ctypes.create_string_buffer(b"\x7fELF")) == 0
    assert cuda.driver.cuModuleGetFunction(byref(function), handle, b"_Z4anyPf") == 0
    stream = cuda.Stream()
    launch = cuda.driver.cuLaunchKernel
    assert launch(function, 1, 1, 1, 32, 1, 1, 0, stream.handle, None, None) == 0
    assert launch(function, 1, 1, 1, 2048, 1, 1, 0, stream.handle, None, None) == 1, "too many threads"
    assert launch(c_void_p(64), 1, 1, 1, 32, 1, 1, 0, stream.handle, None, None) == 400
    assert launch(function, 1, 1, 1, 32, 1, 1, 0, c_void_p(64), None, None) == 400
    stream.synchronize()
    assert cuda.driver.cuModuleUnload(handle) == 0
    assert launch(function, 1, 1, 1, 32, 1, 1, 0, stream.handle, None, None) == 400


class Dim3(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]


class Wrapper(ctypes.Structure):
    _fields_ = [("magic", c_uint), ("version", c_uint), ("image", c_void_p), ("unused", c_void_p)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [("grid", Dim3), ("block", Dim3), ("shared", c_size_t), ("stream", c_void_p), ("attrs", c_void_p), ("n", c_uint)]


def registered_kernels():
    runtime, one = cuda.runtime, Dim3(1, 1, 1)
    image = ctypes.create_string_buffer(b"//xpu_sim\nkernel _Z3mulv 50000\n")
    wrapper = Wrapper(0x466243B1, 1, ctypes.cast(image, c_void_p), None)
    register = runtime.__getattr__("__cudaRegisterFatBinary")
    register.restype = c_void_p
    binary = c_void_p(register(byref(wrapper)))
    host = c_void_p(0x1234)
    function = runtime.__getattr__("__cudaRegisterFunction")
    function(binary, host, c_void_p(), b"_Z3mulv", -1, None, None, None, None, None)
    runtime.__getattr__("__cudaRegisterFatBinaryEnd")(binary)
    for name in ("cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchKernel_ptsz", "cudaLaunchCooperativeKernel"):
        launch = runtime.__getattr__(name)
        launch.argtypes = (c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p)
        stream = cuda.Stream()
        assert launch(host, one, one, None, 0, stream.handle) == 0, name
        assert not stream.query(), "it lasts"
        stream.synchronize()
        assert launch(c_void_p(0x9999), one, one, None, 0, stream.handle) == 98, "not registered"
    stream = cuda.Stream()
    config = LaunchConfig(one, one, 0, stream.handle, None, 0)
    runtime.cudaLaunchKernelExC.argtypes = (c_void_p, c_void_p, c_void_p)
    assert runtime.cudaLaunchKernelExC(byref(config), host, None) == 0 and not stream.query()
    assert runtime.cudaGetLastError() == cuda.NOT_READY and runtime.cudaGetLastError() == 0
    push, pop = runtime.__getattr__("__cudaPushCallConfiguration"), runtime.__getattr__("__cudaPopCallConfiguration")
    push.argtypes = (Dim3, Dim3, c_size_t, c_void_p)
    assert push(Dim3(1, 2, 3), Dim3(4, 5, 6), 7, c_void_p(8)) == 0
    grid, block, shared, popped = Dim3(), Dim3(), c_size_t(), c_void_p()
    assert pop(byref(grid), byref(block), byref(shared), byref(popped)) == 0
    assert (grid.z, block.x, shared.value, popped.value) == (3, 4, 7, 8)
    stream.synchronize()
    # The other runtime is the same source: only its version differs.
    versions = []
    for soname in ("libcudart.so.13", "libcudart.so.12"):
        version = c_int()
        assert ctypes.CDLL(soname).cudaRuntimeGetVersion(byref(version)) == 0
        versions.append(version.value // 1000)
    assert versions == [13, 12], versions


def memory():
    buffer, other = cuda.Buffer(1000, "i32").from_list(list(range(1000))), cuda.Buffer(1000, "i32")
    stream = cuda.Stream()
    cuda._cuda("cudaMemcpyAsync", other.pointer, buffer.pointer, buffer.nbytes, cuda.DEVICE_TO_DEVICE, stream.handle)
    cuda._cuda("cudaMemsetAsync", buffer.pointer, 1, 8, stream.handle)
    stream.synchronize()
    assert other.to_list() == list(range(1000)) and buffer.to_list()[:3] == [0x01010101, 0x01010101, 2]
    # Pageable host memory is read before the call returns, however long the stream takes.
    cuda.Kernel("slow", 50_000).launch(stream)
    source = ctypes.create_string_buffer(b"\x05\x00\x00\x00", 4)
    cuda._cuda("cudaMemcpyAsync", other.pointer, source, 4, cuda.HOST_TO_DEVICE, stream.handle)
    source[0] = b"\x09"
    stream.synchronize()
    assert other.to_list()[0] == 5
    assert code_of(cuda.Buffer, 1 << 40) == 2, "a device has an end"
    free, total = c_size_t(), c_size_t()
    assert cuda.runtime.cudaMemGetInfo(byref(free), byref(total)) == 0
    assert 0 < total.value - free.value < 1 << 20
    buffer.free()
    buffer.pointer = c_void_p(0x1000)
    assert code_of(buffer.free) == 1
    cuda.set_device(7)
    assert cuda.get_device() == 7 and cuda.device_count() == 8
    assert in_thread(cuda.get_device) == 0, "a fresh thread is on device 0"
    assert code_of(cuda.set_device, 8) == 101
    ms = c_float()
    assert cuda.driver.cuEventElapsedTime(byref(ms), None, None) == 400


def fork_child_of(body):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(body())
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forks():
    """Before the first call a child may use the device; after it none may, and none is harmed."""

    def whole():
        cuda.set_device(0)
        stream = cuda.Stream()
        cuda.Kernel("any", 10).launch(stream)
        stream.synchronize()
        return 0

    assert fork_child_of(whole) == 0
    whole()
    stream = cuda.Stream()
    cuda.Kernel("slow", 200_000).launch(stream)
    assert fork_child_of(lambda: 0) == 0
    assert fork_child_of(lambda: code_of(stream.query)) == 3
    assert fork_child_of(lambda: code_of(cuda.Stream)) == 3
    assert fork_child_of(lambda: code_of(cuda._nccl, "ncclGetUniqueId", None)) == 4
    assert fork_child_of(lambda: os.execv("/bin/true", ["true"])) == 0
    stream.synchronize()


# Several ranks


def world(name="world", **options):
    cuda.set_device(RANK % 8)
    return cuda.Communicator.create(name, **options), cuda.Stream()


def nccl(name, *arguments):
    cuda._nccl(name, *arguments)


def collectives():
    comm, stream = world()

    def run(function, *buffers):
        function()
        stream.synchronize()
        return [buffer.to_list() for buffer in buffers]

    for dtype in cuda.DTYPES:
        for op, expected in (("sum", 10), ("prod", 24), ("max", 4), ("min", 1), ("avg", 2.5 if dtype[0] in "fb" else 2)):
            buffer = cuda.Buffer(5, dtype).fill(RANK + 1)
            assert run(lambda: comm.all_reduce(buffer, stream, op), buffer) == [[expected] * 5], (dtype, op)
    # More than one piece, and a tail.
    count = 300_001
    buffer, out = cuda.Buffer(count, "i64").from_list([RANK * i for i in range(count)]), cuda.Buffer(count, "i64")
    assert run(lambda: comm.all_reduce(buffer, stream, out=out), out) == [[6 * i for i in range(count)]]
    part = cuda.Buffer(count // 4, "i64")
    whole = cuda.Buffer(part.count * 4, "i64").from_list([RANK + i for i in range(part.count * 4)])
    run(lambda: comm.reduce_scatter(whole, part, stream))
    assert part.to_list() == [6 + 4 * (RANK * part.count + i) for i in range(part.count)]
    run(lambda: comm.all_gather(part, whole, stream))
    assert whole.to_list() == [6 + 4 * i for i in range(part.count * 4)]

    buffer, out = cuda.Buffer(3).fill(RANK), cuda.Buffer(3).fill(-1)
    run(lambda: comm.reduce(buffer, 2, stream, out=out))
    assert out.to_list() == ([6.0] * 3 if RANK == 2 else [-1.0] * 3)
    assert run(lambda: comm.broadcast(buffer, 3, stream), buffer) == [[3.0] * 3]
    args = (c_size_t(3), 7, 1, comm.handle, stream.handle)
    buffer.fill(RANK)
    assert run(lambda: nccl("ncclBcast", buffer.pointer, *args), buffer) == [[1.0] * 3]

    each, all_ = cuda.Buffer(2, "i32"), cuda.Buffer(8, "i32")
    wide = cuda.Buffer(8, "i32").from_list([10 * RANK + i // 2 for i in range(8)])
    run(lambda: nccl("ncclAlltoAll", wide.pointer, all_.pointer, c_size_t(2), 2, comm.handle, stream.handle))
    assert all_.to_list() == [10 * (i // 2) + RANK for i in range(8)]
    each.fill(RANK)
    all_.fill(-1)
    run(lambda: nccl("ncclGather", each.pointer, all_.pointer, c_size_t(2), 2, 1, comm.handle, stream.handle))
    assert all_.to_list() == ([0, 0, 1, 1, 2, 2, 3, 3] if RANK == 1 else [-1] * 8)
    run(lambda: nccl("ncclScatter", wide.pointer, each.pointer, c_size_t(2), 2, 3, comm.handle, stream.handle))
    assert each.to_list() == [30 + RANK] * 2

    factor, op = c_float(0.5 * (RANK + 1)), c_int()
    nccl("ncclRedOpCreatePreMulSum", byref(op), byref(factor), 7, 1, comm.handle)
    buffer.fill(2)
    run(lambda: nccl("ncclAllReduce", buffer.pointer, buffer.pointer, c_size_t(3), 7, op, comm.handle, stream.handle), buffer)
    assert buffer.to_list() == [10.0] * 3
    code = cuda.nccl.ncclAllReduce(buffer.pointer, buffer.pointer, 3, 77, 0, comm.handle, stream.handle)
    assert code == 4, "no such type"

    # The kernels of a communicator keep their order across streams.
    other = cuda.Stream()
    cuda.Kernel("slow", 20_000).launch(stream)
    buffer.fill(1)
    for step in range(6):
        comm.all_reduce(buffer, (stream, other)[step % 2])
    cuda.synchronize()
    assert buffer.to_list() == [4.0**6] * 3
    comm.finalize()
    comm.destroy()


def point_to_point():
    comm, stream = world()
    peers = [rank for rank in range(SIZE) if rank != RANK]
    # Long messages to all and from all, in an order that would deadlock one after the other; two to
    # the same peer.
    count = 40_000
    out = {peer: [cuda.Buffer(count, "i32").fill(100 * RANK + peer + k) for k in (0, 1000)] for peer in peers}
    into = {peer: [cuda.Buffer(count, "i32") for _ in (0, 1)] for peer in peers}
    with cuda.group():
        for peer in peers if RANK % 2 else reversed(peers):
            for buffer in into[peer]:
                comm.recv(buffer, peer, stream)
            with cuda.group():
                for buffer in out[peer]:
                    comm.send(buffer, peer, stream)
    stream.synchronize()
    for peer in peers:
        for k, buffer in zip((0, 1000), into[peer]):
            assert buffer.to_list() == [100 * peer + RANK + k] * count, (peer, k)
    # To oneself.
    a, b = cuda.Buffer(3).fill(7), cuda.Buffer(3)
    with cuda.group():
        comm.send(a, RANK, stream)
        comm.recv(b, RANK, stream)
    stream.synchronize()
    assert b.to_list() == [7.0] * 3
    # Sizes that differ never meet, and a send that nobody receives waits.
    if RANK < 2:
        peer = 1 - RANK
        buffer = cuda.Buffer(3 + RANK)
        (comm.send if RANK == 0 else comm.recv)(buffer, peer, stream)
        assert stays_pending(recorded(stream))
        assert_hung_quietly()


def missing_rank():
    """Rank 2 never comes: the others' events stay pending, and they burn no CPU."""
    comm, stream = world()
    buffer = cuda.Buffer(4).fill(1)
    for _ in range(3):
        comm.all_reduce(buffer, stream)
    stream.synchronize()
    if RANK != 2:
        comm.all_reduce(buffer, stream)
        event = recorded(stream)
        assert stays_pending(event)
        assert_hung_quietly()
    gather(RANK)


def gather(value):
    """Meets all ranks outside the device, through files, so that no rank ends before the others
    have looked.
    """
    folder = os.environ["XPU_EXAMPLE_RENDEZVOUS"]
    with open(f"{folder}/done.{RANK}.tmp", "w") as file:
        file.write(str(value))
    os.rename(f"{folder}/done.{RANK}.tmp", f"{folder}/done.{RANK}")
    until(lambda: all(os.path.exists(f"{folder}/done.{rank}") for rank in range(SIZE)), "all ranks are done")


def skipped_pairs_with_the_next():
    """Rank 1 skips its 2nd collective: its 3rd meets the others' 2nd, with wrong data, and only the
    last one hangs.
    """
    comm, stream = world()
    results = []
    buffers = [cuda.Buffer(2).fill(10.0**step) for step in range(4)]
    events = []
    for buffer in buffers:
        comm.all_reduce(buffer, stream)
        events.append(recorded(stream))
    if RANK == 1:
        stream.synchronize()
        results = [buffer.to_list()[0] for buffer in buffers]
        assert results == [3.0, 10.0, 120.0, 1200.0], results
    else:
        until(lambda: events[2].query(), "the third is complete")
        assert stays_pending(events[3])
    gather(RANK)


def mismatch_hangs():
    """Rank 1's second collective is another one, or of another size, by the fault."""
    comm, stream = world()
    buffer = cuda.Buffer(64).fill(1)
    comm.all_reduce(buffer, stream)
    stream.synchronize()
    comm.all_reduce(buffer, stream)
    event = recorded(stream)
    assert stays_pending(event)
    assert_hung_quietly()
    gather(RANK)


def shape_mismatch_of_the_program():
    """No fault is injected: the program itself disagrees in operation, size, type and root."""
    for number, call in enumerate((
        lambda c, s: c.all_reduce(cuda.Buffer(8), s) if RANK else c.broadcast(cuda.Buffer(8), 0, s),
        lambda c, s: c.all_reduce(cuda.Buffer(8 + RANK), s),
        lambda c, s: c.all_reduce(cuda.Buffer(8, "f32" if RANK else "i32"), s),
        lambda c, s: c.broadcast(cuda.Buffer(8), RANK, s),
    )):
        comm, stream = world(f"mismatch{number}")
        call(comm, stream)
        assert stays_pending(recorded(stream), 0.1), number
        comm.abort()
        stream.synchronize()


def stalled():
    """stall:bytes=1000: 400 bytes a step, so the third never ends, on any rank."""
    comm, stream = world()
    buffer = cuda.Buffer(100).fill(1)
    events = []
    for _ in range(4):
        comm.all_reduce(buffer, stream)
        events.append(recorded(stream))
    until(lambda: events[1].query(), "two are complete")
    assert stays_pending(events[2])
    assert_hung_quietly()
    gather(RANK)


def init_skipped():
    """Rank 1's initialization does not happen: the others are blocked in ncclCommInitRank, and rank
    1 gets nothing done.
    """
    cuda.set_device(RANK)
    done = []
    thread = threading.Thread(target=lambda: done.append(world()), daemon=True)
    thread.start()
    if RANK == 1:
        until(lambda: done, "it returns at once")
        comm, stream = done[0]
        comm.all_reduce(cuda.Buffer(4), stream)
        assert stays_pending(recorded(stream))
    else:
        thread.join(0.5)
        assert not done
    gather(RANK)


def killed():
    """Rank 1 dies at its third collective."""
    comm, stream = world()
    buffer = cuda.Buffer(4).fill(1)
    for step in range(3):
        print("step", step, flush=True)
        comm.all_reduce(buffer, stream)
        event = recorded(stream)
        if step < 2:
            event.synchronize()
    assert RANK != 1 and stays_pending(event)


def slow_rank():
    """slow:rank=1,ms=40: kernels of rank 1 take longer, collectives do not."""
    comm, stream = world()
    kernel, buffer = cuda.Kernel("any", 1000), cuda.Buffer(4).fill(1)
    start = recorded(stream)
    kernel.launch(stream)
    end = recorded(stream)
    comm.all_reduce(buffer, stream)
    stream.synchronize()
    ms = start.elapsed_ms(end)
    print("ms", ms)
    assert (ms >= 40) == (RANK == 1), ms
    comm.destroy()


def nonblocking():
    """Rank 1 comes late: until then the others are in progress, and so is a collective that is
    launched.
    """
    cuda.set_device(RANK)
    if RANK == 1:
        until(lambda: os.path.exists(os.environ["XPU_EXAMPLE_RENDEZVOUS"] + "/waiting"), "rank 0 has seen 7")
    else:
        _, unique_id = cuda._exchange("world", RANK, PATIENCE)
        comm = cuda.Communicator(c_void_p(), RANK, SIZE)
        config = cuda._Config(blocking=False)
        code = cuda.nccl.ncclCommInitRankConfig(byref(comm.handle), SIZE, unique_id, RANK, byref(config))
        assert code == cuda.IN_PROGRESS and comm.handle.value
        assert comm.async_error() == cuda.IN_PROGRESS
        buffer = cuda.Buffer(1)
        code = cuda.nccl.ncclAllReduce(buffer.pointer, buffer.pointer, 1, 7, 0, comm.handle, None)
        assert code == 4, "not before it is initialized"
        open(os.environ["XPU_EXAMPLE_RENDEZVOUS"] + "/waiting", "w").close()
        comm.wait_ready()
    if RANK == 1:
        comm = cuda.Communicator.create("world", blocking=False)
    stream, buffer = cuda.Stream(), cuda.Buffer(4).fill(RANK)
    code = cuda.nccl.ncclAllReduce(buffer.pointer, buffer.pointer, 4, 7, 0, comm.handle, stream.handle)
    assert code == cuda.IN_PROGRESS, code
    comm.wait_ready()
    stream.synchronize()
    assert buffer.to_list() == [1.0] * 4
    comm.finalize()
    comm.destroy()


def nonblocking_children():
    """A child is there when its parent says so, and until then there is no handle."""
    comm = cuda.Communicator.create("world", blocking=False)
    late = os.environ["XPU_EXAMPLE_RENDEZVOUS"] + "/split"
    for grouped in (False, True):
        if RANK == 1:
            until(lambda: os.path.exists(f"{late}{grouped}"), "rank 0 is in the split")
        child = cuda.Communicator(c_void_p(), RANK, SIZE)
        if grouped:
            nccl("ncclGroupStart")
        code = cuda.nccl.ncclCommSplit(comm.handle, 0, RANK, byref(child.handle), None)
        if grouped:
            assert code == 0
            code = cuda.nccl.ncclGroupEnd()
        assert code == cuda.IN_PROGRESS, code
        if RANK == 0:
            assert not child.handle.value and comm.async_error() == cuda.IN_PROGRESS
            open(f"{late}{grouped}", "w").close()
        comm.wait_ready()
        assert child.handle.value and child._integer("ncclCommCount") == SIZE
        stream, buffer = cuda.Stream(), cuda.Buffer(4).fill(RANK)
        code = cuda.nccl.ncclAllReduce(buffer.pointer, buffer.pointer, 4, 7, 0, child.handle, stream.handle)
        assert code == cuda.IN_PROGRESS, code
        child.wait_ready()
        stream.synchronize()
        assert buffer.to_list() == [1.0] * 4


def kernels_meet():
    """A kernel waits for the flags that the kernels of all ranks set, once for each launch, and a
    flag is set only by a launch.
    """
    cuda.set_device(0)
    folder = os.environ["XPU_EXAMPLE_RENDEZVOUS"]
    meet = cuda.Kernel("meet", 10, f"flags={folder}/flags sets={RANK} awaits=0..{SIZE}")
    stream = cuda.Stream()
    for launch in range(3):
        if RANK == 0:
            meet.launch(stream)
            event = recorded(stream)
            assert stays_pending(event), "rank 1 has not launched"
            open(f"{folder}/go{launch}", "w").close()
            until(event.query, "the flag of rank 1")
        else:
            until(lambda: os.path.exists(f"{folder}/go{launch}"), "rank 0 waits")
            meet.launch(stream)
            stream.synchronize()
    assert code_of(cuda.Kernel, "bad", 10, "flags=/nowhere/flags sets=0") != 0


def abort():
    """An abort ends pending kernels, and what comes after them in the stream goes on."""
    comm, stream = world()
    buffer = cuda.Buffer(4).fill(1)
    if RANK == 0:
        comm.all_reduce(buffer, stream)
        comm.all_reduce(buffer, stream)
        event = recorded(stream)
        assert stays_pending(event)
        blocked = threading.Thread(target=stream.synchronize)
        blocked.start()
        comm.abort()
        blocked.join(PATIENCE)
        assert not blocked.is_alive() and event.query()
        assert code_of(comm.all_reduce, buffer, stream) == 4, "it is gone"
    # So does one that was still waiting for its peers.
    alone = cuda.Communicator(c_void_p(), 0, 2)
    unique_id, config = cuda._UniqueId(), cuda._Config(blocking=False)
    nccl("ncclGetUniqueId", byref(unique_id))
    assert cuda.nccl.ncclCommInitRankConfig(byref(alone.handle), 2, unique_id, 0, byref(config)) == cuda.IN_PROGRESS
    alone.abort()
    until(lambda: not any(w[0] == "sim-nccl-init" for w in workers()), "its thread is gone")


def split_and_shrink():
    comm, stream = world()
    child = comm.split(RANK % 2, -RANK)
    assert (child.rank, child.size) == ((1, 2) if RANK < 2 else (0, 2))
    buffer = cuda.Buffer(2).fill(RANK)
    child.all_reduce(buffer, stream)
    stream.synchronize()
    assert buffer.to_list() == [2.0 if RANK % 2 == 0 else 4.0] * 2
    assert (comm.split(cuda.NO_COLOR if RANK == 3 else 0) is None) == (RANK == 3)
    if RANK != 1:
        shrunk, excluded = cuda.Communicator(c_void_p(), 0, 0), c_int(1)
        nccl("ncclCommShrink", comm.handle, byref(excluded), 1, byref(shrunk.handle), None, 0)
        assert shrunk._integer("ncclCommUserRank") == (0, None, 1, 2)[RANK]
        buffer.fill(RANK)
        shrunk.all_reduce(buffer, stream)
        stream.synchronize()
        assert buffer.to_list() == [5.0] * 2
    buffer.fill(1)
    comm.all_reduce(buffer, stream)
    stream.synchronize()
    assert buffer.to_list() == [4.0] * 2, "the parent is as it was"


def grow():
    """Three ranks become four: the first makes the id, and the last has nothing but it.

    Returns the communicator of all.
    """
    def grown_from(comm, unique_id, rank):
        new = cuda.Communicator(c_void_p(), RANK, SIZE)
        nccl("ncclCommGrow", comm, SIZE, unique_id, rank, byref(new.handle), None)
        return new

    cuda.set_device(RANK)
    path = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], "grow")
    unique_id = cuda._UniqueId()
    if RANK < SIZE - 1:
        comm = cuda.Communicator.create("small", RANK, SIZE - 1)
        if RANK == 0:
            nccl("ncclCommGetUniqueId", comm.handle, byref(unique_id))
            with open(path + ".new", "wb") as file:
                file.write(bytes(unique_id))
            os.rename(path + ".new", path)
        return grown_from(comm.handle, byref(unique_id) if RANK == 0 else None, -1)
    until(lambda: os.path.exists(path), "the id")
    with open(path, "rb") as file:
        ctypes.memmove(byref(unique_id), file.read(), 128)
    return grown_from(None, byref(unique_id), RANK)


def grown():
    new = grow()
    assert (new._integer("ncclCommUserRank"), new._integer("ncclCommCount")) == (RANK, SIZE)
    stream, buffer = cuda.Stream(), cuda.Buffer(2).fill(RANK)
    new.all_reduce(buffer, stream)
    stream.synchronize()
    assert buffer.to_list() == [float(sum(range(SIZE)))] * 2


def children_of_a_grown_one():
    """All ranks of a grown communicator make others of it, and one of one of these; the environment
    says who stays away from the last collective.
    """
    new, stream = grow(), cuda.Stream()
    copy = new.split(0)
    half = copy.split(RANK % 2)
    buffer = cuda.Buffer(2)
    for comm in (copy, half, copy):
        buffer.fill(1)
        comm.all_reduce(buffer, stream)
        stream.synchronize()
        assert buffer.to_list() == [float(comm.size)] * 2
    if os.environ.get("AWAY") == str(RANK):
        stay_away()
    copy.all_reduce(buffer, stream)
    stream.synchronize()


def stay_away():
    while True:
        time.sleep(1)


def recent_functions():
    """Functions of NCCL since 2.28: a configuration for each call, signals, windows, and a group
    that is only tried out.
    """
    comm, stream = world()
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    send, receive = cuda.Buffer(4 * SIZE).fill(1), cuda.Buffer(4 * SIZE).fill(0)
    ends = (comm.handle, stream.handle)
    window = c_void_p()
    nccl("ncclCommWindowRegister", comm.handle, receive.pointer, c_size_t(16 * SIZE), byref(window), 0)
    pair, four = (send.pointer, receive.pointer), (c_size_t(4), 7)
    nccl("ncclAllReduceConfig", *pair, *four, 0, *ends, None)
    nccl("ncclReduceConfig", *pair, *four, 2, 1, *ends, None)
    nccl("ncclBroadcastConfig", *pair, *four, 1, *ends, None)
    nccl("ncclAllGatherConfig", *pair, *four, *ends, None)
    nccl("ncclReduceScatterConfig", *pair, *four, 0, *ends, None)
    nccl("ncclAlltoAllConfig", *pair, *four, *ends, None)
    nccl("ncclGatherConfig", *pair, *four, 0, *ends, None)
    nccl("ncclScatterConfig", *pair, *four, 0, *ends, None)
    # As if it had never been.
    nccl("ncclGroupStart")
    nccl("ncclAllReduce", *pair, *four, 0, *ends)
    nccl("ncclSend", send.pointer, *four, right, *ends)
    nccl("ncclGroupSimulateEnd", None)
    with cuda.group():
        nccl("ncclSignal", right, 5, 0, 0, *ends)
        nccl("ncclWaitSignal", 2, (c_int * 8)(1, left, 5, 0, 0, right, 6, 0), *ends)
    if "NO_SIGNAL" in os.environ:
        if RANK == 1:
            nccl("ncclWaitSignal", 1, (c_int * 4)(1, left, 9, 0), *ends)
        return
    nccl("ncclAllReduce", *pair, *four, 0, *ends)
    stream.synchronize()
    assert receive.to_list()[:4] == [float(SIZE)] * 4, receive.to_list()
    nccl("ncclCommWindowDeregister", comm.handle, window)


def captured_collectives():
    """Two collectives and an exchange in a graph, launched three times; the environment says on
    which rank one launch less.
    """
    comm, stream = world()
    buffer = cuda.Buffer(4).fill(1)
    comm.all_reduce(buffer, stream)
    stream.synchronize()
    with cuda.capture(stream) as graph:
        comm.all_reduce(buffer, stream)
        with cuda.group():
            comm.send(buffer, 1 - RANK, stream)
            comm.recv(buffer, 1 - RANK, stream)
        comm.all_reduce(buffer, stream, op="max")
    for number in range(3):
        if number < 2 or os.environ.get("SKIPS_A_LAUNCH") != str(RANK):
            graph.launch(stream)
    if "SKIPS_A_LAUNCH" in os.environ:
        return
    stream.synchronize()
    assert buffer.to_list() == [16.0] * 4, buffer.to_list()
    graph.destroy()
    comm.all_reduce(buffer, stream)
    stream.synchronize()


def a_lost_device_answers_its_error():
    """The third kernel is the fault's."""
    cuda.set_device(0)
    kernel, stream, event = cuda.Kernel("any", 100), cuda.Stream(), cuda.Event()
    for _ in range(3):
        kernel.launch(stream)
    until(lambda: code_of(stream.query) == 700, "the error")
    assert code_of(event.record, stream) == 700 and code_of(kernel.launch, stream) == 700
    assert code_of(cuda.synchronize) == 700


def a_destroyed_context_has_no_events():
    cuda.set_device(0)
    kernel, stream, event = cuda.Kernel("any", 10_000_000), cuda.Stream(), cuda.Event()
    kernel.launch(stream)
    event.record(stream)
    assert cuda.driver.cuDevicePrimaryCtxReset_v2(0) == 0
    assert code_of(event.query) == 709


def contexts_are_destroyed_with_work_and_made_again():
    """With more of them than the hook has pools of events."""
    for _ in range(30):
        cuda.set_device(0)
        kernel, stream = cuda.Kernel("any", 100), cuda.Stream()
        for _ in range(20):
            kernel.launch(stream)
        stream.synchronize()
        cuda.Kernel("long", 10_000_000).launch(stream)
        time.sleep(0.02)
        assert cuda.driver.cuDevicePrimaryCtxReset_v2(0) == 0
    context = c_void_p()
    for _ in range(10):
        assert cuda.driver.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
        assert cuda.driver.cuCtxSetCurrent(context) == 0
        cuda.Kernel("any", 100).launch(cuda.Stream())
        assert cuda.driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    cuda.set_device(0)
    kernel, stream = cuda.Kernel("last", 100), cuda.Stream()
    kernel.launch(stream)
    stream.synchronize()


def per_thread_streams():
    """Two threads use the same handle for two streams: the first's never goes on, the second's
    does.
    """
    cuda.set_device(0)
    kernel = cuda.Kernel("any", 0)
    launch, wait = cuda.driver.cuLaunchKernel_ptsz, cuda.driver.cuStreamSynchronize_ptsz
    launch.argtypes, wait.argtypes = cuda.driver.cuLaunchKernel.argtypes, (c_void_p,)

    def launched():
        cuda.set_device(0)
        assert launch(kernel.function, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0

    def completed():
        for _ in range(3):
            launched()
        assert wait(None) == 0

    in_thread(launched)
    in_thread(completed)


def green_contexts():
    """Kernels and collectives on streams of green contexts, whose thread has the primary one or the
    green one; twice, because the second green context may be where the first was. Nobody but this
    thread may make a green one its own.
    """
    driver, comm, kernel = cuda.driver, None, None
    current = lambda: (context := c_void_p(), driver.cuCtxGetCurrent(byref(context)), context.value)[-1]

    def ok(name, *arguments):
        code = getattr(driver, name)(*arguments)
        assert code == 0, (name, code)

    comm, primary_stream = world()
    kernel, primary = cuda.Kernel("any", 2000), current()
    for _ in range(2):
        green, context, stream = c_void_p(), c_void_p(), cuda.Stream.default()
        ok("cuGreenCtxCreate", byref(green), None, RANK, 1)
        ok("cuCtxFromGreenCtx", byref(context), green)
        ok("cuGreenCtxStreamCreate", byref(stream.handle), green, 1, 0)
        of, of_green = c_void_p(), c_void_p()
        ok("cuStreamGetCtx_v2", stream.handle, byref(of), byref(of_green))
        assert (of.value, of_green.value) == (primary, green.value)
        event, buffer = cuda.Event(), cuda.Buffer(2).fill(RANK + 1)
        for _ in range(3):
            kernel.launch(stream)
        comm.all_reduce(buffer, stream)
        event.record(stream)
        event.synchronize()
        assert buffer.to_list() == [float(SIZE * (SIZE + 1) // 2)] * 2 and current() == primary
        for _ in range(20):
            ok("cuCtxSetCurrent", context)
            kernel.launch(cuda.Stream.default())
            kernel.launch(stream)
            assert current() == context.value
            ok("cuCtxSynchronize")
            ok("cuCtxSetCurrent", c_void_p(primary))
        ok("cuStreamDestroy_v2", stream.handle)
        ok("cuGreenCtxDestroy", green)
    kernel.launch(primary_stream)
    primary_stream.synchronize()


def one_process_all_devices():
    """ncclCommInitAll, and a group over all communicators of one thread."""
    cuda.set_device(0)
    handles = (c_void_p * 4)()
    nccl("ncclCommInitAll", handles, 4, (c_int * 4)(3, 2, 1, 0))
    comms = [cuda.Communicator(c_void_p(handle), rank, 4) for rank, handle in enumerate(handles)]
    assert [comm._integer("ncclCommCuDevice") for comm in comms] == [3, 2, 1, 0] and cuda.get_device() == 0
    streams, buffers = [], []
    for device in (3, 2, 1, 0):
        cuda.set_device(device)
        streams.append(cuda.Stream())
        buffers.append(cuda.Buffer(4).fill(device))
    with cuda.group():
        for comm, buffer, stream in zip(comms, buffers, streams):
            comm.all_reduce(buffer, stream)
    for stream in streams:
        stream.synchronize()
    assert all(buffer.to_list() == [6.0] * 4 for buffer in buffers)
    with cuda.capture(streams[0]) as graph:
        comms[0].all_reduce(buffers[0], streams[0])
    for comm, buffer, stream in list(zip(comms, buffers, streams))[1:]:
        comm.all_reduce(buffer, stream)
    last = recorded_on(3, streams[3])
    assert stays_pending(last, 0.1), "a captured collective has not happened"
    graph.launch(streams[0])
    last.synchronize()
    # The last rank has its sum; a copy waits for no stream that was made nonblocking, so the first
    # one is waited for by name.
    streams[0].synchronize()
    assert buffers[0].to_list() == [24.0] * 4
    # A failed call inside a group is the group's failure, and nothing of it begins.
    nccl("ncclGroupStart")
    comms[0].all_reduce(buffers[0], streams[0])
    assert code_of(comms[0].broadcast, buffers[0], 9, streams[0]) == 4
    assert cuda.nccl.ncclGroupEnd() == 4
    assert recorded_on(3, streams[0]).synchronize() is None
    assert cuda.nccl.ncclGroupEnd() == 5, "there is no group to end"


def attention():
    """Kernels with the names of flash attention, and their argument."""
    cuda.set_device(0)
    driver, module = cuda.driver, c_void_p()
    assert driver.cuModuleLoadData(byref(module), ctypes.create_string_buffer(b"\x7fELF")) == 0
    stream = cuda.Stream()
    numbers = {96: 16, 100: 4, 104: 4, 176: 2, 180: 1024, 184: 2048, 192: 64, 196: 1024, 200: 2048, 204: 64}
    argument = ctypes.create_string_buffer(1024)
    for offset, number in numbers.items():
        ctypes.memmove(ctypes.addressof(argument) + offset, byref(c_int(number)), 4)
    arguments = (c_void_p * 1)(ctypes.addressof(argument))
    for name in [b"flash_fwd_kernel_half", b"flash_bwd_dq_dk_dv_loop_bfloat16", b"flash_bwd_dot_do_o_kernel"]:
        function = c_void_p()
        assert driver.cuModuleGetFunction(byref(function), module, name) == 0
        # The first launch shows the name.
        for _ in range(3):
            assert driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream.handle, arguments, None) == 0
    stream.synchronize()


def asynchronous_error():
    """Run with a fault that reports a remote error."""
    comm, stream = world()
    buffer = cuda.Buffer(4).fill(1)
    nccl("ncclAllReduce", buffer.pointer, buffer.pointer, c_size_t(4), 7, 0, comm.handle, stream.handle)
    stream.synchronize()
    assert comm.async_error() == 6
    memory, handle = c_void_p(), c_void_p()
    nccl("ncclMemAlloc", byref(memory), c_size_t(4096))
    nccl("ncclCommRegister", comm.handle, memory, c_size_t(4096), byref(handle))


def recorded_on(device, stream):
    # An event belongs to the device that was current when it was made.
    before = cuda.get_device()
    for candidate in (device, 3, 2, 1, 0):
        cuda.set_device(candidate)
        event = cuda.Event()
        if code_of(event.record, stream) == 0:
            break
    cuda.set_device(before)
    return event


def calls_through_symbols():
    """Run with an interposer that counts: NCCL's calls of itself pass it."""
    cuda.set_device(0)
    counts = ctypes.CDLL(None)

    def count(name):
        return c_int.in_dll(counts, f"count_{name}").value

    handle = (c_void_p * 1)()
    nccl("ncclCommInitAll", handle, 1, None)
    assert count("ncclGetUniqueId") == 1
    comm, stream, buffer = cuda.Communicator(c_void_p(handle[0]), 0, 1), cuda.Stream(), cuda.Buffer(2).fill(3)
    args = (buffer.pointer, c_size_t(2), 7, 0, comm.handle, stream.handle)
    nccl("ncclBcast", *args)
    nccl("pncclBcast", *args)
    assert count("ncclBroadcast") == 2
    before = count("ncclGroupStart")
    with cuda.group():
        nccl("pncclSend", *args)
        nccl("pncclRecv", *args)
    assert count("ncclGroupStart") == before + 2, "one each; ours goes through a handle"
    stream.synchronize()
    assert ctypes.cast(cuda.nccl.ncclSend, c_void_p).value != ctypes.cast(cuda.nccl.pncclSend, c_void_p).value


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok", flush=True)
    # A hung stream must not be waited for, and it is not; the interpreter's own end is not what is
    # tested.
    os._exit(0)
