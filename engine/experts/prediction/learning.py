"""The trained predictor's life: loaded if there is one, trained again while the machine is idle, then taken over."""

from __future__ import annotations

from collections.abc import Sequence

from engine.experts.prediction.background_training import BackgroundTraining, TrainingState
from engine.experts.prediction.mlp import WIDTHS
from engine.experts.prediction.mlp_predictor import MlpPredictor
from engine.experts.prediction.routes import RecordedRoutes
from engine.experts.prediction.saved_mlp import load_or_tell, mlp_file

_LEAST_STEPS = 512
"""Decode steps to learn from; and so many new ones before it is worth learning again."""


class Learning:
    """For one target's layers.

    Args:
        model_key: see `engine.experts.prediction.saved_mlp.mlp_file`; with the layers in it, if a model has several
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
