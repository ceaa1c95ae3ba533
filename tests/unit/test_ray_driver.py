"""The process that speaks to Ray, before there is a cluster: what is missing or does not match is one sentence."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.jobs.rows import never
from engine.process.ray_driver import RayDriver
from engine.remote.ray_link import RayLink


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whatever address is asked for, unless a test is about that."""
    if "nobody" not in request.node.name:
        reached = SimpleNamespace(create_connection=lambda _address, _patience_s: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr("engine.process.ray_driver.socket", reached)


def connecting(init: Callable[..., Any], version: str = "2.60.3", address: str = "10.0.0.5:6379") -> str:
    ray = SimpleNamespace(__version__=version, init=init)
    return RayDriver(ray, lambda _event: None).connect(address)


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
        methods = {kind: SimpleNamespace(remote=self._call(kind)) for kind in ("open", "doing", "take", "give", "drop")}
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


def _said(driver: RayDriver, said: list[dict[str, Any]], *commands: dict[str, Any]) -> list[dict[str, Any]]:
    """What the driver says of all that is in its inbox, and of these commands."""
    said.clear()
    for command in (*commands, None):
        driver.inbox.put(command)
    driver.run()
    return [event for event in said if event["said"] != "nodes"]


def test_replies_are_taken_as_they_come_and_none_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, said = MadeUpActors(monkeypatch), list[dict[str, Any]]()
    driver = RayDriver(ray, said.append)
    node = {"node": "n", "life": 1}
    assert _said(driver, said, {"do": "start", **node, "cpus": 1, "gpus": 0, "spec": {}}) == []
    ray.reply("doing").set_result("loads the model")
    ray.reply("open").set_result({"at_once": 8})
    doing, opened = {"said": "doing", **node, "what": "loads the model"}, {"said": "opened", **node}
    assert _said(driver, said) == [doing, {**opened, "about": {"at_once": 8}}]
    ray.reply("take").set_result({"answers": [[1, {}]], "under_way": [2, 3], "broken": ""})
    assert _said(driver, said, {"do": "give", **node, "rows": []}) == [
        {"said": "answers", **node, "answers": [[1, {}]], "under_way": [2, 3]}
    ]
    assert not ray.killed
    # Its process dies: each open call says so, and one of them is heard.
    ray.reply("give").set_exception(type("ActorDiedError", (Exception,), {})("The actor is dead."))
    ray.reply("take").set_exception(type("ActorDiedError", (Exception,), {})("The actor is dead."))
    assert _said(driver, said, {"do": "drop", **node, "tickets": []}) == [
        {"said": "gone", **node, "why": "its process ended"}
    ]
    assert len(ray.killed) == 1


def test_a_node_that_refuses_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, said = MadeUpActors(monkeypatch), list[dict[str, Any]]()
    driver = RayDriver(ray, said.append)
    node = {"node": "n", "life": 1}
    _said(driver, said, {"do": "start", **node, "cpus": 1, "gpus": 0, "spec": {}})
    replying = threading.Thread(target=lambda: ray.reply("open").set_result({"refused": "it has no room"}))
    replying.start()  # Ray answers on a thread of its own
    replying.join()
    assert _said(driver, said) == [{"said": "opened", **node, "about": {"refused": "it has no room"}}]
    ray.reply("doing").set_result("")
    assert _said(driver, said) == []
    assert [kind for kind, _reply in ray.asked] == ["open", "doing"]
    assert len(ray.killed) == 1


def test_without_ray_the_command_to_install_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("engine.remote.ray_link.python_module", _behind(tmp_path))
    link = RayLink("auto")
    said = [event for _ in range(2) for event in link.events(30.0)]
    link.close()
    assert said == [
        {
            "said": "refused",
            "why": "Jobs on a cluster need Ray, which is not installed: "
            'run pip install "ray==2.60.*" in Switchyard\'s environment.',
        },
        {"said": "ended"},
    ]


def _behind(folder: Path) -> Callable[[str], tuple[list[str], dict[str, str]]]:
    """A module is run with another folder before all others on the import path."""
    checkout = Path(__file__).resolve().parents[2]
    path = f"{folder}:{checkout}" if sys.platform != "win32" else f"{folder};{checkout}"
    return lambda module: ([sys.executable, "-P", "-m", module], {"PYTHONPATH": path})
