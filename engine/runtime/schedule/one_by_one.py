"""Rows of families whose layers do not take several at once: one after the other, each as if it were a chat."""

from __future__ import annotations

from dataclasses import replace

from engine.common.errors import EngineError
from engine.jobs.rows import Check
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.lane import Lane, RowSource
from engine.runtime.schedule.request import PreparedRow
from engine.runtime.schedule.single_stream import SingleStream


class OneByOne(Lane):
    """See `ContinuousBatch`; sources take turns.

    An answer goes on where it was.  A prompt is left between two layers, and read again from what it has in common with
    what had been read by then.  A row whose source rests makes room for one of another: what it has written is read
    again later.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._stream = SingleStream(loaded)
        self._now: tuple[RowSource, PreparedRow] | None = None
        self._aside: list[tuple[RowSource, PreparedRow, AnswerSequence | None]] = []
        """Rows whose sources rest, and what they have written."""
        self._is_written = self._is_left = False
        self._until: Check = lambda: False

    @property
    def under_way(self) -> tuple[int, int]:
        """One row, whose tokens only count once it ends."""
        return 1, 0

    def works_on(self, _source: RowSource) -> bool:
        """Never: a row can be left after each token."""
        return False

    def has_ended(self, source: RowSource) -> bool:
        """See `Lane.has_ended`."""
        is_aside = any(each is source for each, _asked, _begun in self._aside)
        return super().has_ended(source) and not self._answers(source) and not is_aside

    def _answers(self, source: RowSource) -> bool:
        return self._now is not None and self._now[0] is source

    def go_on(self, until: Check) -> bool:
        """See `Lane.go_on`; asked before each token, and between the layers of a prompt."""
        self._until = until
        while True:
            if until():
                return True
            if self._now is None and not self._next():
                return False
            assert self._now is not None
            source, asked = self._now
            if source.rests:
                if all(each.rests for each in self.sources):
                    return False
                self._aside.append((source, asked, self._stream.set_aside()))
                self._now = None
                continue
            try:
                result = self._stream.turn(until)
                is_left = result is not None and result.finish_reason == "cancelled" and self._is_left
                begins_again = is_left and not asked.request.cancelled()
            except EngineError as error:
                self._now = None
                source.on_row(asked.ended(error))
                continue
            if begins_again:
                self._begin(source, asked)
            elif result is not None:
                self._ended(result)

    def drop(self, source: RowSource) -> None:
        """Gives up a source, and its row if it is being answered."""
        if self._answers(source):
            self._now = None
        self._aside = [each for each in self._aside if each[0] is not source]
        if source in self.sources:
            self.sources.remove(source)
        source.next = None

    def free(self) -> None:
        """Frees the KV cache."""
        self.close()
        self._stream.clear()

    def _next(self) -> bool:
        """Goes on with a row that stepped aside, or begins the next one of whoever waits longest; whether it could."""
        for place, (source, asked, begun) in enumerate(self._aside):
            if not source.rests:
                del self._aside[place]
                self._begin(source, asked, begun)
                return True
        for source in [each for each in self.sources if not each.rests]:
            new = source.take()
            if new is not None:
                self.sources.remove(source)
                self.sources.append(source)
                self.turns += 1
                self._begin(source, new)
                return True
        return False

    def _begin(self, source: RowSource, asked: PreparedRow, begun: AnswerSequence | None = None) -> None:
        request = asked.request
        self._is_written = self._is_left = False

        def on_text(text: str, tokens: int) -> None:
            self._is_written = True
            request.on_text(text, tokens)

        def cancelled() -> bool:
            # A prompt is left between two layers, an answer between two tokens.
            self._is_left = not self._is_written and self._until()
            return self._is_left or request.cancelled()

        watched = replace(asked, request=replace(request, cancelled=cancelled, on_text=on_text))
        self._stream.begin(watched, begun)
        self._now = source, asked

    def _ended(self, result: GenerationResult) -> None:
        assert self._now is not None
        (source, asked), self._now = self._now, None
        source.on_row(replace(result, row=asked.request.row))
