"""An emulated card with a clock of its own, for measurements: cards and links of any speed, on any machine.

`engine.devices.emulated` computes on threads of the processor that it is compared with: neither is as fast as it would
be, and no card is faster than the processor.  Here nothing runs beside the engine.  What the card would do is done when
it is issued, while the clock that times the engine stands still, and is charged on a timeline: a copy takes the link's
latency and its bytes at the link's rate, a kernel its launch and the longer of its bytes and its arithmetic at the
card's rates by its data sheet.  The host's own time is real, but for what the processor stands in for another one.

Results come out as on the other emulated card; its races do not.  Times are those of data sheets: what kernels reach in
truth is for a card to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.common import clock as clocks
from engine.common.clock import OwnClock
from engine.devices.device import CopyLog, Device, Direction, Event, Stream
from engine.devices.failures import as_engine_error
from engine.devices.host_memory import PageableMemory, allocate_host
from engine.devices.memory_budget import MemoryBudget
from engine.devices.timeline import TimedEvent, Timeline, Wire
from engine.hardware.profiles import DeviceProfile


class Meter:
    """What work costs on a card whose time is modelled, and on the processor that belongs to it.

    Attributes:
        clock: that it is charged to.
    """

    def __init__(self, timeline: Timeline, profile: DeviceProfile) -> None:
        self.clock, self._timeline, self._profile = timeline.clock, timeline, profile
        self._seconds = 0.0
        self._compute: ClockedStream | None = None
        self._beside: ClockedStream | None = None
        self._inside = False

    def compute_on(self, stream: ClockedStream, beside: ClockedStream) -> None:
        """The stream that the caller's own operators are queued on, and that of what the processor does meanwhile."""
        self._compute, self._beside = stream, beside

    @property
    def launch_s(self) -> float:
        """From one kernel to the next."""
        return self._profile.launch_us / 1e6

    def kernel(self, nbytes: float, flops: float, launches: int = 1) -> None:
        """The work under way runs a kernel on the card.

        Args:
            nbytes: that it reads and writes.
            flops: of its arithmetic.
        """
        self._seconds += self.kernel_s(nbytes, flops, launches)

    def kernel_s(self, nbytes: float, flops: float, launches: int = 1) -> float:
        """Seconds of a kernel."""
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
        """Within, the caller's operators are the card's; `kernel` says what they cost, and at the end the host waits.

        Raises:
            EngineError: the card was closed.
        """
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


class _Called:
    """While a stream is called: the host's clock stands still, but for what the call takes."""

    __slots__ = ("_call_s", "_timeline")

    def __init__(self, timeline: Timeline, call_s: float) -> None:
        self._timeline, self._call_s = timeline, call_s

    def __enter__(self) -> None:
        clock = self._timeline.clock
        clock.stop(1)
        self._timeline.lock.acquire()
        clock.advance(self._call_s)

    def __exit__(self, *_: object) -> None:
        self._timeline.lock.release()
        self._timeline.clock.stop(-1)


class ClockedStream(Stream):
    """See `engine.devices.device.Stream`.  Work is done when it is submitted, and ends when the timeline says.

    Args:
        call_s: of the host's time for each call.
        carries: the wire for a direction, and whether copies of this stream are urgent there.
    """

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        meter: Meter,
        copy_log: CopyLog,
        carries: Callable[[torch.Tensor, torch.Tensor, Direction | None], tuple[Direction, Wire | None]],
        *,
        is_urgent: bool,
        call_s: float,
    ) -> None:
        super().__init__(name, copy_log)
        self._timeline, self._meter = timeline, meter
        self._carries, self._is_urgent, self._call_s = carries, is_urgent, call_s
        self._queue = timeline.new_queue()

    def charge(self, seconds: float) -> TimedEvent:
        """Work of so many seconds whose results are there already."""
        self._require_open()
        with self._called():
            return self._timeline.issue(self._queue, seconds)

    def wait(self, event: Event) -> None:
        self._require_open()
        with self._called():
            if isinstance(event, TimedEvent) and event.issued_failure is not None:
                self._failure = self._failure or event.issued_failure
            else:
                self._timeline.wait(self._queue, event)

    def record(self) -> Event:
        return self._done_now(lambda: None, 0.0)

    def recover(self) -> None:
        self._require_open()
        with self._called():
            event = self._timeline.issue(self._queue)
        event.wait()
        self._failure = None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._timeline.close(self._queue)

    def _run(self, work: Callable[[], object]) -> Event:
        return self._done_now(work, self._meter.launch_s)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:
        taken, wire = self._carries(destination, source, direction)
        nbytes, name, log = source.nbytes, self.name, self._copy_log

        def move() -> None:
            with torch.inference_mode():
                destination.copy_(source)
            if wire is None:
                self._meter.kernel(2 * nbytes, 0)

        seconds = 0.0 if wire is None else wire.needed_s(nbytes)
        return self._done_now(
            move, seconds, wire, lambda start_s, end_s: log.ended(name, taken, nbytes, start_s, end_s)
        )

    def _done_now(
        self,
        work: Callable[[], object],
        at_least_s: float,
        wire: Wire | None = None,
        on_end: Callable[[float, float], None] | None = None,
    ) -> TimedEvent:
        with self._called():
            self._require_open()
            if self._failure is None:
                before_s = self._meter.take()
                try:
                    work()
                except Exception as error:
                    self._failure = as_engine_error(error, self.name)
                seconds = max(at_least_s, self._meter.take())
                self._meter.put_back(before_s)
            if self._failure is not None:
                return TimedEvent.failed(self._timeline, self._failure)
            return self._timeline.issue(self._queue, seconds, wire=wire, is_urgent=self._is_urgent, on_end=on_end)

    def _called(self) -> _Called:
        return _Called(self._timeline, self._call_s)


