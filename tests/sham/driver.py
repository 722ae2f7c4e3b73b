"""The driver of the simulated CUDA device: loads it before torch, and is what torch.cuda calls.

The functions are those of `torch._C` in a torch that is built for CUDA; `torch.cuda` itself is unchanged.

    PIPEFIT_SHAM          the library that `build.py` has made
    PIPEFIT_SHAM_DEVICES  number of devices; default 4
    PIPEFIT_SHAM_BYTES    memory of each; default 8 GiB
    PIPEFIT_SHAM_SEED     of the order in which lanes' threads run
    PIPEFIT_SHAM_LOG      file for every new place where the host waits, and every finding, of all processes
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib.machinery
import itertools
import json
import math
import os
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libtorch_python.so")

CLOCKS = "stage/moments.py begin"
"""Where clocks are compared, at times that depend on the machine's speed; no list has these waits."""

waits: Counter[str] = Counter()
"""How often the host has waited for a device at each place: "file function: kind", after "thread of a lane: " there."""

_library: Any = None
_seen: set[str] = set()


# ---- what is written down --------------------------------------------------------------------------------------------


def place() -> str:
    """File and function of pipefit that the calling thread is in; "" outside of it.

    Functions that only stand for torch's have no place of their own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/src/pipefit/" in path and not name.startswith("<") and not path.endswith("stage/accelerator.py"):
            return f"{path.split('/src/pipefit/')[1]} {name}"
        frame = frame.f_back
    return ""


def _log(kind: str, text: str) -> None:
    """Writes a line that is new in this process; all processes may write into one file."""
    path = os.environ.get("PIPEFIT_SHAM_LOG")
    if path and (kind, text) not in _seen:
        _seen.add((kind, text))
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123  (no import that nobody needs)
            file.write(json.dumps([kind, text]) + "\n")


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Copies of the backend's own, which a GPU would not make: the host waits for nothing and learns nothing."""
    _library.sham_set_unseen(1)
    try:
        yield
    finally:
        _library.sham_set_unseen(0)


def begin_case() -> None:
    """Begins a test: every place is new again, and the threads' order that of the seed."""
    _seen.clear()
    waits.clear()
    _order.seed(int(os.environ.get("PIPEFIT_SHAM_SEED", "0")))


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note(kind: bytes) -> None:
    where = place()
    if where and where != CLOCKS:
        line = f"{where}: {kind.decode().removeprefix('aten::')}"
        if threading.current_thread().name.startswith("pipefit-"):
            waits[f"thread of a lane: {line}"] += 1
        else:
            waits[line] += 1
        _log("wait", line)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _found(text: bytes) -> None:
    _log("finding", f"{text.decode()} ({place() or 'outside of pipefit'})")


# ---- threads in a fixed order ----------------------------------------------------------------------------------------

Future = concurrent.futures.Future
Pool = concurrent.futures.ThreadPoolExecutor
_result, _submit, _shutdown = Future.result, Pool.submit, Pool.shutdown
_set_result, _set_exception = Future.set_result, Future.set_exception

_lanes: list[Pool] = []
_order = random.Random()
_numbers = itertools.cycle(range(1, 64))  # of the host's threads; 0: all others


class _Task:
    """A call that a lane's thread will make, with what its submitter had waited for."""

    def __init__(self, number: int, work: Any) -> None:
        self.number, self.work, self.clock, self.future = number, work, _clock(), Future()

    def run(self) -> None:
        _library.sham_set_host(self.number)
        _library.sham_host_joins(self.clock)
        # What the call holds goes on this thread, as in the pool of Python.
        work, self.work = self.work, None
        try:
            value = work()
            del work
        except BaseException as problem:
            self.future.set_exception(problem)
        else:
            self.future.set_result(value)


def _clock() -> Any:
    clock = (ctypes.c_uint64 * _library.sham_clock_size())()
    _library.sham_host_clock(clock)
    return clock


def _is_lane(pool: Pool) -> bool:
    return pool._thread_name_prefix.startswith("pipefit-") and pool._max_workers == 1


