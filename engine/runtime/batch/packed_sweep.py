"""One sweep of many rows through the library's layers, packed without padding."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.common import clock
from engine.common.errors import ErrorCode
from engine.common.falls import FALLS
from engine.common.footprint import pages_for
from engine.devices.memory_budget import DeviceMemoryError
from engine.jobs.rows import Check, never
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, Piece, Pieces
from engine.planner.schedules import HYBRID, S4, SCHEDULES, Schedule
from engine.runtime.batch.layers import DecoderLayers, MicroBatch, NativeRows, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.device_pipeline import KEPT_PAGES, DevicePipeline
from engine.runtime.batch.pipeline.paged import PagedAttention, PlacedRows
from engine.runtime.batch.policy import BatchPolicy, PlanOutdatedError, ScheduleChoice, why_not_packed
from engine.runtime.batch.row_mixers import RowMixers
from engine.runtime.decode.encoder_decoder import decoder_start
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.decode.paged_steps import PagedSteps, has_pages, packs_mixers
from engine.runtime.decode.pieces import PromptPieces
from engine.runtime.decode.sequence import Sequence as Answer
from engine.runtime.decode.speculation import Guess
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.library_attention import attending_by, configs_of
from engine.runtime.kv.library_caches import LibraryCaches
from engine.runtime.kv.paged_cache import PagedCaches, keeps_latents
from engine.runtime.kv.pages import PageSizes
from engine.runtime.kv.reuse import (
    exact_tokens,
    kinds_by_length,
    long_rope_boundary,
    restart_angles,
    together_tokens,
)
from engine.runtime.load.devices import PageRoom
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.pictures import Layout, PromptPart, Sight
from engine.runtime.schedule.row import PagedRow
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)
_MOST_PAGES_BESIDE = 64
"""Where pages are only counted, one is at least so much of what a row holds however long it is."""

_PIPELINE, _AS_CHATS = "The pipeline of batches", "experts computed as in a chat"
_PLANNED = "The schedule that was planned for rows"
_SETTLED = 3
"""Sweeps in a row by another schedule than the planned one: more than a trial."""


@dataclass(frozen=True, slots=True)
class Work:
    """A row and its number of tokens in the next sweep.

    Attributes:
        is_piggybacked: whether it rides along in a sweep of others.
        is_exact: whether the sweep computes what `PagedSteps` does: the prompt of one row, or answers.
        guess: what is tried behind the next token of its answer.
    """

    row: PagedRow
    tokens: int
    is_piggybacked: bool = False
    is_exact: bool = False
    guess: Guess | None = None

    @property
    def wants_logits(self) -> bool:
        """Whether a token is to be sampled after these."""
        return self.row.held + self.tokens >= len(self.row.prompt)

    @property
    def picture(self) -> Layout | None:
        """Where pictures lie, if any are among these tokens."""
        layout, held = self.row.layout, self.row.held
        return layout if layout is not None and layout.has_any(held, held + self.tokens) else None

    @property
    def is_certain(self) -> bool:
        """Whether all of it stays: its state can be written over."""
        return self.is_exact and not self.row.is_reading and self.guess is None

    @property
    def reads_exactly(self) -> bool:
        return self.is_exact and self.row.is_reading

    @property
    def ids(self) -> list[int]:
        """Those tokens."""
        ids = self.row.next_ids(self.tokens)
        return ids if self.guess is None else [*ids, *self.guess.ids]


class PackedModel:
    """A model whose layers process tokens of many rows as one sequence, or all of them but their mixers.

    What rows hold is in pages, or else in caches of the library's, and pages are only counted.

    Args:
        opens: whether it is found out now whether rows share sweeps, which takes some steps of the model; else that is
            done once there are two of them, see `packs`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: BatchPolicy,
        *,
        opens: bool = True,
    ) -> None:
        self._loaded, self._policy = loaded, policy
        self._states = PagedStates(loaded.kernels, loaded.context_tokens, policy.window, policy.kept)
        self.mixers: RowMixers | None = None
        """What calls mixers row by row, if they are not computed for all rows at once."""
        self._kv_type = policy.kv_type or (KvType.BF16 if loaded.model.dtype == torch.bfloat16 else KvType.FP32)
        self._may_have_pages = has_pages(loaded) and policy.on_device == (loaded.devices is not None)
        self._configs = configs_of(loaded.model)
        self._follows_length = "dynamic" in kinds_by_length(loaded.model)
        self.together_tokens = together_tokens(loaded.model)
        self._native: NativeRows | None = None
        self._pipeline: DevicePipeline | None = None
        self._exact: PagedSteps | None = None
        self.apart = why_not_packed(loaded.model)
        """Why rows share no sweeps, as the end of a sentence; empty if they do, or that is not known yet."""
        self._is_open = False
        self._choice = ScheduleChoice(policy.planned, policy.planned_reading, by_hand=policy.by_hand)
        self._last: Schedule | None = None
        self._others = 0
        """Sweeps in a row by `_last`, which is not the planned schedule."""
        self._micro_batch_tokens = policy.micro_batch_tokens
        """As many as there has been memory for."""
        self._budgets: Sequence[int] = ()
        """Of devices, when that was found out."""
        self._read: Cache | None = None
        """The library's cache after a token."""
        if opens:
            self._try_to_open(is_first=True)
        self.caches: PagedCaches | LibraryCaches | None = None
        """Of the pages of each layer, once there are any, if what they hold is what the model's own cache would."""
        self.leaves: Check = never
        """Asked between the layers of a prompt that is read alone: whether it is left there, and begun again later."""
        self.state_bytes, by_window = 0, dict[int, int]()
        if self._is_open and self.mixers is None:
            by_window = self._states.bytes_by_window(self._kv_type)
            self.state_bytes = self._native.state_bytes if self._native is not None else 0
        elif self._may_have_pages and (one := self._pages_of_library(1, 1)) is not None:
            by_window, self.state_bytes = one.bytes_by_window(), one.state_bytes
        else:
            self.caches = LibraryCaches(loaded.model)
        self.context_tokens = loaded.context_tokens
        self.most_at_once = max(policy.sweep_tokens, PromptPieces(loaded).longest(loaded.chunk_tokens))
        """Tokens of a row in one sweep, at most."""
        self.has_card = loaded.devices is not None
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        if self._encodes:
            self.context_tokens *= 2  # prompt and answer each have all of it
        if isinstance(self.caches, LibraryCaches):
            # A cache is counted by its tokens, and as much of what it has beside them as is in a page.
            token, self.state_bytes = loaded.info.kv_bytes_per_token, max(1, loaded.kv_fixed_bytes)
            self.sizes = PageSizes(max(1, token * PAGE_TOKENS, -(-self.state_bytes // _MOST_PAGES_BESIDE)))
        else:
            self.sizes = PageSizes.of(by_window, self._slides())
        self.pages = max(1, policy.kv_bytes // self.page_bytes)
        """Pages that fit into the budget."""
        if (policy.on_device or isinstance(self.caches, LibraryCaches)) and loaded.devices is not None:
            self.pages = PageRoom.most(loaded.devices, self.page_bytes)
        self.room: PageRoom | None = None
        """What pages take of devices, if they lie there."""
        is_there = policy.on_device or isinstance(self.caches, LibraryCaches)
        self.logits_place = loaded.device if is_there else torch.device("cpu")
        """Where a sweep's are."""
        self._attention = dict[torch.device, PagedAttention]()
        self._placed: tuple[Pieces, dict[int, PlacedRows]] | None = None
        """By the window, where pieces of one lie."""
        self._generation = 0

    def _open(self, *, is_first: bool) -> None:
        """Finds the layers, and what calls their mixers row by row, if anything does.

        Args:
            is_first: whether rows' caches are not chosen yet.

        Raises:
            LookupError: they or their attention are not found where expected, or do not take many rows.
        """
        loaded, policy = self._loaded, self._policy
        mixers: RowMixers | None = None
        if not (is_first and packs_mixers(loaded)) or (policy.on_device and keeps_latents(loaded.model)):
            mixers = RowMixers(loaded, self._states, may_have_pages=self._may_have_pages)
        self._layers: DecoderLayers = mixers or DecoderLayers(loaded.model)
        if mixers is None:
            self._probe_attention()
            if not self._states.shapes:
                raise LookupError("its attention does not go through the library's attention interface")
        if loaded.kernels is not None and loaded.device.type == "cpu" and not policy.cached:
            apart = mixers.apart if mixers is not None else frozenset[Any]()
            self._native = NativeRows(loaded.model, self._layers, self._states, loaded.kernels, apart)
        if policy.schedule is not HYBRID and mixers is None and not policy.on_device:
            self._pipeline = self._opened_pipeline()
        self.mixers, self._is_open = mixers, True
        if mixers is not None and not is_first and self.caches is not None:
            mixers.go_over(self.caches)

    def packs(self) -> bool:
        """Whether rows share sweeps; it may take some steps of the model to find that out."""
        self._try_to_open(is_first=False)
        return self.are_packed

    def _try_to_open(self, *, is_first: bool) -> None:
        if not self._is_open and not self.apart:
            try:
                self._open(is_first=is_first)
            except LookupError as error:
                self.apart = str(error)

    @property
    def places_of_states(self) -> int:
        """Another one whenever a card's states get other memory, where a sweep under way would not find them."""
        return self.caches.state_generation if self.caches is not None else 0

    @property
    def are_packed(self) -> bool:
        """The same, as far as it is known."""
        return self._is_open and not self.apart

    def held_bytes(self, pages: int) -> int:
        """What so many pages take, with all that is in use as they are."""
        if isinstance(self.caches, LibraryCaches):
            return self.caches.nbytes
        return self.room.nbytes if self.room is not None else pages * self.page_bytes

    @property
    def exact_tokens(self) -> tuple[int, int]:
        """See `PageKind.exact` and `PageKind.again`."""
        model = self._loaded.model
        return 0 if self._encodes else exact_tokens(model), long_rope_boundary(model) or sys.maxsize

    def repeats(self, row: PagedRow) -> bool:
        """Whether a row is to be computed as it would be another time; on a card none can be."""
        return row.request.repeats and self._loaded.devices is None and self._loaded.device.type == "cpu"

    def answer_prefix(self, new: Answer) -> list[int]:
        """The tokens that an answer continues."""
        return [decoder_start(self._loaded.model)] if self._encodes else new.known_prompt

    def _slides(self) -> bool:
        """Whether layers with a window have pages of their own."""
        loaded = self._loaded
        return (
            not self._policy.window
            and not self.state_bytes
            and (self._policy.on_device if loaded.devices is not None else loaded.device.type == "cpu")
            and self._pipeline is None
        )

    @property
    def page_bytes(self) -> int:
        """Of what a pool counts in."""
        return self.sizes.unit

    def _opened_pipeline(self) -> DevicePipeline | None:
        """None where experts are computed as in a chat; where some of them come over a link, it is said why."""
        if not self._loaded.caches:
            if self._policy.by_hand:
                FALLS.say(_PLANNED, _AS_CHATS, "no experts come to the model's device")
            return None
        try:
            pipeline = DevicePipeline(self._loaded, self._layers, self._states, self._policy.resident)
        except (LookupError, DeviceMemoryError) as error:
            FALLS.say(_PIPELINE, _AS_CHATS, str(error))
            return None
        for what in (_PIPELINE, KEPT_PAGES, _PLANNED):
            FALLS.is_over(what)
        return pipeline

    def exact_steps(self) -> PagedSteps | None:
        """What computes single sequences in these pages, once there are any; None if their own cache does better."""
        if self.caches is not None:
            is_over_pages = self._is_open and self._loaded.kernels is not None and not self.caches.are_of_card
            is_over_pages = is_over_pages and (self.mixers is None or self.mixers.attends_over_pages)
            self._exact = PagedSteps.of(self._loaded, self.caches, self._attending if is_over_pages else None)
        return self._exact

    def allocate(self, pages: int, states: int = 0, windows: int = 0, *, by_head: bool = False) -> None:
        """Allocates `pages` pages of every layer, see `PagedStates.allocate`, and so many of what layers sum up."""
        self.pages = pages
        if self.mixers is not None or not self._is_open:
            if self.caches is None:
                self.caches = self._pages_of_library(pages, states, windows, by_head=by_head)
            if self.mixers is not None and self.caches is not None:
                self.mixers.go_over(self.caches)
        elif not self._shares_pages(pages, windows, by_head=by_head):
            self._states.allocate(self._kv_type, pages, windows, by_head=by_head)
            if self._native is not None:
                self._native.allocate_states(states)
                self.caches = self._native.caches()
        is_there = self._policy.on_device or isinstance(self.caches, LibraryCaches)
        if is_there and self.caches is not None and (devices := self._loaded.devices) is not None:
            self.room = PageRoom(devices, self.caches, pages_for(self.context_tokens))
        planned = self._policy.planned
        if self._policy.row_tokens and self._pipeline is not None and (planned is None or planned.attends_on_card):
            each = pages_for(self._policy.row_tokens)
            among = min(pages, self._policy.rows * each)
            moving = math.ceil((self._policy.micro_batch_rows or self._policy.rows) * each * (1 - self._policy.cached))
            self._pipeline.keep_pages(self._policy.cached, among, moving)

    def _pages_of_library(
        self, pages: int, states: int, windows: int = 0, *, by_head: bool = False
    ) -> PagedCaches | None:
        """Those that hold what the library's cache of this model does; None if none do."""
        read = self.mixers.read if self.mixers is not None else self._loaded.read
        if read is None:
            loaded = self._loaded
            with torch.inference_mode():
                token = torch.zeros(1, 1, dtype=torch.long, device=loaded.device)
                _, read = StepModel(loaded.model, 1)(token, library_cache(loaded.model), 0)
            self._loaded.read = read
        own_positions = any(getattr(each, "indexer_position_ids", None) is not None for each in read.layers)
        if own_positions and self._loaded.sight is not None:
            return None  # behind pictures they are not as many as there are tokens
        return PagedCaches.like(read, self._kv_type, pages, states, windows, by_head=by_head)

    def _shares_pages(self, pages: int, windows: int, *, by_head: bool) -> bool:
        """Whether modules attend over the same pages as the library's cache of this model, which are allocated then."""
        is_native = self._native is not None and self._native.has_all
        if is_native or self._read is None or not self._may_have_pages:
            return False
        caches = PagedCaches.like(self._read, self._kv_type, pages, 0, windows, by_head=by_head)
        if caches is None or not self._states.attend_over(caches):
            return False
        self.caches = caches
        return True

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of these pages to the system, as far as it takes it."""
        (self.caches or self._states).discard(pages)

    def discard_windows(self, pages: Sequence[int]) -> None:
        """The same of windows' pages."""
        (self.caches or self._states).discard_windows(pages)

    def discard_states(self, states: Sequence[int]) -> None:
        """The same of what layers have summed up."""
        if self.caches is not None:
            self.caches.discard_states(states)

    def heed(self, fit: Callable[..., bool]) -> None:
        """Between sweeps: follows what other programs leave of a device's memory.

        Args:
            fit: gives up what pages do not use of it, see `PagePool.fit`.
        """
        devices = self._loaded.devices
        if devices is None:
            return
        if (budgets := devices.heed(monotonic())) != self._budgets:
            self._budgets, self._micro_batch_tokens = budgets, self._policy.micro_batch_tokens
        while any(device.memory.excess for device in devices.devices):
            if not (fit() or devices.experts.make_room() or self.lighten() or fit(forgets=True)):
                break

    def lighten(self, *, is_exact: bool = False) -> bool:
        """After a sweep for which a device had no memory: the next one computes fewer tokens at once, beside fewer
        experts, and at last without whole layers of them.  Whether there was anything of that to be done.

        Args:
            is_exact: whether the sweep was of `PagedSteps`, which read as much at once as they are told.
        """
        devices = self._loaded.devices
        if devices is None:
            return False
        for device in devices.devices:
            device.recover()
        freed = sum(each.shrink() for each in devices.experts.activations)
        tokens = self._micro_batch_tokens if is_exact else max(PAGE_TOKENS, self._micro_batch_tokens // 2)
        is_less = devices.shrink() or tokens < self._micro_batch_tokens
        self._micro_batch_tokens = tokens
        if not is_less and self._pipeline is not None and self._pipeline.keeps_pages:
            self._pipeline.leave_pages()
            FALLS.say(KEPT_PAGES, "keys and values in RAM", "others need the graphics card's memory")
            is_less = True
        elif not is_less and self._pipeline is not None:
            self.close()
            FALLS.say(_PIPELINE, _AS_CHATS, "a sweep found no memory on the card beside two layers")
            is_less = True
        _log.info("a sweep found no memory: %d tokens at once, %d bytes of buffers freed", tokens, freed)
        return is_less

    def are_others_in_the_way(self) -> bool:
        """Whether a device refuses memory because other programs hold it."""
        devices = self._loaded.devices
        return devices is not None and devices.are_short(monotonic())

    def threads(self) -> AbstractContextManager[None]:
        """For the duration of sweeps: torch uses one thread where native kernels do the large operations."""
        return self._loaded.token_by_token() if self._native is not None or not self._is_open else nullcontext()

    def sweep(self, work: list[Work]) -> Generator[None, None, torch.Tensor]:
        """Takes the tokens of `work` through all layers; yields after each layer of each micro-batch.

        Returns:
            logits [R, V] on the CPU, for the rows that need them, in the order of `work`.
        """
        tokens, busy_s, since_ns = sum(each.tokens for each in work), 0.0, clock.now_ns()
        reads = any(each.tokens > 1 for each in work)
        if work[0].is_exact:
            yield
            return self._exactly(work)
        if (few := self._few(work)) is not None:
            yield
            logits = few()
            self._record(work, since_ns)
            return logits
        if self._follows_length:
            restart_angles(self._loaded.model)  # one that was computed alone may have been longer
        sees = any(each.picture is not None for each in work)
        # Pipelines hand hidden states from layer to layer as they are.
        chosen = HYBRID if sees else self._schedule(tokens, len(work), reads)
        schedule = self._able(chosen)
        parts = self._parts(work, schedule)
        micro_batches = [self._prepare(part) for part in parts]
        for step in self._steps(micro_batches, schedule):
            begun_s = clock.now()
            step()
            busy_s += clock.now() - begun_s
            yield
        if not sees:
            self._choice.took(chosen, tokens, busy_s, reads=reads)
        if not reads and len(work) >= self._policy.rows:
            self._compare(schedule)
            self._heed_plan()
        self._record(work, since_ns)
        return self._logits(work, parts, micro_batches)

    @torch.inference_mode()
    def _exactly(self, work: list[Work]) -> torch.Tensor:
        """Logits [R, V] after a part of a prompt, or after each token of answers."""
        first, since_ns = work[0], clock.now_ns()
        row, request = first.row, first.row.request
        reads = row.is_reading
        assert self._exact is not None
        with self._exact.listening() as heard:
            if reads:
                piece, told = row.piece(first.tokens), ignore_progress if row.sequence.ids else request.on_progress
                given, at = row.given(first.ids, self._loaded.model), row.position(row.held)
                until = lambda: self.leaves() or request.cancelled()  # noqa: E731
                logits = self._exact.read(first.ids, piece, len(row.prompt), told, until, at, given)
            else:
                ids = [token for each in work for token in each.ids]
                pieces = [
                    (each.row, piece)
                    for each in work
                    for piece in each.row.pieces(each.tokens, in_place=each.is_certain and self._exact.graphs is None)
                ]
                positions = [of.position(piece.held) for of, piece in pieces]
                own = [piece for _row, piece in pieces]
                is_swept = self._is_open and len(ids) == len(own) > 1 and not self._exact.is_native
                if is_swept and self._exact.most_rows == 1:
                    logits = self._beams(ids, own, positions)
                else:
                    logits = self._exact.write(ids, own, positions, request.cancelled)
        begin = 0
        for each in work if heard else ():
            if (drafter := each.row.drafter) is not None:
                drafter.take(each.row.held, each.ids, heard[0][:, begin : begin + each.tokens], each.row)
            begin += each.tokens
        if RECORDER.on and RECORDER.request != row.recorded:
            written = 0 if reads else len(work)
            RECORDER.swept(since_ns, written, first.tokens if reads else 0)
        return logits

    def _beams(self, ids: list[int], pieces: Sequence[Piece], positions: list[int]) -> torch.Tensor:
        """Logits [B, V] after a token of each beam."""
        own = Pieces(pieces)
        with self._attending(own):
            recording = (
                self.mixers.record_pieces([[token] for token in ids], positions, own)
                if self.mixers is not None
                else self._layers.record(
                    torch.tensor([ids], device=self._loaded.device),
                    torch.tensor([positions], device=self._loaded.device),
                )
            )
        batch = MicroBatch(own, recording, recording.hidden, list(range(len(ids))))
        for index in range(len(self._layers)):
            self._step(index, batch)
        with self._attending(None):
            return (self._native or self._layers).logits(batch.hidden)

    def _few(self, work: list[Work]) -> Callable[[], torch.Tensor] | None:
        """What computes a token of each of these rows in one go, if anything does."""
        native = self._native
        if not all(each.tokens == 1 and each.wants_logits and each.picture is None for each in work):
            return None
        return partial(self._in_one_go, native, work) if native is not None and native.takes_few(len(work)) else None

    @torch.inference_mode()
    def _in_one_go(self, native: NativeRows, work: list[Work]) -> torch.Tensor:
        pieces = Pieces([each.row.piece(1) for each in work])
        ids = [each.row.next_ids(1)[0] for each in work]
        return native.few(ids, [each.row.position(each.row.held) for each in work], pieces)

    def _record(self, work: list[Work], since_ns: int) -> None:
        if not RECORDER.on:
            return
        tokens = sum(each.tokens for each in work)
        read = sum(each.tokens for each in work if each.row.is_reading)
        if any(each.row.is_of_job for each in work):
            piggybacked = sum(each.is_piggybacked for each in work)
            RECORDER.swept(since_ns, piggybacked, 0, tokens - piggybacked)
        else:
            RECORDER.swept(since_ns, tokens - read, read)

    def _steps(self, micro_batches: list[MicroBatch], schedule: Schedule) -> Iterator[Callable[[], None]]:
        """The steps of a sweep; it may be interrupted between them."""
        if self._pipeline is None or schedule is HYBRID:
            for index in range(len(self._layers)):
                for batch in micro_batches:
                    yield partial(self._step, index, batch)
            return
        with closing(self._pipeline.sweep(micro_batches, schedule)) as sweep:
            for index in range(len(self._layers)):
                yield partial(self._step_by_schedule, index, sweep)
            for _ in sweep:
                raise AssertionError("a schedule yields once after each layer")

    def _step_by_schedule(self, index: int, sweep: Iterator[None]) -> None:
        """The rest of one layer, and the part of the next one that starts meanwhile."""
        both = range(index, min(index + 2, len(self._layers)))
        with self._attending(None), self._native.linears(both) if self._native is not None else nullcontext():
            next(sweep)

    def _step(self, index: int, batch: MicroBatch) -> None:
        with self._attending(batch.pieces), self._where_pages_are():
            batch.hidden = batch.recording.after(index, self._run(index, batch))

    @contextmanager
    def _where_pages_are(self) -> Iterator[None]:
        """Without a schedule attention is computed in RAM, unless pages, or some of them, are on the device."""
        pipeline, caches = self._pipeline, self.caches
        if pipeline is not None and pipeline.keeps_pages:
            self._states.elsewhere = pipeline.attend_now
        elif self.mixers is None and isinstance(caches, PagedCaches) and caches.are_of_card:
            if self._generation != caches.generation:
                self._generation = caches.generation
                self._states.attend_over(caches)
            self._states.elsewhere = self._attend_there
        try:
            yield
        finally:
            self._states.elsewhere = None

    def _attend_there(
        self, module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention over pages in a device's memory, see `PagedStates.elsewhere`."""
        pieces, place = self._states.pieces, queries.device
        assert pieces is not None
        if self._placed is None or self._placed[0] is not pieces:
            self._placed = pieces, {}
        attention = self._attention.setdefault(place, PagedAttention(place, None))
        states = (each[0].transpose(0, 1).contiguous() for each in (queries, keys, values))
        layer, terms = self._states.layer_of(module)[0], self._states.terms_of(module)
        if (rows := self._placed[1].get(terms.window)) is None:
            rows = self._placed[1][terms.window] = PlacedRows(pieces, terms.window)
        return attention.attend(layer, terms, rows, *states)[None]

    def close(self) -> None:
        """Releases the device memory that sweeps use, and what rows left.  Safe to call twice."""
        if self._exact is not None:
            self._exact.close()
        if self.room is not None:
            self.room.release()
        if isinstance(self.caches, LibraryCaches):
            self.caches.close()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def _schedule(self, tokens: int, rows: int, reads: bool) -> Schedule:
        """The requested schedule, else the measured fastest; `HYBRID` for sweeps that use few of the experts, unless
        they have as many rows as the plan, which has accounted for that."""
        if self._pipeline is None:
            return HYBRID
        policy = self._policy
        as_planned = policy.planned is not None and rows >= policy.rows
        wants_most = tokens * self._pipeline.experts_per_token >= self._pipeline.experts.most
        return policy.schedule or (self._choice.of(tokens, reads=reads) if as_planned or wants_most else HYBRID)

    def _able(self, schedule: Schedule) -> Schedule:
        """The same with attention on the device, where keys and values are."""
        if self._pipeline is None or not self._pipeline.keeps_pages or schedule.in_ram is not None:
            return schedule
        return next(
            (each for each in SCHEDULES.values() if each.in_ram is schedule), S4 if schedule.order else schedule
        )

    def _compare(self, schedule: Schedule) -> None:
        """Says that sweeps have settled for another schedule than the planned one: a link may be slower than said."""
        planned = self._policy.planned
        if planned is None or self._policy.schedule is not None or self._pipeline is None:
            return
        self._others = self._others + 1 if schedule is self._last and schedule is not planned else 0
        self._last = schedule
        if self._others >= _SETTLED:
            FALLS.say(_PLANNED, str(schedule), f"{planned} was measured to be slower here")
        elif schedule is planned:
            FALLS.is_over(_PLANNED)

    def _heed_plan(self) -> None:
        """Has rows planned again where what was planned is outdated.

        Raises:
            PlanOutdatedError: it is.
        """
        if self._pipeline is None or self._policy.by_hand:
            return
        if said := self._policy.outdated():
            FALLS.tell("The plan for rows", said)
            raise PlanOutdatedError(ErrorCode.BUSY, said)

    def _run(self, index: int, batch: MicroBatch) -> torch.Tensor:
        if self._native is None:
            return self._layers.run(index, batch.hidden, batch.recording)
        return self._native.run(index, batch.hidden, batch.recording, batch.pieces)

    def _parts(self, work: list[Work], schedule: Schedule) -> list[list[Work]]:
        lengths = [each.tokens for each in work]
        count = -(-sum(lengths) // self._micro_batch_tokens)
        if self._policy.micro_batch_rows and schedule is not HYBRID:
            count = max(count, -(-len(work) // self._policy.micro_batch_rows))
        return [[work[place] for place in part] for part in balanced(lengths, max(count, 1))]

    def _prepare(self, work: list[Work]) -> MicroBatch:
        device = self._loaded.device
        pieces = Pieces([each.row.piece(each.tokens) for each in work])
        own, positions, wanted = list[list[int]](), list[int](), list[int]()
        for each in work:
            own.append(each.row.next_ids(each.tokens))
            first = each.row.position(each.row.held)
            positions += range(first, first + each.tokens)
            if each.wants_logits:
                wanted.append(len(positions) - 1)
        ids = [token for of_row in own for token in of_row]
        with self._attending(pieces):
            if self.mixers is not None:
                recording: Recording = self.mixers.record_rows(own, [each.row for each in work], pieces)
            else:
                given = self._given(work, own)
                recording = self._layers.record(
                    torch.tensor([ids if given is None else []], device=device),
                    torch.tensor([positions], device=device),
                    given=given,
                )
            if (sight := self._sight_of(work)) is not None:
                recording.places, recording.added = sight.added(_pictured(work, own))
        return MicroBatch(pieces, recording, recording.hidden, wanted)

    def _sight_of(self, work: list[Work]) -> Sight | None:
        """What has seen pictures among these tokens, if there are any."""
        return self._loaded.sight if any(each.picture is not None for each in work) else None

    def _given(self, work: list[Work], ids: list[list[int]]) -> dict[str, Any] | None:
        """Arguments of the model for the tokens of rows some of which have pictures among them."""
        sight = self._sight_of(work)
        return sight.given(_pictured(work, ids), self._loaded.model) if sight is not None else None

    def _logits(self, work: list[Work], parts: list[list[Work]], micro_batches: list[MicroBatch]) -> torch.Tensor:
        rows = [batch.hidden[:, batch.wanted] for batch in micro_batches]
        hidden = torch.cat([part.to(rows[0].device) for part in rows], dim=1)
        if not hidden.shape[1]:
            return torch.empty(0)
        with self._attending(None):
            logits = (self._native or self._layers).logits(hidden).to(self.logits_place)
        # Micro-batches are not in row order.
        order = [each for part in parts for each in part if each.wants_logits]
        wanted = [each for each in work if each.wants_logits]
        places = {id(each.row): place for place, each in enumerate(order)}
        return logits[[places[id(each.row)] for each in wanted]] if len(micro_batches) > 1 else logits

    def _probe_attention(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=self._loaded.device)
        self._read = library_cache(self._loaded.model)
        with self._attending(None):
            recording = self._layers.record(token, token, self._read)
            hidden = recording.hidden
            with self._layers.without_experts():
                for index in range(len(self._layers)):
                    hidden = self._layers.run(index, hidden, recording)
        self._states.are_met = True

    @contextmanager
    def _attending(self, pieces: Pieces | None) -> Iterator[None]:
        """Attention over pages, without gradients, while a part of the model runs."""
        with torch.inference_mode():
            if self.mixers is not None and not self.mixers.attends_over_pages:
                yield
                return
            self._states.pieces = pieces
            with attending_by(self._states, self._configs):
                yield


def _pictured(work: list[Work], ids: list[list[int]]) -> list[PromptPart]:
    return [PromptPart(each.row.layout, each.row.held, own) for each, own in zip(work, ids, strict=True)]


def balanced(lengths: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Rows, by their tokens, in so many micro-batches at most: the longest first, each to the one with the fewest."""
    parts = [list[int]() for _ in range(micro_batches)]
    tokens = [0] * micro_batches
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = tokens.index(min(tokens))
        parts[place].append(row)
        tokens[place] += lengths[row]
    return [sorted(part) for part in parts if part]
