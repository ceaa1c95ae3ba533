"""Copies from memory that is not pinned: their submitter does not wait, nothing overtakes them, all bytes arrive."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.card import BUFFER_BYTES, WORTH_BYTES, CardClock, RelayedStream
from engine.devices.device import CopyLog, CopyRecord, Direction
from tests.fake_cards import FakeCards
from tests.refusals import refused

_BIG = 5 * BUFFER_BYTES + 4097
_PLACE = torch.device("cpu")


class Gate:
    """Holds up whoever wants a pinned buffer, as a slow file behind a mapping would."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: set[int] = set()
        self.refuses = refuses

    def __call__(self, nbytes: int) -> torch.Tensor | None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.open.wait(20)
        return None if self.refuses else torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def log() -> CopyLog:
    return CopyLog()


def a_stream(gate: Gate, log: CopyLog, pinned: Any = None) -> RelayedStream:
    cards = FakeCards()
    clock = CardClock(cards, _PLACE)  # type: ignore[arg-type]
    made = RelayedStream("fake:0 h2d", cards.Stream(_PLACE, priority=0), cards, clock, log)
    made._is_pinned, made._pinned = lambda tensor: tensor is pinned, gate  # type: ignore[method-assign]
    return made


@pytest.fixture
def stream(gate: Gate, log: CopyLog) -> Iterator[RelayedStream]:
    made = a_stream(gate, log)
    yield made
    gate.open.set()
    made.close()


def some(count: int = _BIG) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, dtype=torch.uint8), torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("count", [WORTH_BYTES, BUFFER_BYTES, BUFFER_BYTES + 1, _BIG])
def test_who_submits_does_not_wait_and_the_bytes_arrive(gate: Gate, log: CopyLog, count: int, refuses: bool) -> None:
    gate.refuses = refuses
    seen: list[CopyRecord] = []
    log.listen(seen.append)
    stream = a_stream(gate, log)
    there, sent = some(count)
    event = stream.copy(there, sent, direction=Direction.H2D)
    assert gate.entered.wait(20)
    assert not event.done()
    assert not event.wait(0.01)
    gate.open.set()
    assert event.wait()
    assert torch.equal(there, sent)
    assert threading.get_ident() not in gate.threads
    assert [(record.direction, record.nbytes) for record in seen] == [("h2d", count)]
    assert event.started_s <= event.ended_s
    stream.close()


def test_nothing_overtakes_what_is_on_its_way(gate: Gate, stream: RelayedStream) -> None:
    order: list[int] = []
    first, second = some(), some(WORTH_BYTES)
    events = [stream.copy(*first, direction=Direction.H2D)]
    events.append(stream.submit(lambda: order.append(int(torch.equal(*first)))))
    events.append(stream.copy(*second, direction=Direction.H2D))
    events.append(stream.submit(lambda: order.append(2 * int(torch.equal(*second)))))
    events.append(stream.record())
    assert not any(event.done() for event in events)
    gate.open.set()
    stream.synchronize()
    assert order == [1, 2]
    assert all(event.done() and event.failure is None for event in events)


@pytest.mark.parametrize("way", ["small", "pinned", "strided", "back"])
def test_other_copies_go_the_direct_way(gate: Gate, log: CopyLog, way: str) -> None:
    there, sent = some()
    if way == "small":
        there, sent = there[: WORTH_BYTES - 1], sent[: WORTH_BYTES - 1]
    if way == "strided":
        there, sent = there[::2], sent[::2]
    stream = a_stream(gate, log, pinned=sent if way == "pinned" else None)
    event = stream.copy(there, sent, direction=Direction.D2H if way == "back" else Direction.H2D)
    assert event.done()
    assert torch.equal(there, sent)
    assert not gate.entered.is_set()
    stream.close()


def test_a_failure_stops_what_is_behind_it_until_recovery(gate: Gate, stream: RelayedStream) -> None:
    copied = stream.copy(*some(), direction=Direction.H2D)

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    failed, later = stream.submit(fail), some()
    behind = stream.copy(*later, direction=Direction.H2D)
    gate.open.set()
    assert copied.wait()
    for event in (failed, behind):
        with pytest.raises(EngineError, match="on purpose"):
            event.wait()
    assert not later[0].any()
    stream.recover()
    assert stream.copy(*later, direction=Direction.H2D).wait()
    assert torch.equal(*later)


def test_closing_fails_what_has_not_begun(gate: Gate, log: CopyLog) -> None:
    stream = a_stream(gate, log)
    events = [stream.copy(*some(), direction=Direction.H2D) for _ in range(3)]
    assert gate.entered.wait(20)
    closing = threading.Thread(target=stream.close)
    closing.start()
    time.sleep(0.02)
    gate.open.set()
    closing.join(20)
    assert not closing.is_alive()
    for event in events:
        with refused(ErrorCode.DEVICE_UNAVAILABLE):
            event.wait(20)
    with pytest.raises(EngineError):
        stream.copy(*some(), direction=Direction.H2D)
    stream.close()


def test_many_threads_each_get_their_own_bytes(gate: Gate, stream: RelayedStream) -> None:
    gate.open.set()
    wrong: list[int] = []

    def copies(seed: int) -> None:
        for turn in range(20):
            there, sent = some((WORTH_BYTES, BUFFER_BYTES + 3, 100)[(seed + turn) % 3])
            stream.copy(there, sent, direction=Direction.H2D).wait()
            wrong.extend([seed] if not torch.equal(there, sent) else [])

    threads = [threading.Thread(target=copies, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
