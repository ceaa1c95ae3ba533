"""Answers over a cache of its own, one after the other: what every other way to answer is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.jobs.rows import never
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest, Preparation
from engine.runtime.schedule.single_stream import NOTHING_CAME, SingleStream


class Alone(SingleStream):
    """See `SingleStream`."""

    def __init__(self, loaded: LoadedModel, **how: Any) -> None:
        super().__init__(loaded, **how)
        self._preparation = Preparation(loaded)

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
            return NOTHING_CAME
        self.begin(asked)
        while (result := self.turn(never)) is None:
            pass
        return result
