"""An emulated graphics card: memory with the card's budget, streams, links, and a clock of its own.

The processor that the card is compared with computes and stores everything; nothing runs beside the engine.  What the
card does is done while the clock that times the engine stands still, and is charged on a timeline: a copy takes the
link's latency and its bytes at the link's rate.  The host's own time is real, but for what the processor stands in for
another one.  There are two kinds of cards, by their profiles:

- Of one with a data sheet, a kernel takes its launch and the longer of its bytes and its arithmetic at the card's
  rates.  The caller's own operators are the card's, in order with submitted work: everything is done when it is issued.
- Any other takes as long as the processor, or as many times as long as its profile says.  What is submitted is put off
  until somebody asks for an event that needs it, and bytes move at the end of their copy: reading before the event is
  done gives old bytes, as on a card.  The timeline can also be told to hurry, for tests that draw the order.

A CUDA graph is emulated by recording torch operators with their tensors, and replaying them. Results go to the same
memory as in the capture, as on a card, so code that forgets that numbers and addresses are baked into a graph fails
here too. Reading a number back during a capture is an error, as on a card.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.common import clock as clocks
from engine.common.clock import OwnClock
from engine.common.errors import EngineError
from engine.devices.device import CaptureError, CopyLog, Device, Direction, Event, Graph, Stream
from engine.devices.failures import as_engine_error
from engine.devices.host_memory import HostMemory, allocate_host
from engine.devices.memory_budget import MemoryBudget, MemoryWatch, Room
from engine.devices.timeline import TimedEvent, Timeline, Wire
from engine.hardware.profiles import DeviceProfile


class Meter:
    """What work costs on a card whose time is modelled, and on the processor that belongs to it."""

    def __init__(self, timeline: Timeline, profile: DeviceProfile) -> None:
        self.clock, self._timeline, self._profile = timeline.clock, timeline, profile
        self._seconds = 0.0
        self._compute: EmulatedStream | None = None
        self._beside: EmulatedStream | None = None
        self._inside = False

    def compute_on(self, stream: EmulatedStream, beside: EmulatedStream) -> None:
        """For the caller's own operators, and for what the processor does meanwhile."""
        self._compute, self._beside = stream, beside

    @property
    def launch_s(self) -> float:
        """From one kernel to the next."""
        return self._profile.launch_us / 1e6

    def kernel(self, nbytes: float, flops: float, launches: int = 1) -> None:
        """The work under way runs a kernel on the card, which reads and writes so many bytes."""
        self._seconds += self.kernel_s(nbytes, flops, launches)

    def kernel_s(self, nbytes: float, flops: float, launches: int = 1) -> float:
        profile = self._profile
        busy_s = max(nbytes / (profile.card_gbps * 1e9), flops / (profile.card_tflops * 1e12))
        return launches * self.launch_s + busy_s

    def link_s(self, nbytes: float) -> float:
        """Seconds of a small copy, either way."""
        profile = self._profile
        return profile.link_latency_us / 1e6 + nbytes / (min(profile.link_h2d_gbps, profile.link_d2h_gbps) * 1e9)

    def processor_s(self, nbytes: float, flops: float, took_s: float) -> float:
        """Seconds of work on the processor that took so many on this one."""
        profile = self._profile
        if not self.clock.is_fixed:
            return took_s * profile.cpu_slowdown
        return profile.call_us / 1e6 + max(nbytes / (profile.cpu_gbps * 1e9), flops / (profile.cpu_tflops * 1e12))

    def beside(self, after: Event, seconds: float) -> Event:
        """When the processor has worked so long on a thread of its own, from `after` on."""
        assert self._beside is not None
        self._beside.wait(after)
        return self._beside.charge(seconds)

    def charge(self, seconds: float) -> None:
        """The card has worked so long, and the host waits for it."""
        assert self._compute is not None
        self._compute.charge(seconds).wait()

    def take(self) -> float:
        """Seconds of the kernels since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def put_back(self, seconds: float) -> None:
        """Of kernels that were taken too early."""
        self._seconds += seconds

    @contextmanager
    def on_card(self) -> Iterator[None]:
        """Within, the caller's operators are the card's; `kernel` says what they cost; the host waits at the end."""
        assert self._compute is not None
        self._inside = True
        try:
            with self.clock.stopped():
                yield
        finally:
            self._inside = False
        self._compute.charge(self.take()).wait()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within, in `on_card`, the host goes on beside the card."""
        assert self._compute is not None
        if not self._inside:
            yield
            return
        self._compute.charge(self.take())
        self._inside = False
        try:
            with self.clock.going_on():
                yield
        finally:
            self._inside = True

    @contextmanager
    def on_processor(self, nbytes: float, flops: float) -> Iterator[None]:
        """Within, the processor computes: its time is that of the profile's."""
        profile = self._profile
        if self.clock.is_fixed:
            yield
            self.clock.advance(self.processor_s(nbytes, flops, 0.0))
            return
        with self.clock.paced(profile.cpu_slowdown):
            yield


