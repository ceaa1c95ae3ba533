"""A real Ray cluster on the loopback, each node with a budget of its own, in processes that all end with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.common.paths import python_module

_PROGRAM = "benchmarks.ray_nodes"
_ENGINE = "ray::NodeActor"
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A node; `raylet` is the process that stands for it."""

    ident: str
    raylet: int


class LocalRay:
    """Close it, whatever happens.

    Args:
        nodes: to begin with.
        python: runs all of them.
        environment: variables of all its processes, beside those of this one.
    """

    def __init__(self, nodes: int = 0, python: str = sys.executable, **environment: str) -> None:
        # Sockets lie there, whose paths must be short.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp" if Path("/tmp").is_dir() else None)
        (_python, *command), extra = python_module(_PROGRAM)
        self.environment = {
            **os.environ,
            **extra,
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            # So that nodes and drivers speak over 127.0.0.1, and not over the machine's address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "disabled",  # a token of the user's own would be asked for by some of them alone
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.nodes: list[LocalNode] = []
        self._process = subprocess.Popen(
            [python, *command],
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

    def add(self, cpus: int = 1, memory: int = 10**9, core: int = -1, **environment: str) -> LocalNode:
        """One more node, which keeps to a core if one is given; `environment`: variables of its own, without blanks."""
        assert self._process.stdin is not None
        variables = "".join(f" {name}={value}" for name, value in environment.items())
        self._process.stdin.write(f"add {cpus} {memory} {core}{variables}\n".encode())
        self._process.stdin.flush()
        said = self._said()
        self.nodes.append(LocalNode(said["node"], said["raylet"]))
        return self.nodes[-1]

    def engines(self) -> list[int]:
        return [process.pid for process in self.processes() if _ENGINE in _command(process)]

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster: they have its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == self._folder:
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends everything, and looks whether it did."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=_PATIENCE_S)
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_PATIENCE_S)
        assert self.processes() == []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the cluster did not start")
        said: dict[str, Any] = json.loads(line)
        return said


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
