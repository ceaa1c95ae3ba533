"""The line between the HTTP server and the engine, and the process at its end."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool, ToolCall
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.protocol import Ask, Began, Failed, Finished, Token
from engine.serving import engine_process
from engine.serving.engine_process import EngineProcess
from engine.serving.link import BrokerLink, EngineLink
from tests.refusals import until
from tests.scripted_broker import ScriptedBroker

ASK = Ask(
    Path("models/m"),
    (ChatMessage("user", "Grüezi \U0001f600"), ChatMessage("assistant", "", "hm", (ToolCall("1", "f", "{}"),))),
    (Tool("f", "does", '{"type": "object"}'),),
    sampling={"stop": ("a", "b"), "logit_bias": ((3, 1.5),), "temperature": 1},
    constraint=Constraint(choices=("x", "y")),
    top_chances=2,
)


@pytest.fixture
def link() -> Iterator[EngineLink]:
    found = EngineLink()
    found.start()
    yield found
    found.close()


def test_what_is_asked_and_what_happens_arrive_as_they_were(link: EngineLink) -> None:
    broker, events = ScriptedBroker(ends=True), list[Any]()
    link.ask(ASK, events.append)  # before there is an engine
    engine = BrokerLink(link.address, link.secret, broker)
    until(lambda: len(events) == 3)
    assert events == [Began("1", 3, thinks=False), Token("1", "Hello", 1), Finished("1", "stop", 3, 0, 1)]
    assert broker.tickets[0].ask == ASK
    engine.model_is(Path("models/m"))
    until(lambda: link.state.model == Path("models/m"))
    link.release(Path("r"))
    until(lambda: broker.released == [(Path("r"), 0)])
    engine.close()


def test_who_goes_away_is_cancelled_in_the_engine(link: EngineLink) -> None:
    broker, events = ScriptedBroker(ends=False), list[Any]()
    engine = BrokerLink(link.address, link.secret, broker)
    ticket = link.ask(ASK, events.append)
    until(lambda: len(events) == 2)
    ticket.cancel()
    until(lambda: broker.tickets[0].is_cancelled())
    engine.close()


def test_a_lost_engine_refuses_all_and_the_next_one_answers(link: EngineLink) -> None:
    events, woken = list[Any](), list[str]()
    link.wake = lambda: woken.append("woken")
    first = BrokerLink(link.address, link.secret, ScriptedBroker(ends=False))
    for _ in range(3):
        link.ask(ASK, events.append)
    until(lambda: len(events) == 6)
    first.close()
    until(lambda: len(events) == 9)
    refused = [event for event in events if isinstance(event, Failed)]
    assert [each.error.code for each in refused] == [ErrorCode.ENGINE_DIED] * 3
    until(lambda: not link.is_connected)
    woken.clear()
    link.ask(ASK, events.append)
    assert woken == ["woken"]
    second = BrokerLink(link.address, link.secret, ScriptedBroker(ends=True))
    until(lambda: isinstance(events[-1], Finished))
    second.close()


def test_where_no_engine_can_come_nobody_waits_for_it(link: EngineLink) -> None:
    def cannot() -> None:
        raise EngineError(ErrorCode.ENGINE_DIED, "There is none.")

    link.wake, events, broker = cannot, list[Any](), ScriptedBroker(ends=True)
    with pytest.raises(EngineError, match="none"):
        link.ask(ASK, events.append)
    assert link.state.under_way == 0
    engine = BrokerLink(link.address, link.secret, broker)
    until(lambda: link.is_connected)
    link.ask(ASK, events.append)
    until(lambda: isinstance(events[-1], Finished) if events else False)
    assert len(broker.tickets) == 1
    engine.close()


def test_an_engine_that_ends_while_somebody_asks_refuses_it(link: EngineLink) -> None:
    events = list[Any]()
    link.wake = lambda: link.refuse_all(EngineError(ErrorCode.ENGINE_DIED, "It has just ended."))
    link.ask(ASK, events.append)
    assert [type(event) for event in events] == [Failed]


def test_a_lost_server_cancels_what_it_asked() -> None:
    link, broker, lost = EngineLink(), ScriptedBroker(ends=False), list[str]()
    link.start()
    engine = BrokerLink(link.address, link.secret, broker, lambda: lost.append("lost"))
    link.ask(ASK, lambda _event: None)
    until(lambda: broker.tickets)
    link.close()
    until(lambda: lost)
    assert broker.tickets[0].is_cancelled()
    engine.close()


def test_nobody_connects_without_the_secret(link: EngineLink) -> None:
    with pytest.raises(EngineError):
        BrokerLink(link.address, "wrong", ScriptedBroker(ends=True))
    engine = BrokerLink(link.address, link.secret, ScriptedBroker(ends=True))
    until(lambda: link.is_connected)
    engine.close()


def test_a_note_is_made_once_whichever_engine_makes_it(link: EngineLink) -> None:
    said = list[str]()
    link.on_remark = said.append
    for _restart in range(2):
        engine = BrokerLink(link.address, link.secret, ScriptedBroker(ends=True))
        for text, about in (
            ("No card.", ""),
            ("No template.", "a"),
            ("No template.", "b"),
            ("", "c"),
            ("It broke.", None),
        ):
            engine.remark(text, about)
        engine.close()
    until(lambda: said.count("It broke.") == 2)
    assert said == ["No card.", "No template.", "No template.", "It broke.", "It broke."]


def test_a_message_that_cannot_be_handled_loses_the_line(link: EngineLink) -> None:
    events = list[Any]()
    link.on_model = lambda _model, _loading: 1 // 0  # type: ignore[assignment,return-value]
    engine = BrokerLink(link.address, link.secret, ScriptedBroker(ends=False))
    link.ask(ASK, events.append)
    until(lambda: len(events) == 2)
    engine.model_is(None)
    until(lambda: isinstance(events[-1], Failed))
    assert not link.is_connected
    engine.close()


@pytest.mark.skipif(os.name != "posix", reason="a pipe of Windows has no folder")
def test_folders_of_servers_that_were_killed_go_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = EngineLink()
    place = Path(ours.address).parent
    killed = tmp_path / "switchyard-link-abandoned"
    killed.mkdir()
    (killed / "engine").touch()
    other = tmp_path / "switchyard-bench-1"
    other.mkdir()
    again = EngineLink()
    assert {entry.name for entry in tmp_path.iterdir()} == {place.name, Path(again.address).parent.name, other.name}
    ours.close()
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == [other.name]


ENDS_AT_ONCE = "import sys; sys.stdin.read()"
GOES_ON = "import sys, time; sys.stdin.read(); time.sleep(120)"


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def engine(ends: list[str]) -> Iterator[EngineProcess]:
    with closing(EngineProcess(EngineConfig("m"), None, lambda: ends.append("ended"))) as found:
        yield found


def runs(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "python_module", lambda _name: ([sys.executable, "-c", program], {}))


def test_who_asks_after_its_end_starts_it_again(
    engine: EngineProcess, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, pids = list[Any](), set[int]()
    runs(ENDS_AT_ONCE, monkeypatch)
    for asked in range(1, 4):
        engine.ask(Ask(Path("models/m")), events.append)
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
    engine._process.kill()
    engine.close()
    engine.wake()
    assert (ends, engine.pid) == ([], pid)
