"""Pictures in prompts: their tokens' ids, what the tower makes of them, and where it comes in.

A picture's tokens have ids of their own, made of its file's digest, in place of the one placeholder that the family
repeats.  So whatever compares prompts (the live cache, kept blocks, keys on disk) tells pictures apart, and finds again
what was read of one, also after a restart, without knowing that there are pictures.  Where the model computes such
ids, the placeholder stands for them again, and the tower's rows come beside it.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.pictures import picture_gflops, picture_grid, sizes_of, tower_key
from engine.common import clock
from engine.common.chat import Picture
from engine.common.costs import Cost, CostModel, Source, picture_on_card
from engine.common.errors import EngineError, ErrorCode, never_cancelled
from engine.common.falls import FALLS
from engine.common.pictures import read_picture, size_of
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.host_memory import available_ram
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.families.library import CHOSEN_EXPERTS
from engine.families.pictures import Grid, Sizes
from engine.runtime.adapters import Adapter
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.library_conversion import load_rest, plan_loading, tensors_of
from engine.runtime.load.library_models import build_skeleton
from engine.runtime.load.tensor_reader import TensorReader
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

FIRST = 1 << 62
"""Ids from here on are tokens of pictures."""
_CHUNK_BITS, _INDEX_BITS = 45, 17
_CHUNKS = 8
_ACTIVATIONS = 64
"""Numbers that a tower computes at once for each of a picture's: widths of its layers' inner parts, and some more."""
_MOST_KEPT_BYTES = 256 * 2**20
_MOST_KNOWN_BYTES = 64 * 2**20
"""Of pictures' files that prompts may be made of before anybody holds on to them."""


class SeenPicture:
    """A picture in a prompt."""

    def __init__(self, picture: Picture, grid: Grid) -> None:
        self.picture, self.grid = picture, grid
        self.digest = hashlib.blake2b(base64.b64decode(picture.data), digest_size=_CHUNKS * 6).digest()
        self.chunks = [
            int.from_bytes(self.digest[6 * place : 6 * place + 6], "big") & ((1 << _CHUNK_BITS) - 1)
            for place in range(_CHUNKS)
        ]

    def ids(self) -> list[int]:
        """Of its tokens: the number of each, and a part of the digest."""
        return [FIRST | index << _CHUNK_BITS | self.chunks[index % _CHUNKS] for index in range(self.grid.seen)]


@dataclass(frozen=True, slots=True)
class Features:
    """What a tower makes of a picture: rows [N, H] in place of embeddings, and rows that are added after layers."""

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.rows.nbytes + sum(each.nbytes for each in self.deep)


@dataclass(frozen=True, slots=True)
class Blind:
    """In place of `Sight`: why a model reads text only, completing a sentence."""

    name: str
    why: str

    def refuse(self) -> EngineError:
        """What a request with pictures gets."""
        return EngineError(
            ErrorCode.PICTURES_NOT_READ,
            f"{self.name} reads text only: {self.why}. Send the text alone, or choose a model that sees.",
        )


