"""What pages are computed with exactly as if each sequence were alone: a prompt, or tokens of up to eight answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from engine.common.errors import CancelCheck
from engine.families import family_of
from engine.kernels.native.paged_attention import KvType, PagedLayer, Piece, Pieces
from engine.runtime.decode.generation import ProgressCallback
from engine.runtime.decode.step_model import MOST_ROWS, StepModel, watched_layers
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.fast_path.decoder_layer import knows_layer
from engine.runtime.fast_path.grouped_attention import GroupedAttention
from engine.runtime.fast_path.latent_attention import LatentAttention
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.reuse import exact_tokens
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.recorder import RECORDER


class PagedSteps:
    """Of one model on the CPU.

    Args:
        layers, windows: see `PagedCaches`.

    Attributes:
        chunk_tokens: how much of a prompt is computed at once.
        guesses: whether coming tokens of answers may be guessed.
    """

    def __init__(self, loaded: LoadedModel, layers: list[PagedLayer], windows: list[int]) -> None:
        self._model = loaded.model
        self._step = StepModel(loaded.model, loaded.context_tokens)
        self._caches = PagedCaches(layers, windows)
        self._threads = torch.get_num_threads()
        self.chunk_tokens = loaded.chunk_tokens
        self.guesses = loaded.speculates
        self.copy_page: Callable[[int, int], None] = self._caches.copy_page

    @staticmethod
    def are_likely(loaded: LoadedModel) -> bool:
        """Whether a model may have them: nothing is computed to find that out."""
        model = loaded.model
        layers = decoder_layers(model)
        return (
            bool(layers)
            and loaded.devices is None
            and loaded.stream is None  # to see what attends, its layers would have to be read
            and loaded.kernels is not None
            and loaded.device.type == "cpu"
            and not getattr(model.config, "is_encoder_decoder", False)
            and family_of(model.config.get_text_config(decoder=True).model_type).packs_rows
            and all(knows_layer(layer) and _can_attend(layer, loaded.kv_type) for layer in layers)
            and exact_tokens(model) >= loaded.context_tokens
        )

    @classmethod
    def of(cls, loaded: LoadedModel, layers: list[PagedLayer], windows: list[int]) -> PagedSteps | None:
        """That of a model, or `None` if its own cache does not hold what pages do, token by token."""
        is_narrow = any(layer.kv_type in (KvType.INT8, KvType.FP16) for layer in layers)
        if (
            not (layers and cls.are_likely(loaded))
            or (is_narrow and any(windows))  # windows of a cache of its own are in the model's type
            or not PagedCaches.can_hold(loaded.model, layers, windows)
        ):
            return None
        return cls(loaded, layers, windows)

    @property
    def most_rows(self) -> int:
        """Tokens that `write` computes together now."""
        return MOST_ROWS if self._step.rows_of(MOST_ROWS) is not None else 1

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
        if len(ids) == 1 and start and given is None:
            return self.write(ids, [piece], [position])
        watched = watched_layers(self._model, start, start + len(ids), total, on_progress, cancelled)
        with self._all_threads() if len(ids) > MOST_ROWS else nullcontext(), watched:
            if RECORDER.on:
                RECORDER.forward()
            tokens = torch.tensor([list(ids)]) if given is None else torch.empty(0)
            logits, _ = self._step(tokens, self._caches.of(piece), position, given)
        if RECORDER.on:
            RECORDER.head()
        return logits

    def write(self, ids: Sequence[int], pieces: Sequence[Piece], positions: Sequence[int]) -> torch.Tensor:
        """Tokens of answers; logits [q, V] after each of them.  More than `most_rows`, of beams, take several steps.

        Args:
            positions: of the first token of each piece.
        """
        if len(ids) > (most := self.most_rows) and len(pieces) > 1:
            parts = range(0, len(pieces), most)  # a token each
            cut = [slice(at, at + most) for at in parts]
            return torch.cat([self.write(ids[each], pieces[each], positions[each]) for each in cut])
        places = [at + place for at, piece in zip(positions, pieces, strict=True) for place in range(piece.tokens)]
        if RECORDER.on:
            RECORDER.forward()
        step = self._step.rows_of(len(ids))
        if step is not None:
            logits = step.rows(list(ids), places, self._caches.structs, Pieces(pieces))
        else:  # somebody listens to layers
            (piece,) = pieces
            logits, _ = self._step(torch.tensor([list(ids)]), self._caches.of(piece), positions[0])
        if RECORDER.on:
            RECORDER.head()
        return logits

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        """Prompts are computed by the library in part; see `LoadedModel.token_by_token`."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _can_attend(layer: Any, kv_type: KvType | None) -> bool:
    """Whether native attention over pages holds of a decoder layer's tokens what the library does."""
    return GroupedAttention.can_step(layer) or (kv_type is None and LatentAttention.can_step(layer))
