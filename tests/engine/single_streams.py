"""Answers one after the other, with nobody beside: what every other way to answer is held to."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from transformers.cache_utils import Cache

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.footprint import pages_for
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, Piece, Pieces, StatePages
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.beam_search import Beams
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence as Answer
from engine.runtime.decode.speculation import StepPrices
from engine.runtime.decode.step_model import StepModel, TokenStep
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.paged_cache import PagedCaches, parts_of_pages
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.executor import BatchExecutor, batch_for
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, random_prompt

_Result = TypeVar("_Result")


class BeamModel(Protocol):
    """Several sequences in lock-step."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to each sequence, tokens [B, 1] int64; logits [B, V]."""

    def reorder(self, sources: torch.Tensor) -> None:
        """Sequence i continues what sequence `sources[i]` was; [B] int64."""


def search_over(model: BeamModel, search: Beams[_Result], device: torch.device) -> _Result:
    """What a search finds over sequences that hold the prompt."""
    try:
        step = next(search)
        while True:
            if step.sources != list(range(len(step.sources))):
                model.reorder(torch.tensor(step.sources, device=device))
            step = search.send(model.step(torch.tensor(step.tokens, device=device)[:, None]))
    except StopIteration as end:
        result: _Result = end.value
        return result


def rows_of(lengths: Iterable[int], tokens: int) -> list[BatchRequest]:
    """A row for each length of a prompt, answered greedily by so many tokens."""
    sampling = SamplingParams(max_tokens=tokens)
    return [
        BatchRequest(row, ids=tuple(random_prompt(length, seed=row)), sampling=sampling, end_ids=NO_END)
        for row, length in enumerate(lengths)
    ]


def answers_of(loaded: LoadedModel, rows: Iterable[BatchRequest], policy: BatchPolicy) -> dict[int, tuple[int, ...]]:
    """What a batch answers, with nothing to say of how it runs."""
    answers = dict[int, tuple[int, ...]]()
    with closing(BatchExecutor(loaded, policy)) as executor:
        assert not executor.note
        executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer.token_ids))
    return answers


def answers_alone(loaded: LoadedModel, rows: Iterable[BatchRequest]) -> dict[int, tuple[int, ...]]:
    """What each row is answered with nobody beside it."""
    chat = Alone(loaded)
    found = {row.row: chat.generate_from_ids(row.ids, row.sampling, end_ids=NO_END).token_ids for row in rows}
    chat.clear()
    return found


def answered_together(scheduler: Scheduler, requests: Iterable[BatchRequest]) -> dict[int, GenerationResult]:
    """What comes of requests that share a model, by their numbers; what is wrong with one is in its result."""
    answers = dict[int, GenerationResult]()

    def ended(number: int, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, EngineError)
            outcome = GenerationResult(error=outcome)
        answers[number] = outcome

    for request in requests:
        scheduler.submit(request, partial(ended, request.row))
    scheduler.serve()
    return answers


class PagedSequence:
    """A sequence over pages of its own: its next tokens as a cache for the library's model, or as pieces for steps."""

    def __init__(self, model: Any, tokens: int = 512, kv_type: KvType | None = None, read: Any = None) -> None:
        self.read, pages = read, pages_for(tokens)
        if read is None:
            with torch.inference_mode():
                _, self.read = StepModel(model, 1)(torch.zeros(1, 1, dtype=torch.long), library_cache(model), 0)
        own = KvType.BF16 if model.dtype == torch.bfloat16 else KvType.FP32
        caches = PagedCaches.like(self.read, kv_type or own, pages, 1)
        assert caches is not None
        self.caches, self.held, self._pages = caches, 0, torch.arange(pages, dtype=torch.int32)

    def piece(self, tokens: int) -> Piece:
        """So many tokens, which it holds from now on."""
        self.held += tokens
        return Piece(self._pages, self.held - tokens, tokens)

    def next(self, tokens: int) -> Cache:
        """The same as a cache."""
        return self.caches.of(self.piece(tokens))

    def logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Logits [V] after its next tokens [1, q], by the library's model."""
        logits: torch.Tensor = model(input_ids=ids, cache=self.next(ids.shape[1]), use_cache=True).logits[0, -1]
        return logits

    def rows(self, step: TokenStep, ids: torch.Tensor) -> torch.Tensor:
        """Logits [q, V] after its next tokens [q], by native steps."""
        at = range(self.held, self.held + len(ids))
        return step.rows(ids.tolist(), list(at), self.caches.structs, Pieces([self.piece(len(ids))]))

    def parts(self) -> list[torch.Tensor]:
        """All that it holds."""
        states = [
            part for each in self.caches.layers if isinstance(each, StatePages) for part in (each.recent, each.states)
        ]
        rows = [part[: pages_for(self.held)] for each in self.caches.layers for part in parts_of_pages(each)]
        last = self.held % PAGE_TOKENS or PAGE_TOKENS
        return [*states, *(part[:-1] for part in rows), *(part[-1, :, :last] for part in rows)]

    def become(self, other: "PagedSequence") -> None:
        """Holds what another of such a model does."""
        self.held = other.held
        for mine, its in zip(self.parts(), other.parts(), strict=True):
            mine.copy_(its)


class Alone:
    """One request at a time, each with all of what the ones before it have left."""

    def __init__(self, loaded: LoadedModel, *, kept: PrefixCache | None = None, speculates: bool | None = None) -> None:
        if speculates is not None:
            loaded = replace(loaded, speculates=speculates)
        self._batch = batch_for(loaded, kept)
        self._preparation = Preparation(loaded)

    @property
    def _prices(self) -> StepPrices:
        return self._batch._prices

    @_prices.setter
    def _prices(self, prices: StepPrices) -> None:
        self._batch._prices = prices

    @property
    def kv_tokens(self) -> int:
        """Tokens now held in the KV cache."""
        return self._batch.kv_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes now held by the KV cache."""
        return self._batch.held_bytes

    def clear(self) -> None:
        """Frees the KV cache."""
        self._batch.free()

    def generate(self, messages: Sequence[ChatMessage], sampling: SamplingParams, **options: Any) -> GenerationResult:
        """Answers a conversation."""
        return self.answer(BatchRequest(0, tuple(messages), sampling=sampling, **options))

    def generate_from_ids(self, ids: Sequence[int], sampling: SamplingParams, **options: Any) -> GenerationResult:
        """Continues a prompt given as tokens."""
        if not ids:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        return self.answer(BatchRequest(0, ids=tuple(ids), sampling=sampling, **options))

    def answer(self, request: BatchRequest) -> GenerationResult:
        """Answers a request from its beginning to its end."""
        try:
            asked = self._preparation.prepare(Answer(request), request.cancelled)
        except RequestCancelled:
            return GenerationResult()
        ends = list[GenerationResult]()
        self._batch.submit(asked, ends.append)
        try:
            with torch.inference_mode():
                self._batch.go_on(lambda: bool(ends), by_layer=False)
        except Exception as error:
            self._batch.give_up(error)
            raise
        (end,) = ends
        if end.error is not None:
            raise end.error
        return end
