"""What pages are computed with exactly as if each sequence were alone: a prompt, or tokens of up to eight answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from engine.common.errors import CancelCheck, never_cancelled
from engine.families import family_of
from engine.families.library import own_forward
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, Piece, Pieces
from engine.runtime.decode.encoder_decoder import EncoderDecoderStep
from engine.runtime.decode.generation import ProgressCallback
from engine.runtime.decode.graphs import GraphedSteps
from engine.runtime.decode.pieces import PromptPieces
from engine.runtime.decode.speculation import HeadDrafter
from engine.runtime.decode.step_model import MOST_ROWS, StepModel, watched_layers
from engine.runtime.decode.tabled_attention import attention_over_pages
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.draft_head import draft_head_of
from engine.runtime.fast_path.attention import CompressedAttention, GroupedAttention, LatentAttention, NoAttention
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer, knows_layer
from engine.runtime.fast_path.state_mixer import StateMixer
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.library_caches import LibraryCaches
from engine.runtime.kv.paged_cache import PagedCaches, may_hold
from engine.runtime.kv.reuse import exact_tokens, kinds_by_length, restart_angles
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.recorder import RECORDER

Attending = Callable[[Pieces], AbstractContextManager[Any]]


def packs_mixers(loaded: LoadedModel) -> bool:
    """Whether mixers, too, take the tokens of all rows at once, over pages; else each row's is called by itself."""
    if family_of(loaded.model.config.get_text_config(decoder=True).model_type).packs_rows:
        return loaded.device.type != "mps"  # which has no kernel that attends over pages
    if loaded.devices is not None or loaded.stream is not None or loaded.device.type != "cpu":
        return False
    steps = [own_forward(layer) for layer in decoder_layers(loaded.model)]
    return any(map(_has_state, steps)) and all(
        isinstance(step, SingleTokenLayer)
        and step.is_native
        and not isinstance(step.attention, NoAttention)
        and (isinstance(step.attention, StateMixer) or not step.attention.has_index)
        for step in steps
    )


def has_pages(loaded: LoadedModel) -> bool:
    """Whether pages may hold what a model's layers keep; nothing is computed to find that out."""
    return not getattr(loaded.model.config, "is_encoder_decoder", False) and (
        _are_native(loaded) or may_hold(library_cache(loaded.model))
    )


def attends_there(loaded: LoadedModel) -> bool:
    """Whether the cards of a model attend for rows of jobs, too, over pages there: no schedule orders their layers."""
    return has_pages(loaded) and not (packs_mixers(loaded) and loaded.caches)


