"""The decoder layers of a library model, one at a time: their arguments are recorded, then replayed.

The model's own forward runs with its layers replaced by stubs that record their arguments.  The real layers are then
called with these arguments, in any order and in any pieces.  Finally the forward runs again, with the last stub
returning the real layers' output, so that the library's own final norm and head follow.  Native kernels compute the
linear layers of every family, and whole attention layers of some.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.common import clock
from engine.experts.dispatch import experts_forward
from engine.experts.whole_layer import STANDS_IN
from engine.families.library import own_forward, replaced
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import RowsLinear, attention_rows, route_rows
from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer, Piece, Pieces, StatePages
from engine.kernels.native.structs import PagesStruct, SparseBlockStruct
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.decode.step_model import TokenStep
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.fast_path.attention import GroupedAttention, LatentAttention, attention_struct
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer, knows_layer
from engine.runtime.fast_path.norms import LayerNorms, add_mlp, mlp_of, multiple_of
from engine.runtime.fast_path.sparse_block import SparseBlock, shared_expert_of
from engine.runtime.fast_path.state_mixer import StateMixer
from engine.runtime.kv.paged_cache import PagedCaches
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


class LatentRows:
    """The attention of one decoder layer, from the norm before it to the residual after it.

    Args:
        native: of the same layer.
        states: of its module, which is to have pages of latents.
    """

    def __init__(self, layer: Any, native: LatentAttention, states: PagedStates) -> None:
        self._module, self._norms = layer.self_attn, LayerNorms.of(layer)
        self._native, self._states = native, states

    @staticmethod
    def can(layer: Any) -> bool:
        """Whether the module of a layer that native steps know expands latents in a call of its own."""
        return hasattr(layer.self_attn, "expand_kv")

    def attend(self, hidden: torch.Tensor, pieces: Pieces, positions: Any) -> torch.Tensor:
        """Hidden states [1, T, H] plus attention, float32.

        Args:
            positions: the angles of these tokens, as the model gives them to its layers.
        """
        hidden = hidden.float()
        out = torch.empty_like(hidden)
        paged, struct = self._states.layer_of(self._module)
        for group in short_pieces(pieces):
            places, some = some_pieces(pieces, group)
            out[:, places] = self._native.rows(hidden[:, places], struct.held, some, _of_tokens(positions, places))
        if long := [place for place, piece in enumerate(pieces.pieces) if piece.tokens > MAX_TOKENS]:
            places, some = some_pieces(pieces, long)
            before = hidden[:, places]
            self._states.elsewhere = partial(_attend_expanded, paged, some)
            try:
                attended = self._module(
                    hidden_states=self._norms.before_attention(before),
                    attention_mask=None,
                    cache=_LatentPages(paged, some),
                    position_embeddings=_of_tokens(positions, places),
                )[0]
            finally:
                self._states.elsewhere = None
            out[:, places] = before + attended
        return out


class _LatentPages:
    """The cache that a module is given for prompts: latents go into pages, and it goes on with those of its tokens."""

    def __init__(self, paged: PagedLayer, pieces: Pieces) -> None:
        self._paged, self._pieces = paged, pieces

    def update(
        self, latents: torch.Tensor, rotary_keys: torch.Tensor, _layer: int, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows, [1, 1, T, rank] and [1, 1, T, rope]."""
        pages, rows = _where(self._pieces)
        for part, states in ((self._paged.keys, latents), (self._paged.values, rotary_keys)):
            part[pages, 0, rows] = states[0, 0].to(part.dtype)
        return latents, rotary_keys


