"""Rows over caches of their own, for what pages do not hold.

That is so of encoder-decoders, of layers that keep what pages do not know or come from disk, and on Apple's chips.  A
row by itself is computed by the library's model, or a native step; several share sweeps, where their layers allow that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from engine.jobs.rows import Check, never
from engine.runtime.batch.row_prefixes import Partings
from engine.runtime.decode.beam_search import Beams, BeamStep
from engine.runtime.decode.encoder_decoder_session import EncoderDecoderSession
from engine.runtime.decode.generation import BeamModel, Decoded, Reading, ignore_progress, ignore_reused
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kept.prefixes import KeptPrefixes, Reused
from engine.runtime.kv.reuse import kinds_by_length, restart_angles
from engine.runtime.loaded_model import LoadedModel

if TYPE_CHECKING:
    from engine.runtime.schedule.row import PagedRow

Session = KvSession | EncoderDecoderSession


class RowSession:
    """The session of a row in progress.

    Args:
        keeps: whether others, and the chat's next turn, find what it has read.
        repeats: whether its answer is to be that of another time, bit by bit.
    """

    def __init__(self, rows: SessionRows, session: Session, row: PagedRow, *, keeps: bool, repeats: bool) -> None:
        self._rows, self._session, self._row, self._keeps, self._repeats = rows, session, row, keeps, repeats
        self._reading: Reading | None = None
        self._coming = 0
        self._has_begun = False

    @property
    def is_whole(self) -> bool:
        """Whether it certainly holds what its row has read, and no more."""
        return self._session.is_whole and self._session.tokens == self._row.held

    @property
    def cache(self) -> Cache:
        """What it holds, and perhaps some of what is being computed."""
        assert isinstance(self._session, KvSession)
        return self._session.live_cache

    @torch.inference_mode()
    def coming(self) -> int:
        """How many tokens of its prompt it reads next, by itself."""
        if self._reading is None:
            request, answer = self._row.request, self._row.sequence.ids
            self._reading = self._session.read(
                self._row.prompt[: len(self._row.prompt) - len(answer)],
                ignore_progress if answer or self._has_begun else request.on_progress,
                lambda: self._rows.leaves() or request.cancelled(),
                ignore_reused if answer or self._has_begun else self._has_reused,
                repeats=self._repeats,
                answer=answer,
            )
            self._coming, self._has_begun = next(self._reading), True
        return self._coming

    def _has_reused(self, ram: int, disk: int, seconds: float) -> None:
        self._row.kept = Reused(0, ram, disk)
        self._row.request.on_reused(ram, disk, seconds)

    def read(self) -> torch.Tensor:
        """The tokens that were coming; logits [1, V] after the last ones of a prompt."""
        assert self._reading is not None
        reading, self._reading = self._reading, None
        try:
            self._coming = next(reading)
        except StopIteration as end:
            logits: torch.Tensor = end.value[0]
            return logits
        self._reading = reading
        return torch.empty(0)

    def up_to(self, tokens: int) -> int:
        """How many of its next tokens it reads in a sweep of several rows, before it leaves something for others."""
        assert isinstance(self._session, KvSession)
        tokens = self._rows.partings.up_to(self._row, tokens)
        before = self._session.before_snapshot(len(self._row.prompt)) if self._keeps else 0
        return min(tokens, before or tokens)

    @contextmanager
    def advancing(self, ids: Sequence[int]) -> Iterator[None]:
        """Within it a sweep of several rows takes in these tokens: all of them, or none if it is given up."""
        row, session = self._row, self._session
        assert isinstance(session, KvSession)
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        ends = row.is_reading and session.tokens + len(ids) == len(row.prompt)
        with session.advancing(ids, leaves_snapshot=self._keeps and ends):
            yield
        self._rows.has_passed(row, session)

    def takes(self, tokens: int) -> bool:
        """Whether a step computes so many tokens of its answer."""
        return isinstance(self._session, KvSession) and self._session.takes(tokens)

    @torch.inference_mode()
    def step(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [q, V] after each of an answer's next tokens."""
        if len(ids) == 1:
            return self._session.step(torch.tensor([list(ids)], device=self._rows.device), ids[0])
        assert isinstance(self._session, KvSession)
        return self._session.several(ids)

    @torch.inference_mode()  # as they were computed: states are, once more
    def take_back(self, tokens: int) -> None:
        """Forgets the last tokens, which did not come true."""
        assert isinstance(self._session, KvSession)
        self._session.take_back(tokens)

    def beams(self, search: Beams[Decoded], width: int) -> SessionBeams:
        """So many sequences that go on from what is held."""
        return SessionBeams(search, self._session.beams(width), self._rows.device)

    def close(self) -> None:
        """The row has ended, or has stepped aside: the next one may go on from what is held."""
        if self._reading is not None:
            self._reading.close()
        self._rows.take_back(self._session, keeps=self._keeps)


