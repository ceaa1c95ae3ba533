"""The process that speaks to Ray, before there is a cluster: what is missing or does not match is one sentence."""

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.common.config import BatchJob, EngineConfig
from engine.common.errors import ErrorCode
from engine.common.installed import version
from engine.jobs.rows import never
from engine.process.ray_driver import Inbox, RayDriver
from engine.protocol import (
    MAX_LINE_BYTES,
    ClusterJob,
    ClusterNodes,
    DropRows,
    Failed,
    GiveRows,
    Message,
    NodeAnswers,
    NodeDoes,
    NodeGone,
    StartNode,
    decode,
    encode,
)
from engine.remote.ray_rows import RayLink


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whatever address is asked for, unless a test is about that."""
    if "nobody" not in request.node.name:
        reached = SimpleNamespace(create_connection=lambda _address, _patience_s: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr("engine.process.ray_driver.socket", reached)


def connecting(init: Callable[..., Any], version: str = "2.60.3", address: str = "10.0.0.5:6379") -> str:
    ray = SimpleNamespace(__version__=version, init=init)
    return RayDriver(ray, lambda _line: None, Inbox()).connect(address)


def failing(error: Exception) -> Callable[..., Any]:
    def init(**_options: Any) -> None:
        raise error

    return init


def test_a_cluster_of_this_version_is_used_and_told_nothing_else() -> None:
    asked: dict[str, Any] = {}
    assert connecting(lambda **options: asked.update(options)) == ""
    assert asked["address"] == "10.0.0.5:6379"
    assert asked["log_to_driver"] is False


def test_another_ray_here_is_said() -> None:
    said = connecting(never, version="2.9.0")
    wanted = 'run pip install "ray==2.60.*" in Switchyard\'s environment.'
    assert said == f"Ray 2.9.0 is installed here, and Switchyard works with Ray 2.60: {wanted}"


def test_another_ray_there_is_said() -> None:
    mismatch = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n"
        "This process on node 127.0.0.1 was started with:\n    Ray: 2.60.3\n    Python: 3.11.7\n"
    )
    said = connecting(failing(RuntimeError(mismatch)))
    assert said == (
        "The Ray cluster at 10.0.0.5:6379 runs Ray 2.9.0 with Python 3.10.1, and this computer Ray 2.60.3 with Python "
        "3.11.7: install Ray 2.60 on all of its computers and on this one, with the same Python."
    )
    said = connecting(failing(RuntimeError("Version mismatch in\nother words")))
    assert said.startswith(
        "The Ray cluster at 10.0.0.5:6379 has another version of Ray or of Python (Version mismatch in"
    )


def test_a_cluster_that_is_not_there_is_said() -> None:
    said = connecting(failing(ConnectionError("Could not find any running Ray instance.")))
    assert said.startswith("No Ray cluster answers at 10.0.0.5:6379 (ConnectionError: Could not find any")
    assert "`ray start --address=10.0.0.5:6379`" in said
    assert "pip install 'ray[client]'" in connecting(failing(ImportError("grpcio is missing")), address="ray://a:10001")


def test_an_address_where_nobody_listens_is_said_at_once() -> None:
    """Ray itself would try for a minute and a half."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        said = connecting(never, address=address)
        assert said.startswith(f"No Ray cluster answers at {address} (ConnectionRefusedError: ")
    assert connecting(lambda **_options: None, address="127.0.0.1:port") == ""