def submit(self: Pool, work: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Lets a lane's thread make the call now or when somebody waits for it, as the seed decides."""
    if not _is_lane(self):
        return _submit(self, work, *args, **kwargs)
    if self not in _lanes:
        _lanes.append(self)
        self._sham_tasks = deque()
        self._sham_busy = False
        self._sham_number = next(_numbers)
    task = _Task(self._sham_number, lambda: work(*args, **kwargs))
    self._sham_tasks.append(task)
    if _order.random() < 0.5:
        while self._sham_tasks and not self._sham_busy:
            _run_next(self)
    return task.future


def _run_next(pool: Pool) -> None:
    """Runs a lane's next call on its thread, while this thread waits."""
    task = pool._sham_tasks.popleft()
    pool._sham_busy = True
    try:
        _result(_submit(pool, task.run))
    finally:
        pool._sham_busy = False
        pool._sham_ended = task.future._sham_clock


def result(self: Any, timeout: float | None = None) -> Any:
    """Waits for a call; lanes whose calls have waited for this run now."""
    while not self.done():
        ready = [pool for pool in _lanes if pool._sham_tasks and not pool._sham_busy]
        if not ready:
            break
        _run_next(_order.choice(ready))
    value = None
    try:
        value = _result(self, timeout)
    finally:
        clock = getattr(self, "_sham_clock", None)
        if clock is not None:
            _library.sham_host_joins(clock)
    return value


def set_result(self: Any, value: Any) -> None:
    """What the thread has waited for, the one that gets the result has waited for too."""
    self._sham_clock = _clock()
    _set_result(self, value)


def set_exception(self: Any, problem: BaseException) -> None:
    """As `set_result`."""
    self._sham_clock = _clock()
    _set_exception(self, problem)


def shutdown(self: Pool, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Runs what the lane has left."""
    if self in _lanes:
        while self._sham_tasks and not self._sham_busy:
            _run_next(self)
        _lanes.remove(self)
    _shutdown(self, wait=wait, cancel_futures=cancel_futures)
    if wait and hasattr(self, "_sham_ended"):
        _library.sham_host_joins(self._sham_ended)


def _order_threads() -> None:
    begin_case()
    Future.result, Future.set_result, Future.set_exception = result, set_result, set_exception
    Pool.submit, Pool.shutdown = submit, shutdown


# ---- torch's own names -----------------------------------------------------------------------------------------------


class _Error(IntEnum):
    success = 0


class _Runtime:
    """The functions of the CUDA runtime that Python may call."""

    cudaError = _Error  # noqa: N815

    def cudaHostRegister(self, data: int, num_bytes: int, flags: int) -> _Error:  # noqa: N802
        _library.sham_pin(data, num_bytes)
        return _Error.success

    def cudaHostUnregister(self, data: int) -> _Error:  # noqa: N802
        _library.sham_unpin(data)
        return _Error.success

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        capacity = _library.sham_capacity()
        return capacity - _library.sham_bytes(device), capacity

    def cudaGetErrorString(self, error: _Error) -> str:  # noqa: N802
        return error.name


class _Properties(NamedTuple):
    """What torch may ask about a device."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1


class _Process:
    """Whether this process has asked for a GPU, which its forks cannot use then."""

    has_used = is_bad_fork = False

    def use(self) -> None:
        self.has_used = True

    def fork(self) -> None:
        self.is_bad_fork = self.has_used


def _resized(of_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, also for the device."""

    def resize_(storage: Any, num_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return of_cpu(storage, num_bytes)
        _library.sham_resize(storage._cdata, storage.device.index, num_bytes)
        return storage

    return resize_


def _names(native: Any) -> dict[str, Any]:
    """The functions of `torch._C` for CUDA."""
    process, modes = _Process(), [0]
    os.register_at_fork(after_in_child=process.fork)

    class StreamBase(native.Stream):
        def __new__(cls, priority: int = 0, **known: int) -> Any:
            if "stream_id" in known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device=f"cuda:{_library.sham_device()}", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class EventBase(native.Event):
        def __new__(cls, enable_timing: bool, blocking: bool, interprocess: bool, external: bool) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end: Any) -> float:
            elapsed_ms: float = _library.sham_elapsed_ms(self.event_id, end.event_id)
            if math.isnan(elapsed_ms):
                raise RuntimeError("CUDA error: device not ready")
            return elapsed_ms

    def device_count() -> int:
        process.use()
        return 0 if process.is_bad_fork else _library.sham_device_count()

    def init() -> None:
        import torch

        process.use()
        devices = range(_library.sham_device_count())
        torch.cuda._get_device_properties = properties  # type: ignore[attr-defined]
        torch.UntypedStorage.resize_ = _resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
        torch.cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in devices)

    def exchange_device(device: int) -> int:
        before = _library.sham_device()
        if device >= 0:
            set_device(device)
        return before

    def set_device(device: int) -> None:
        if device >= _library.sham_device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        _library.sham_set_device(device)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        set_device(device_index)
        _library.sham_set_stream(device_index, stream_id)

    def memory_stats(device: int) -> dict[str, Any]:
        figures = {"current": _library.sham_bytes(device), "peak": _library.sham_peak(device)}
        return {f"{kind}_bytes": {"all": figures} for kind in ("allocated", "reserved", "active")}

    def properties(device: int) -> _Properties:
        return _Properties(f"simulated GPU {device}", _library.sham_capacity())

    def set_mode(mode: int) -> None:
        modes[0] = mode
        _library.sham_set_sync_debug_mode(mode)

    return {
        "_has_cuda": True,
        "_cudart": _Runtime(),
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: process.is_bad_fork,
        "_cuda_getDeviceCount": device_count,
        "_CudaDeviceProperties": _Properties,
        "_cuda_getDevice": lambda: _library.sham_device(),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": lambda device: exchange_device(device),
        "_cuda_getCurrentStream": lambda device: (_library.sham_stream(device), device, 1),
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: native._accelerator_synchronizeDevice(_library.sham_device()),
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: _library.sham_forget_peak(device),
        "_cuda_emptyCache": lambda: None,
        "_cuda_clearCublasWorkspaces": lambda: _library.sham_clear_workspaces(),
        "_cuda_set_sync_debug_mode": set_mode,
        "_cuda_get_sync_debug_mode": lambda: modes[0],
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda device: _library.sham_stream(device),
        "_CUDAGraph": type("_CUDAGraph", (), {}),
        "_graph_pool_handle": type("_graph_pool_handle", (), {}),
    }


# ---- loading ---------------------------------------------------------------------------------------------------------


def _load() -> None:
    """Loads the device after torch's libraries and before Python's part of torch, which asks for devices once."""
    global _library
    found = importlib.machinery.PathFinder.find_spec("torch")
    assert found is not None and found.origin is not None
    for name in LIBRARIES:
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(os.environ["PIPEFIT_SHAM"])
    _library.sham_stream.restype = ctypes.c_int64
    _library.sham_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.sham_begin.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    _library.sham_resize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    _library.sham_pin.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    _library.sham_unpin.argtypes = [ctypes.c_void_p]
    _library.sham_elapsed_ms.argtypes, _library.sham_elapsed_ms.restype = [ctypes.c_void_p] * 2, ctypes.c_double
    for name in ("bytes", "peak", "capacity"):
        getattr(_library, f"sham_{name}").restype = ctypes.c_uint64
    devices = int(os.environ.get("PIPEFIT_SHAM_DEVICES", "4"))
    num_bytes = int(os.environ.get("PIPEFIT_SHAM_BYTES", str(8 << 30)))
    _library.sham_begin(devices, num_bytes, _note, _found)
    _order_threads()


def _after(spec: Any, then: Callable[[Any], None]) -> None:
    """Calls a function with a module once it has been executed."""
    execute = spec.loader.exec_module

    def execute_and_call(module: Any) -> None:
        execute(module)
        then(module)

    spec.loader.exec_module = execute_and_call


def _register_backend(torch: Any) -> None:
    from tests.sham import backend

    backend.register()


class _Finder:
    """Adds to torch what a build for CUDA has, when it is imported for the first time."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("torch", "torch._C"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if name == "torch":
            _load()
            _after(spec, _register_backend)
        else:
            _after(spec, lambda module: vars(module).update(_names(module)))
        return spec


def install() -> None:
    """Lets the next import of torch find the simulated devices."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
