"""Decoding by graphs: a model's step is captured once and repeated, with the experts between its pieces.

A forward is captured as it runs: at each call of experts that have to know the routing the piece under way ends, the
experts are computed, and with their result in a buffer that stays the next piece begins.  Repeating a step is then to
launch the pieces and to call the experts in between: the library's Python does not run at all.  A timeline sees by the
device's clock when a piece began and ended, and which layers are in it; nothing of its inside.

The first step of a kind is computed twice: the ordinary way, and on the tensors that stay, which brings kernels into
being and allocates what libraries want.  Where the two do not agree, a family means something by its cache that is not
known here, and nothing is captured.  The second step is captured, the others repeat it.  A kind is how many rows of
keys a step attends to; it ends when the cache gets other buffers, when another cache comes, or when others compute
experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.devices.device import Capture, Device, Graph
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.card_tokens import CardTokens
from engine.experts.dispatch import bound_kernel, compute_experts, interrupted_by_experts
from engine.experts.recording import LAYER_NUMBER
from engine.kernels.interface import captured_state, is_capturable
from engine.kernels.native.exchange import OverdueError
from engine.runtime.decode.step_model import StepModel
from engine.runtime.decode.tabled_attention import TabledAttention
from engine.runtime.kv.fixed import FixedCache, FixedPosition
from engine.runtime.kv.tabled import TabledCache
from engine.telemetry.lanes import DENSE, GRAPH, HEAD
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)

_UNLIKE = {True: 1e-4, False: 0.03}
"""1 - cosine of logits, in fp32 and in what is rounded more: sums in another order, and a router's near tie."""


@dataclass(frozen=True)
class _Experts:
    """A call of experts between two pieces: what it is given and where its result goes, all in memory that stays."""

    module: Any
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    result: torch.Tensor

    def replay(self) -> None:
        # A copy: predictors that learn from hidden states read them when the next token's are already there.
        self.result.copy_(compute_experts(self.module, self.hidden.clone(), self.index, self.weights))