class MadeUpActors:
    """Ray as the driver uses it, with actors whose replies a test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        for name in ("ray", "ray.util"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        self.asked: list[tuple[str, Future[Any]]] = []
        self.killed: list[Any] = []

    def nodes(self) -> list[dict[str, Any]]:
        return []

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def remote(self, _class: type) -> Any:
        methods = {kind: SimpleNamespace(remote=self._call(kind)) for kind in ("begin", "tell", "events")}
        return SimpleNamespace(options=lambda **_options: SimpleNamespace(remote=lambda: SimpleNamespace(**methods)))

    def reply(self, kind: str) -> Future[Any]:
        """What the oldest open call of this kind is to come to."""
        return next(reply for asked, reply in self.asked if asked == kind and not reply.done())

    def _call(self, kind: str) -> Callable[..., Any]:
        def call(*_values: Any) -> Any:
            reply = Future[Any]()
            self.asked.append((kind, reply))
            return SimpleNamespace(future=lambda: reply)

        return call


START = StartNode("n", 1, 1.0, 0.0, ClusterJob(("m",), "", EngineConfig("m"), BatchJob("a", "b"), ()))


class Driven:
    """A driver over such a Ray."""

    def __init__(self, ray: MadeUpActors) -> None:
        self.inbox, self.lines = Inbox(), list[bytes]()
        self.driver = RayDriver(ray, self.lines.append, self.inbox)

    def said(self, *commands: Message) -> list[Message]:
        """What the driver says of all that is in its inbox, and of these commands."""
        self.lines.clear()
        for command in commands:
            self.inbox.put(encode(command))
        self.inbox.put(None)
        self.driver.run()
        return [event for event in map(decode, self.lines) if not isinstance(event, ClusterNodes)]


def test_replies_are_taken_as_they_come_and_none_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MadeUpActors(monkeypatch)
    driven = Driven(ray)
    assert driven.said(START) == []
    ray.reply("begin").set_result(None)
    does, answers = NodeDoes("n", 1, "loads the model"), NodeAnswers("n", 1, (), (2, 3))
    ray.reply("events").set_result(([encode(does)], False))
    assert driven.said() == [does]
    ray.reply("events").set_result(([encode(answers)], False))
    assert driven.said(GiveRows("n", 1, ())) == [answers]
    assert not ray.killed
    # Its process dies: each open call says so, and one of them is heard.
    ray.reply("tell").set_exception(type("ActorDiedError", (Exception,), {})("The actor is dead."))
    ray.reply("events").set_exception(type("ActorDiedError", (Exception,), {})("The actor is dead."))
    assert driven.said(DropRows("n", 1, ())) == [NodeGone("n", 1, "its process ended")]
    assert len(ray.killed) == 1


def test_a_node_of_an_old_version_says_so_and_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MadeUpActors(monkeypatch)
    driven = Driven(ray)
    driven.said(START)
    ray.reply("begin").set_exception(AttributeError("'NodeActor' object has no attribute 'begin'"))
    (gone,) = driven.said()
    assert (gone.why, gone.refuses) == (f"it has another Switchyard than the one that asks, which is {version()}", True)


def test_a_node_that_refuses_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, gone = MadeUpActors(monkeypatch), NodeGone("n", 1, "it has no room", refuses=True)
    driven = Driven(ray)
    driven.said(START)
    # Ray answers on a thread of its own.
    replying = threading.Thread(target=lambda: ray.reply("events").set_result(([encode(gone)], True)))
    replying.start()
    replying.join()
    assert driven.said(GiveRows("n", 1, ())) == [gone]
    assert driven.said(GiveRows("n", 1, ())) == []
    assert [kind for kind, _reply in ray.asked] == ["begin", "events"]
    assert len(ray.killed) == 1


def test_without_ray_the_command_to_install_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("engine.remote.ray_rows.python_module", _behind(tmp_path))
    link = RayLink("auto")
    said = [event for _ in range(2) for event in link.events(30.0)]
    link.close()
    how = 'run pip install "ray==2.60.*" in Switchyard\'s environment.'
    why = f"Jobs on a cluster need Ray, which is not installed: {how}"
    assert said == [Failed("", ErrorCode.DEVICE_UNAVAILABLE, why), Failed("", ErrorCode.ENGINE_DIED, "")]


def test_a_line_of_many_rows_may_be_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = "__version__ = '2.60.0'\ndef init(**options): pass\ndef nodes(): return []\ndef shutdown(): pass\n"
    (tmp_path / "ray.py").write_text(ray)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("engine.remote.ray_rows.python_module", _behind(tmp_path))
    monkeypatch.setattr("engine.remote.ray_rows.encode", lambda line: line)
    link = RayLink("local")
    line = b'{"node": "n", "life": 1' + b" " * MAX_LINE_BYTES + b"}\n"  # which is read, and no command
    link.send(line)  # type: ignore[arg-type]
    failed = next(event for _ in range(9) for event in link.events(30.0) if isinstance(event, Failed))
    link.close()
    assert (failed.code, str(len(line)) in failed.message) == (ErrorCode.PROTOCOL, True)


def _behind(folder: Path) -> Callable[[str], tuple[list[str], dict[str, str]]]:
    """A module is run with another folder before all others on the import path."""
    checkout = Path(__file__).resolve().parents[2]
    path = f"{folder}:{checkout}" if sys.platform != "win32" else f"{folder};{checkout}"
    return lambda module: ([sys.executable, "-P", "-m", module], {"PYTHONPATH": path})
