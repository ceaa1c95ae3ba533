"""Answers over a cache of its own, one after the other: what every other way to answer is held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.batch.session_rows import Session
from engine.runtime.decode.beam_search import Beams
from engine.runtime.decode.generation import BeamModel, GenerationResult
from engine.runtime.decode.speculation import StepPrices
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch
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
    """One request at a time, each with the session that the one before has left."""

    def __init__(self, loaded: LoadedModel, **how: Any) -> None:
        policy = BatchPolicy(rows=1, ahead=64)
        model = PackedModel(loaded, policy, in_sessions=True, **how)
        assert model.sessions is not None
        self._rows = model.sessions
        self._rows.prepare()
        self._batch = ContinuousBatch(model, policy, kept=how.get("kept"), keeps=True, exact=True)
        self._preparation = Preparation(loaded)

    @property
    def _session(self) -> Session:
        return [*self._rows._in_use, *self._rows._idle][0]

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