class SessionBeams:
    """The beams of a row's search, with a cache of their own.

    Attributes:
        tokens: the next one of each.
    """

    taken = beside = 0
    """Pages."""

    def __init__(self, search: Beams[Decoded], model: BeamModel, device: torch.device) -> None:
        self.search, self._model, self._device = search, model, device
        self.tokens: list[int] = []
        self.held = 0

    def follow(self, step: BeamStep) -> None:
        """The next tokens, and which beam each goes on from."""
        self.tokens = step.tokens
        if step.sources != list(range(len(step.sources))):
            self._model.reorder(torch.tensor(step.sources, device=self._device))

    def step(self) -> torch.Tensor:
        """Logits [B, V] after the next tokens."""
        return self._model.step(torch.tensor(self.tokens, device=self._device)[:, None])

    def close(self) -> None:
        """Its cache goes with it."""
        del self._model


class SessionRows:
    """The sessions of a model's rows, and those that rows which have ended left.

    Args:
        most_bytes: of what all of them hold; what is idle goes first.
        leaves: asked between the layers of a prompt: whether it is left there, and begun again later.
        speculates: whether coming tokens may be guessed and tried together; `None` is what the model was loaded for.
        kept: what earlier answers left; `None` reads each prompt that no earlier answer here shares.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        most_bytes: int,
        leaves: Check = never,
        *,
        speculates: bool | None = None,
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._loaded, self._most_bytes, self._kept = loaded, most_bytes, kept
        self.device = loaded.device
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self.guesses = (loaded.speculates if speculates is None else speculates) and not self._encodes
        self._step = StepModel(loaded.model, loaded.context_tokens) if not self._encodes else None
        self._threads = torch.get_num_threads()
        self._follows_length = "dynamic" in kinds_by_length(loaded.model)
        self._in_use = list[Session]()
        self._idle = dict[Session, bool]()
        """Those that hold what the last answers left, the oldest first, and whether that is kept."""
        self.partings = Partings()
        """Where rows that share sweeps leave copies of their sessions for others which begin alike."""
        self._copies = set[KvSession]()
        """Those: they are copied once more by who goes on from them."""
        self.leaves = leaves

    @property
    def idle_tokens(self) -> int:
        """Tokens that those of no row in progress hold."""
        return sum(session.tokens for session in self._idle)

    @property
    def nbytes(self) -> int:
        """Bytes now held, spare capacity included."""
        return sum(session.bytes for session in (*self._in_use, *self._idle))

    def prepare(self) -> None:
        """Makes what the first row needs."""
        if not (self._in_use or self._idle):
            self._idle[self._new()] = True

    def begin(self, row: PagedRow, *, keeps: bool, repeats: bool) -> None:
        """A row goes on from what is there of its prompt, and of its answer if it has stepped aside.

        Args:
            keeps, repeats: see `RowSession`.
        """
        session = self._session_for(row, keeps=keeps, repeats=repeats)
        if isinstance(session, KvSession):
            session.chat = row.request.chat if keeps else ""
        row.own = own = RowSession(self, session, row, keeps=keeps, repeats=repeats)
        own.coming()
        row.starts_behind(session.tokens)
        if isinstance(session, KvSession):
            row.layout = session.layout
            drafters = session.drafters()
            # Guesses of a draft head depend on the time they take, and change rounding.
            if row.speculation is not None and row.request.repeats and drafters:
                row.speculation = None
            elif row.speculation is not None:
                row.speculation.use(drafters)

    def _session_for(self, row: PagedRow, *, keeps: bool, repeats: bool) -> Session:
        """That which holds most of what a row begins with, or a copy of it, else the one of no use for longest."""
        idle = [each for each, is_kept in self._idle.items() if (keeps or not is_kept) and each not in self._copies]
        session = max(idle, key=lambda each: each.usable(row.prompt)) if idle else self._new()
        copied = max(self._copies, key=lambda each: each.usable(row.prompt), default=session)
        if not repeats and copied.usable(row.prompt) > session.usable(row.prompt):
            self._idle[copied] = self._idle.pop(copied)  # it was of use
            session = self._copy(copied)
        self._idle.pop(session, None)
        self._in_use.append(session)
        while self._idle and self.nbytes > self._most_bytes:
            self._drop_oldest()
        return session

    def _copy(self, session: Session) -> KvSession:
        copy = self._new()
        assert isinstance(session, KvSession)
        assert isinstance(copy, KvSession)
        copy.go_on_from(deepcopy(session.live_cache), session.ids)
        return copy

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._idle))
        del self._idle[oldest]
        self._copies.discard(oldest)
        oldest.clear()

    def _new(self) -> Session:
        if self._encodes:
            return EncoderDecoderSession(self._loaded)
        return KvSession(self._loaded, guesses=self.guesses, kept=self._kept, step=self._step)

    def take_back(self, session: Session, *, keeps: bool) -> None:
        """Its row is over."""
        self._in_use.remove(session)
        self._idle[session] = keeps
        if not session.is_whole:
            session.clear()
        elif isinstance(session, KvSession) and keeps:
            session.keep()  # others find it; nothing is copied now
        while self._loaded.devices is not None and len(self._idle) > 1:  # experts want the memory of cards
            self._drop_oldest()

    def has_passed(self, row: PagedRow, session: KvSession) -> None:
        """A row has read some of its prompt in a sweep of several."""
        if self._loaded.devices is None and self.partings.ends(row, session.tokens):
            copy = self._copy(session)
            self._idle[copy] = False
            self._copies.add(copy)

    def compute(self, row: PagedRow, ids: Sequence[int]) -> torch.Tensor:
        """The part of a row's prompt that was coming, or these tokens of its answer, by themselves.

        Returns:
            logits [1, V] after the prompt, or those after each token of the answer, or of each beam.
        """
        own = row.own
        assert own is not None
        with torch.inference_mode(), self._given_up(row):
            if self._follows_length:
                restart_angles(self._loaded.model)  # others may have been longer
            if not row.is_reading and row.beams is None:
                with self._loaded.token_by_token():
                    logits = own.step(ids)
            else:
                with self._all_threads():
                    logits = row.beams.step() if isinstance(row.beams, SessionBeams) else own.read()
            return logits.to(self.device)

    def _given_up(self, row: PagedRow) -> AbstractContextManager[None]:
        """While layers come from disk, a step may take so long that nobody wants to wait for its end."""
        stream = self._loaded.stream
        if stream is None:
            return nullcontext()
        return stream.until(lambda: (row.is_reading and self.leaves()) or row.request.cancelled())

    @contextmanager
    def _all_threads(self) -> Generator[None, None, None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def give_up(self) -> bool:
        """Frees what the row that has ended first left; whether there was anything."""
        oldest = next((session for session in self._idle if session.tokens), None)
        if oldest is not None:
            self._copies.discard(oldest)
            oldest.clear()
        return oldest is not None

    def forget(self) -> bool:
        """Frees what rows that have ended left; whether there was anything."""
        had = bool(self.idle_tokens)
        self.partings.forget()
        self._copies.clear()
        for session in self._idle:
            session.clear()
        while len(self._idle) > 1:  # one with all that was prepared for it
            self._drop_oldest()
        return had

    def close(self) -> None:
        """Frees all that is held."""
        self.partings.forget()
        for session in (*self._in_use, *self._idle):
            session.clear()
