"""A real Ray cluster on the loopback, each node with a budget of its own, in processes that all end with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
_ENGINE = "ray::NodeActor"
_PATIENCE_S = 60.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class LoopbackNode:
    """A node; `raylet` is the process that stands for it."""

    ident: str
    raylet: int


class LoopbackRay:
    """Close it, whatever happens.

    Args:
        home: `SWITCHYARD_HOME` of the engines on all nodes.
        nodes: to begin with.
    """

    def __init__(self, home: Path, nodes: int) -> None:
        # Sockets lie there, whose paths must be short.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self.environment = {
            **os.environ,
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            # So that nodes and drivers speak over 127.0.0.1, and not over the machine's address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "SWITCHYARD_HOME": str(home),
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
        }
        self.nodes: list[LoopbackNode] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes_process"],
            cwd=CHECKOUT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.address: str = self._said()["address"]
            for _ in range(nodes):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self, cpus: int = 1, memory: int = 10**9) -> LoopbackNode:
        """One more node."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"add {cpus} {memory}\n".encode())
        self._process.stdin.flush()
        said = self._said()
        self.nodes.append(LoopbackNode(said["node"], said["raylet"]))
        return self.nodes[-1]

    def kill(self, node: LoopbackNode) -> None:
        """A machine that loses its power: the raylet and all that it began die at once."""
        raylet = psutil.Process(node.raylet)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.remove(node)

    def kill_raylet(self, node: LoopbackNode) -> None:
        """Only the raylet dies; its children see to themselves."""
        os.kill(node.raylet, signal.SIGKILL)
        self.nodes.remove(node)

    def engines(self) -> list[int]:
        """Processes of engines."""
        return [process.pid for process in self._all() if _ENGINE in _command(process)]

    def close(self) -> None:
        """Ends everything, and looks whether it did."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=_PATIENCE_S)
        left = self._all()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_PATIENCE_S)
        assert self._all() == []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _all(self) -> list[psutil.Process]:
        """All processes of this cluster: they have its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == self._folder:
                    found.append(process)
        return found

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster did not start"
        said: dict[str, Any] = json.loads(line)
        return said


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def until(is_so: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
    """Waits for something that has to come; time in which this process is stopped does not count."""
    for _ in range(int(patience_s / _LOOK_S)):
        if is_so():
            return
        time.sleep(_LOOK_S)
    raise AssertionError("it did not come")
