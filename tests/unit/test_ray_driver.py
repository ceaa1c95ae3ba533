"""The process that speaks to Ray, before there is a cluster: what is missing or does not match is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.jobs.rows import never
from engine.process.ray_driver import RayDriver
from engine.remote.ray_link import RayLink


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
    mismatch = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\nThis process ..."
    said = connecting(failing(RuntimeError(mismatch)))
    assert said.startswith(
        "The Ray cluster at 10.0.0.5:6379 has another version of Ray or of Python than this computer:"
    )
    assert "Ray: 2.9.0 Python: 3.10.1" in said
    assert "\n" not in said


def test_a_cluster_that_is_not_there_is_said() -> None:
    said = connecting(failing(ConnectionError("Could not find any running Ray instance.")))
    assert said.startswith("No Ray cluster answers at 10.0.0.5:6379 (ConnectionError: Could not find any")
    assert "`ray start --address=10.0.0.5:6379`" in said
    assert "pip install 'ray[client]'" in connecting(failing(ImportError("grpcio is missing")), address="ray://a:10001")


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
