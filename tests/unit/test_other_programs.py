"""What other programs take of the processor: all that is busy, less what is ours."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.hardware.probe import BusyLately, OtherPrograms


class Machine:
    """Two CPUs whose counters the test moves on."""

    def __init__(self) -> None:
        self.user = [0.0, 0.0]
        self.idle = [0.0, 0.0]
        self.waiting = [0.0, 0.0]
        self.ours: dict[int, float] = {7: 0.0}

    def cpu_times(self) -> list[Any]:
        return [_times(*each) for each in zip(self.user, self.idle, self.waiting, strict=True)]

    def watched(self, usable: Iterable[int] | None = None) -> OtherPrograms:
        return OtherPrograms(
            lambda: tuple(self.ours), cpu_times=self.cpu_times, process_s=self.ours.get, usable=lambda: usable
        )

    def spend(self, user: list[float], idle: list[float], ours: float, waiting: float = 0.0) -> None:
        self.user = [a + b for a, b in zip(self.user, user, strict=True)]
        self.idle = [a + b for a, b in zip(self.idle, idle, strict=True)]
        self.waiting[0] += waiting
        self.ours[7] += ours


class _times(tuple[float, ...]):  # noqa: N801  # as psutil's: a tuple with names
    def __new__(cls, user: float, idle: float, iowait: float) -> "_times":
        made = super().__new__(cls, (user, idle, iowait))
        vars(made).update(user=user, idle=idle, iowait=iowait)
        return made


@pytest.mark.parametrize(
    ("user", "idle", "ours", "share"),
    [
        ([1.0, 1.0], [0.0, 0.0], 2.0, 0.0),  # all is ours
        ([1.0, 1.0], [0.0, 0.0], 0.12, 0.94),
        ([0.0, 0.0], [1.0, 1.0], 0.0, 0.0),
        ([0.5, 0.0], [0.5, 1.0], 0.1, 0.2),
        ([0.5, 0.5], [0.5, 0.5], 1.2, 0.0),  # counters of two clocks: never less than nothing
    ],
)
def test_what_is_busy_and_not_ours_is_others(user: list[float], idle: list[float], ours: float, share: float) -> None:
    machine = Machine()
    taken = machine.watched().watch()
    machine.spend(user, idle, ours)
    assert taken() == pytest.approx(share)


def test_a_stretch_is_told_as_far_as_it_has_come() -> None:
    machine = Machine()
    taken = machine.watched().watch()
    assert taken() == 0.0  # no time has passed
    machine.spend([1.0, 1.0], [0.0, 0.0], 0.0)
    assert taken() == pytest.approx(1.0)
    machine.spend([0.0, 0.0], [1.0, 1.0], 0.0)
    assert taken() == pytest.approx(0.5)


def test_a_system_that_tells_nothing_is_quiet() -> None:
    def fails() -> list[SimpleNamespace]:
        raise OSError

    taken = OtherPrograms(lambda: (), cpu_times=fails).watch()
    assert taken() == 0.0


def test_whether_it_was_busy_of_late_is_looked_up_now_and_then() -> None:
    machine, now_s = Machine(), 0.0
    is_busy_lately = BusyLately(machine.watched(), every_s=2.0, clock=lambda: now_s)
    assert not is_busy_lately()
    machine.spend([1.0, 1.0], [0.0, 0.0], 0.0)
    assert not is_busy_lately()  # it is too soon to say
    now_s = 2.5
    assert is_busy_lately()
    machine.spend([0.0, 0.0], [1.0, 1.0], 0.0)
    assert is_busy_lately()
    now_s = 5.0
    assert not is_busy_lately()
