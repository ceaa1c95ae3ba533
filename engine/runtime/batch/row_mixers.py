"""Layers whose mixers sum up what they read, choose tokens by an index or attend in ways of their own: row by row.

A layer's mixers (attention, a recurrent state, a short convolution) are called with each row's cache, one row after the
other: of its pages, or the library's where these do not hold all that layers keep.  All else of a
layer, above all its experts, is computed for the tokens of all rows at once, so that weights are read once.  What a
layer is called with is recorded for each row; what is the same for every token is joined, the rest is handed through
the layer as it is to the mixer, which takes its row's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.families.library import own_forward, replaced
from engine.kernels.native.paged_attention import Pieces
from engine.runtime.batch.layers import DecoderLayers, Further, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.decode.step_model import StepModel
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.library_attention import attending_by, configs_of
from engine.runtime.kv.library_caches import LibraryCaches
from engine.runtime.kv.paged_cache import PagedCaches, has_index
from engine.runtime.kv.reuse import exact_tokens
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.row import PagedRow

_LEAST_ALIKE = 0.9
_BETWEEN = "this model computes something between its layers"


@dataclass(frozen=True, slots=True)
class PerRow:
    """An argument that is another one for each row."""

    values: list[Any]


@dataclass
class RowsRecording(Recording):
    """The arguments for the tokens of several rows.

    Attributes:
        spans: where each row's tokens are.
        caches: of each row.
        pieces: of each row, if these are pages.
        further: by layer, what it gave beside hidden states.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    pieces: list[Pieces] = field(default_factory=list)
    further: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class RowMixers(DecoderLayers):
    """The layers of a model, their mixers called row by row.

    Args:
        states: has native attention compute over pages where that is what mixers attend by.
        may_have_pages: whether pages may hold what layers keep.

    Attributes:
        read: the library's cache of a token.
        attends_over_pages: whether native attention does, for which nothing of them is copied.

    Raises:
        LookupError: the model does not hand its layers a cache, computes something between them, or its answer would
            depend on how a prompt is read.
    """

    def __init__(self, loaded: LoadedModel, states: PagedStates, *, may_have_pages: bool) -> None:
        super().__init__(loaded.model)
        if exact_tokens(loaded.model) < loaded.context_tokens:
            raise LookupError("this model has to read long prompts at once")
        if not may_have_pages and loaded.devices is not None and len({*loaded.devices.layers.of_layer}) > 1:
            raise LookupError("this model's layers are on several devices")
        self._loaded = loaded
        self._caches: PagedCaches | LibraryCaches | None = None
        self.attends_over_pages = False
        self._step = StepModel(loaded.model, loaded.context_tokens)
        self._states = states
        with torch.inference_mode():
            try:
                may_attend = loaded.kernels is not None and loaded.device.type == "cpu" and not has_index(loaded.model)
                with attending_by(states, configs_of(loaded.model)) if may_attend else nullcontext():
                    self._mixers, self.read = self._probe()
            except LookupError:  # it attends in another way
                states.shapes.clear()
                self._mixers, self.read = self._probe()
            states.are_met = True
            self._compare()

    def go_over(self, caches: PagedCaches | LibraryCaches) -> None:
        """Rows' caches are these from now on."""
        self._caches = caches
        of_pages = isinstance(caches, PagedCaches) and bool(self._states.shapes)
        self.attends_over_pages = of_pages and self._states.attend_over(caches)  # type: ignore[arg-type]

    @property
    def apart(self) -> set[Any]:
        """The modules that belong to mixers, each of which computes as in a chat."""
        return {module for of_layer in self._mixers for mixer in of_layer for module in mixer.modules()}

    def record_rows(self, ids: list[list[int]], rows: Sequence[PagedRow], pieces: Pieces) -> RowsRecording:
        """The arguments of all layers for the next tokens of each row, behind those that its cache holds."""
        given = [row.given(of_row, self._loaded.model) for row, of_row in zip(rows, ids, strict=True)]
        held = [row.position(row.held) for row in rows]
        return self.record_pieces(ids, held, pieces, given)

    def record_pieces(
        self,
        ids: list[list[int]],
        begins: list[int],
        pieces: Pieces,
        given: Sequence[Mapping[str, Any] | None] = (),
    ) -> RowsRecording:
        """Those of tokens from these positions on."""
        assert self._caches is not None
        caches = [self._caches.of(piece, passes=self.attends_over_pages) for piece in pieces.pieces]
        recording = self._record_rows(ids, begins, caches, given)
        recording.pieces = [Pieces([piece]) for piece in pieces.pieces]
        return recording

    def _record_rows(
        self,
        ids: list[list[int]],
        begins: list[int],
        caches: list[Cache],
        given: Sequence[Mapping[str, Any] | None] = (),
    ) -> RowsRecording:
        """Those of tokens from these positions on, or of what is `given` in their place."""
        device, places, own = self._loaded.device, list[tuple[int, int]](), []
        for number, (of_row, begun, cache) in enumerate(zip(ids, begins, caches, strict=True)):
            positions = torch.arange(begun, begun + len(of_row), device=device)[None]
            its = given[number] if given else None
            tokens = torch.tensor([of_row], device=device) if its is None else torch.empty(0)
            own.append(self.record(tokens, positions, cache, its))
            begin = places[-1][1] if places else 0
            places.append((begin, begin + len(of_row)))
        lengths = [len(of_row) for of_row in ids]
        calls = []
        for each in zip(*(recording.calls for recording in own), strict=True):
            args = tuple(_joined(list(values), lengths) for values in zip(*(args for args, _ in each), strict=True))
            names = each[0][1]
            calls.append((args, {name: _joined([kwargs[name] for _, kwargs in each], lengths) for name in names}))
        hidden = torch.cat([recording.hidden for recording in own], dim=1)
        return RowsRecording(hidden, calls, spans=places, caches=caches)

    def run(self, index: int, hidden: torch.Tensor, recording: Recording) -> torch.Tensor:
        assert isinstance(recording, RowsRecording)
        args, kwargs = self._given(index, recording)
        layer, spans = self[index], recording.spans
        fast = own_forward(layer)
        forwards: list[tuple[Any, Callable[..., Any]]] = [
            (mixer, partial(_row_by_row, mixer.forward, spans, partial(self._goes_on_with, recording.pieces)))
            for mixer in self._mixers[index]
        ]
        if isinstance(fast, SingleTokenLayer):
            hidden = hidden.float() if hidden.dtype == torch.bfloat16 and fast.streams is None else hidden
            forwards.append((layer, fast.in_library))
        with replaced(forwards):
            out = layer(hidden, *args, **kwargs)
        if isinstance(out, tuple):
            recording.further[index] = out[1:]
            out = out[0]
        assert isinstance(out, torch.Tensor)
        return out

    def _goes_on_with(self, pieces: list[Pieces], row: int) -> None:
        if pieces:
            self._states.pieces = pieces[row]

    def _given(self, index: int, recording: RowsRecording) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a layer is called with, and what earlier ones hand on to it."""

        def found(value: Any) -> Any:
            return recording.further[value.layer][value.place] if isinstance(value, Further) else value

        args, kwargs = recording.calls[index]
        return tuple(map(found, args)), {name: found(value) for name, value in kwargs.items()}

    def _empty(self) -> Cache:
        cache = library_cache(self._loaded.model)
        if cache is None:
            raise LookupError("this model makes its cache itself")
        return cache

    def _probe(self) -> tuple[list[list[Any]], Cache]:
        """The mixers of each layer: the outermost modules in it that are called with the cache; and what that is like
        once it has read a token."""
        cache = self._empty()
        found: list[list[Any]] = [[] for _ in range(len(self))]

        def look(index: int, module: Any, args: Any, kwargs: Any) -> None:
            if any(value is cache for value in (*args, *kwargs.values())):
                found[index].append(module)

        def count(index: int, _module: Any, _args: Any, output: Any) -> None:
            self.returns[index] = len(output) - 1 if isinstance(output, tuple) else 0

        hooks = []
        try:
            for index in range(len(self)):
                hooks.append(self[index].register_forward_hook(partial(count, index)))
                within = [module for module in self[index].modules() if module is not self[index]]
                look_at = partial(look, index)
                hooks += [module.register_forward_pre_hook(look_at, with_kwargs=True) for module in within]
            self._step(torch.zeros(1, 1, dtype=torch.long, device=self._loaded.device), cache, 0)
        finally:
            for hook in hooks:
                hook.remove()
        if not any(found):
            raise LookupError("its layers keep what they read in places of their own")
        return [_outermost(of_layer) for of_layer in found], cache

    def _compare(self) -> None:
        """Some tokens of two rows, against the model itself."""
        rows = [[3], [5, 4]]
        caches = [self._empty() for _ in rows]
        try:
            recording = self._record_rows(rows, [0, 0], caches)
            hidden = recording.hidden
            for index in range(len(self)):
                hidden = self.run(index, hidden, recording)
            found = self.logits(hidden[:, [0, 2]]).float()
        except (TypeError, ValueError, AttributeError, IndexError) as error:  # of a layer called as none ever is
            raise LookupError(f"{_BETWEEN} ({type(error).__name__})") from error
        for logits, ids in zip(found, rows, strict=True):
            own, _ = self._step(torch.tensor([ids], device=self._loaded.device), self._empty(), 0)
            # A router's near tie moves them a little; another model's would have nothing to do with these.
            if torch.corrcoef(torch.stack([logits, own[0].float()]))[0, 1] < _LEAST_ALIKE:
                raise LookupError(_BETWEEN)


def _outermost(modules: list[Any]) -> list[Any]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


def _row_by_row(
    own: Callable[..., Any], spans: list[tuple[int, int]], begin_row: Callable[[int], None], *args: Any, **kwargs: Any
) -> Any:
    """The `forward` of a mixer while a layer is computed: its own, once for each row."""
    if len(spans) == 1:
        begin_row(0)
        return own(*args, **kwargs)
    total, results = spans[-1][1], []
    for place, (begin, end) in enumerate(spans):
        begin_row(place)
        its = [_own(value, place, begin, end, total) for value in args]
        named = {name: _own(value, place, begin, end, total) for name, value in kwargs.items()}
        results.append(own(*its, **named))
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results, dim=1)
    hidden, *further = zip(*results, strict=True)
    return torch.cat(hidden, dim=1), *(
        None if all(each is None for each in values) else PerRow(list(values)) for values in further
    )


def _own(value: Any, place: int, begin: int, end: int, total: int) -> Any:
    """What is one row's of an argument."""
    if isinstance(value, PerRow):
        return value.values[place]
    if isinstance(value, torch.Tensor):
        is_by_token = value.dim() > 1 and value.shape[:2] == (1, total)
        return value[:, begin:end] if is_by_token else value
    if type(value) is tuple:
        return tuple(_own(each, place, begin, end, total) for each in value)
    return value


def _joined(values: list[Any], lengths: list[int]) -> Any:
    """An argument for the tokens of all rows, of what it is for each row."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if all(isinstance(value, torch.Tensor) for value in values):
        # A mask of one token may look like a token's values: joined, it comes apart again as it was.
        by_token = all(
            value.dim() > 1 and value.shape[:2] == (1, length) and value.shape[2:] == first.shape[2:]
            for value, length in zip(values, lengths, strict=True)
        )
        return torch.cat(values, dim=1) if by_token else PerRow(values)
    if all(type(value) is tuple and len(value) == len(first) for value in values):
        return tuple(_joined(list(parts), lengths) for parts in zip(*values, strict=True))
    if isinstance(first, bool | int | float | str | Further) and all(value == first for value in values):
        return first
    return PerRow(values)
