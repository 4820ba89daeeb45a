"""Small ctypes bindings of the CUDA runtime, the driver's kernel launch and NCCL, for the example
training programs.

It loads the libraries by soname, so the dynamic linker decides whether they are real or simulated.
`Kernel` alone needs the simulated driver, whose modules are text. Every failure raises `CudaError`
or `NcclError`. Ranks come from RANK, LOCAL_RANK and WORLD_SIZE; unique ids travel through a file in
the folder XPU_EXAMPLE_RENDEZVOUS.
"""

import array
import contextlib
import ctypes
import os
import struct
import time
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

NOT_READY = 600
IN_PROGRESS = 7
NO_COLOR = -1
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 0, 1, 2

# Name: (NCCL's number, bytes, type code of the array module or None).
DTYPES = {
    "i8": (0, 1, "b"), "u8": (1, 1, "B"), "i32": (2, 4, "i"), "u32": (3, 4, "I"), "i64": (4, 8, "q"), "u64": (5, 8, "Q"),
    "f16": (6, 2, None), "f32": (7, 4, "f"), "f64": (8, 8, "d"), "bf16": (9, 2, None),
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class CudaError(RuntimeError):
    """A CUDA call failed; `code` is its cudaError_t or CUresult."""

    def __init__(self, function, code, text):
        super().__init__(f"{function}: {text} ({code})")
        self.code = code


class NcclError(RuntimeError):
    """An NCCL call failed; `code` is its ncclResult_t."""

    def __init__(self, function, code, text):
        super().__init__(f"{function}: {text} ({code})")
        self.code = code


class _UniqueId(Structure):
    _fields_ = [("internal", c_char * 128)]


class _Config(Structure):
    """ncclConfig_t of NCCL 2.14, its shortest form, which every later version accepts."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]

    def __init__(self, blocking):
        super().__init__(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, int(blocking))


def _load(*sonames):
    problems = []
    for soname in sonames:
        try:
            return ctypes.CDLL(soname)
        except OSError as problem:
            problems.append(str(problem))
    raise ImportError("; ".join(problems))


runtime = _load("libcudart.so.13", "libcudart.so.12")
driver = _load("libcuda.so.1")
nccl = _load("libnccl.so.2")

_HANDLE = c_void_p
_SIGNATURES = {
    runtime: {
        "cudaGetErrorString": (c_int,),
        "cudaGetDeviceCount": (POINTER(c_int),),
        "cudaSetDevice": (c_int,),
        "cudaGetDevice": (POINTER(c_int),),
        "cudaDeviceSynchronize": (),
        "cudaFree": (c_void_p,),
        "cudaMalloc": (POINTER(c_void_p), c_size_t),
        "cudaMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
        "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, _HANDLE),
        "cudaMemsetAsync": (c_void_p, c_int, c_size_t, _HANDLE),
        "cudaStreamCreateWithPriority": (POINTER(_HANDLE), c_uint, c_int),
        "cudaStreamDestroy": (_HANDLE,),
        "cudaStreamSynchronize": (_HANDLE,),
        "cudaStreamQuery": (_HANDLE,),
        "cudaStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
        "cudaStreamBeginCapture": (_HANDLE, c_int),
        "cudaStreamEndCapture": (_HANDLE, POINTER(_HANDLE)),
        "cudaGraphInstantiateWithFlags": (POINTER(_HANDLE), _HANDLE, c_uint64),
        "cudaGraphLaunch": (_HANDLE, _HANDLE),
        "cudaGraphDestroy": (_HANDLE,),
        "cudaGraphExecDestroy": (_HANDLE,),
        "cudaEventCreateWithFlags": (POINTER(_HANDLE), c_uint),
        "cudaEventDestroy": (_HANDLE,),
        "cudaEventRecord": (_HANDLE, _HANDLE),
        "cudaEventQuery": (_HANDLE,),
        "cudaEventSynchronize": (_HANDLE,),
        "cudaEventElapsedTime": (POINTER(c_float), _HANDLE, _HANDLE),
    },
    driver: {
        "cuGetErrorName": (c_int, POINTER(c_char_p)),
        "cuModuleLoadData": (POINTER(_HANDLE), c_void_p),
        "cuModuleUnload": (_HANDLE,),
        "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
        "cuLaunchKernel": (_HANDLE, *[c_uint] * 7, _HANDLE, POINTER(c_void_p), POINTER(c_void_p)),
    },
    nccl: {
        "ncclGetErrorString": (c_int,),
        "ncclGetUniqueId": (POINTER(_UniqueId),),
        "ncclCommInitRank": (POINTER(_HANDLE), c_int, _UniqueId, c_int),
        "ncclCommInitRankConfig": (POINTER(_HANDLE), c_int, _UniqueId, c_int, POINTER(_Config)),
        "ncclCommSplit": (_HANDLE, c_int, c_int, POINTER(_HANDLE), POINTER(_Config)),
        "ncclCommGetAsyncError": (_HANDLE, POINTER(c_int)),
        "ncclCommFinalize": (_HANDLE,),
        "ncclCommDestroy": (_HANDLE,),
        "ncclCommAbort": (_HANDLE,),
        "ncclCommCount": (_HANDLE, POINTER(c_int)),
        "ncclCommUserRank": (_HANDLE, POINTER(c_int)),
        "ncclGroupStart": (),
        "ncclGroupEnd": (),
        "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _HANDLE),
        "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, _HANDLE, _HANDLE),
        "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _HANDLE),
        "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, _HANDLE, _HANDLE),
        "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, _HANDLE, _HANDLE),
        "ncclSend": (c_void_p, c_size_t, c_int, c_int, _HANDLE, _HANDLE),
        "ncclRecv": (c_void_p, c_size_t, c_int, c_int, _HANDLE, _HANDLE),
    },
}
for _library, _functions in _SIGNATURES.items():
    for _name, _arguments in _functions.items():
        getattr(_library, _name).argtypes = _arguments
        getattr(_library, _name).restype = c_int
runtime.cudaGetErrorString.restype = c_char_p
nccl.ncclGetErrorString.restype = c_char_p


def _cuda(name, *arguments):
    code = getattr(runtime, name)(*arguments)
    if code != 0:
        raise CudaError(name, code, runtime.cudaGetErrorString(code).decode())


def _driver(name, *arguments):
    code = getattr(driver, name)(*arguments)
    if code != 0:
        text = c_char_p()
        driver.cuGetErrorName(code, byref(text))
        raise CudaError(name, code, (text.value or b"unknown error").decode())


def _nccl(name, *arguments, ready=None):
    """Calls NCCL. With `ready`, waits while the communicator that it returns is "in progress"."""
    code = getattr(nccl, name)(*arguments)
    if code == IN_PROGRESS and ready is not None:
        ready().wait_ready(name)
    elif code not in (0, IN_PROGRESS):
        raise NcclError(name, code, nccl.ncclGetErrorString(code).decode())


def device_count():
    count = c_int()
    _cuda("cudaGetDeviceCount", byref(count))
    return count.value


def set_device(index):
    """Makes `index` this thread's device and creates its context."""
    _cuda("cudaSetDevice", index)
    _cuda("cudaFree", None)


def get_device():
    index = c_int()
    _cuda("cudaGetDevice", byref(index))
    return index.value


def synchronize():
    _cuda("cudaDeviceSynchronize")


class Stream:
    """A new stream; `Stream.default()` is the NULL stream."""

    def __init__(self, priority=0, non_blocking=True):
        self.handle = _HANDLE()
        _cuda("cudaStreamCreateWithPriority", byref(self.handle), int(non_blocking), priority)

    @classmethod
    def default(cls):
        stream = cls.__new__(cls)
        stream.handle = _HANDLE()
        return stream

    def synchronize(self):
        _cuda("cudaStreamSynchronize", self.handle)

    def query(self):
        """Whether everything submitted so far has completed."""
        return _ready("cudaStreamQuery", self.handle)

    def wait(self, event):
        _cuda("cudaStreamWaitEvent", self.handle, event.handle, 0)

    def destroy(self):
        _cuda("cudaStreamDestroy", self.handle)


class Event:
    def __init__(self, timing=True):
        self.handle = _HANDLE()
        _cuda("cudaEventCreateWithFlags", byref(self.handle), 0 if timing else 2)

    def record(self, stream=None):
        _cuda("cudaEventRecord", self.handle, _handle(stream))

    def query(self):
        """Whether the latest record has completed."""
        return _ready("cudaEventQuery", self.handle)

    def synchronize(self):
        _cuda("cudaEventSynchronize", self.handle)

    def elapsed_ms(self, end):
        """Milliseconds from this event to `end`."""
        value = c_float()
        _cuda("cudaEventElapsedTime", byref(value), self.handle, end.handle)
        return value.value

    def destroy(self):
        _cuda("cudaEventDestroy", self.handle)


class Buffer:
    """`count` elements of `dtype` in device memory."""

    def __init__(self, count, dtype="f32"):
        self.count, self.dtype = count, dtype
        self.number, self.width, self.code = DTYPES[dtype]
        self.pointer = c_void_p()
        _cuda("cudaMalloc", byref(self.pointer), max(count * self.width, 1))

    @property
    def nbytes(self):
        return self.count * self.width

    def from_list(self, values):
        """Copies `values` to the device, and returns this buffer."""
        if len(values) != self.count:
            raise ValueError(f"{len(values)} values for a buffer of {self.count}")
        data = self._pack(values)
        _cuda("cudaMemcpy", self.pointer, data, len(data), HOST_TO_DEVICE)
        return self

    def to_list(self):
        data = ctypes.create_string_buffer(self.nbytes)
        _cuda("cudaMemcpy", data, self.pointer, self.nbytes, DEVICE_TO_HOST)
        return self._unpack(data.raw)

    def fill(self, value):
        return self.from_list([value] * self.count)

    def free(self):
        pointer, self.pointer = self.pointer, c_void_p()
        _cuda("cudaFree", pointer)

    def _pack(self, values):
        if self.code:
            return array.array(self.code, values).tobytes()
        if self.dtype == "f16":
            return struct.pack(f"<{len(values)}e", *values)
        # The upper half of a binary32; exact for the values that a bfloat16 can hold.
        return b"".join(struct.pack("<f", value)[2:] for value in values)

    def _unpack(self, data):
        if self.code:
            return array.array(self.code, data).tolist()
        if self.dtype == "f16":
            return list(struct.unpack(f"<{self.count}e", data))
        return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


class Kernel:
    """A kernel of the simulated device that keeps its stream busy for `microseconds`.

    `flags` makes it exchange flags with the devices of other processes, such as
    `flags=/dev/shm/x sets=0 awaits=0..4`; the documentation of the simulated device has the words.
    """

    def __init__(self, name, microseconds=0, flags=""):
        self.name = name
        self.module, self.function = _HANDLE(), _HANDLE()
        image = f"//xpu_sim\nkernel {name} {int(microseconds)} {flags}\n".encode()
        _driver("cuModuleLoadData", byref(self.module), ctypes.create_string_buffer(image))
        _driver("cuModuleGetFunction", byref(self.function), self.module, name.encode())

    def launch(self, stream=None, grid=1, block=32):
        _driver("cuLaunchKernel", self.function, grid, 1, 1, block, 1, 1, 0, _handle(stream), None, None)


class Graph:
    """The graph that `capture` recorded, ready to launch."""

    def __init__(self):
        self.graph, self.exec = _HANDLE(), _HANDLE()

    def launch(self, stream=None):
        _cuda("cudaGraphLaunch", self.exec, _handle(stream))

    def destroy(self):
        _cuda("cudaGraphExecDestroy", self.exec)
        _cuda("cudaGraphDestroy", self.graph)


@contextlib.contextmanager
def capture(stream, mode=CAPTURE_GLOBAL):
    """Captures what the block submits to `stream`: `with cuda.capture(stream) as graph: ...`, then
    `graph.launch(stream)`."""
    graph = Graph()
    _cuda("cudaStreamBeginCapture", stream.handle, mode)
    try:
        yield graph
    except BaseException:
        # The capture must end in any case, and the current exception must not be replaced.
        runtime.cudaStreamEndCapture(stream.handle, byref(graph.graph))
        raise
    _cuda("cudaStreamEndCapture", stream.handle, byref(graph.graph))
    _cuda("cudaGraphInstantiateWithFlags", byref(graph.exec), graph.graph, 0)


@contextlib.contextmanager
def group():
    """NCCL calls of the block start together when it ends."""
    _nccl("ncclGroupStart")
    try:
        yield
    finally:
        _nccl("ncclGroupEnd")


class Communicator:
    """An NCCL communicator; this process is `rank` of `size`."""

    def __init__(self, handle, rank, size):
        self.handle, self.rank, self.size = handle, rank, size

    @classmethod
    def create(cls, name, rank=None, size=None, blocking=True, timeout=60.0):
        """Joins the communicator `name`; with `blocking=False` NCCL initializes in the background
        and this polls for it.

        `timeout` bounds the wait for rank 0's unique id, not the one inside NCCL.
        """
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        size = int(os.environ.get("WORLD_SIZE", "1")) if size is None else size
        path, unique_id = _exchange(name, rank, timeout)
        communicator = cls(_HANDLE(), rank, size)
        if blocking:
            _nccl("ncclCommInitRank", byref(communicator.handle), size, unique_id, rank)
        else:
            config = _Config(blocking=False)
            _nccl("ncclCommInitRankConfig", byref(communicator.handle), size, unique_id, rank, byref(config))
            communicator.wait_ready("ncclCommInitRankConfig")
        if rank == 0:
            # All ranks have joined, so all have read it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return communicator

    def async_error(self):
        code = c_int()
        _nccl("ncclCommGetAsyncError", self.handle, byref(code))
        return code.value

    def wait_ready(self, what="communicator"):
        """Polls until a nonblocking communicator has left "in progress"."""
        while (code := self.async_error()) == IN_PROGRESS:
            time.sleep(0.001)
        if code != 0:
            raise NcclError(what, code, nccl.ncclGetErrorString(code).decode())

    def all_reduce(self, buffer, stream=None, op="sum", out=None):
        out = out or buffer
        self._call("ncclAllReduce", buffer.pointer, out.pointer, buffer.count, buffer.number, OPS[op], stream=stream)

    def reduce(self, buffer, root=0, stream=None, op="sum", out=None):
        out = out or buffer
        self._call("ncclReduce", buffer.pointer, out.pointer, buffer.count, buffer.number, OPS[op], root, stream=stream)

    def broadcast(self, buffer, root=0, stream=None):
        self._call("ncclBroadcast", buffer.pointer, buffer.pointer, buffer.count, buffer.number, root, stream=stream)

    def all_gather(self, buffer, out, stream=None):
        """`out` holds `size` times the elements of `buffer`."""
        self._call("ncclAllGather", buffer.pointer, out.pointer, buffer.count, buffer.number, stream=stream)

    def reduce_scatter(self, buffer, out, stream=None, op="sum"):
        """`buffer` holds `size` times the elements of `out`."""
        self._call("ncclReduceScatter", buffer.pointer, out.pointer, out.count, out.number, OPS[op], stream=stream)

    def send(self, buffer, peer, stream=None):
        self._call("ncclSend", buffer.pointer, buffer.count, buffer.number, peer, stream=stream)

    def recv(self, buffer, peer, stream=None):
        self._call("ncclRecv", buffer.pointer, buffer.count, buffer.number, peer, stream=stream)

    def split(self, color, key=0):
        """The communicator of the ranks with the same `color`, ordered by `key`; None for
        `NO_COLOR`."""
        handle = _HANDLE()
        _nccl("ncclCommSplit", self.handle, color, key, byref(handle), None)
        if not handle.value:
            return None
        child = Communicator(handle, 0, 0)
        child.wait_ready("ncclCommSplit")
        child.rank, child.size = child._integer("ncclCommUserRank"), child._integer("ncclCommCount")
        return child

    def abort(self):
        _nccl("ncclCommAbort", self.handle)

    def finalize(self):
        _nccl("ncclCommFinalize", self.handle, ready=lambda: self)

    def destroy(self):
        _nccl("ncclCommDestroy", self.handle)

    def _call(self, name, *arguments, stream):
        _nccl(name, *arguments, self.handle, _handle(stream))

    def _integer(self, name):
        value = c_int()
        _nccl(name, self.handle, byref(value))
        return value.value


def _handle(stream):
    return stream.handle if stream is not None else None


def _ready(name, handle):
    code = getattr(runtime, name)(handle)
    if code == NOT_READY:
        return False
    if code != 0:
        raise CudaError(name, code, runtime.cudaGetErrorString(code).decode())
    return True


def _exchange(name, rank, timeout):
    """Rank 0 makes a unique id and publishes it as a file; the others read it. Returns the path and
    the id.

    The file names its writer, so that the file of a job that died here earlier is not taken for
    this job's.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = os.path.join(os.environ["XPU_EXAMPLE_RENDEZVOUS"], f"{name}.{attempt}.id")
    unique_id = _UniqueId()
    if rank == 0:
        _nccl("ncclGetUniqueId", byref(unique_id))
        with open(f"{path}.{os.getpid()}", "wb") as file:
            file.write(bytes(unique_id) + _identity(os.getpid()).encode())
        os.replace(f"{path}.{os.getpid()}", path)
        return path, unique_id
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            with open(path, "rb") as file:
                data = file.read()
            writer = data[128:].decode()
            if writer and _identity(writer.split(".")[0]) == writer:
                ctypes.memmove(byref(unique_id), data, 128)
                return path, unique_id
        time.sleep(0.005)
    raise TimeoutError(f"no unique id in {path} after {timeout} s")


def _identity(pid):
    """`PID.START`, where START is the process's start time, so that a pid used again is told apart;
    empty for no process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return f"{pid}.{file.read().rpartition(')')[2].split()[19]}"
    except FileNotFoundError:
        return ""
