"""Decoding by graphs: which steps are captured, when they are repeated, and when they are of no use any more.

The first step of a kind is computed twice: the ordinary way, and on the tensors that stay, which brings kernels into
being and allocates what libraries want.  Where the two do not agree, a family means something by its cache that is not
known here, and nothing is captured.  The second step is captured, the others repeat it.  A kind is how many rows of
keys a step attends to; it ends when the cache gets other buffers, when another cache comes, or when others compute
experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.runtime.fixed_cache import FixedCache, FixedPosition
from engine.runtime.graph_step import ExpertsFailedError, GraphStep
from engine.runtime.step_model import StepModel

_log = logging.getLogger(__name__)

_UNLIKE = {True: 1e-4, False: 0.03}
"""1 - cosine of logits, in fp32 and in what is rounded more: sums in another order, and a router's near tie."""


@dataclass
class GraphCounters:
    """Steps: computed both ways before a capture, captured, repeated, and computed the ordinary way for want of one."""

    warm_ups: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0


class GraphedSteps:
    """Decode steps of one sequence on one device.  Not for several threads.

    Args:
        model: computes a step.
        device: that the whole model is on; it can capture.

    Attributes:
        refused: why this model's steps are not captured any more, once that was found out; it is said in the log once.
    """

    def __init__(self, model: StepModel, device: Device) -> None:
        self._model, self._device = model, device
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device.torch_device)
        self._position = FixedPosition(device.torch_device)
        self._memory = device.memory.reserve(0, MemoryCategory.ACTIVATIONS)
        self._beside = 0
        self._of: Cache | None = None
        self._cache: FixedCache | None = None
        self._step: GraphStep | None = None
        # To a mask a ring of the last tokens is not a chunk that begins again from time to time.
        self._chunked = "attention in chunks" if model.attends_in_chunks else model.why_not_repeated
        self.counters = GraphCounters()
        self.refused: str | None = None

    def step(self, token: torch.Tensor, cache: Cache | None, held: int) -> torch.Tensor | None:
        """Appends one token [1, 1] to a cache that holds `held`; logits [1, V] after it.

        Returns:
            `None` if the step is to be computed the ordinary way.

        Raises:
            EngineError: experts could not be computed; the cache is of no use then.
        """
        fixed = self._fixed(cache, held)
        if fixed is None:
            self.counters.eager += 1
            return None
        self._token.copy_(token)
        self._position.set(held)
        if self._step is not None and not self._step.is_current:
            self._forget_step()
        if self._step is not None:
            logits = self._step.replay()
            self.counters.replays += 1
        elif fixed.is_warm:
            captured = self._capture(fixed)
            if captured is None:
                self.leave()
                return None
            logits = captured
        else:
            assert cache is not None
            logits = self._warm_up(fixed, cache, held)
        fixed.stepped(held + 1)
        return logits.clone()

    def leave(self) -> None:
        """Before somebody else uses the cache: gives all back that is kept elsewhere meanwhile."""
        if self._cache is not None and self._cache.leave():
            self.forget()

    def forget(self) -> None:
        """Lets go of the cache and of all that was captured."""
        self._forget_step()
        self._cache = self._of = None
        self._memory.release()

    def _fixed(self, cache: Cache | None, held: int) -> FixedCache | None:
        """The cache of steps that are repeated, a new one where the old one does not do."""
        if self.refused is not None or cache is None or not held:
            return None
        if self._cache is not None and self._of is cache and self._cache.holds(held, held + 1):
            return self._cache
        self.leave()
        self.forget()
        try:
            self._beside = FixedCache.bytes_beside(cache)
            self._memory.resize(self._beside)
        except DeviceMemoryError as error:
            self._refuse(str(error))
            return None
        made = self._chunked or FixedCache.over(cache, held + 1, self._position)
        if isinstance(made, str):
            self._memory.release()
            self._refuse(made)
            return None
        self._of, self._cache = cache, made
        return made

    def _forward(self, cache: FixedCache) -> torch.Tensor:
        return self._model.at(self._position.ids, self._token, cache)[0]

    def _warm_up(self, fixed: FixedCache, cache: Cache, held: int) -> torch.Tensor:
        """The step both ways; what counts is the ordinary one, and whether they agree."""
        fixed.is_warm = True
        self.counters.warm_ups += 1
        try:
            found: torch.Tensor | None = self._forward(fixed)
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a family that wants to know more of its cache than this one can say
            found = None
            self._refuse(_sentence(error))
        logits = self._model(self._token, cache, held)[0]
        if found is not None:
            likeness = torch.cosine_similarity(found.float(), logits.float()).item()
            if not likeness > 1 - _UNLIKE[logits.dtype == torch.float32]:
                self._refuse("its steps come out differently when keys lie in a fixed place")
        return logits

    def _capture(self, cache: FixedCache) -> torch.Tensor | None:
        assert self._device.new_capture is not None
        try:
            step = GraphStep(self._device.new_capture(), lambda: self._forward(cache))
        except ExpertsFailedError as error:
            raise error.reason from None
        except Exception as error:  # whatever a family does that cannot be repeated
            self._refuse(_sentence(error))
            return None
        try:
            self._memory.resize(self._beside + step.nbytes)
        except DeviceMemoryError as error:
            step.close()
            self._refuse(str(error))
            return None
        self._step = step
        self.counters.captures += 1
        return step.logits

    def _refuse(self, why: str) -> None:
        self.refused = why
        _log.info("decode steps are not captured as graphs on %s: %s", self._device.name, why)

    def _forget_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
            self._memory.resize(self._beside)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