@dataclass
class _Shared:
    """The timeline of all cards that are open at once, and how many they are."""

    timeline: Timeline
    cards: int = 0


_turn = threading.Lock()
_shared: _Shared | None = None


def _join(*, is_fixed: bool) -> Timeline:
    global _shared
    with _turn:
        if _shared is None:
            _shared = _Shared(Timeline(OwnClock(is_fixed=is_fixed)))
            clocks.use(_shared.timeline.clock)
        _shared.cards += 1
        return _shared.timeline


def _leave() -> None:
    global _shared
    with _turn:
        assert _shared is not None
        _shared.cards -= 1
        if not _shared.cards:
            _shared = None
            clocks.use(None)


def open_clocked(
    profile: DeviceProfile, index: int = 0, vram_bytes: int | None = None, *, is_fixed: bool = False
) -> Device:
    """Opens an emulated card with a clock of its own, which the engine reads until it is closed.

    Args:
        index: distinguishes devices of one profile.
        vram_bytes: a budget below the profile's.
        is_fixed: the host's time is modelled, too: each call and each expert by the profile, and nothing else.
    """
    name = f"emulated:{profile.name}#{index}"
    total = profile.vram_bytes if vram_bytes is None else min(vram_bytes, profile.vram_bytes)
    memory = MemoryBudget(name, total, allocate_host)
    log = CopyLog()
    timeline = _join(is_fixed=is_fixed)
    meter = Meter(timeline, profile)
    latency_s = profile.link_latency_us / 1e6
    wires = {
        Direction.H2D: Wire(profile.link_h2d_gbps * 1e9, latency_s),
        Direction.D2H: Wire(profile.link_d2h_gbps * 1e9, latency_s),
        Direction.P2P: Wire(*profile.from_peers),
    }

    def stream(
        role: str, usual: Direction | None, *, is_urgent: bool = False, call_s: float = profile.call_us / 1e6
    ) -> ClockedStream:
        def carries(
            destination: torch.Tensor, source: torch.Tensor, asked: Direction | None
        ) -> tuple[Direction, Wire | None]:
            direction = asked or usual or direction_between(memory, destination, source, crosses=is_urgent)
            return direction, wires.get(direction)

        return ClockedStream(f"{name} {role}", timeline, meter, log, carries, is_urgent=is_urgent, call_s=call_s)

    streams = (
        stream("compute", None),
        stream("h2d", Direction.H2D),
        stream("d2h", Direction.D2H),
        stream("small copies", None, is_urgent=True),
        stream("processor", None, call_s=0.0),
    )
    meter.compute_on(streams[0], streams[4])
    is_open = True

    def close() -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            for each in streams:
                each.close()
            _leave()

    return Device(
        name=name,
        torch_device=torch.device("cpu"),
        memory=memory,
        host_memory=PageableMemory(),
        streams=streams[:4],
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        meter=meter,
    )


def direction_between(
    memory: MemoryBudget, destination: torch.Tensor, source: torch.Tensor, *, crosses: bool
) -> Direction:
    """The direction of a copy by who owns its tensors.

    Args:
        memory: the device's own.
        crosses: whether copies between tensors of torch, whose owners are unknown, are taken to cross the link.
    """
    into_ours, out_of_ours = memory.holds(destination), memory.holds(source)
    if into_ours != out_of_ours:
        return Direction.H2D if into_ours else Direction.D2H
    return Direction.H2D if crosses and not into_ours else Direction.D2D