class PagedSteps:
    """Of one model.

    Attributes:
        chunk_tokens: how much of a prompt is computed at once.
        guesses: whether coming tokens of answers may be guessed.
        is_native: whether native calls compute steps; else the library does.

    Args:
        attending: within it the library's modules attend over pages.
    """

    def __init__(
        self, loaded: LoadedModel, caches: PagedCaches | LibraryCaches, attending: Attending | None = None
    ) -> None:
        self._model, self._attending = loaded.model, attending
        self.is_native = _are_native(loaded) and isinstance(caches, PagedCaches)
        encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        has_card = loaded.devices is not None
        self._step = (
            EncoderDecoderStep(loaded) if encodes else StepModel(loaded.model, loaded.context_tokens, has_card=has_card)
        )
        kinds = kinds_by_length(loaded.model)
        self._follows_length = "dynamic" in kinds
        self._caches = caches
        self._threads = torch.get_num_threads()
        self.chunk_tokens = loaded.chunk_tokens
        self._device, self._has_card = loaded.device, has_card
        self._stream = loaded.stream
        self._pieces, self._set_aside = PromptPieces(loaded), ExitStack()
        self.guesses = loaded.speculates and not encodes
        self.graphs: GraphedSteps | None = None
        """What repeats steps on a card."""
        is_alike = not kinds and exact_tokens(loaded.model) >= loaded.context_tokens and isinstance(caches, PagedCaches)
        if loaded.graph_device is not None and loaded.devices is not None and is_alike:
            assert isinstance(caches, PagedCaches)
            places = [device.torch_device for device in loaded.devices.devices]
            self.graphs = GraphedSteps(
                self._step,
                loaded.graph_device,
                caches,
                loaded.context_tokens,
                attention_over_pages(loaded.model, places, loaded.context_tokens),
                self._one_by_one,
                takes_rows=family_of(loaded.model.config.get_text_config(decoder=True).model_type).packs_rows,
                tokens=loaded.devices.experts.tokens,
            )
            self.guesses = self.guesses and self.graphs.takes_guesses
        self._head = draft_head_of(loaded.model) if self.guesses else None

    @classmethod
    def of(
        cls, loaded: LoadedModel, caches: PagedCaches | LibraryCaches, attending: Attending | None = None
    ) -> PagedSteps | None:
        """That of a model, or `None` if its own cache does not hold what pages do, token by token."""
        if isinstance(caches, PagedCaches) and not (has_pages(loaded) and caches.can_hold(loaded.model)):
            return None
        return cls(loaded, caches, attending)

    def drafter(self) -> HeadDrafter | None:
        """What guesses coming tokens of one answer beside its text, if the model has a head for that."""
        return HeadDrafter(self._model, self._head) if self._head is not None else None

    @contextmanager
    def listening(self) -> Iterator[list[torch.Tensor]]:
        """While tokens are computed; then the list has their hidden states [1, q, H], if a head drafts from them."""
        head, heard = self._head, list[torch.Tensor]()
        if head is not None:
            head.heard = []
        try:
            yield heard
        finally:
            found = head.all_heard() if head is not None else None
        if found is not None:
            heard.append(found)

    @property
    def most_rows(self) -> int:
        """Tokens that `write` computes together now."""
        if self.graphs is not None:
            return self.graphs.most
        return MOST_ROWS if self.is_native and self._step.rows_of(MOST_ROWS) is not None else 1

    @property
    def was_usual(self) -> bool:
        """Whether the last step took what such steps take: none is captured while it is computed."""
        return self.graphs is None or self.graphs.refused is not None or self.graphs.was_repeated

    def close(self) -> None:
        """Frees what is held for steps that are repeated."""
        self._set_aside.close()
        if self.graphs is not None:
            self.graphs.forget()

    def at_once(self, left: int, undivided: int = 0) -> int:
        """How many of the tokens that are left of a prompt to read next; on a card, memory for them is set aside.

        Args:
            undivided: that have to be read together, if any.
        """
        self._set_aside.close()
        if undivided:
            return undivided
        return min(left, self._set_aside.enter_context(self._pieces.of(left, self.chunk_tokens)))

    def reads_less(self, tokens: int) -> bool:
        """After a piece of a prompt for which a card had no memory: from now on they are shorter, if they can be."""
        if tokens <= PAGE_TOKENS or not self._has_card:
            return False
        self.chunk_tokens = min(self.chunk_tokens, max(PAGE_TOKENS, tokens // 2))
        return True

    def read(
        self,
        ids: Sequence[int],
        piece: Piece,
        total: int,
        on_progress: ProgressCallback,
        cancelled: CancelCheck,
        position: int | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """The next tokens of a prompt of `total`; logits [1, V] after them.

        Args:
            position: of the first of them, if not as many as are before it.
            given: what the model gets in their place, where pictures are among them.

        Raises:
            RequestCancelled: asked for between two layers; nothing has been read then.
        """
        start = piece.held
        position = start if position is None else position
        is_few = len(ids) == 1 or (self.is_native and self._step.rows_of(len(ids)) is not None)
        if is_few and start and given is None:
            return self.write(ids, [piece], [position], cancelled)[-1:]
        watched = watched_layers(self._model, start, start + len(ids), total, on_progress, cancelled)
        threads = self._all_threads() if len(ids) > MOST_ROWS else nullcontext()
        with self._set_aside, threads, watched, self._until(cancelled):
            if RECORDER.on:
                RECORDER.forward()
            tokens = torch.tensor([list(ids)], device=self._device) if given is None else torch.empty(0)
            logits = self._library_step(tokens, piece, position, given)
        if RECORDER.on:
            RECORDER.head()
        return logits

    def _library_step(
        self,
        tokens: torch.Tensor,
        piece: Piece,
        position: int,
        given: Mapping[str, Any] | None = None,
        *,
        passes: bool = False,
    ) -> torch.Tensor:
        if self._follows_length:
            restart_angles(self._model)  # others may have been longer
        logits, cache = self._step(tokens, self._caches.of(piece, passes=passes), position, given)
        self._caches.keep(piece, cache)
        return logits

    def _until(self, cancelled: CancelCheck) -> AbstractContextManager[Any]:
        """While layers come from disk, a step may take so long that nobody wants to wait for its end."""
        return self._stream.until(cancelled) if self._stream is not None else nullcontext()

    def write(
        self,
        ids: Sequence[int],
        pieces: Sequence[Piece],
        positions: Sequence[int],
        cancelled: CancelCheck = never_cancelled,
    ) -> torch.Tensor:
        """Tokens of answers; logits [q, V] after each of them.  More than `most_rows`, of beams, take several steps.

        Args:
            positions: of the first token of each piece.
        """
        if isinstance(self._caches, LibraryCaches) and len(pieces) > 1:
            joined = self._caches.together(pieces)
            if joined is not None:
                tokens = torch.tensor(ids, device=self._device)[:, None]
                with self._until(cancelled):
                    logits, joined = self._step(tokens, joined, positions[0])
                self._caches.apart(pieces, joined)
                return logits
        if len(ids) > (most := self.most_rows) and len(ids) == len(pieces) > 1:
            parts = range(0, len(pieces), most)
            cut = [slice(at, at + most) for at in parts]
            return torch.cat([self.write(ids[each], pieces[each], positions[each]) for each in cut])
        places = [at + place for at, piece in zip(positions, pieces, strict=True) for place in range(piece.tokens)]
        if RECORDER.on:
            RECORDER.forward()
        step = self._step.rows_of(len(ids)) if self.is_native else None
        if self._follows_length:
            restart_angles(self._model)  # others may have been longer
        if step is not None:
            assert isinstance(self._caches, PagedCaches)
            logits = step.rows(list(ids), places, self._caches.structs, Pieces(pieces))
        elif self.graphs is not None and (repeated := self.graphs.step(ids, places, pieces)) is not None:
            logits = repeated
        else:  # the library computes, or somebody listens to layers
            with self._until(cancelled):
                logits = self._one_by_one(ids, pieces, positions)
        if RECORDER.on:
            RECORDER.head()
        return logits

    def _one_by_one(self, ids: Sequence[int], pieces: Sequence[Piece], positions: Sequence[int]) -> torch.Tensor:
        singles, passes, left = list[torch.Tensor](), self._attending is not None, iter(ids)
        for piece, position in zip(pieces, positions, strict=True):
            state = piece.state
            for place in range(piece.tokens):
                held = piece.held + place
                own, state = replace(piece, held=held, tokens=1, state=state), piece.next_state
                with self._attending(Pieces([own])) if self._attending is not None else nullcontext():
                    token = torch.tensor([[next(left)]], device=self._device)
                    singles.append(self._library_step(token, own, position + place, passes=passes))
        return torch.cat(singles)

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        """Prompts are computed by the library in part; see `LoadedModel.token_by_token`."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _are_native(loaded: LoadedModel) -> bool:
    """Whether native calls compute steps."""
    layers = decoder_layers(loaded.model)
    if loaded.device.type != "cpu" or loaded.graph_device is not None:
        return False
    return loaded.kernels is not None and all(
        knows_layer(layer) and _can_attend(layer, loaded.kv_type) for layer in layers
    )


def _can_attend(layer: Any, kv_type: KvType | None) -> bool:
    """Whether native attention over pages holds of a decoder layer's tokens what the library does."""
    return (
        _has_state(own_forward(layer))
        or NoAttention.can_step(layer)
        or GroupedAttention.can_step(layer)
        or (kv_type is None and (LatentAttention.can_step(layer) or _is_compressed(own_forward(layer))))
    )


def _is_compressed(step: Any) -> bool:
    """Whether a layer is one of those that are computed whole or not at all."""
    return isinstance(step, SingleTokenLayer) and isinstance(step.attention, CompressedAttention) and step.is_native


def _has_state(step: Any) -> bool:
    return isinstance(step, SingleTokenLayer) and isinstance(step.attention, StateMixer)