def _attend_expanded(
    paged: PagedLayer,
    pieces: Pieces,
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The attention of each piece's tokens [1, heads, T, dim] to those before them -> [1, T, heads, value_dim].

    Args:
        keys, values: of these tokens.
    """
    results, attend = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    for begin, piece in zip(_begins(pieces), pieces.pieces, strict=True):
        of_piece = slice(begin, begin + piece.tokens)
        key, value, mask = keys[:, :, of_piece], values[:, :, of_piece], None
        if piece.held:
            latents, rotary_keys = (_held(part, piece) for part in (paged.keys, paged.values))
            before = module.expand_kv(latents.to(key.dtype), rotary_keys.to(key.dtype))
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
            seen = torch.ones(piece.tokens, key.shape[2], dtype=torch.bool).tril(piece.held)
            mask = seen[None, None]
        results.append(attend(module, queries[:, :, of_piece], key, value, mask, scaling=module.scaling)[0])
    return torch.cat(results, dim=1)


def _held(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What a piece's tokens follow, [1, 1, held, D]."""
    pages = piece.pages[: -(-piece.held // PAGE_TOKENS)].long()
    return part[pages].flatten(0, 2)[None, None, : piece.held]


def short_pieces(pieces: Pieces) -> Iterator[list[int]]:
    """The pieces that native calls compute, as many at once as one takes."""
    group, tokens = list[int](), 0
    for place, piece in enumerate(pieces.pieces):
        if piece.tokens > MAX_TOKENS:
            continue
        if tokens + piece.tokens > MAX_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += piece.tokens
    if group:
        yield group


def _begins(pieces: Pieces) -> list[int]:
    return [struct.first for struct in pieces.struct]


def some_pieces(pieces: Pieces, which: list[int]) -> tuple[torch.Tensor, Pieces]:
    """Some of the pieces, and the places of their tokens."""
    begins = _begins(pieces)
    places = [at for each in which for at in range(begins[each], begins[each] + pieces.pieces[each].tokens)]
    return torch.tensor(places), Pieces([pieces.pieces[each] for each in which])


def _of_tokens(positions: Any, places: torch.Tensor) -> Any:
    if positions is None or isinstance(positions, torch.Tensor):
        return positions if positions is None else positions[:, places]
    return tuple(each[:, places] for each in positions)


def _where(pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """The page of each token, and its row there."""
    pages, rows = [], []
    for piece in pieces.pieces:
        numbers = torch.arange(piece.held, piece.held + piece.tokens)
        pages.append(piece.pages[numbers // PAGE_TOKENS])
        rows.append(numbers % PAGE_TOKENS)
    return torch.cat(pages).long(), torch.cat(rows)


_FEWEST_WEIGHTS = 64 * 1024
"""Below this torch is as fast.  Routers stay with the library, because rounding there changes the choice of experts."""


class _Enough(Exception):  # noqa: N818 - not an error: the last layer's arguments are recorded
    pass


@dataclass(frozen=True, slots=True)
class Further:
    """Stands for what a layer gives beside hidden states, until it has been computed; see `DecoderLayers.returns`."""

    layer: int
    place: int


@dataclass
class Recording:
    """What the model passed to each layer apart from hidden states, and the first hidden states [1, T, H].

    Attributes:
        added: rows for the hidden states at `places` after each of the first layers, of pictures.
    """

    hidden: torch.Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    places: torch.Tensor | None = None
    added: list[torch.Tensor] = field(default_factory=list)

    def after(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the model makes of a layer's output before it hands that to the next one."""
        if self.places is None or index >= len(self.added):
            return hidden
        # Layers may be on several devices.
        return hidden.index_add(1, self.places.to(hidden.device), self.added[index].to(hidden)[None])


@dataclass
class MicroBatch:
    """Rows that pass through a layer together.

    Attributes:
        wanted: positions of the tokens [T] whose logits are needed.
    """

    pieces: Pieces
    recording: Recording
    hidden: torch.Tensor
    wanted: list[int]


class DecoderLayers:
    """The layers of a causal language model.

    Raises:
        LookupError: they cannot be found.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._wants_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._layers = decoder_layers(model)
        if not self._layers:
            raise LookupError("the model's layers were not found")
        self.returns = [0] * len(self._layers)
        """How many values each layer gives beside hidden states, which the model hands on to others."""

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Any:
        return self._layers[index]

    def record(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any = None,
        given: Mapping[str, Any] | None = None,
    ) -> Recording:
        """The arguments of all layers for tokens [1, T] at positions [1, T], behind what a cache holds.

        Args:
            given: what the model gets in their place, where pictures are among them.
        """
        recording, last = Recording(torch.empty(0), []), len(self._layers) - 1

        def note(index: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                recording.hidden = hidden_states
            recording.calls.append((args, kwargs))
            if index == last:
                raise _Enough
            return self._returned(index, hidden_states)

        try:
            with self._replaced(note):
                self._forward(ids, positions, cache, given)
        except _Enough:
            return recording
        raise LookupError("the model does not call its layers one after the other")

    def run(self, index: int, hidden: torch.Tensor, recording: Recording) -> torch.Tensor:
        """The output of a layer for hidden states [1, T, H]."""
        args, kwargs = recording.calls[index]
        out = self._layers[index](hidden, *args, **kwargs)
        result = out[0] if isinstance(out, tuple) else out
        assert isinstance(result, torch.Tensor)
        return result

    def without_experts(self) -> AbstractContextManager[None]:
        """Inside, layers of the common kind compute little more than attention, for who wants to see that."""
        mlps = [part for layer in self._layers if knows_layer(layer) for part in mlp_of(layer) if part is not None]
        return replaced((getattr(mlp, "experts", mlp), _nothing) for mlp in mlps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, R, H] after the last layer -> [R, V]."""
        rows = hidden.shape[1]
        ids = torch.zeros(1, rows, dtype=torch.long, device=hidden.device)

        def hand_on(index: int, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return self._returned(index, hidden if index == len(self._layers) - 1 else hidden_states)

        with self._replaced(hand_on):
            out = self._forward(ids, torch.zeros_like(ids))
        logits = out.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def _replaced(self, stub: Callable[..., Any]) -> AbstractContextManager[None]:
        """Has `stub` called in each layer's place, with its index first."""
        return replaced((layer, _standing_in(partial(stub, index))) for index, layer in enumerate(self._layers))

    def _returned(self, index: int, hidden: torch.Tensor) -> Any:
        """What the model expects of a layer."""
        further = [Further(index, place) for place in range(self.returns[index])]
        return (hidden, *further) if further else hidden

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any = None,
        given: Mapping[str, Any] | None = None,
    ) -> Any:
        taken = {"input_ids": ids, **({"position_ids": positions} if self._wants_positions else {})}
        taken = taken if given is None else dict(given)
        if cache is not None:
            taken["cache"] = cache
        return self._model(use_cache=cache is not None, return_dict=True, **taken)


class NativeRows:
    """The parts of a model's layers that native kernels compute.

    Args:
        states: the pages of its attention modules, all of which have been probed.
        apart: modules that are not computed for all rows at once.
    """

    def __init__(
        self,
        model: Any,
        layers: DecoderLayers,
        states: PagedStates,
        kernels: NativeKernels,
        apart: AbstractSet[Any] = frozenset(),
    ) -> None:
        self._layers, self._states, self._kernels = layers, states, kernels
        self._is_few = MAX_TOKENS if apart else 0
        grouped = {
            index: attention_struct(layers[index])
            for index in range(len(layers) if not apart else 0)
            if knows_layer(layers[index]) and GroupedAttention.can_step(layers[index])
        }
        self._attention = {
            index: struct for index, struct in grouped.items() if not (struct.is_gated or struct.norms_values)
        }
        self._mixers = {} if apart else _state_mixers(layers)
        self._latent = {} if apart else _latent_rows(layers, states, len(self._mixers))
        self._states_of: dict[int, StatePages] = {}
        own = (*self._attention, *self._latent, *self._mixers)
        blocks = {index: SparseBlock.of(layers[index], kernels) for index in own}
        self._sparse = {index: block for index, block in blocks.items() if block is not None and block.has_experts}
        self._linears = [_linears(layers[index], kernels, apart) for index in range(len(layers))]
        # A dense model's rows have the same logits, bit by bit, whatever is beside them: a second way would end that.
        self.has_all = len(grouped) + len(self._latent) + len(self._mixers) == len(layers)
        """Whether it computes the attention of each layer."""
        self._step = TokenStep.of(model) if self._sparse and self.has_all else None
        head = model.get_output_embeddings()
        self._head = _linears(head, kernels) if head is not None else []

    def caches(self) -> PagedCaches | None:
        """The pages of each layer, if what they hold is what the model's own cache would."""
        if not self.has_all:
            return None
        modules = [
            None if index in self._mixers else self._layers[index].self_attn for index in range(len(self._layers))
        ]
        pages = [
            self._states_of[index] if module is None else self._states.layer_of(module)[0]
            for index, module in enumerate(modules)
        ]
        windows = [0 if each is None else self._states.terms_of(each).window for each in modules]
        return PagedCaches(pages, windows, slides=self._states.slides)

    @property
    def state_bytes(self) -> int:
        """Of what layers sum up of a sequence."""
        return sum(mixer.page_bytes for mixer in self._mixers.values())

    def allocate_states(self, states: int) -> None:
        """Room for so many."""
        self._states_of = {index: mixer.pages(states) for index, mixer in self._mixers.items()}

    def takes_few(self, rows: int) -> bool:
        """Whether `few` computes a token of so many rows."""
        return self._step is not None and self._step.takes_rows(rows)

    def few(self, ids: list[int], positions: list[int], pieces: Pieces) -> torch.Tensor:
        """Logits [R, V] after one token of each row, in one native call.

        Arguments that layers are called with, routing and grouping of experts take as long for a few rows as for
        hundreds; a few chats at once would spend half of their time there.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        assert self._step is not None
        held = [
            self._states_of[index].held()
            if index in self._mixers
            else self._states.layer_of(self._layers[index].self_attn)[1].held
            for index in range(len(self._layers))
        ]
        return self._step.rows(ids, positions, held, pieces)

    def run(self, index: int, hidden: torch.Tensor, recording: Recording, pieces: Pieces) -> torch.Tensor:
        """The output of a layer for hidden states [1, T, H]."""
        # Where mixers go row by row, a few tokens are computed as each alone as far as that goes.
        with replaced(self._linears[index] if pieces.tokens > self._is_few else ()):
            struct, latent, mixer = self._attention.get(index), self._latent.get(index), self._mixers.get(index)
            if struct is None and latent is None and mixer is None:
                return self._layers.run(index, hidden, recording)
            layer = self._layers[index]
            for listener in layer._forward_pre_hooks.values():  # nothing calls the module itself
                listener(layer, (hidden,))
            positions: Any = recording.calls[index][1].get("position_embeddings")
            begun_ns = clock.now_ns()
            if mixer is not None:
                out = _through_mixer(mixer, hidden.float(), self._states_of[index].held(), pieces)
            elif latent is not None:
                out = latent.attend(hidden, pieces, positions)
            else:
                assert struct is not None
                paged = self._states.layer_of(layer.self_attn)[1]
                cos, sin = (hidden.new_empty(1, hidden.shape[1], 0),) * 2 if positions is None else positions
                out = attention_rows(self._kernels, struct, paged, pieces, hidden[0], cos[0], sin[0])[None]
            if RECORDER.on:
                RECORDER.layer, RECORDER.layer_since_ns = index, clock.now_ns()
                RECORDER.dense(lanes.ATTENTION, begun_ns, RECORDER.layer_since_ns, index)
            sparse = self._sparse.get(index)
            if sparse is not None:
                return self._add_experts(layer, sparse.struct, out[0])[None]
            return add_mlp(layer, LayerNorms.of(layer), out)

    def linears(self, layers: Iterable[int]) -> AbstractContextManager[None]:
        """Inside this context the kernels compute these layers' linear layers, for every caller."""
        return replaced([pair for index in layers for pair in self._linears[index]])

    def _add_experts(self, layer: Any, struct: SparseBlockStruct, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] plus the output of a layer's sparse block."""
        block, beside = mlp_of(layer)
        normed, chosen, shares = route_rows(self._kernels, struct, hidden)
        mixed = experts_forward(block.experts, normed, chosen, shares)
        shared = shared_expert_of(block) if beside is None else beside
        if shared is not None:
            of_all = shared(normed)
            gate = getattr(block, "shared_expert_gate", None)
            mixed = mixed + (of_all if gate is None else torch.sigmoid(gate(normed)) * of_all)
        return torch.add(hidden, mixed, alpha=multiple_of(layer))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, R, H] after the last layer -> [R, V]."""
        with replaced(self._head):
            return self._layers.logits(hidden)


def _nothing(hidden: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _state_mixers(layers: DecoderLayers) -> dict[int, StateMixer]:
    steps = {index: own_forward(layers[index]) for index in range(len(layers))}
    return {
        index: step.attention
        for index, step in steps.items()
        if isinstance(step, SingleTokenLayer) and isinstance(step.attention, StateMixer)
    }


def _through_mixer(mixer: StateMixer, hidden: torch.Tensor, held: PagesStruct, pieces: Pieces) -> torch.Tensor:
    """Float hidden states [1, T, H] plus what a mixer gives: of a few tokens as if alone, bit by bit."""
    out = torch.empty_like(hidden)
    for group in short_pieces(pieces):
        places, some = some_pieces(pieces, group)
        out[:, places] = mixer.rows(hidden[:, places], held, some, None)
    if long := [place for place, piece in enumerate(pieces.pieces) if piece.tokens > MAX_TOKENS]:
        places, some = some_pieces(pieces, long)
        out[:, places] = mixer.read(hidden[:, places], held, some)
    return out


def _latent_rows(layers: DecoderLayers, states: PagedStates, others: int) -> dict[int, LatentRows]:
    """Of a model whose layers, but so many others, all have latent attention that native steps compute."""
    fast = [own_forward(layers[index]) for index in range(len(layers))]
    found = {
        index: LatentRows(layers[index], step.attention, states)
        for index, step in enumerate(fast)
        if isinstance(step, SingleTokenLayer)
        and isinstance(step.attention, LatentAttention)
        and step.is_native
        and LatentRows.can(layers[index])
    }
    if len(found) + others < len(layers):
        return {}
    for index in found:
        module = layers[index].self_attn
        states.keep_latents(module, module.kv_lora_rank, module.qk_rope_head_dim)
    return found


def _standing_in(forward: Callable[..., Any]) -> Callable[..., Any]:
    setattr(forward, STANDS_IN, True)
    return forward


def _linears(part: Any, kernels: NativeKernels, apart: AbstractSet[Any] = frozenset()) -> list[tuple[Any, RowsLinear]]:
    return [
        (module, RowsLinear(module, kernels))
        for module in part.modules()
        if module not in apart
        and RowsLinear.can(module)
        and module.in_features * module.out_features >= _FEWEST_WEIGHTS
    ]
