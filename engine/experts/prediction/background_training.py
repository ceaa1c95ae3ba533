"""Training on the same PC while it is idle: a process of its own, of low priority, that can be ended at any time.

A process rather than a thread: a decode step never waits for its interpreter lock, and its memory is gone when it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from engine.common.files import private_folder
from engine.common.paths import python_module
from engine.experts.prediction.mlp import WIDTHS
from engine.experts.replay.trace_file import RoutingTrace, write_trace

_log = logging.getLogger(__name__)


class TrainingState(Enum):
    """Of a training that was started."""

    NONE = "none"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class BackgroundTraining:
    """At most one training at a time, for one model.

    Args:
        path: where the trained predictor goes, whole or not at all.
        widths, epochs, seed: see `engine.experts.prediction.training.train`.
    """

    def __init__(self, path: Path, *, widths: Sequence[int] = WIDTHS, epochs: int = 20, seed: int = 0) -> None:
        self._path = path
        self._options = {"widths": list(widths), "epochs": epochs, "seed": seed}
        self._child: subprocess.Popen[bytes] | None = None
        self._trace: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether one has been started and not been seen to end."""
        return self._child is not None

    def start(self, trace: RoutingTrace, distance: int) -> bool:
        """Begins to train on these routes; False if that is impossible now, or a training is running.

        Args:
            distance: see `engine.experts.prediction.training.train`.
        """
        if self._child is not None:
            return False
        try:
            private_folder(self._path.parent)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".routes-", suffix=".npz")
            os.close(handle)
            self._trace = Path(name)
            write_trace(trace, self._trace)
            command, variables = python_module("engine.experts.prediction.training_process")
            self._child = subprocess.Popen(
                [*command, str(self._trace), str(self._path), json.dumps({**self._options, "distance": distance})],
                stdin=subprocess.PIPE,  # closed when we end, however: the child sees it and ends too
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **variables},
                **_LOW_PRIORITY,
            )
        except OSError as error:
            _log.warning("nothing is learnt about this model's experts: %s", error)
            self._clean_up()
            return False
        return True

    def poll(self) -> TrainingState:
        """How it stands.  `DONE` and `FAILED` are told once."""
        if self._child is None:
            return TrainingState.NONE
        code = self._child.poll()
        if code is None:
            return TrainingState.RUNNING
        self._end(self._child)
        if code:
            _log.warning("learning about this model's experts ended with code %d", code)
        return TrainingState.FAILED if code else TrainingState.DONE

    def wait(self) -> None:
        """Returns when it has ended, which `poll` has still to tell."""
        if self._child is not None:
            self._child.wait()

    def cancel(self) -> None:
        """Ends it at once, without a result.  What was learnt before stays.  Harmless if none is running."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._end(self._child)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is not None:
            child.stdin.close()
        self._child = None
        self._clean_up()

    def _clean_up(self) -> None:
        """What a child that was killed has left half written goes too."""
        leftovers = [self._trace] if self._trace is not None else []
        leftovers += self._path.parent.glob(f".{self._path.name}-*")
        for leftover in leftovers:
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        self._trace = None


_LOW_PRIORITY: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "IDLE_PRIORITY_CLASS", 0)} if os.name == "nt" else {}
)