class EmulatedStream(Stream):
    """See `engine.devices.device.Stream`.  Work ends when the timeline says.

    Args:
        call_s: of the host's time for each call.
        slowdown: factor on the duration of work that is put off; None: all is done when it is issued.
        memory: of the device, which says which way a copy goes; wires: by the directions that cross the link.
        usual: direction of this stream's copies, if there is one; is_urgent: whether they overtake others.
    """

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        meter: Meter,
        copy_log: CopyLog,
        memory: MemoryBudget,
        wires: Mapping[Direction, Wire],
        *,
        usual: Direction | None,
        is_urgent: bool,
        call_s: float,
        slowdown: float | None,
    ) -> None:
        super().__init__(name, copy_log)
        self._timeline, self._meter = timeline, meter
        self._memory, self._wires, self._usual = memory, wires, usual
        self._is_urgent, self._call_s = is_urgent, call_s
        self._slowdown = slowdown
        self._queue = timeline.new_queue(name)

    @property
    def failure(self) -> EngineError | None:
        return self._queue.failure

    def charge(self, seconds: float) -> TimedEvent:
        """Work of so many seconds whose results are there already."""
        self._require_open()
        with self._called():
            return self._timeline.issue(self._queue, seconds)

    def wait(self, event: Event) -> None:
        self._require_open()
        with self._called():
            try:
                if self._slowdown is None and event.failure is not None:
                    raise event.failure
                self._timeline.wait(self._queue, event)
            except EngineError as error:
                self._queue.failure = self._queue.failure or error

    def record(self) -> Event:
        return self._issue(lambda: None, 0.0)

    def recover(self) -> None:
        self._require_open()
        with self._called():
            event = self._timeline.issue(self._queue)
        event.wait()
        self._queue.failure = None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._timeline.close(self._queue)

    def _run(self, work: Callable[[], object]) -> Event:
        return self._issue(work, self._meter.launch_s)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:
        taken = direction or self._usual or self._direction_between(destination, source)
        wire, nbytes, name, log = self._wires.get(taken), source.nbytes, self.name, self._copy_log

        def move() -> None:
            with torch.inference_mode():
                destination.copy_(source)
            if wire is None and self._slowdown is None:
                self._meter.kernel(2 * nbytes, 0)

        seconds = 0.0 if wire is None else wire.needed_s(nbytes)
        return self._issue(move, seconds, wire, lambda start_s, end_s: log.ended(name, taken, nbytes, start_s, end_s))

    def _issue(
        self,
        work: Callable[[], object],
        at_least_s: float,
        wire: Wire | None = None,
        on_end: Callable[[float, float], None] | None = None,
    ) -> TimedEvent:
        if self._slowdown is not None:
            with self._called():
                self._require_open()
                event = self._timeline.issue(
                    self._queue,
                    0.0 if wire is None else at_least_s,
                    wire=wire,
                    is_urgent=self._is_urgent,
                    work=self._put_off(work, self._slowdown),
                    on_end=on_end,
                )
            if self._timeline.hurries():
                self._timeline.play_until(event)
            return event
        with self._called():
            self._require_open()
            if self._queue.failure is None:
                before_s = self._meter.take()
                try:
                    work()
                except Exception as error:
                    self._queue.failure = as_engine_error(error, self.name)
                seconds = max(at_least_s, self._meter.take())
                self._meter.put_back(before_s)
            if self._queue.failure is not None:
                return TimedEvent.failed(self._timeline, self._queue, self._queue.failure)
            return self._timeline.issue(self._queue, seconds, wire=wire, is_urgent=self._is_urgent, on_end=on_end)

    def _put_off(self, work: Callable[[], object], slowdown: float) -> Callable[[], float]:
        """Does the work with the caller's gradient and inference mode, and says what it took."""
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> float:
            with self._timeline.clock.stopped(), torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                begun_s = perf_counter()
                work()
                return (perf_counter() - begun_s) * slowdown

        return run

    def _direction_between(self, destination: torch.Tensor, source: torch.Tensor) -> Direction:
        """By who owns the tensors; small copies between tensors of torch, whose owners are unknown, cross the link."""
        into_ours, out_of_ours = self._memory.holds(destination), self._memory.holds(source)
        if into_ours != out_of_ours:
            return Direction.H2D if into_ours else Direction.D2H
        return Direction.H2D if self._is_urgent and not into_ours else Direction.D2D

    @contextmanager
    def _called(self) -> Iterator[None]:
        """While the stream is called: the host's clock stands still, but for what the call takes."""
        with self._timeline.clock.stopped(), self._timeline.lock:
            self._timeline.clock.advance(self._call_s)
            yield


_turn = threading.Lock()
_joined: list[Timeline] = []
"""The timeline of all cards that are open at once, as often as they are."""


def _join(*, is_fixed: bool) -> Timeline:
    with _turn:
        timeline = _joined[0] if _joined else Timeline(OwnClock(is_fixed=is_fixed))
        if not _joined:
            clocks.use(timeline.clock)
        _joined.append(timeline)
        return timeline