class Sight:
    """What a model that sees has beside its text side.

    Args:
        open_tower: reads its weights, at the first picture.
        place: where embeddings are.
        devices: cards on which the tower may compute.

    Raises:
        LookupError: it cannot be used, for a reason that completes a sentence.
    """

    def __init__(
        self,
        directory: Path,
        raw: Mapping[str, Any],
        config: Any,
        open_tower: Callable[[], Any],
        tokenizer: Any,
        place: torch.device,
        devices: ModelDevices | None = None,
        *,
        is_whole: bool,
    ) -> None:
        self.sizes: Sizes = sizes_of(directory, raw)
        self._directory, self._place, self._devices = directory, place, devices
        self.key = tower_key(directory)
        """Says by what pictures are read: what is kept of them is of no use to anything else."""
        self._open_tower, self._is_whole, self._raw = open_tower, is_whole, raw
        self.costs_of: Callable[[], CostModel] = CostModel
        """What the planner knows of this machine; asked once, if there is a card that could read pictures."""
        self._tower: Any = None
        self._processor: Any = None
        self._lists = True
        """Whether the library's model takes the rows of each picture by themselves."""
        self._known = WeakValueDictionary[int, SeenPicture]()
        self._recent = OrderedDict[bytes, SeenPicture]()
        self._features = OrderedDict[bytes, Features]()
        self._turn = threading.Lock()
        self.placeholder_id = _token_id(config, "image_token_id", "image_token_index")
        known = self.placeholder_id < len(tokenizer)
        names = {"image": tokenizer.convert_ids_to_tokens(self.placeholder_id) if known else ""}
        sight = self.sizes.sight
        for short in ("boi", "eoi"):
            is_written = short == sight.mark or f"{{{short}}}" in sight.before + sight.after
            if (
                is_written
                and (found := _token_id(config, f"{short}_token_id", f"{short}_token_index", default=-1)) >= 0
            ):
                names[short] = tokenizer.convert_ids_to_tokens(found)
        ends = (_token_id(config, f"image_{end}_token_id", default=-1) for end in ("start", "end"))
        self._ends = frozenset(ends)
        """The tokens that begin and end a picture, where those have a part of their own."""
        self._follows = None if known else _token_id(config, "boi_token_id", "boi_token_index")
        """The token that pictures' tokens follow, where no text is one: GGUF files of Gemma 3 have no placeholder."""
        self._names = names
        self.mark: str = names.get(sight.mark, "" if sight.mark == "boi" else sight.mark) or ""
        """What the chat template writes for a picture."""
        if not (self.mark and all(names.values() if known else (self.mark,))):
            raise LookupError("its tokenizer has no token for pictures")
        self.read_pictures = self.read_on_card = 0
        """How often the tower has computed one, and has done so on a card."""

    # --- prompts ----------------------------------------------------------------------------------------

    def see(self, picture: Picture) -> SeenPicture:
        """A picture's place in a prompt; its headers are looked at.

        Raises:
            EngineError: `INVALID_REQUEST`: it is none that the model can read.
        """
        seen = SeenPicture(picture, picture_grid(self.sizes, *size_of(picture)))
        with self._turn:
            known = self._known.get(seen.chunks[0])
            if known is not None and known.digest == seen.digest:
                seen = known
            for chunk in seen.chunks:
                self._known[chunk] = seen
            self._recent[seen.digest] = seen
            self._recent.move_to_end(seen.digest)
            while len(self._recent) > 1 and sum(len(each.picture.data) for each in self._recent.values()) > (
                _MOST_KNOWN_BYTES
            ):
                self._recent.popitem(last=False)
        return seen

    def text_of(self, seen: SeenPicture) -> str:
        """What stands for a picture in the text that is made tokens of."""
        return self.sizes.sight.text(seen.grid, self._names)

    def with_ids(self, ids: Sequence[int], pictures: Sequence[SeenPicture]) -> list[int]:
        """A prompt's tokens with those of pictures in place of placeholders.

        Raises:
            EngineError: `MODEL_UNSUPPORTED`: the chat template has no place for them.
        """
        if self._follows is not None:
            left = list(pictures)
            found = [
                each
                for token in ids
                for each in (token, *(left.pop(0).ids() if token == self._follows and left else ()))
            ]
            if left:
                raise self.no_place()
            return found
        own = (token for each in pictures for token in each.ids())
        found = [next(own, -1) if token == self.placeholder_id else token for token in ids]
        if -1 in found or next(own, -1) != -1:
            raise self.no_place()
        return found

    def no_place(self) -> EngineError:
        """Where a template writes no picture, or more than were sent."""
        return EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            "The model's chat template has no place for pictures there: send them in a user's message, or get another "
            "version of the model.",
        )

    def plain(self, ids: Sequence[int]) -> list[int]:
        """The same with the placeholder in place of pictures' tokens, as the library has it."""
        return [self.placeholder_id if token >= FIRST else token for token in ids]

    def text(self, ids: Sequence[int]) -> list[int]:
        """The same with a token that the tokenizer knows in their place."""
        stands = self.placeholder_id if self._follows is None else self._follows
        return [stands if token >= FIRST else token for token in ids]

    def layout(self, ids: Sequence[int]) -> Layout | None:
        """Where pictures lie in a prompt; `None` without any."""
        if not ids or max(ids) < FIRST:
            return None
        spans, at = list[Span](), 0
        while at < len(ids):
            if ids[at] < FIRST:
                at += 1
                continue
            with self._turn:
                seen = self._known.get(ids[at] & ((1 << _CHUNK_BITS) - 1))
            if seen is None:
                raise EngineError(ErrorCode.INTERNAL, "A picture of this conversation is gone: send it again.")
            begin, index = at, 0
            while at < len(ids) and index < seen.grid.seen:  # rows may have ends between them
                index += ids[at] >= FIRST
                at += 1
            spans.append(Span(begin, at, seen))
        return Layout(self, list(ids), spans)

    # --- what the model is given ----------------------------------------------------------------------------

    def features(self, seen: SeenPicture) -> Features:
        """What the tower makes of a picture; kept for the next time.

        Raises:
            EngineError: the picture is damaged, the tower's weights are, or there is no memory.
        """
        found = self._features.get(seen.digest)
        if found is None:
            found = self._computed(seen)
            self._features[seen.digest] = found
            while len(self._features) > 1 and sum(each.nbytes for each in self._features.values()) > _MOST_KEPT_BYTES:
                self._features.popitem(last=False)
        self._features.move_to_end(seen.digest)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that the tower, once it is open, and its results take."""
        held = sum(each.nbytes for each in self._features.values())
        if self._tower is not None:
            held += sum(each.nbytes for each in (*self._tower.parameters(), *self._tower.buffers()))
        return held

    @torch.inference_mode()
    def _computed(self, seen: SeenPicture) -> Features:
        from engine.runtime.picture_processors import processor_of, senseless  # with what only pictures need

        begun_ns = clock.now_ns()
        image = read_picture(seen.picture, "The picture")
        if self._tower is None:
            if tower_key(self._directory) != self.key:
                raise EngineError(
                    ErrorCode.CHECKPOINT_DAMAGED,
                    f"The part of {self._directory.name} that sees is another one than when the model was loaded: load "
                    "the model again.",
                )
            self._tower = self._open_tower()
            self._processor = processor_of(self._directory, self.sizes)
        try:
            given = self._processor(images=[image], return_tensors="pt")
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise senseless(self._directory, error) from error
        takes = inspect.signature(self._tower.get_image_features).parameters
        dtype = next(self._tower.parameters()).dtype
        inputs = {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in given.items()
            if name in takes
        }
        numbers = sum(value.numel() for value in inputs.values() if torch.is_tensor(value))
        weights = sum(each.numel() for each in self._tower.parameters())
        gflops = picture_gflops(self._raw, self.sizes, weights, seen.grid)
        with self._placed(_ACTIVATIONS * numbers * dtype.itemsize, gflops) as place:
            inputs = {name: value.to(place) if torch.is_tensor(value) else value for name, value in inputs.items()}
            out = self._tower.get_image_features(**inputs, return_dict=True)
            if out.pooler_output is None:  # Llama 4's whole model joins what its tower makes to the text by itself
                out.pooler_output = self._tower.multi_modal_projector(out.last_hidden_state)
        rows, deep = _joined(out.pooler_output), tuple(map(_joined, getattr(out, "deepstack_features", None) or ()))
        expected = seen.grid.seen
        if rows.shape[0] != expected:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"The model makes {rows.shape[0]:,} tokens of a picture, and its files say {expected:,}: get another "
                "version of the model.",
            )
        self.read_pictures += 1
        self._lists = isinstance(out.pooler_output, list | tuple)
        if RECORDER.on:
            RECORDER.layer_since_ns = clock.now_ns()  # what follows is dense work again
            RECORDER.span(lanes.PICTURES, lanes.PICTURE, begun_ns, RECORDER.layer_since_ns, layer=-1, count=expected)
        return Features(rows.to(self._place), tuple(each.to(self._place) for each in deep))

    @contextmanager
    def _placed(self, activations: int, gflops: float) -> Iterator[torch.device]:
        """Where the tower is meanwhile: on the first card, if that is not slower and the experts there can make room
        for it, or on the CPU; what it takes corrects what the planner knows.

        Its weights are copied there for a picture and stay in RAM: few are sent, and every token uses experts.
        """
        if self._devices is None:
            yield torch.device("cpu")
            return
        costs, before, begun_s = self.costs, self.read_on_card, clock.now()
        wanted = picture_on_card(costs, gflops)
        with self._on_card(activations) if wanted else nullcontext(torch.device("cpu")) as place:
            yield place
            if self.read_on_card > before:
                self._devices.devices[0].synchronize()
        kind = Cost.CARD_PICTURE if self.read_on_card > before else Cost.CPU_PICTURE
        if costs.source(kind) is not Source.ASSUMED:
            costs.observe(kind, gflops, clock.now() - begun_s)

    @cached_property
    def costs(self) -> CostModel:
        """Of pictures, on the card and on the CPU."""
        return self.costs_of()

    @contextmanager
    def _on_card(self, activations: int) -> Iterator[torch.device]:
        """On the first card, or on the CPU if it has no room."""
        assert self._devices is not None
        cpu = torch.device("cpu")
        card, experts = self._devices.devices[0], self._devices.experts
        own = [*self._tower.parameters(), *self._tower.buffers()]
        reservation = card.memory.reserve(0, MemoryCategory.WEIGHTS)
        need = sum(each.nbytes for each in own) + activations
        try:
            try:
                reservation.resize(need)
            except DeviceMemoryError as error:
                experts.give_back(0, error.asked - error.free + card.memory.excess)
                reservation.resize(need)
        except DeviceMemoryError:
            FALLS.say("The part that sees", "the CPU", f"{card.name} has no room for it beside what it holds")
            experts.take_back()
            yield cpu
            return
        held = [each.data for each in own]
        try:
            for each in own:
                each.data = each.data.to(card.torch_device)
            self.read_on_card += 1
            yield card.torch_device
        finally:
            for each, data in zip(own, held, strict=True):
                each.data = data
            reservation.release()
            experts.take_back()

    def given(self, pieces: Sequence[PromptPart], model: Any) -> dict[str, Any]:
        """Arguments of the model's forward, but for its cache, for tokens of one prompt, or of several as one."""
        sight, tokens = self.sizes.sight, [token for piece in pieces for token in piece.ids]
        ids = torch.tensor([self.plain(tokens)], device=self._place)
        positions = [piece.positions(sight.axes) for piece in pieces]
        found: dict[str, Any] = {"position_ids": torch.cat(positions, dim=-1).to(self._place)}
        rows, deep = self._rows(pieces, model)
        if sight.experts:
            own = [int(token >= FIRST or token in self._ends) for token in tokens]
            found[sight.experts] = torch.tensor([own], device=self._place)
        if sight.both_ways:
            (piece,) = pieces
            before = piece.layout.ids[: piece.begin] if piece.layout is not None else []
            kinds = [int(token >= FIRST) for token in (*before, *tokens)]
            found[sight.both_ways] = torch.tensor([kinds], device=self._place)
        if self._is_whole:
            found["input_ids"] = ids
            if rows:
                listed = tuple(rows) if self._lists else torch.cat(rows)[None]
                out = BaseModelOutputWithPooling(pooler_output=listed)
                out.deepstack_features = deep
                found["mm_encoder_outputs"] = {"image": out}
            return found
        embedded = model.get_input_embeddings()(ids)
        if rows:
            mask = (ids == self.placeholder_id)[..., None]
            embedded = embedded.masked_scatter(mask, torch.cat(rows).to(embedded.dtype))
        if getattr(model.config.get_text_config(decoder=True), "ple_layer_ids", None):
            found["ple_input_ids"] = ids  # of whose runs Qwen3.8's layers have embeddings, too
        return {**found, "inputs_embeds": embedded}

    def added(self, pieces: Sequence[PromptPart]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What is added to hidden states after the first layers: for which of these tokens, and rows for each layer."""
        tokens = [token for piece in pieces for token in piece.ids]
        places = [place for place, token in enumerate(tokens) if token >= FIRST]
        _rows, deep = self._rows(pieces, None)
        return torch.tensor(places, device=self._place), [torch.cat(each) for each in deep]

    def _rows(self, pieces: Sequence[PromptPart], model: Any) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Rows for all placeholders in these tokens; one that the model itself wrote has its embedding."""
        rows, deep = list[torch.Tensor](), list[list[torch.Tensor]]()
        if not any(token >= FIRST for piece in pieces for token in piece.ids):
            return rows, deep
        for piece in pieces:
            at = 0
            while at < len(piece.ids):
                token = piece.ids[at]
                if token < FIRST:
                    at += 1
                    if token == self.placeholder_id and model is not None:
                        rows.append(model.get_input_embeddings()(torch.tensor([token], device=self._place)))
                    continue
                assert piece.layout is not None
                span = piece.layout.span_at(piece.begin + at)
                own = piece.ids[at : span.end - piece.begin]
                index = [(each >> _CHUNK_BITS) & ((1 << _INDEX_BITS) - 1) for each in own if each >= FIRST]
                features = piece.layout.features(span)
                rows.append(features.rows[index[0] : index[-1] + 1])
                deep = deep or [[] for _ in features.deep]
                for place, each in enumerate(features.deep):
                    deep[place].append(each[index[0] : index[-1] + 1])
                at += len(own)
        return rows, deep

    def close(self) -> None:
        """Frees the tower and all that it made."""
        self._tower = self._processor = None
        self._features.clear()
        self._recent.clear()


@dataclass(frozen=True, slots=True)
class Span:
    """From where to where a picture's tokens lie in a prompt."""

    begin: int
    end: int
    seen: SeenPicture


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The tokens from `begin` on of a sequence, which may have pictures among them or before."""

    layout: Layout | None
    begin: int
    ids: Sequence[int]

    def positions(self, axes: bool) -> torch.Tensor:
        """[1, T], or of three axes [3, 1, T]."""
        if axes and self.layout is not None:
            return self.layout.rotated(self.begin, len(self.ids))[:, None]
        plain = torch.arange(self.begin, self.begin + len(self.ids))[None]
        return plain.expand(3, 1, -1) if axes else plain


class Layout:
    """Where pictures lie in a prompt, and the positions of its tokens.

    Attributes:
        shift: of the positions of all that comes behind the last picture.
        end: of the last picture.
        read, read_s: pictures that the tower has read for this prompt, and the seconds that it took.
    """

    def __init__(self, sight: Sight, ids: list[int], spans: list[Span]) -> None:
        self.sight, self.ids, self.spans = sight, ids, spans
        self.end = spans[-1].end
        self.read, self.read_s = 0, 0.0
        self._held = dict[Span, Features]()
        self._positions: torch.Tensor | None = None
        self.shift = 0
        if sight.sizes.sight.axes:
            self._positions, self.shift = self._laid_out()

    def _laid_out(self) -> tuple[torch.Tensor, int]:
        """As `get_rope_index` of the library: a picture is as long as its longer side."""
        pieces, at, position = list[torch.Tensor](), 0, 0
        for span in self.spans:
            text = torch.arange(position, position + span.begin - at)
            pieces.append(text.expand(3, -1))
            position += span.begin - at
            rows, columns = span.seen.grid[:2]
            row, column = torch.arange(rows), torch.arange(columns)
            down, across = row[:, None].expand(rows, columns).reshape(-1), column.repeat(rows)
            pieces.append(position + torch.stack([torch.zeros_like(down), down, across]))
            position += max(rows, columns)
            at = span.end
        pieces.append(torch.arange(position, position + len(self.ids) - at).expand(3, -1))
        return torch.cat(pieces, dim=1), position - at

    def whole(self, begin: int, end: int) -> int:
        """Up to where tokens from `begin` on may be computed together, `end` at most: pictures whose tokens attend to
        each other are not cut."""
        if not self.sight.sizes.sight.both_ways:
            return end
        for span in self.spans:
            if span.begin < end < span.end:
                return span.begin if span.begin > begin else span.end
        return end

    def has_any(self, begin: int, end: int) -> bool:
        """Whether the model needs to be told of pictures for these tokens: else they are text at shifted positions."""
        ends = bool(self.sight.sizes.sight.experts)  # which begin and end a picture
        return begin < self.end + ends and end > self.spans[0].begin - ends

    def given(self, begin: int, ids: Sequence[int], model: Any) -> dict[str, Any] | None:
        """Arguments of the model for these tokens; `None` where they are those of text at shifted positions."""
        return (
            self.sight.given([PromptPart(self, begin, ids)], model) if self.has_any(begin, begin + len(ids)) else None
        )

    def seen_by(self, sight: Sight) -> Layout:
        """The same for another copy of the model."""
        return Layout(sight, self.ids, [replace(span, seen=sight.see(span.seen.picture)) for span in self.spans])

    @property
    def told(self) -> dict[str, Any]:
        """What an answer says of its pictures; see `GenerationResult`."""
        kept = len(self.spans) - self.read
        return {"pictures": len(self.spans), "pictures_kept": kept, "pictures_s": self.read_s}

    def look(self, begin: int, end: int) -> None:
        """Has the tower read what lies among these tokens, and holds on to it until others are looked at.

        Raises:
            EngineError: as `Sight.features`.
        """
        now = [span for span in self.spans if span.begin < end and span.end > begin]
        self._held = {span: self.features(span) for span in now}

    def features(self, span: Span) -> Features:
        """What the tower makes of a picture here."""
        if (found := self._held.get(span)) is None:
            before, begun_s = self.sight.read_pictures, clock.now()
            found = self.sight.features(span.seen)
            if self.sight.read_pictures > before:
                self.read += 1
                self.read_s += clock.now() - begun_s
        return found

    def span_at(self, index: int) -> Span:
        """The picture among whose tokens this one is."""
        return next(span for span in self.spans if span.begin <= index < span.end)

    def rotated(self, begin: int, count: int) -> torch.Tensor:
        """Positions [3, T] of these tokens, some of which may lie behind the prompt."""
        assert self._positions is not None
        behind = torch.arange(max(begin, len(self.ids)), max(begin + count, len(self.ids))) + self.shift
        return torch.cat([self._positions[:, begin : begin + count], behind.expand(3, -1)], dim=1)

    def position(self, index: int) -> int:
        """Where a token lies that is not among pictures, for rotations."""
        return index + (self.shift if index >= self.end else 0)


def _joined(rows: Any) -> torch.Tensor:
    """[N, H] of a tower's output, however the family returns it."""
    joined = torch.cat(tuple(rows)) if isinstance(rows, list | tuple) else rows
    return joined.reshape(-1, joined.shape[-1])


def _token_id(config: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(found := getattr(config, name, None), int):
            return found
    if default is None:
        raise LookupError("its tokenizer has no token for pictures")
    return default


def open_tower(
    config: Any,
    tensors: Mapping[str, TensorEntry],
    dtype: torch.dtype,
    quantizer: Any | None,
    adapter: Adapter | None,
) -> Any:
    """The tower and what joins it to the text side, with weights, on the CPU: a model with `get_image_features`.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if weights are missing or do not fit.
    """
    kind, little = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], deepcopy(config)
    little.get_text_config(decoder=True).num_hidden_layers = 1  # the text side is thrown away
    try:
        whole = build_skeleton(kind, little, dtype, None)
    except EngineError:  # Gemma 4 wants all of its kinds of layers
        whole = build_skeleton(kind, config, dtype, None)
    inner = getattr(whole, "model", whole)
    inner.language_model = whole.lm_head = None
    for name, _part in [*inner.named_children()]:
        if "audio" in name:
            setattr(inner, name, None)
    whole.all_tied_weights_keys = {}
    own = tensors_of(whole, tensors, quantizer, adapter)
    plan = plan_loading(whole, [], own, dtype, quantizer, adapter)
    if plan.nbytes > (free := available_ram()):
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"The part of the model that sees needs {rounded_up(plan.nbytes)} of RAM, and {rounded_down(free)} are "
            "free: close other programs, or send the text alone.",
        )
    with TensorReader(lambda _done, _all: None, never_cancelled, plan.nbytes, dtype=dtype) as reader:
        load_rest(whole, plan, reader, {"": torch.device("cpu")})
    for module in inner.modules():  # dots3.note's tower has experts, which lie in it
        if hasattr(config := getattr(module, "config", None), CHOSEN_EXPERTS):
            setattr(config, CHOSEN_EXPERTS, "eager")
    return inner.eval().requires_grad_(False)
