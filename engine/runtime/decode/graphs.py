"""Decoding by graphs: a model's step is captured once and repeated, with the experts between its pieces.

A forward is captured as it runs: at each call of experts that have to know the routing the piece under way ends, the
experts are computed, and with their result in a buffer that stays the next piece begins.  Repeating a step is then to
launch the pieces and to call the experts in between: the library's Python does not run at all.  A timeline sees by the
device's clock when a piece began and ended, and which layers are in it; nothing of its inside.

The first step of a kind is computed twice: the ordinary way, and on the tensors that stay, which brings kernels into
being and allocates what libraries want.  Where the two do not agree, a family means something by its cache that is not
known here, and nothing is captured.  The second step is captured, the others repeat it.  A kind is how many tokens a
step has, of one sequence or several; it ends when others compute experts, when states get other memory, or, where no
kernel attends, when it has to read more pages, or others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.devices.device import Capture, Device, Graph
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.card_tokens import CardTokens
from engine.experts.dispatch import bound_kernel, compute_experts, interrupted_by_experts
from engine.experts.executor import LAYER_NUMBER
from engine.kernels.interface import captured_state, is_capturable
from engine.kernels.native.exchange import OverdueError
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.paged_attention import Piece
from engine.runtime.decode.step_model import StepModel
from engine.runtime.decode.tabled_attention import TabledAttention
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.kv.paged_cache import PagedCaches, keeps_latents
from engine.runtime.kv.tabled import GATHERED_PAGES, RowPlaces, RowsCache, why_not_repeated
from engine.telemetry.lanes import DENSE, GRAPH, HEAD
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)

OneByOne = Callable[[Sequence[int], Sequence[Piece], Sequence[int]], torch.Tensor]

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
        self._pieces, self._inside, self._kernels = [], [], []
        self.__dict__.pop("logits", None)  # which lie in the capture's memory
        self._capture.close()

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


@dataclass
class _Kind:
    """Steps of so many tokens.

    Attributes:
        cache: that they read and write.
        generation, state_generation: of the pages, and of the states, that the step reads without a table.
        step: once it is captured.
    """

    cache: RowsCache
    generation: int
    state_generation: int
    step: GraphStep | None = None
    is_by_itself: bool = False


class GraphedSteps:
    """The next tokens of a few sequences over pages of a device.  Not for several threads.

    Args:
        model: computes a step.
        device: that the whole model is on, or begins on; it can capture.
        caches: the pages.
        context_tokens: of the longest sequence.
        attention: over pages.
        one_by_one: computes the same tokens in the ordinary way: logits [q, V] of ids, positions and sequences.
        takes_rows: whether layers take tokens of several sequences as one; else each is a sequence of its own to them.
        tokens: those that the device runs by itself, experts and all: such a step is one graph.

    Attributes:
        most: tokens of a step.
        refused: why this model's steps are not captured any more, once that was found out; it is said in the log once.
    """

    def __init__(
        self,
        model: StepModel,
        device: Device,
        caches: PagedCaches,
        context_tokens: int,
        attention: TabledAttention,
        one_by_one: OneByOne,
        *,
        takes_rows: bool,
        tokens: CardTokens | None = None,
    ) -> None:
        self._model, self._device, self._attention, self._tokens = model, device, attention, tokens
        self._caches, self._one_by_one, self._context_tokens = caches, one_by_one, context_tokens
        self._keeps_latents, self._takes_rows = keeps_latents(model.model), takes_rows and not caches.have_states
        self._layers = decoder_layers(model.model)
        self._memory = device.memory.reserve(0, MemoryCategory.ACTIVATIONS)
        self._places: RowPlaces | None = None
        self._kinds: dict[int, _Kind] = {}
        self._gathers = False
        self._most = MAX_TOKENS
        self.counters = GraphCounters()
        self.was_repeated = False
        """Whether the last step was: others take longer than such steps do."""
        self.refused: str | None = None
        if (
            why := "attention in chunks"
            if model.attends_in_chunks
            else model.why_not_repeated or why_not_repeated(caches)
        ):
            self._refuse(why)

    @property
    def most(self) -> int:
        """Tokens of a step."""
        return self._most if self.refused is None else 1

    @property
    def takes_guesses(self) -> bool:
        """Whether a sequence may have several of them."""
        return self._takes_rows

    def step(self, ids: Sequence[int], positions: Sequence[int], pieces: Sequence[Piece]) -> torch.Tensor | None:
        """Computes tokens of sequences, a position for each; logits [q, V].

        Returns:
            `None` if the step is to be computed the ordinary way.

        Raises:
            EngineError: experts could not be computed; what the step was to write is of no use then.
        """
        places, rows, replays = self._opened(), len(ids), self.counters.replays
        self.was_repeated = False
        is_able = rows <= self.most and (self._takes_rows or rows == len(pieces))
        if places is None or not is_able or not all(piece.held for piece in pieces):
            self.counters.eager += 1
            return None
        pages = places.set(ids, positions, pieces)
        kind = self._kinds.get(rows)
        if kind is None or not self._is_current(kind, pages):
            return self._warm_up(places, pages, ids, positions, pieces)
        repeated = self._by_itself(kind) if self._runs_tokens(rows) else self._dispatched(kind)
        self.was_repeated = self.counters.replays > replays
        return repeated.clone() if repeated is not None else None

    def _runs_tokens(self, rows: int) -> bool:
        tokens = self._tokens
        is_able = tokens is not None and tokens.is_captured and tokens.can_run_more and rows <= tokens.most_rows
        return is_able and tokens is not None and tokens.takes_next

    def _dispatched(self, kind: _Kind) -> torch.Tensor | None:
        """The step with the experts between its pieces."""
        tokens = self._tokens
        is_chosen = tokens is not None and tokens.is_captured and tokens.can_run_more and kind.cache.rows == 1
        with tokens.dispatched() if tokens is not None and is_chosen else nullcontext():
            return self._repeat(kind)

    def _by_itself(self, kind: _Kind) -> torch.Tensor | None:
        """The step as one of the device's own.  One that came to nothing has changed nothing that its repetition
        does not write again."""
        assert self._tokens is not None
        for is_last in (False, True):
            try:
                with self._tokens.token():
                    return self._repeat(kind)
            except OverdueError as error:
                if is_last:
                    self._tokens.give_up(str(error))
        return self._repeat(kind)

    def _repeat(self, kind: _Kind) -> torch.Tensor | None:
        """The step once more, captured before if it is the first or something has changed."""
        by_itself = self._tokens is not None and self._tokens.is_open
        if kind.step is not None and not (kind.step.is_current and kind.is_by_itself == by_itself):
            self._forget_step(kind)
        kind.is_by_itself = by_itself
        if kind.step is None:
            return self._capture(kind)
        self.counters.replays += 1
        return kind.step.replay()

    def forget(self) -> None:
        """Lets go of all that was captured."""
        while self._kinds:
            self._forget_step(self._kinds.popitem()[1])
        self._places = None
        self._memory.release()

    def _opened(self) -> RowPlaces | None:
        """Where tokens go; None if there is no memory for that, or no step is repeated any more."""
        if self._places is None and self.refused is None:
            place = self._device.torch_device
            places = RowPlaces(self._caches, self._most, self._context_tokens, place)
            try:
                self._memory.resize(places.nbytes)
                self._places = places
            except DeviceMemoryError as error:
                self._refuse(str(error))
        return self._places

    def _is_current(self, kind: _Kind, pages: int) -> bool:
        """Whether such steps read the pages that there are, as many as are needed."""
        if kind.state_generation != self._caches.state_generation:
            return False
        if self._attention.kernels and kind.cache.rows == 1 and not self._gathers:
            return True  # a table says where they are
        return kind.generation == self._caches.generation and pages <= kind.cache.pages

    def _forward(self, cache: RowsCache) -> torch.Tensor:
        assert self._places is not None
        positions, ids = self._places.positions[:, : cache.rows], self._places.ids[:, : cache.rows]
        if not self._takes_rows:
            positions, ids = positions.T, ids.T
        with self._attention.over(cache), cache.advancing(self._layers):
            return self._model.rows_at(positions, ids, cache)

    def _captured_forward(self, cache: RowsCache) -> torch.Tensor:
        if self._tokens is not None and self._tokens.is_captured and self._tokens.is_open:
            return self._tokens.whole(lambda: self._forward(cache))
        return self._forward(cache)

    def _warm_up(
        self,
        places: RowPlaces,
        pages: int,
        ids: Sequence[int],
        positions: Sequence[int],
        pieces: Sequence[Piece],
    ) -> torch.Tensor:
        """The step both ways; what counts is the ordinary one, and whether they agree."""
        self.counters.warm_ups += 1
        if (before := self._kinds.pop(len(ids), None)) is not None:
            self._forget_step(before)
        found, why = None, "its steps come out differently when keys lie in a fixed place"
        try:
            rounded = min(-(-pages // GATHERED_PAGES) * GATHERED_PAGES, places.most_pages)
            cache = RowsCache(self._caches, places, len(ids), rounded, gathers=self._gathers)
            found = self._forward(cache)
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a family that wants to know more of its cache than this one can say
            why = _sentence(error)
        logits = self._one_by_one(ids, pieces, [positions[at] for at in _begins(pieces)])
        if found is not None:
            likeness = torch.cosine_similarity(found.float(), logits.float()).min().item()
            if likeness > 1 - _UNLIKE[self._model.dtype == torch.float32]:
                self._kinds[len(ids)] = _Kind(cache, self._caches.generation, self._caches.state_generation)
                return logits
        self._doubt(len(ids), why)
        return logits

    def _capture(self, kind: _Kind) -> torch.Tensor | None:
        assert self._device.new_capture is not None
        try:
            step = GraphStep(self._device.new_capture(), lambda: self._captured_forward(kind.cache))
        except ExpertsFailedError as error:
            raise error.reason from None
        except Exception as error:  # whatever a family does that cannot be repeated
            self._give_up(kind.cache.rows, _sentence(error))
            return None
        try:
            self._memory.resize(self._memory.nbytes + step.nbytes)
        except DeviceMemoryError as error:
            step.close()
            self._give_up(kind.cache.rows, str(error))
            return None
        kind.step = step
        self.counters.captures += 1
        return step.logits

    def _doubt(self, rows: int, why: str) -> None:
        """A step cannot be repeated as it is: the next one is tried with fewer tokens, with PyTorch's operators, or by
        modules that attend by themselves, if this was not."""
        if rows > 1:
            self._give_up(rows, why)
            return
        if self._attention.kernels:
            _log.info("PyTorch's operators compute attention on %s: %s", self._device.name, why)
            self._attention.kernels = {}
        elif self._keeps_latents and not self._gathers:
            self._gathers, self._most = True, 1
        else:
            self._refuse(why)
            return
        self.forget()

    def _give_up(self, rows: int, why: str) -> None:
        """No step of several tokens is repeated any more, or none at all."""
        if rows == 1:
            self._refuse(why)
            return
        self._most = 1
        self.forget()  # the places, too, have room for several
        _log.info("steps of several tokens are not repeated on %s: %s", self._device.name, why)

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.forget()
        FALLS.say(f"The graph of decode steps on {self._device.name}", "operators launched one by one", why)

    def _forget_step(self, kind: _Kind) -> None:
        if kind.step is not None:
            held = kind.step.nbytes
            kind.step.close()
            kind.step = None
            self._memory.resize(max(0, self._memory.nbytes - held))


def _begins(pieces: Sequence[Piece]) -> list[int]:
    """Which tokens are the first ones of their sequences."""
    return [0, *accumulate(piece.tokens for piece in pieces)][:-1]


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
