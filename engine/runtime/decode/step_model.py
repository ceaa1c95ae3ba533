"""One forward pass of a decoder-only model over a cache: what to pass, decided once.

The library's model around the layers decides again for every token what never changes: masks that hide nothing, which
layers there are, which outputs were asked for, the angles of a position.  With small models that took as long as a
tenth of the layers, so a step of a few tokens through layers that all have a fast path goes past it.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.common.errors import CancelCheck, RequestCancelled
from engine.common.footprint import SHORT_TOKENS
from engine.experts.card_tokens import CardTokens
from engine.families import fast_path_of
from engine.families.family import FastPath
from engine.families.library import WITH_PICTURES, own_forward
from engine.formats import BF16
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import out_of_memory
from engine.kernels.native.linear import address_of, is_plain, is_readable, keeps_rows_apart, linear_struct
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import AnglesStruct, LayerStruct, ModelStruct, PagesStruct, StreamsStruct
from engine.runtime.decode.generation import ProgressCallback
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.fast_path.angles import Angles, Rotations
from engine.runtime.fast_path.attention import CompressedAttention, GroupedAttention, LatentAttention, NativeAttention
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.fast_path.norms import epsilon_of, offset_of
from engine.runtime.fast_path.sparse_block import STEP_IDS
from engine.runtime.fast_path.state_mixer import StateMixer
from engine.runtime.kv.reuse import kinds_by_length

MOST_ROWS = MAX_TOKENS
"""Most tokens of a step that are computed together, each as if alone."""


@contextmanager
def watched_layers(
    model: Any, begin: int, end: int, total: int, on_progress: ProgressCallback, cancelled: CancelCheck
) -> Iterator[None]:
    """While a long chunk is computed, every layer reports progress and checks for a cancel.

    Raises:
        RequestCancelled: out of the forward, whose cache must not be used afterwards.
    """
    layers = decoder_layers(model) if end - begin > SHORT_TOKENS else []
    passed = 0

    def enter(_module: Any, _args: Any) -> None:
        nonlocal passed
        if cancelled():
            raise RequestCancelled
        on_progress(begin + (end - begin) * passed // len(layers), total)
        passed += 1

    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class StepModel:
    """Calls a transformers model the way its own `generate` does, without what `generate` does around it.

    Positions are slices of one tensor, no attention mask is passed (there is no padding), and only the last position's
    logits are asked for.

    Args:
        model: a causal language model in eval mode.
        context_tokens: longest context; positions are laid out for it, and for more if more is needed.
        has_card: whether experts are computed now on a card and now beside it: several tokens need not be rounded as
            each alone.
    """

    def __init__(self, model: Any, context_tokens: int, *, has_card: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._device: torch.device = model.device
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._wants_positions = "position_ids" in parameters
        self._positions = self._lay_out(context_tokens)
        self._native = TokenStep.of(model, has_card=has_card)
        self._last_layer = _last_layer(model)
        trained = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", context_tokens)
        self._angles_grow = "dynamic" in kinds_by_length(model) and context_tokens > trained

    @property
    def model(self) -> Any:
        """The library's."""
        return self._model

    @property
    def dtype(self) -> torch.dtype:
        """What the model's own operators compute in; logits may be in float32 all the same."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def attends_in_chunks(self) -> bool:
        """Whether some layers attend to the tokens since the last multiple of a length (Llama 4)."""
        config = self._model.config.get_text_config(decoder=True)
        return "chunked_attention" in (getattr(config, "layer_types", None) or ())

    @property
    def why_not_repeated(self) -> str:
        """Why a step cannot be repeated as it was for the token before; empty if it can."""
        return "rotary embeddings that follow the length of the context" if self._angles_grow else ""

    def rows_of(self, sequences: int) -> TokenStep | None:
        """What computes a token of so many sequences in one native call, if that is possible."""
        return self._native if self._native is not None and self._native.takes_rows(sequences) else None

    def _lay_out(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens, device=self._device).unsqueeze(0)

    def __call__(
        self, tokens: torch.Tensor, cache: Cache | None, start: int, given: Mapping[str, Any] | None = None
    ) -> tuple[torch.Tensor, Cache]:
        """Runs `tokens` [B, q] int64 at positions `start`, ..., `start + q - 1` and appends them to the cache.

        Args:
            given: what the library's model gets in their place, where pictures are among them.

        Returns:
            logits [B, V] of the last position in the model's precision, and the cache (the model's own, if `cache` was
            `None`).
        """
        if given is not None:
            return self._of_library(given, cache)
        end = start + tokens.shape[1]
        if end > self._positions.shape[1]:
            self._positions = self._lay_out(2 * end)
        positions = self._positions[:, start:end]
        if tokens.shape[0] > 1:
            # One row per sequence, as `generate` passes them: some families keep them beside the cache.
            positions = positions.expand(tokens.shape[0], -1)
        return self.at(positions, tokens, cache)

    def at(self, positions: torch.Tensor, tokens: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
        """The same at positions [B, q] that are in a tensor."""
        return self._of_library(
            {"input_ids": tokens, "position_ids": positions} if self._wants_positions else {"input_ids": tokens}, cache
        )

    def rows_at(self, positions: torch.Tensor, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits [q, V] after each of tokens [1, q] at these positions, which may be of several sequences."""
        count = tokens.shape[1]
        if count == 1:
            return self.at(positions, tokens, cache)[0]
        return self._all_logits(tokens, positions, cache)

    def _all_logits(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        extra: dict[str, Any] = {"logits_to_keep": tokens.shape[1]} if self._last_only else {}
        if self._wants_positions:
            extra["position_ids"] = positions
        output = self._model(input_ids=tokens, cache=cache, use_cache=True, return_dict=True, **extra)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _of_library(self, given: Mapping[str, Any], cache: Cache | None) -> tuple[torch.Tensor, Cache]:
        with self._last_row_only():
            output = self._model(**given, **self._last_only, cache=cache, use_cache=True, return_dict=True)
        return output.logits[:, -1], output.cache

    @contextmanager
    def _last_row_only(self) -> Iterator[None]:
        """While in use, the last layer leaves out what only the logits of other positions need."""
        last = self._last_layer
        if last is None or _last_norm(self._model)._forward_hooks:  # somebody listens to all hidden states
            yield
            return
        last.wants_last = True
        try:
            yield
        finally:
            last.wants_last = False


def _last_layer(model: Any) -> SingleTokenLayer | None:
    """The last layer of a model of a known kind: what its layers give is the next one's input, and nothing else."""
    if fast_path_of(model, "model") is None:
        return None
    layer = own_forward(model.model.layers[-1])
    is_attention = isinstance(layer, SingleTokenLayer) and isinstance(layer.attention, NativeAttention)
    return layer if is_attention else None


def _text_parts(model: Any) -> tuple[Any, Any, FastPath] | None:
    """What has the embedding, the layers and the last norm of a model of a known kind, its head, and their names.

    Of one that sees pictures too, what computes text.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for known in (model, decoder):
        if (path := fast_path_of(known, "model")) is not None:
            return known.model, known.lm_head, path
    path = fast_path_of(decoder.layers[0], "layer") if type(model).__name__ in WITH_PICTURES else None
    return None if path is None else (decoder, model.lm_head, path)


def _last_norm(model: Any) -> Any:
    path = fast_path_of(model, "model")
    assert path is not None
    return getattr(model.model, path.last_norm)


class WholeModel:
    """All layers of a model, the last norm and the head in one native call.

    Between two calls a processor's threads wait and memory rests; with a call for each part of a layer that came to a
    hundredth of a step of a large model, and to a tenth of a small one's.

    Args:
        streams: what adds up the last streams of hidden states, if there are several.
    """

    def __init__(self, layers: Sequence[SingleTokenLayer], norm: Any, head: Any, streams: Any = None) -> None:
        self._layers = layers
        self._streams = list[tuple[StreamsStruct, tuple[torch.Tensor, ...]]]()
        self._wide_norm = norm.weight.detach().float()
        self._attentions = [layer.attention for layer in layers]
        self._kernels = self._attentions[0].kernels
        self._structs = (LayerStruct * len(layers))()
        types = sorted({attention.type for attention in self._attentions})
        self._rotating = [
            max((each for each in self._attentions if each.type == name), key=lambda each: each.rotated)
            for name in types
        ]
        self._angles = (AnglesStruct * len(types))()
        for struct, layer in zip(self._structs, layers, strict=True):
            assert layer.sparse is not None
            if isinstance(layer.attention, LatentAttention):
                struct.latent = layer.attention.address
            elif isinstance(layer.attention, StateMixer):
                struct.delta = layer.attention.address
            elif isinstance(layer.attention, CompressedAttention):
                struct.compressed = layer.attention.address
            elif isinstance(layer.attention, GroupedAttention):
                struct.attention = layer.attention.address
            for place, module in enumerate(layer.streams or ()):
                struct.streams[place] = self._around(module)
            struct.block = layer.sparse.address if layer.sparse.is_there else None
            struct.chosen, struct.shares = layer.sparse.routing
            struct.angles = types.index(layer.attention.type)
        self._model = ModelStruct(
            ctypes.addressof(self._structs),
            norm.weight.data_ptr() if streams is None else None,
            address_of(head.bias),
            linear_struct(head),
            epsilon_of(norm),
            len(layers),
            offset_of(norm),
            *((self._wide_norm.data_ptr(), self._around(streams)) if streams is not None else ()),
        )
        self._vocabulary: int = self._model.head.rows
        self._logits = torch.bfloat16 if self._model.head.format == BF16.native else torch.float32

    @classmethod
    def of(cls, layers: Sequence[SingleTokenLayer], norm: Any, head: Any, streams: Any = None) -> WholeModel | None:
        """That of a model, or `None` if some part of it is of another kind."""
        if (
            any(layer.sparse is None for layer in layers)
            or type(norm) is not type(layers[0].norm)
            or not (is_plain(norm.weight) or streams is not None)
            or not (keeps_rows_apart(head) and is_readable(head))
        ):
            return None
        return cls(layers, norm, head, streams)

    def _around(self, module: Any) -> int:
        """The struct of what is round a part of a layer, or of what adds up the last streams."""
        rounds: int = getattr(module, "hc_sinkhorn_iters", 0)
        own = (module.fn, module.base, module.scale) if rounds else (module.hc_fn, module.hc_base, module.hc_scale)
        mix, base, scale = (each.detach().float().contiguous() for each in own)
        struct = StreamsStruct(
            mix.data_ptr(),
            base.data_ptr(),
            (ctypes.c_float * 3)(*scale.tolist()),
            module.input_norm.eps,
            module.hc_eps if rounds else module.eps,
            module.hc_mult,
            rounds,
        )
        self._streams.append((struct, (mix, base)))
        return ctypes.addressof(struct)

    def rows(
        self, hidden: torch.Tensor, held: Sequence[PagesStruct], pieces: Pieces, positions: dict[str, Any]
    ) -> torch.Tensor | None:
        """Hidden states [1, q, hidden] of the next tokens of several sequences, float32, contiguous -> logits [q, V]
        after each, as if each were alone, bit by bit.

        Logits are float32 unless the head is in bf16.

        Args:
            held: the pages of each layer, into which keys and values go.
            pieces: the sequences of these tokens.
            positions: their cosines and sines, by the type of the layers that they are for.

        Returns:
            `None`, and nothing was done, if these are not for one call.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        angles = self._turn_to(positions, pieces.tokens)
        if angles is None:
            return None
        for struct, pages in zip(self._structs, held, strict=True):
            struct.held, struct.pieces = pages, pieces.address_for(pages)
        return self._compute(len(pieces.pieces), hidden, angles)

    def _turn_to(self, positions: dict[str, Any], tokens: int) -> list[Angles] | None:
        """The angles of so many tokens; `None` if they are of others, or no step may be computed now."""
        if any(layer.sparse is None or not layer.sparse.can_step for layer in self._layers):
            return None
        found = [attention.angles_of(positions[attention.type], tokens) for attention in self._rotating]
        angles = [each for each in found if each is not None]
        return angles if len(angles) == len(found) else None

    def _compute(self, pieces: int, hidden: torch.Tensor, angles: list[Angles]) -> torch.Tensor:
        for into, found in zip(self._angles, angles, strict=False):
            into.cos, into.sin, into.angle_step, into.token_step = found.arguments
        kernels, tokens = self._kernels, hidden.shape[1]
        logits = hidden.new_empty((tokens, self._vocabulary), dtype=self._logits)
        failed = kernels.model_step(
            kernels.pool,
            ctypes.addressof(self._model),
            pieces,
            tokens,
            hidden.data_ptr(),
            ctypes.addressof(self._angles),
            logits.data_ptr(),
        )
        if failed:
            raise out_of_memory()
        return logits


def _one_by_one(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """`compute` for each token of [1, q, n] alone, joined."""
    if rows.shape[1] == 1:
        return compute(rows)
    return torch.cat([compute(row) for row in torch.split(rows, 1, dim=1)], dim=1)


def _product(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer of each token of [1, q, n] as if alone; where the kernels compute it, in one call."""
    result: torch.Tensor = linear(rows) if keeps_rows_apart(linear) else _one_by_one(linear, rows)
    return result


class TokenStep:
    """Steps of a token, of a few that are tried together, or of a few sequences, through one model."""

    def __init__(self, model: Any, *, has_card: bool) -> None:
        self._has_card = has_card
        parts = _text_parts(model)
        assert parts is not None
        inner, self._head, path = parts
        self._embed, self._norm = getattr(inner, path.embedding), getattr(inner, path.last_norm)
        self._multiple: float = inner.embedding_multiplier if path.has_multiples else 1.0
        self._divisor: float = inner.config.logits_scaling if path.has_multiples else 1.0
        self._cap: float | None = getattr(inner.config, "final_logit_softcapping", None)
        self._layers: list[SingleTokenLayer] = [own_forward(layer) for layer in inner.layers]
        self._hooks = [hooks for layer in inner.layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        rotary = getattr(inner, "rotary_emb", getattr(inner, "pos_emb", None))
        self._angles = Rotations(rotary, {layer.attention.type for layer in self._layers})
        streams = getattr(inner, path.streams[2]) if path.streams is not None else None
        self._has_streams = streams is not None
        self._whole = WholeModel.of(self._layers, self._norm, self._head, streams)

    @classmethod
    def of(cls, model: Any, *, has_card: bool = False) -> TokenStep | None:
        """That of a model, or `None` if it is of no known kind or some of its layers have no fast path."""
        parts = _text_parts(model)
        if parts is None or getattr(parts[0], parts[2].embedding).weight.dtype != torch.bfloat16:
            return None
        is_known = all(isinstance(own_forward(layer), SingleTokenLayer) for layer in parts[0].layers)
        return cls(model, has_card=has_card) if is_known else None

    @property
    def card(self) -> CardTokens | None:
        """The tokens of a card that has experts of the model, if it computes any by itself."""
        blocks = (layer.sparse for layer in self._layers if layer.sparse is not None)
        return next((block.tokens for block in blocks if block.tokens is not None), None)

    def takes_rows(self, tokens: int) -> bool:
        """Whether `rows` computes so many now; one may have an MLP that the library computes."""
        return (
            tokens <= (MOST_ROWS if self._angles.is_fixed else 1)
            and not any(self._hooks)
            and (self._has_card or tokens == 1 or all(layer.is_native for layer in self._layers))
            and (not self._has_streams or self._computes_streams)
        )

    @property
    def _computes_streams(self) -> bool:
        """Whether whole steps are computed now: between streams there are no others."""
        is_native = self._whole is not None and all(layer.is_native for layer in self._layers)
        return is_native and not self._norm._forward_hooks

    def rows(self, ids: list[int], positions: list[int], held: Sequence[PagesStruct], pieces: Pieces) -> torch.Tensor:
        """The next tokens of several sequences, if it `takes_rows`; logits [R, V].

        Each sequence's are those of its step alone, bit by bit.

        Args:
            held: the pages of each layer.
            pieces: the sequences of these tokens.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        embedded = self._embed(torch.tensor([ids]))
        hidden = self._begun(embedded)
        angles = self._angles.at(positions, hidden if self._has_streams else embedded)
        if self._has_streams:
            STEP_IDS[: len(ids)] = torch.tensor(ids)
        with self._by_card(len(ids)):
            whole = None if self._norm._forward_hooks else self._whole
            logits = whole.rows(hidden, held, pieces, angles) if whole is not None else None
            if logits is not None:
                return self._ended(logits)
            for layer, pages in zip(self._layers, held, strict=True):
                hidden = layer.rows(hidden, pages, pieces, angles[layer.attention.type])
            return self._ended(_product(self._head, _one_by_one(self._norm, hidden))[0])

    def _by_card(self, tokens: int) -> AbstractContextManager[None]:
        """Tokens are a card's own, or the dispatcher's, which is compared by its single ones."""
        card = self.card
        if card is not None and card.takes_next and tokens <= card.most_rows:
            return card.token()
        return nullcontext() if card is None or tokens > 1 else card.dispatched()

    def _begun(self, rows: torch.Tensor) -> torch.Tensor:
        """An embedding's rows as what layers take."""
        hidden = rows.float()
        return hidden if self._multiple == 1 else hidden * self._multiple

    def _ended(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of its head's."""
        logits = logits if self._divisor == 1 else logits / self._divisor
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
