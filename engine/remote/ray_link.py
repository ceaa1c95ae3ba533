"""The pipes to the process that speaks to a Ray cluster; `engine.process.ray_driver` says what goes over them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from typing import Any, Protocol

from engine.common.paths import python_module

_PROGRAM = "engine.process.ray_driver"
_ENDS_S = 8.0
_LINE = 1 << 26
"""A longer line is not one of ours."""

Message = dict[str, Any]


class Link(Protocol):
    """Commands to the nodes of a cluster, and what they say."""

    def send(self, command: Message) -> None:
        """Without effect once the other side has ended."""

    def events(self, wait_s: float) -> list[Message]:
        """What was said since the last call, after waiting for something; `{"said": "ended"}` is the last thing."""

    def close(self) -> None:
        """Ends the other side and all that it began on nodes."""


class RayLink:
    """A process of our own; safe to use on one thread at a time.

    Args:
        address: of the cluster, as `ray.init` takes it.
    """

    def __init__(self, address: str) -> None:
        command, extra = python_module(_PROGRAM)
        self._process = subprocess.Popen(
            [*command, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray explains itself at length
            env={**os.environ, **extra},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name="ray-events", daemon=True),
            threading.Thread(target=self._write, name="ray-commands", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, command: Message) -> None:
        """See `Link`."""
        self._told.put(json.dumps(command).encode() + b"\n")

    def events(self, wait_s: float) -> list[Message]:
        """See `Link`."""
        found: list[Message] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._said.get(timeout=wait_s))
            while True:
                found.append(self._said.get_nowait())
        return found

    def close(self) -> None:
        """See `Link`."""
        self._told.put(None)
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            while line := pipe.readline(_LINE):
                self._said.put(json.loads(line))
        self._said.put({"said": "ended"})

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            while (line := self._told.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with contextlib.suppress(OSError, ValueError):
            pipe.close()
