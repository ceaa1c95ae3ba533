"""The server's engine process comes back after it ended, unless its end was wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.protocol import Ask, Failed
from engine.serving import engine_process
from engine.serving.engine_process import EngineProcess

ASK = Ask(Path("models/m"))
ENDS_AT_ONCE = "import sys; sys.stdin.read()"
GOES_ON = "import sys, time; sys.stdin.read(); time.sleep(120)"


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def engine(ends: list[str]) -> Iterator[EngineProcess]:
    found = EngineProcess(EngineConfig("m"), None, lambda: ends.append("ended"))
    yield found
    found.close()


def runs(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "python_module", lambda _name: ([sys.executable, "-c", program], {}))


def until(holds: Callable[[], Any]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen")


def test_who_asks_after_its_end_starts_it_again(
    engine: EngineProcess, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, pids = list[Any](), set[int]()
    runs(ENDS_AT_ONCE, monkeypatch)
    for asked in range(1, 4):
        engine.ask(ASK, events.append)
        pids.add(engine.pid)
        until(lambda asked=asked: len(events) == asked)  # type: ignore[misc]
    until(lambda: len(ends) == 3)
    engine.close()
    assert len(pids) == 3
    assert {type(event) for event in events} == {Failed}
    assert {event.error.code for event in events} == {ErrorCode.ENGINE_DIED}


def test_an_end_that_is_expected_is_no_news(
    engine: EngineProcess, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(GOES_ON, monkeypatch)
    engine.wake()
    pid = engine.pid
    engine.expect_end()
    assert engine._process is not None
    engine._process.kill()
    engine.close()
    engine.wake()
    assert (ends, engine.pid) == ([], pid)
