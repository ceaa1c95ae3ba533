"""One live KV cache and the tokens it holds: the next prompt computes only what is new in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicCache

from engine.common import clock
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.falls import FALLS
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.decode.drafter import Drafter
from engine.runtime.decode.generation import BeamModel, ProgressCallback, Reading, ReusedCallback, ignore_reused
from engine.runtime.decode.head_drafter import HeadDrafter
from engine.runtime.decode.pieces import PromptPieces
from engine.runtime.decode.step_model import MOST_ROWS, StepModel, watched_layers
from engine.runtime.draft_head import draft_head_of
from engine.runtime.kept.block import BLOCK_TOKENS, BlockLayout
from engine.runtime.kept.copying import from_cache, into_cache
from engine.runtime.kept.prefixes import Found, KeptPrefixes, Reused
from engine.runtime.kept.state import CacheForm, HeldState
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer, grown_capacity
from engine.runtime.kv.layers import new_cache
from engine.runtime.kv.memory import cache_bytes, cache_layer_bytes
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.reuse import (
    KvSnapshot,
    can_take_back,
    exact_tokens,
    forgetful_bytes,
    long_rope_boundary,
    restart_angles,
)
from engine.runtime.load.devices import ModelDevices
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.pictures import Layout
from engine.telemetry.recorder import RECORDER

SNAPSHOT_TOKENS = 16
"""How far before the end of a prompt a snapshot is taken, for caches that cannot be cropped: behind the common
prefix of a prompt asked again, or followed by another turn, lie but a few tokens that the chat template added."""

_DRAFTS = "The layer that drafts"
"""Gives way where pictures are read."""
_FEWEST_APART = 8 * BLOCK_TOKENS
"""Between two snapshots in the middle of a prompt."""
_MOST_SNAPSHOTS = 8
"""Of what came before the two last turns."""


class KvSession:
    """The KV cache of a decoder-only model, across requests.

    Tokens are the same with and without reuse, but for rounding: what cannot be taken back exactly is computed again.
    How a token is rounded depends on which tokens are computed with it.  Where an answer has to be repeated bit by bit,
    only those chunks are reused that would be computed alike without reuse.  A forward that fails or is interrupted
    leaves a cache that is never used again.

    Args:
        guesses: whether its tokens are going to be guessed, if the model was loaded for that.
        kept: where it finds prompts that others have read, and offers what it has read itself.
        step: of the model, if there is one already.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        guesses: bool = True,
        kept: KeptPrefixes | None = None,
        step: StepModel | None = None,
    ) -> None:
        self._model = loaded.model
        self._context_tokens = loaded.context_tokens
        self._kv_type = loaded.kv_type
        self._step = step or StepModel(loaded.model, loaded.context_tokens)
        self._device = loaded.device
        self._devices = loaded.devices
        self._room = KvRoom(loaded.devices, loaded.context_tokens)
        self._beam_room = KvRoom(loaded.devices, loaded.context_tokens)
        head = draft_head_of(loaded.model) if guesses and loaded.speculates else None
        self._drafter = HeadDrafter(loaded.model, head, loaded.context_tokens) if head is not None else None
        self._before: KvSnapshot | None = None
        self._chunk_tokens = loaded.chunk_tokens
        self._fitting_tokens = loaded.context_tokens
        """Of a prompt at once that there has been memory for."""
        self._pieces = PromptPieces(loaded)
        self._long_rope = long_rope_boundary(loaded.model)
        self._exact = exact_tokens(loaded.model)
        self._sight = loaded.sight
        self.layout: Layout | None = None
        """Where pictures lie in the prompt."""
        self._kept = kept
        self._form = CacheForm.of(new_cache(loaded.model)) if self._kept is not None else None
        self._cache: Cache | None = None
        self._ids: list[int] = []
        self._prompt_tokens = 0
        self._steady = 0
        """Tokens at the beginning that were computed in whole chunks from the first token on."""
        self._snapshots: list[KvSnapshot] = []
        """Where it can go back to, if it cannot be cropped; the shortest first."""
        self._whole = False
        """Whether the cache holds exactly `_ids`: false while a forward runs, and for ever if it fails."""
        self.chat = ""
        """Whose prompts and answers it reads now; see `BatchRequest`."""

    @property
    def tokens(self) -> int:
        """Tokens now held."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """Those."""
        return self._ids

    @property
    def is_whole(self) -> bool:
        """Whether it certainly holds exactly these."""
        return self._whole

    @property
    def live_cache(self) -> Cache:
        """What holds them, and perhaps some of what is being computed."""
        assert self._cache is not None
        return self._cache

    @property
    def cache(self) -> Cache | None:
        """What holds exactly the tokens so far; None while that is not certain."""
        return self._cache if self._whole else None

    @property
    def bytes(self) -> int:
        """Bytes now held, spare capacity included."""
        return cache_bytes(self._cache)

    def keep(self) -> None:
        """Offers all that is held to those who come later, until it is needed for something else."""
        cache, kept = self.cache, self._kept
        if cache is not None and kept is not None and self._ids:
            layout = BlockLayout.of_cache(cache, len(self._ids))
            if layout is not None:
                kept.offer(self, self._ids, layout, from_cache(cache, layout), self.chat)
            elif self._form is not None and self._form.has_state:
                rows = BlockLayout.of_rows(cache)
                states = [HeldState(cache, each.length, each.forgetful) for each in self._snapshots]
                states.append(HeldState(cache, len(self._ids)))
                layout = rows if rows.nbytes else None
                kept.offer_states(self, self._ids, layout, from_cache(cache, rows), states, self.chat)

    def clear(self) -> None:
        """Frees the cache."""
        if self._kept is not None:
            self._kept.withdraw(self)
        if self._drafter is not None:
            self._drafter.clear()
        self._cache = None
        self._ids, self._steady = [], 0
        self._snapshots, self._before = [], None
        self._whole = False
        self._beam_room.release()
        self._room.release()

    def read(
        self,
        prompt: Sequence[int],
        on_progress: ProgressCallback,
        cancelled: CancelCheck,
        on_reused: ReusedCallback = ignore_reused,
        *,
        repeats: bool = False,
        answer: Sequence[int] = (),
    ) -> Reading:
        """Makes the cache hold `prompt`, at least its last token freshly computed; pauses before each chunk, and says
        how many tokens that has.

        Args:
            repeats: whether its logits have to be those of another time, bit by bit, whatever was read before; on a
                card, where experts are computed now here and now there, they cannot be.
            answer: the tokens that have followed the prompt, if it was held before.

        Returns:
            logits [1, V] after all of it, and how many of its tokens were reused.

        Raises:
            RequestCancelled: asked for between two chunks; what was computed so far serves the next prompt.
        """
        asked, prompt = len(prompt), [*prompt, *answer]
        self._beam_room.release()
        restart_angles(self._model)
        self.layout = self._sight.layout(prompt) if self._sight is not None else None
        self._say_falls()
        begun_s = clock.now()
        found = self._reuse(prompt, repeats=repeats and self._devices is None)
        on_reused(found.ram, found.disk, clock.now() - begun_s)
        reused = found.tokens
        # What is kept was computed elsewhere, and a chunk of which a part is gone is no longer whole.
        self._steady = min(self._steady, found.held) // self._chunk_tokens * self._chunk_tokens
        total, self._prompt_tokens = len(prompt), asked
        on_progress(reused, total)
        if self._cache is None:
            self._cache = new_cache(self._model, self._context_tokens, self._kv_type)
        logits: torch.Tensor | None = None
        with self._pieces.of(total - reused, self._chunk_tokens) as piece:
            for start, end in self._chunks(reused, total, piece, repeats=repeats):
                yield end - start
                if cancelled():
                    raise RequestCancelled
                if end == total or self._is_far(start):
                    self._take_snapshot()
                ids = prompt[start:end]
                with watched_layers(self._model, start, end, total, on_progress, cancelled):
                    logits = self._forward(torch.tensor([ids], device=self._device), ids)
                if start == self._steady and end - start == self._chunk_tokens:
                    self._steady = end
                on_progress(end, total)
        assert logits is not None  # the last token is never reused
        return logits, found

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """Appends one token [1, 1] whose id is `token_id`; logits [1, V] after it."""
        if self._long_rope is not None and len(self._ids) == self._long_rope:
            # From here every position is rotated differently: compute the context again, as transformers does.
            ids = [*self._ids, token_id]
            self.clear()
            self._cache = new_cache(self._model, self._context_tokens, self._kv_type)
            return self._forward(torch.tensor([ids], device=self._device), ids)
        return self._forward(token, (token_id,))

    @contextmanager
    def advancing(self, ids: Sequence[int], *, leaves_snapshot: bool = False) -> Iterator[None]:
        """Within it others compute these tokens over `live_cache`: all of them, or none if that is given up.

        Args:
            leaves_snapshot: whether a prompt ends with them, which its next turn goes on from.
        """
        cache, held = self._cache, len(self._ids)
        assert cache is not None
        assert self._whole or not held
        if leaves_snapshot:
            self._take_snapshot()
        self._room.make(cache, held + len(ids))
        before, self._whole = KvSnapshot(cache, held), False
        try:
            yield
        except BaseException:
            before.give_up(cache)
            self._whole = True
            raise
        self._room.count(cache)
        self._ids.extend(ids)
        self._whole = True
        if self._drafter is not None:
            self._drafter.clear()  # it has not heard these

    def before_snapshot(self, total: int) -> int:
        """How many tokens of a prompt of `total` are read before the place that its next turn goes on from; 0 if that
        has been passed, or the cache can be cropped anyway."""
        return max(0, total - SNAPSHOT_TOKENS - len(self._ids)) if self._forgets() else 0

    def go_on_from(self, cache: Cache, ids: Sequence[int]) -> None:
        """Takes over a cache that holds exactly these tokens."""
        self.clear()
        self._room.make(cache, len(ids))
        self._cache, self._ids, self._whole = cache, list(ids), True

    def drafters(self) -> list[Drafter]:
        """What guesses its next tokens besides their text."""
        return list(self._heads)

    def _say_falls(self) -> None:
        """What cannot be done behind pictures gives way, and says so."""
        drafter = self._drafter
        if drafter is not None and self.layout is not None:
            FALLS.say(_DRAFTS, "tokens one by one", "it knows no positions behind pictures")
        else:
            FALLS.is_over(_DRAFTS)
        if drafter is not None and self.layout is not None:
            drafter.clear()

    @property
    def _heads(self) -> list[HeadDrafter]:
        """A layer that drafts knows no positions of pictures."""
        return [self._drafter] if self._drafter is not None and self.layout is None else []

    def takes(self, tokens: int) -> bool:
        """Whether `several` computes so many tokens now, and `take_back` forgets them exactly.

        Each comes out as from `step`, bit by bit where the native kernels compute the step; the library, which does so
        for models with a draft head, may sum in another order.
        """
        after = len(self._ids) + tokens
        return (
            after <= min(self._context_tokens, self._exact)
            and not self._crosses(len(self._ids), after)
            and (self._step.takes(tokens, self._cache) or self._sweeps(tokens))
        )

    def several(self, ids: Sequence[int]) -> torch.Tensor:
        """Appends tokens that it `takes`; logits [q, V] after each of them."""
        cache = self._cache
        assert cache is not None
        in_steps = self._step.takes(len(ids), cache)
        self._before = KvSnapshot(cache, len(self._ids)) if KvSnapshot.worth_taking(cache) else None
        self._whole = False
        held = len(self._ids)
        self._room.make(cache, held + len(ids))
        compute = self._step.several if in_steps else self._step.sweep
        with self._listening():
            logits = compute(torch.tensor([list(ids)], device=self._device), cache, self._position(held))
        self._room.count(cache)
        self._computed(ids)
        return logits

    def take_back(self, tokens: int) -> None:
        """Forgets the last tokens, which `several` appended."""
        if not self._whole or self._cache is None:
            return  # after a failure, of no use in any case
        before, self._before = self._before, None
        if before is None:
            self._cache.crop(-tokens)
            del self._ids[-tokens:]
            for drafter in self._heads:
                drafter.take_back(tokens)
            return
        # States that have taken the tokens in do not let go of them: those that stay are computed again.
        kept = self._ids[before.length : -tokens]
        before.restore(self._cache, len(self._ids))
        del self._ids[before.length :]
        self._forward(torch.tensor([kept], device=self._device), kept)

    def _sweeps(self, tokens: int) -> bool:
        """Whether the library computes so many tokens at once."""
        return bool(self._heads) and 0 < tokens <= MOST_ROWS and type(self._cache) is DynamicCache and bool(self._ids)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """During a forward."""
        if RECORDER.on:
            RECORDER.forward()
        for drafter in self._heads:
            drafter.listen()
        try:
            yield
        except BaseException:
            for drafter in self._heads:
                drafter.stop_listening()
            raise

    def _computed(self, ids: Sequence[int]) -> None:
        """After a forward over these tokens."""
        held = len(self._ids)
        self._ids.extend(ids)
        self._whole = True
        for drafter in self._heads:
            drafter.heard(held, ids)
        if RECORDER.on:
            RECORDER.head()

    def beams(self, width: int) -> BeamModel:
        """`width` sequences that start with what is held; this cache stays as it is."""
        assert self._cache is not None
        assert self._whole
        room = self._beam_room
        return BeamCache(self._step, self._cache, len(self._ids), width, self._device, room, self._shift)

    def _forward(self, tokens: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        self._whole = False
        held = len(self._ids)
        self._room.make(self._cache, held + len(ids))
        try:
            with self._listening():
                layout = self.layout
                given = layout.given(held, ids, self._model) if layout is not None else None
                logits, self._cache = self._step(tokens, self._cache, self._position(held), given)
        except (EngineError, torch.OutOfMemoryError) as error:
            if isinstance(error, EngineError) and error.code != ErrorCode.NOT_ENOUGH_MEMORY:
                raise
            if self._devices is None or not (self._devices.shrink() or self._reads_less(len(ids))):
                raise
        else:
            self._room.count(self._cache)
            self._computed(ids)
            return logits
        # Not in the handler, which keeps the tensors of the forward alive.
        return self._compute_again([*self._ids, *ids])

    @property
    def _shift(self) -> int:
        """Of the answer's positions, behind pictures."""
        return self.layout.shift if self.layout is not None else 0

    def _position(self, held: int) -> int:
        return self.layout.position(held) if self.layout is not None else held

    def _reads_less(self, tokens: int) -> bool:
        """After a piece of a prompt for which there was no memory: from now on they are shorter, if they can be."""
        if tokens <= PAGE_TOKENS:
            return False
        self._fitting_tokens = max(PAGE_TOKENS, tokens // 2)
        self._chunk_tokens = min(self._chunk_tokens, self._fitting_tokens)
        return True

    def _compute_again(self, ids: list[int]) -> torch.Tensor:
        """With the experts in less memory than before; logits after the last of `ids`."""
        self.clear()
        self._cache = new_cache(self._model, self._context_tokens, self._kv_type)
        logits: torch.Tensor | None = None
        restart_angles(self._model)
        for start, end in self._chunks(0, len(ids), self._chunk_tokens):
            logits = self._forward(torch.tensor([ids[start:end]], device=self._device), ids[start:end])
        assert logits is not None
        return logits

    def _chunks(self, begin: int, total: int, piece: int, *, repeats: bool = False) -> Iterator[tuple[int, int]]:
        """From where to where each forward of a prompt and its answer goes, of up to so many tokens."""
        if self._crosses(0, total):
            yield begin, total
            return
        read = min(self._prompt_tokens, total)
        if read < total and (repeats or total > self._exact):
            # Of an answer that depends on what is computed together, tokens come one by one, as they came before.
            yield from self._chunks(begin, read, piece)
            yield from ((place, place + 1) for place in range(max(begin, read), total))
            return
        if total > self._exact:
            if begin < total:
                yield begin, total
            return
        last = total - SNAPSHOT_TOKENS
        while begin < total:
            end = min(begin + min(piece, self._fitting_tokens), total)
            if begin < last < end and self._forgets():
                end = last
            if self.layout is not None:
                end = self.layout.whole(begin, end)
            yield begin, end
            begin = end

    def _forgets(self) -> bool:
        return self._cache is not None and KvSnapshot.worth_taking(self._cache)

    def _take_snapshot(self) -> None:
        if not (self._ids and self._cache is not None and self._forgets()):
            return
        now = KvSnapshot(self._cache, len(self._ids))
        earlier = [each for each in self._snapshots if each.length < now.length] if self._keeps_several else []
        # The two last turns, and of those before as many as take no more than the tokens in between.
        spaced = list[KvSnapshot]()
        for each in earlier[:-1]:
            if self._costs_less(spaced[-1].length if spaced else 0, each.length, each.nbytes):
                spaced.append(each)
        self._snapshots = [*spaced[-_MOST_SNAPSHOTS:], *earlier[-1:], now]

    @property
    def _keeps_several(self) -> bool:
        return self._kept is not None and self._devices is None

    def _is_far(self, tokens: int) -> bool:
        """Whether another snapshot in mid-prompt, at `tokens`, takes no more than the tokens since the last one."""
        if not (self._keeps_several and self._cache is not None and self._forgets() and tokens == len(self._ids)):
            return False
        last = self._snapshots[-1].length if self._snapshots else 0
        return tokens - last >= _FEWEST_APART and self._costs_less(last, tokens, forgetful_bytes(self._cache))

    def _costs_less(self, before: int, after: int, nbytes: int) -> bool:
        """Than the tokens in between, in the layers that keep all."""
        rows = cache_bytes(self._cache) - forgetful_bytes(self._cache)
        return nbytes * len(self._ids) <= rows * (after - before)

    def _reuse(self, prompt: Sequence[int], *, repeats: bool) -> Reused:
        """Cuts the cache down to what it shares with `prompt`, brings what is kept behind that, and counts both.

        How what is kept was computed is not known: it is of no use to what repeats.
        """
        shared, held = self._shared(prompt, repeats=repeats), len(self._ids)
        found = self._find(prompt, shared) if not repeats else None
        if self._kept is not None:
            # Of a cache that is going to be replaced, nothing stays where it is.
            self._kept.withdraw(self, 0 if found is not None and found.state is not None else shared)
        if not shared:
            self.clear()
            return self._bring_any(found, prompt)
        assert self._cache is not None
        self._whole = False
        if can_take_back(self._cache, held - shared):
            if held > shared:
                self._cache.crop(shared - held)
        else:
            self._snapshots[-1].restore(self._cache, held)
        del self._ids[shared:]
        self._whole = True
        return self._bring_any(found, prompt) if found is not None else Reused(shared)

    def _bring_any(self, found: Found | None, prompt: Sequence[int]) -> Reused:
        """What is found to be damaged is removed: there may be something shorter then."""
        while found is not None:
            brought, tokens = self._bring(found, prompt), found.tokens
            if brought.tokens or found.state is None:
                return brought
            found = self._find(prompt, 0)
            if found is not None and found.tokens >= tokens:
                break
        return Reused()

    def _find(self, prompt: Sequence[int], shared: int) -> Found | None:
        """The longest beginning of a prompt that is kept, if that is longer than what the cache has."""
        if self._kept is None:
            return None
        found = self._kept.find(prompt, shared, self.chat)
        if self._form is not None and self._form.has_state:
            least = found.tokens if found is not None else shared
            found = self._kept.find_state(prompt, least, has_rows=self._form.has_rows, chat=self.chat) or found
        return found

    def usable(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt it need not read."""
        shared = min(common_prefix(self._ids, prompt), len(prompt) - 1) if self._whole else 0
        if not shared or self._cache is None or can_take_back(self._cache, len(self._ids) - shared):
            return shared
        return max((each.length for each in self._snapshots if each.length <= shared), default=0)

    def _shared(self, prompt: Sequence[int], *, repeats: bool) -> int:
        """How much of a prompt the cache can go on from; whole chunks, all computed as at first, where it repeats."""
        shared = common_prefix(self._ids, prompt) if self._whole else 0
        shared = min(shared, len(prompt) - 1)
        step = self._chunk_tokens if repeats else 1
        if repeats:
            shared = min(shared, self._steady) // step * step
        held = len(self._ids)
        if shared and self._cache is not None and not can_take_back(self._cache, held - shared):
            self._snapshots = [each for each in self._snapshots if each.length <= shared]
            shared = next((each.length for each in reversed(self._snapshots) if each.length % step == 0), 0)
            self._snapshots = [each for each in self._snapshots if each.length <= shared]
        keep = (
            shared > 0
            and max(held, len(prompt)) <= self._exact
            and not self._crosses(shared, len(prompt))
            and not self._crosses(shared, held)
        )
        return shared if keep else 0

    def _bring(self, found: Found, prompt: Sequence[int]) -> Reused:
        """Goes on from what is kept of a prompt, of which the cache holds some of its beginning, or nothing."""
        held = len(self._ids)
        begin = held // BLOCK_TOKENS * BLOCK_TOKENS
        if self._crosses(found.tokens, len(prompt)):
            return Reused(held)
        is_again = found.state is not None or self._slides_within(found.tokens)
        if self._cache is None or is_again or not can_take_back(self._cache, held - begin):
            self.clear()
            begin = 0
            self._cache = new_cache(self._model, self._context_tokens, self._kv_type)
            if self._cache is None:
                return Reused()
        elif held > begin:
            self._cache.crop(begin - held)
        self._snapshots = [each for each in self._snapshots if each.length <= begin]
        del self._ids[begin:]
        self._whole = False
        try:
            self._room.make(self._cache, found.tokens)
            tokens = into_cache(found, self._cache, begin, self._device_of)
            self._room.count(self._cache)
        except (LookupError, EngineError):  # of another layout, or there is no room for all of it at once
            self.clear()
            return Reused()
        self._ids, self._whole = list(prompt[:tokens]), True
        if not tokens:
            self.clear()
        return found.reused._replace(held=begin)

    def _slides_within(self, tokens: int) -> bool:
        layers = getattr(self._cache, "layers", [])
        return any(type(each) is GrowingWindowLayer and tokens >= each.sliding_window for each in layers)

    def _device_of(self, layer: int) -> torch.device:
        if self._devices is None:
            return self._device
        return self._devices.devices[self._devices.layers.of_cache_layer(layer)].torch_device

    def _crosses(self, before: int, after: int) -> bool:
        """Whether LongRoPE's boundary lies between these two lengths."""
        return self._long_rope is not None and before <= self._long_rope < after


class BeamCache:
    """The KV caches of several sequences with one common prompt."""

    def __init__(
        self,
        step: StepModel,
        prompt: Cache,
        length: int,
        width: int,
        device: torch.device,
        room: KvRoom,
        shift: int = 0,
    ) -> None:
        self._step, self._shift = step, shift
        self._room = room
        room.make(None, length + 1, width)
        self._cache: Cache = copy.deepcopy(prompt)
        self._length = length
        self.reorder(torch.zeros(width, dtype=torch.long, device=device))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to each sequence, tokens [B, 1]; logits [B, V]."""
        self._room.make(self._cache, self._length + 1, tokens.shape[0])
        if RECORDER.on:
            RECORDER.forward()
        logits, self._cache = self._step(tokens, self._cache, self._length + self._shift)
        self._room.count(self._cache)
        self._length += 1
        if RECORDER.on:
            RECORDER.head()
        return logits

    def reorder(self, sources: torch.Tensor) -> None:
        """Sequence i continues what sequence `sources[i]` was; [B] int64."""
        # Not `batch_select_indices` and the like: layers with recurrent states know only how to reorder.
        self._cache.reorder_cache(sources)


class KvRoom:
    """What one KV cache takes of each device; on the CPU alone there is nothing to count.

    Args:
        most_tokens: longest context.
    """

    def __init__(self, devices: ModelDevices | None, most_tokens: int) -> None:
        self._devices = devices
        self._most_tokens = most_tokens
        opened = devices.devices if devices is not None else ()
        self._reservations = [device.memory.reserve(0, MemoryCategory.KV) for device in opened]

    @property
    def nbytes(self) -> int:
        """Bytes counted now, on all devices."""
        return sum(reservation.nbytes for reservation in self._reservations)

    def make(self, cache: Cache | None, tokens: int, rows: int = 1) -> None:
        """Before a forward that lets each of `rows` sequences hold `tokens`.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: not even all slots of the expert caches would do.
        """
        if self._devices is None:
            return
        held = self._held(cache)
        for index, kv in enumerate(self._devices.kv):
            now = max(0, held[index] // rows - kv.fixed) // kv.per_token if kv.per_token else 0
            capacity = now
            if tokens > now:
                wanted = grown_capacity(now, tokens, self._most_tokens)
                capacity = tokens + min(wanted - tokens, self._spare_tokens(index, tokens, rows))
                self._bound(cache, index, self._most_tokens if capacity == wanted else capacity)
            nbytes = max(held[index], rows * (kv.fixed + capacity * kv.per_token))
            self._devices.resize_kv(index, self._reservations[index], nbytes, tokens)

    def count(self, cache: Cache | None) -> None:
        """After a forward: the bytes that are really held.

        Raises:
            EngineError: as `make`.
        """
        if self._devices is None:
            return
        for index, nbytes in enumerate(self._held(cache)):
            if nbytes != self._reservations[index].nbytes:
                tokens = cache.get_seq_length() if cache is not None else 0
                self._devices.resize_kv(index, self._reservations[index], nbytes, tokens)

    def release(self) -> None:
        """The cache is gone: its memory is the experts' again."""
        if self.nbytes:
            for reservation in self._reservations:
                reservation.release()
            assert self._devices is not None
            self._devices.experts.take_back()

    def _spare_tokens(self, index: int, tokens: int, rows: int) -> int:
        """Of more tokens than so many there is room for, those that leave as much to the steps' activations."""
        assert self._devices is not None
        kv = self._devices.kv[index]
        if not kv.per_token:
            return self._most_tokens
        there = self._devices.spare(index) + self._reservations[index].nbytes
        return max(0, there - rows * (kv.fixed + tokens * kv.per_token)) // (2 * rows * kv.per_token)

    def _bound(self, cache: Cache | None, index: int, most_tokens: int) -> None:
        """Lets a device's layers have no room for more than so many tokens."""
        assert self._devices is not None
        for number, layer in enumerate(getattr(cache, "layers", ())):
            if isinstance(layer, GrowingLayer | NarrowLayer) and self._devices.layers.of_cache_layer(number) == index:
                layer.most_tokens = most_tokens

    def _held(self, cache: Cache | None) -> list[int]:
        held = [0] * len(self._reservations)
        assert self._devices is not None
        for layer, nbytes in enumerate(cache_layer_bytes(cache)):
            held[self._devices.layers.of_cache_layer(layer)] += nbytes
        return held


def common_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (a, b) in enumerate(zip(held, prompt, strict=False)):
        if a != b:
            return index
    return min(len(held), len(prompt))