class ExpertsFailedError(Exception):
    """Experts that were computed between two pieces failed; it is not the capture's fault.

    Attributes:
        reason: how they did.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


class GraphStep:
    """A captured step.

    Args:
        capture: of the device, with nothing in it.
        forward: computes the step from tensors that stay, and returns logits; it is called once, now.

    Attributes:
        logits: of the step, which every repetition overwrites.

    Raises:
        ExpertsFailedError: experts failed.
        Exception: whatever cannot be captured raises; nothing of it was done but for what writes the same again.
    """

    def __init__(self, capture: Capture, forward: Callable[[], torch.Tensor]) -> None:
        self._capture = capture
        self._pieces: list[Graph | _Experts] = []
        self._inside: list[list[Any]] = [[]]  # of each graph the modules of experts that are part of it
        self._kernels: list[tuple[Any, object, object]] = []
        try:
            with interrupted_by_experts(self._between):
                capture.begin()
                self.logits = forward()
                self._pieces.append(capture.end())
        except BaseException:
            self.close()
            raise
        if RECORDER.on:
            RECORDER.piece = self.spans[-1]  # for the head, which is in it

    @property
    def nbytes(self) -> int:
        """Device memory that it holds on to."""
        return self._capture.nbytes

    @property
    def is_current(self) -> bool:
        """Whether experts are still computed by the same kernels."""
        return all(
            (now := bound_kernel(module)[1]) is kernel and captured_state(now) is state
            for module, kernel, state in self._kernels
        )

    @property
    def pieces(self) -> int:
        """Graphs that a step is made of."""
        return sum(not isinstance(piece, _Experts) for piece in self._pieces)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(name, first layer, layers) of each graph, for a timeline; the layer is -1 where modules have no numbers.

        A graph is `dense` if all that it holds comes before the experts of one layer, and `head` behind the last.
        """
        spans = []
        between = [piece.module for piece in self._pieces if isinstance(piece, _Experts)]
        last = -1
        for inside, behind in zip(self._inside, [*between, None], strict=True):
            modules = inside if behind is None else [*inside, behind]
            numbers = [module.__dict__.get(LAYER_NUMBER, -1) for module in modules]
            if not modules:
                spans.append((HEAD, -1, 1))
                continue
            known = min(numbers) > last
            count = max(numbers) - last if known else len(modules)
            name = DENSE if not inside and count == 1 else GRAPH
            spans.append((name, last + 1 if known else -1, count))
            last = max(last, *numbers)
        return spans

    def replay(self) -> torch.Tensor:
        """The step again, with what its tensors hold now.

        Raises:
            EngineError: experts failed.
        """
        spans = iter(self.spans) if RECORDER.on else None
        for piece in self._pieces:
            if spans is not None and not isinstance(piece, _Experts):
                RECORDER.piece = next(spans)  # whatever comes next marks where it ends
            piece.replay()
        return self.logits

    def close(self) -> None:
        """Frees what it holds.  Harmless if repeated."""
        self._capture.close()
        self._pieces, self._inside, self._kernels = [], [], []

    def _between(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer, kernel = bound_kernel(module)
        self._kernels.append((module, kernel, captured_state(kernel)))
        if is_capturable(kernel) and layer.device == hidden.device:
            self._inside[-1].append(module)
            return kernel(hidden, index, weights)  # replays run no Python
        self._pieces.append(self._capture.end())
        try:
            result = compute_experts(module, hidden.clone(), index, weights).clone()
        except BaseException as error:
            raise ExpertsFailedError(error) from error
        self._pieces.append(_Experts(module, hidden, index, weights, result))
        self._inside.append([])
        self._capture.begin()
        return result


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
        tabled: attention by the card's kernel, if it has one; where that does not do what the library does, it is left
            alone from then on.
        tokens: those that the device runs by itself, experts and all: such a step is one graph.

    Attributes:
        refused: why this model's steps are not captured any more, once that was found out; it is said in the log once.
    """

    def __init__(
        self,
        model: StepModel,
        device: Device,
        tabled: TabledAttention | None = None,
        tokens: CardTokens | None = None,
    ) -> None:
        self._model, self._device, self._tabled, self._tokens = model, device, tabled, tokens
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device.torch_device)
        self._position = FixedPosition(device.torch_device)
        self._memory = device.memory.reserve(0, MemoryCategory.ACTIVATIONS)
        self._beside = 0
        self._of: Cache | None = None
        self._cache: FixedCache | None = None
        self._step: GraphStep | None = None
        self._is_by_itself = False
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
        if self._step is None and not fixed.is_warm:
            assert cache is not None
            logits = self._warm_up(fixed, cache, held)
        else:
            repeated = self._by_itself(fixed) if self._runs_tokens else self._dispatched(fixed)
            if repeated is None:
                self.leave()
                return None
            logits = repeated
        fixed.stepped(held + 1)
        return logits.clone()

    @property
    def _runs_tokens(self) -> bool:
        tokens = self._tokens
        return tokens is not None and tokens.is_captured and tokens.can_run_more and tokens.takes_next

    def _dispatched(self, cache: FixedCache) -> torch.Tensor | None:
        """The step with the experts between its pieces."""
        tokens = self._tokens
        is_chosen = tokens is not None and tokens.is_captured and tokens.can_run_more
        with tokens.dispatched() if tokens is not None and is_chosen else nullcontext():
            return self._repeat(cache)

    def _by_itself(self, cache: FixedCache) -> torch.Tensor | None:
        """The step as a token of the device's own.  One that came to nothing has changed nothing that its repetition
        does not write again."""
        assert self._tokens is not None
        for is_last in (False, True):
            try:
                with self._tokens.token():
                    return self._repeat(cache)
            except OverdueError as error:
                if is_last:
                    self._tokens.give_up(str(error))
        return self._repeat(cache)

    def _repeat(self, cache: FixedCache) -> torch.Tensor | None:
        """The step once more, captured before if it is the first or something has changed."""
        by_itself = self._tokens is not None and self._tokens.is_open
        if self._step is not None and not (self._step.is_current and self._is_by_itself == by_itself):
            self._forget_step()
        self._is_by_itself = by_itself
        if self._step is None:
            return self._capture(cache)
        self.counters.replays += 1
        return self._step.replay()

    def leave(self) -> None:
        """Before other code uses the cache: writes back what is kept elsewhere meanwhile."""
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
            kind = FixedCache if self._tabled is None else TabledCache
            self._beside = kind.bytes_beside(cache)
            self._memory.resize(self._beside)
        except DeviceMemoryError as error:
            self._refuse(str(error))
            return None
        made = self._chunked or kind.over(cache, held + 1, self._position)
        if isinstance(made, str):
            self._memory.release()
            self._refuse(made)
            return None
        self._of, self._cache = cache, made
        return made

    def _forward(self, cache: FixedCache) -> torch.Tensor:
        attending = self._tabled.over(cache) if isinstance(cache, TabledCache) and self._tabled else nullcontext()
        with attending:
            return self._model.at(self._position.ids, self._token, cache)[0]

    def _captured_forward(self, cache: FixedCache) -> torch.Tensor:
        if self._tokens is not None and self._tokens.is_captured and self._tokens.is_open:
            return self._tokens.whole(lambda: self._forward(cache))
        return self._forward(cache)

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
            self._doubt(_sentence(error))
        logits = self._model(self._token, cache, held)[0]
        if found is not None:
            likeness = torch.cosine_similarity(found.float(), logits.float()).item()
            if not likeness > 1 - _UNLIKE[self._model.dtype == torch.float32]:
                self._doubt("its steps come out differently when keys lie in a fixed place")
        return logits

    def _capture(self, cache: FixedCache) -> torch.Tensor | None:
        assert self._device.new_capture is not None
        try:
            step = GraphStep(self._device.new_capture(), lambda: self._captured_forward(cache))
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

    def _doubt(self, why: str) -> None:
        """A step cannot be repeated as it is: the next one is tried with the library's attention, if this was not."""
        self._cache = self._of = None  # what the step left there is not written back
        self._memory.release()
        if self._tabled is None:
            self._refuse(why)
            return
        _log.info("PyTorch's operators compute attention on %s: %s", self._device.name, why)
        self._tabled = None

    def _refuse(self, why: str) -> None:
        self.refused = why
        FALLS.say(f"The graph of decode steps on {self._device.name}", "operators launched one by one", why)

    def _forget_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None
            self._memory.resize(self._beside)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
