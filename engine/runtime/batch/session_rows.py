"""Rows over caches of their own, computed one after the other by the library's model: what pages do not hold.

That is so of encoder-decoders, of layers that keep what pages do not know or come from disk, and on Apple's chips.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.jobs.rows import Check, never
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.beam_search import Beams, BeamStep
from engine.runtime.decode.encoder_decoder_session import EncoderDecoderSession
from engine.runtime.decode.generation import BeamModel, Decoded, Reading, ignore_progress, ignore_reused
from engine.runtime.decode.kv_session import KvSession, common_prefix
from engine.runtime.kept.prefixes import KeptPrefixes
from engine.runtime.kv.pages import PageSizes
from engine.runtime.kv.reuse import kinds_by_length, restart_angles
from engine.runtime.loaded_model import LoadedModel

if TYPE_CHECKING:
    from engine.runtime.batch.packed_sweep import Work
    from engine.runtime.schedule.request import PreparedRow
    from engine.runtime.schedule.row import PagedRow

Session = KvSession | EncoderDecoderSession


@dataclass(eq=False)
class RowSession:
    """The session of a row in progress.

    Attributes:
        coming: tokens of the part of its prompt that is read next.
    """

    rows: SessionRows
    session: Session
    reading: Reading
    coming: int = 0

    def takes(self, tokens: int) -> bool:
        """Whether a step computes so many tokens of its answer."""
        return isinstance(self.session, KvSession) and self.session.takes(tokens)

    @torch.inference_mode()  # as they were computed: states are, once more
    def take_back(self, tokens: int) -> None:
        """Forgets the last tokens, which did not come true."""
        assert isinstance(self.session, KvSession)
        self.session.take_back(tokens)

    def beams(self, search: Beams[Decoded], width: int) -> SessionBeams:
        """So many sequences that go on from what is held."""
        return SessionBeams(search, self.session.beams(width), self.rows.device)

    def close(self) -> None:
        """The row has ended, or has stepped aside: the next one may go on from what is held."""
        self.reading.close()
        self.rows.takes_back(self.session)


class SessionBeams:
    """The beams of a row's search, with a cache of their own.

    Attributes:
        tokens: the next one of each.
    """

    taken = needs = beside = 0
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
        """Nothing is held in pages."""


class SessionRows:
    """See `PackedModel`, in whose place it stands; each sweep is of one row.  Pages are counted, and hold nothing.

    Args:
        speculates: whether coming tokens may be guessed and tried together; `None` is what the model was loaded for.
        kept: what earlier answers left; `None` reads each prompt that no earlier answer here shares.
    """

    state_bytes = pages_beside = 0
    caches = mixers = own_caches = room = None
    was_usual = True

    def __init__(
        self,
        loaded: LoadedModel,
        policy: BatchPolicy,
        *,
        speculates: bool | None = None,
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._loaded, self._policy, self._kept = loaded, policy, kept
        self.device, self.chunk_tokens = loaded.device, loaded.chunk_tokens
        self.logits_place = loaded.device
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self.guesses = (loaded.speculates if speculates is None else speculates) and not self._encodes
        self.context_tokens = loaded.context_tokens * (1 + self._encodes)  # prompt and answer each have all of it
        self.page_bytes = max(1, loaded.info.kv_bytes_per_token * PAGE_TOKENS)
        self.sizes = PageSizes(self.page_bytes)
        self.pages = max(1, policy.kv_bytes // self.page_bytes)
        self._threads = torch.get_num_threads()
        self._follows_length = "dynamic" in kinds_by_length(loaded.model)
        self._in_use, self._idle = list[Session](), list[Session]()
        """Idle ones hold what the last answers left, the oldest first."""
        self.leaves: Check = never
        """Asked between the layers of a prompt: whether it is left there, and begun again later."""

    # --- as of `PackedModel` ------------------------------------------------------------------------

    def allocate(self, pages: int, states: int = 0, windows: int = 0, *, by_head: bool = False) -> None:
        """Nothing: caches grow with their tokens."""

    def discard(self, pages: Sequence[int]) -> None:
        """Nothing, likewise."""

    discard_states = discard_windows = discard

    def heed(self, _fit: Callable[..., bool]) -> None:
        """Nothing: who serves follows what other programs leave."""

    def are_others_in_the_way(self) -> bool:
        """Whether a device refuses memory because other programs hold it; a session finds out by itself."""
        return False

    def time_parts(self) -> None:
        """Sweeps follow no schedule."""

    def exact_steps(self) -> SessionRows:
        """Each row is computed as if alone."""
        return self

    def reads_less(self, tokens: int) -> bool:  # noqa: ARG002 - as of `PagedSteps`
        """See `PagedSteps`; a session does by itself."""
        return False

    def threads(self) -> AbstractContextManager[None]:
        """See `PackedModel`."""
        return self._loaded.token_by_token()

    def lighten(self, *, is_exact: bool = False) -> bool:  # noqa: ARG002 - as of `PackedModel`
        """After a step for which there was no memory: frees what is only held in case that somebody goes on with it;
        whether there was anything."""
        had = self.tokens - sum(session.tokens for session in self._in_use)
        self.forget()
        return bool(had)

    def forget(self) -> None:
        """Frees what rows that have ended left."""
        idle, self._idle = self._idle, []
        for session in idle:
            session.clear()
        self._idle = idle[:1]  # with all that was prepared for it

    def close(self) -> None:
        """Frees all that is held."""
        for session in (*self._in_use, *self._idle):
            session.clear()

    # --- sessions ------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens now held."""
        return sum(session.tokens for session in (*self._in_use, *self._idle))

    @property
    def nbytes(self) -> int:
        """Bytes now held, spare capacity included."""
        return sum(session.bytes for session in (*self._in_use, *self._idle))

    def prepare(self) -> None:
        """Makes what the first row needs."""
        if not (self._in_use or self._idle):
            self._idle.append(self._new())

    def _new(self) -> Session:
        if self._encodes:
            return EncoderDecoderSession(self._loaded)
        return KvSession(self._loaded, guesses=self.guesses, kept=self._kept)

    def _session_for(self, row: PagedRow) -> Session:
        """That which holds most of what a row begins with, else the one of no use for longest."""
        if not self._idle:
            self._idle.append(self._new())
        session = max(self._idle, key=lambda each: common_prefix(each.ids, row.prompt))
        self._idle.remove(session)
        self._in_use.append(session)
        while self._idle and self.nbytes > self._policy.kv_bytes:
            self._idle.pop(0).clear()
        return session

    def takes_back(self, session: Session) -> None:
        """Its row is over."""
        self._in_use.remove(session)
        self._idle.append(session)
        if not session.is_whole:
            session.clear()
        elif isinstance(session, KvSession):
            session.keep()  # others find it; nothing is copied now

    def answer_prefix(self, new: PreparedRow) -> list[int]:
        """The tokens that its answer continues."""
        return EncoderDecoderSession.prefix(self._loaded) if self._encodes else new.text

    @torch.inference_mode()
    def begin(self, row: PagedRow) -> None:
        """A row goes on from what is there of its prompt, and of its answer if it has stepped aside."""
        request, answer = row.request, row.sequence.ids
        session = self._session_for(row)
        if isinstance(session, KvSession):
            session.chat = request.chat
        reading = session.read(
            row.prompt[: len(row.prompt) - len(answer)],
            ignore_progress if answer else request.on_progress,
            lambda: self.leaves() or request.cancelled(),
            ignore_reused if answer else request.on_reused,
            repeats=request.repeats,
            answer=answer,
        )
        row.own = own = RowSession(self, session, reading)
        own.coming = next(reading)
        row.starts_behind(session.tokens)
        if isinstance(session, KvSession):
            row.layout = session.layout
            drafters = session.drafters()
            # Guesses of a draft head depend on the time they take, and change rounding.
            if row.speculation is not None and request.repeats and drafters:
                row.speculation = None
            elif row.speculation is not None:
                row.speculation.use(drafters)

    # --- sweeps --------------------------------------------------------------------------------------

    def sweep(self, work: list[Work]) -> Generator[None, None, torch.Tensor]:
        """A part of a prompt, or a step of an answer, with a pause before it.

        Returns:
            logits [1, V] after the prompt, or those after each token of the answer, or of each beam.
        """
        (each,) = work
        yield
        row = each.row
        if row.beams is None:
            row.piece(each.tokens)  # counts them
        with torch.inference_mode(), self._given_up(row):
            if self._follows_length:
                restart_angles(self._loaded.model)  # others may have been longer
            return self._logits(each, row).to(self.device)

    def _logits(self, each: Work, row: PagedRow) -> torch.Tensor:
        own = row.own
        assert isinstance(own, RowSession)
        if row.is_reading:
            with self._all_threads():
                try:
                    own.coming = next(own.reading)
                except StopIteration as end:
                    logits, row.kept = end.value
                    return logits  # type: ignore[no-any-return]
            return torch.empty(0)
        if row.beams is not None:
            assert isinstance(row.beams, SessionBeams)
            with self._all_threads():
                return row.beams.step()
        ids = each.ids
        if len(ids) > 1:
            assert isinstance(own.session, KvSession)
            return own.session.several(ids)
        return own.session.step(torch.tensor([ids], device=self.device), ids[0])

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
