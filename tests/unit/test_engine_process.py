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
from engine.serving.link import EngineLink

ASK = Ask(Path("models/m"))
ENDS_AT_ONCE = "import sys; sys.stdin.read()"
GOES_ON = "import sys, time; sys.stdin.read(); time.sleep(120)"


@pytest.fixture
def link() -> Iterator[EngineLink]:
    found = EngineLink()
    yield found
    found.close()


def running(link: EngineLink, program: str, ends: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    monkeypatch.setattr(engine_process, "python_module", lambda _name: ([sys.executable, "-c", program], {}))
    return EngineProcess(link, EngineConfig("m"), None, lambda: ends.append("ended"))


def until(holds: Callable[[], Any]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen")


def test_who_asks_after_its_end_starts_it_again(link: EngineLink, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, events, pids = list[str](), list[Any](), set[int]()
    engine = running(link, ENDS_AT_ONCE, ends, monkeypatch)
    for asked in range(1, 4):
        link.ask(ASK, events.append)
        pids.add(engine.pid)
        until(lambda asked=asked: len(events) == asked)  # type: ignore[misc]
    until(lambda: len(ends) == 3)
    engine.stop()
    assert len(pids) == 3
    assert {type(event) for event in events} == {Failed}
    assert {event.error.code for event in events} == {ErrorCode.ENGINE_DIED}


def test_an_end_that_is_expected_is_no_news(link: EngineLink, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = list[str]()
    engine = running(link, GOES_ON, ends, monkeypatch)
    engine.start()
    pid = engine.pid
    engine.expect_end()
    assert engine._process is not None
    engine._process.kill()
    engine.stop()
    engine.start()
    assert (ends, engine.pid) == ([], pid)
