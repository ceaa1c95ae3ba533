"""The process that speaks to Ray, before there is a cluster: what is missing or does not match is one sentence."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
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
