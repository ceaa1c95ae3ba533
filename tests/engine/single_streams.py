"""Answers one after the other, with nobody beside: what every other way to answer is held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.runtime.decode.beam_search import Beams
from engine.runtime.decode.generation import BeamModel, GenerationResult
from engine.runtime.decode.speculation import StepPrices
from engine.runtime.kept.prefixes import KeptPrefixes
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import batch_for
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler

_Result = TypeVar("_Result")


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


class Alone:
    """One request at a time, each with all of what the ones before it have left."""

    def __init__(
        self, loaded: LoadedModel, *, kept: KeptPrefixes | None = None, speculates: bool | None = None
    ) -> None:
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
            asked = self._preparation.prepare(request, request.cancelled)
        except RequestCancelled:
            return GenerationResult()
        ends = list[GenerationResult]()
        self._batch.submit(asked, ends.append)
        try:
            with torch.inference_mode():
                self._batch.sweep(lambda: bool(ends))
        except Exception as error:
            self._batch.give_up(error)
            raise
        (end,) = ends
        if end.error is not None:
            raise end.error
        return end
