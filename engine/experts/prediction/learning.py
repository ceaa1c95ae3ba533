"""The trained predictor's life: loaded if there is one, trained again while the machine is idle, then taken over.

Training is a process of its own, of low priority, that can be ended at any time.  A process rather than a thread: a
decode step never waits for its interpreter lock, and its memory is gone when it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.common.files import private_folder
from engine.common.paths import python_module
from engine.experts.prediction.mlp import WIDTHS
from engine.experts.prediction.mlp_predictor import MlpPredictor
from engine.experts.prediction.training import load_or_tell, mlp_file
from engine.experts.replay.trace_file import RoutingTrace, write_trace

_log = logging.getLogger(__name__)
_LOW_PRIORITY: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "IDLE_PRIORITY_CLASS", 0)} if os.name == "nt" else {}
)
_LEAST_STEPS = 512
"""Decode steps to learn from; and so many new ones before it is worth learning again."""


class RecordedRoutes:
    """A ring of the routes of single tokens.  Only expert numbers are kept, nothing of what was said.

    Args:
        layers, experts, per_token: of the model.
        capacity: steps to remember.
    """

    def __init__(self, layers: int, experts: int, per_token: int, capacity: int = 4096) -> None:
        self._experts = experts
        self._ring: NDArray[np.int16] = np.full((capacity, layers, per_token), -1, np.int16)
        self._row: NDArray[np.int16] = np.full((layers, per_token), -1, np.int16)
        self._seen = 0
        self._lock = threading.Lock()
        self.steps = 0

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """A decode step's layer; steps of several tokens are left out, and those that were not seen whole."""
        if layer == 0:
            self._seen = 0
        if layer != self._seen or len(experts) != self._row.shape[1]:
            self._seen = -1  # until the next step begins
            return
        self._row[layer] = experts
        self._seen += 1
        if self._seen == self._row.shape[0]:
            with self._lock:
                self._ring[self.steps % len(self._ring)] = self._row
                self.steps += 1

    def trace(self) -> RoutingTrace | None:
        """The steps that are remembered, oldest first; None if there are none.  From any thread."""
        with self._lock:
            kept = min(self.steps, len(self._ring))
            rows = np.roll(self._ring, -(self.steps % len(self._ring)), axis=0)[len(self._ring) - kept :]
        if not kept:
            return None
        starts = np.array([0, kept], np.int64)
        return RoutingTrace(rows, np.zeros(rows.shape, np.float16), starts, self._experts)


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


class Learning:
    """For one target's layers.

    Args:
        model_key: see `engine.experts.prediction.training.mlp_file`; with the layers in it, if a model has several
            targets.
        limit: experts to predict.
        capacity: steps whose routes are remembered.
    """

    def __init__(
        self,
        model_key: str,
        *,
        layers: int,
        experts: int,
        per_token: int,
        limit: int,
        capacity: int = 4096,
        least_steps: int = _LEAST_STEPS,
        widths: Sequence[int] = WIDTHS,
        epochs: int = 20,
        seed: int = 0,
    ) -> None:
        self.routes = RecordedRoutes(layers, experts, per_token, capacity)
        self.note: str | None = None
        self._layers, self._experts, self._limit = layers, experts, limit
        self._least_steps = least_steps
        self._learnt_steps = 0
        self._path = mlp_file(model_key)
        self._training = BackgroundTraining(self._path, widths=widths, epochs=epochs, seed=seed)
        self._predictors: list[MlpPredictor] = []

    @property
    def is_training(self) -> bool:
        """Whether a training is running."""
        return self._training.is_running

    def load(self) -> MlpPredictor | None:
        """The predictor that was trained last, if there is one; `note` says what is wrong with it."""
        trained, self.note = load_or_tell(self._path, self._layers, self._experts)
        if trained is None:
            return None
        self._predictors.append(MlpPredictor(trained, self._limit))
        return self._predictors[-1]

    def begin(self, ahead: int) -> bool:
        """Starts a training if enough new steps have been seen since the last one; whether it was started.

        Args:
            ahead: layers that experts are brought ahead.  It learns to predict one more: its answer takes time.
        """
        if self._training.is_running or self.routes.steps - self._learnt_steps < self._least_steps:
            return False
        trace = self.routes.trace()
        if trace is None or not self._training.start(trace, min(ahead + 1, self._layers - 1)):
            return False
        self._learnt_steps = self.routes.steps
        return True

    def finished(self) -> MlpPredictor | None:
        """The predictor of a training that has ended well since this was asked last."""
        if self._training.poll() is not TrainingState.DONE:
            return None
        outdated, self._predictors = self._predictors, []
        learnt = self.load()
        for predictor in outdated:
            predictor.close()
        return learnt

    def wait(self) -> None:
        """Returns when no training is running; `finished` has still to be asked."""
        self._training.wait()

    def cancel(self) -> None:
        """Ends a training without a result."""
        self._training.cancel()

    def close(self) -> None:
        """Ends the training and the threads.  Harmless if repeated."""
        self._training.cancel()
        for predictor in self._predictors:
            predictor.close()
        self._predictors = []