def _leave() -> None:
    with _turn:
        _joined.pop()
        if not _joined:
            clocks.use(None)


OTHERS: dict[str, int] = {}
"""Bytes that other programs hold of emulated devices, by their names: as a second program would take them."""


def open_emulated(
    profile: DeviceProfile, index: int = 0, vram_bytes: int | None = None, *, is_fixed: bool = False
) -> Device:
    """Opens an emulated card, whose clock the engine reads until it is closed.

    Args:
        index: distinguishes devices of one profile.
        vram_bytes: a budget below the profile's.
        is_fixed: the host's time beside a card with a data sheet is modelled, too: each call and each expert by the
            profile, and nothing else.
    """
    name = f"emulated:{profile.name}#{index}"
    total = profile.vram_bytes if vram_bytes is None else min(vram_bytes, profile.vram_bytes)
    memory = MemoryBudget(name, total, allocate_host)
    log = CopyLog()
    timeline = _join(is_fixed=is_fixed and profile.has_clock)
    meter = Meter(timeline, profile)
    latency_s = profile.link_latency_us / 1e6
    wires = {
        Direction.H2D: Wire(profile.link_h2d_gbps * 1e9, latency_s),
        Direction.D2H: Wire(profile.link_d2h_gbps * 1e9, latency_s),
        Direction.P2P: Wire(*profile.from_peers),
    }

    def room() -> Room:
        # A system that moves memory of its programs to RAM never says that less than nothing is free.
        free = profile.vram_bytes - memory.use().used - OTHERS.get(name, 0)
        return Room(max(0, free), max(0, -free))

    def stream(
        role: str, usual: Direction | None = None, *, is_urgent: bool = False, calls: bool = True, slowdown: float = 1.0
    ) -> EmulatedStream:
        return EmulatedStream(
            f"{name} {role}",
            timeline,
            meter,
            log,
            memory,
            wires,
            usual=usual,
            is_urgent=is_urgent,
            call_s=profile.call_us / 1e6 if calls and profile.has_clock else 0.0,
            slowdown=None if profile.has_clock else slowdown,
        )

    streams = (
        stream("compute", slowdown=profile.compute_slowdown),
        stream("h2d", Direction.H2D),
        stream("d2h", Direction.D2H),
        stream("small copies", is_urgent=True),
        stream("processor", calls=False),
    )
    meter.compute_on(streams[0], streams[4])
    device = Device(
        name=name,
        torch_device=torch.device("cpu"),
        memory=memory,
        host_memory=HostMemory(),
        streams=streams[:4],
        copy_log=log,
        compute_follows_caller=profile.has_clock,
        new_capture=None if profile.has_clock else RecordedCapture,
        meter=meter if profile.has_clock else None,
        watch=None if profile.has_clock else MemoryWatch(memory, room, 0),
        on_close=lambda: closed(),
    )
    # In case it is never closed: its clock would stay in use.
    closed = weakref.finalize(device, _close, streams)
    return device


def _close(streams: tuple[EmulatedStream, ...]) -> None:
    for stream in streams:
        stream.close()
    _leave()


_READS_BACK = frozenset(
    {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive"}
)
"""Operators that would make the host wait for a result or its shape."""
_READS_BACK_IN_PYTHON = frozenset({"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__"})

_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class RecordedGraph:
    """See `engine.devices.device.Graph`."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    def replay(self) -> None:
        for operator, args, kwargs, outs in self._steps:
            for old, new in zip(outs, _tensors(operator(*args, **kwargs)), strict=True):
                # Views of the memory need no replay.
                if _address(new) != _address(old):
                    old.copy_(new)


class RecordedCapture:
    """See `engine.devices.device.Capture`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._graphs: list[RecordedGraph] = []
        self._recorder: _Recorder | None = None
        self._guard: _Guard | None = None

    def begin(self) -> None:
        self._recorder, self._guard = _Recorder(), _Guard()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._guard.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Graph:
        """See `Capture.end`.  The work has already run while it was recorded."""
        recorder = self._recorder
        assert recorder is not None
        self.abandon()
        graph = RecordedGraph(recorder.steps)
        self._graphs.append(graph)
        self.nbytes += recorder.nbytes
        return graph

    def abandon(self) -> None:
        recorder, guard = self._recorder, self._guard
        self._recorder = self._guard = None
        if recorder is not None and guard is not None:
            guard.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.abandon()
        for graph in self._graphs:
            graph._steps.clear()
        self._graphs, self.nbytes = [], 0


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and records them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.nbytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_BACK:
            raise CaptureError(f"{func.overloadpacket.__name__} reads a number back")
        result = func(*args, **kwargs)
        outs = _tensors(result)
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for out in outs:
            address = _address(out)
            if address not in given and address not in self._known:
                self._known.add(address)
                self.nbytes += out.untyped_storage().nbytes()
        self.steps.append((func, args, kwargs, outs))
        return result


class _Guard(TorchFunctionMode):
    """Catches calls that never reach the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS_BACK_IN_PYTHON:
            raise CaptureError(f"Tensor.{func.__name__} reads a number back")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
