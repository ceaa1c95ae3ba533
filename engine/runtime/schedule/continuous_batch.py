"""Continuous batching: sequences join between two sweeps through the layers, and leave once they are answered.

A sequence that has the model for itself is a batch of one.  Where the native kernels compute what a model's own cache
would hold in pages just as well, a prompt that is read alone, and up to eight tokens of answers, come out as if each
sequence were alone, bit by bit; tokens that are guessed are further rows of the same step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from uuid import uuid4

import torch

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.devices.failures import is_out_of_memory
from engine.jobs.rows import BatchOutcome, Check, never
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.beam_search import decode_beams
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.decode.sequence import Sequence, SequenceError, of_one, wrong_with_one
from engine.runtime.decode.speculation import Guess, Speculation, StepPrices
from engine.runtime.decode.step_model import MOST_ROWS
from engine.runtime.kv.library_caches import LibraryCaches
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.pages import NO_PREFIX, PageKind, PagePool
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.left_pages import LeftPages, Partings
from engine.runtime.schedule.request import AnswerCallback
from engine.runtime.schedule.row import PagedRow
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns

_PREFIXES = 64
"""Contexts, as long as they may be, beyond which pages would be of no use."""
_LONGEST_WITH_PIGGYBACKED_S = 0.3
"""No rows are piggybacked on a sweep that takes longer: they get no other token meanwhile."""
_TAKEN = (
    "Other programs use so much of the graphics card's memory that not even one row has room beside them: close them, "
    "and go on."
)
_MOST_IN_TURNS = 8
"""Rows that share no sweeps."""
_NEWEST = 0.25
"""Weight of the newest measurement in an average."""


@dataclass(eq=False)
class RowSource:
    """Where rows come from and where their answers go: the requests of people, or one job.

    Attributes:
        prepared: the next ones, behind those that are `waiting`.
        rests: whether its rows stay as they are, and no more of them are begun.
        rows: those in progress that have pages, or gave them up.
        is_dry: whether it had no more when it was last asked.
    """

    prepared: Iterator[Sequence] = iter(())  # noqa: RUF009 - it never gives any
    on_row: AnswerCallback = lambda _answer: None
    rests: bool = False
    rows: list[PagedRow] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    is_dry: bool = False

    def take(self) -> Sequence | None:
        new = self.waiting.popleft() if self.waiting else next(self.prepared, None)
        self.is_dry = new is None
        return new

    @property
    def under_way(self) -> tuple[int, int]:
        return len(self.rows), sum(len(row.sequence.ids) for row in self.rows)


class ContinuousBatch:
    """Rows in progress in one model; kept while another request has priority.

    Rows of several sources share each sweep: whoever has the fewest of them in progress begins the next one.  Where
    pages run short rows step aside, those of less priority and the newest first, and read again later what they had.

    Args:
        most_pages: for tests, a page limit below what the policy's bytes allow.
        kept: where the beginnings of prompts are found.
        keeps: whether what rows leave is kept there too.
        exact: whether sequences are to be computed as if each were alone, where that is possible.
        above: rows with priority over these, whose pages they share, even if they store something else in them.
    """

    def __init__(
        self,
        model: PackedModel,
        policy: BatchPolicy,
        most_pages: int | None = None,
        *,
        above: ContinuousBatch | None = None,
        kept: PrefixCache | None = None,
        keeps: bool = False,
        exact: bool = False,
    ) -> None:
        self.sources: list[RowSource] = []
        self.own = RowSource()
        """Of who asks by `submit` or `run`."""
        self.note = ""
        """Why rows cannot share this model's layers, for the user; empty if they can."""
        self.jobs = 0
        """Those whose rows are answered here."""
        self.turns = 0
        """Sweeps begun so far."""
        # With a window of its own a row holds other values than a chat, and what is the library's is not written down.
        self._kept = kept if not (policy.window or isinstance(model.caches, LibraryCaches)) else None
        self._keeps = keeps
        self.model, self._policy, self._above = model, policy, above
        self.below: list[ContinuousBatch] = []
        self._is_exact = exact
        self.exact: PagedSteps | None = None
        """What computes single sequences over pages as if each were alone."""
        self._prices = StepPrices()
        if above is None:
            # Any one request has room; memory is only taken as tokens come.
            state_weight = -(-model.state_bytes // model.page_bytes)
            sizes, pages = model.sizes, model.pages
            discards, exact_tokens = (model.discard, model.discard_states, model.discard_windows), model.exact_tokens
            kind = PageKind(
                NO_PREFIX, 1, *discards, sizes.window_tokens, model.most_at_once, *exact_tokens, model.together_tokens
            )
            if exact or policy.on_device or isinstance(model.caches, LibraryCaches):
                longest = PagePool(0, state_weight, sizes).needs(model.context_tokens, kind)
                pages = min(max(pages, longest), max(policy.rows, _PREFIXES) * longest)
            if most_pages:
                pages = min(pages, most_pages * (sizes.page + sizes.window))
            self.pool, self._kind = PagePool(pages, state_weight, sizes), kind
            model.allocate(self.pool.pages, self.pool.states, self.pool.windows, by_head=exact)
            self.pool.room = model.room
            self.exact = model.exact_steps() if exact else None
        else:
            self.pool, self._kind = above.pool, above._kind
            self.exact = above.exact if exact else None
            above.below.append(self)
            if model is not above.model:
                weight = -(-model.sizes.nbytes // (above.model.sizes.page * above.model.page_bytes))
                self._kind = PageKind(uuid4().bytes, weight, model.discard, model.discard_states)
                model.allocate(self.pool.pages, self.pool.states)
        self._partings = Partings()
        """Where rows leave states, if layers have any."""
        self.is_short: Check = model.are_others_in_the_way
        """Asked when the smallest sweep finds no memory: whether others hold it, so that its caller goes elsewhere, or
        a job ends and can be resumed."""
        self._most_rows, self._sweep_tokens = policy.rows, policy.sweep_tokens
        """As many as there has been memory for."""
        self._pages_given = 0
        """How much of the pages' memory was given up since a sweep had enough."""
        self.rows: list[PagedRow] = []
        self._aside: deque[PagedRow] = deque()
        """Rows that gave up their pages for older ones, the oldest first."""
        self._sweep: Generator[None, None, torch.Tensor] | None = None
        self._work: list[Work] = []
        self._places = 0
        """Where states were when it began, see `PackedModel.places_of_states`."""
        self._request = self._of_all = 0
        """Numbers of the recorded requests: that of the sweep under way, and that of rows that share sweeps."""
        self._round: Iterator[list[Work]] = iter(())
        """Sweeps after each of which some rows have got on, and after all of them each row."""
        self._left = LeftPages(self.pool, self._kind, self._kept, on_device=policy.on_device)
        self._failed = 0
        """Rows that something was wrong with."""
        self.most_rows = 0
        """Most rows in progress at the same time so far."""
        self.piggybacked: Callable[[], list[PagedRow]] = list
        """Asked when a sweep begins: rows of others, in the same pages, that may take part in it with a token each."""
        self._has_dropped_piggybacked = False
        self._token_s = 0.0
        """What sweeps have taken lately for each of their tokens."""
        self._sweep_s = 0.0

    def submit(self, new: Sequence, on_row: AnswerCallback) -> None:
        """Takes a request, which is answered in `sweep`; if some of its answer is there, what it had is read again."""
        self._asks(iter(()), on_row)
        if not new.ids:
            self.own.waiting.append(new)
            return
        row = self.row_of(new, self.own)
        row.step_aside()
        self.own.rows.append(row)
        self._aside.append(row)

    def run(
        self, prepared: Iterator[Sequence], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """Answers the rows of one source until there are no more; see `BatchExecutor.run`."""
        self._asks(prepared, on_row)
        outcome = BatchOutcome.FINISHED

        def until() -> bool:
            nonlocal outcome
            if cancelled():
                outcome = BatchOutcome.CANCELLED
            elif should_yield():
                outcome = BatchOutcome.YIELDED
            return outcome is not BatchOutcome.FINISHED

        self.go_on(until)
        if outcome is BatchOutcome.CANCELLED:
            self.close()
        return outcome

    def _asks(self, prepared: Iterator[Sequence], on_row: AnswerCallback) -> None:
        self.own.prepared, self.own.on_row = prepared, on_row
        if self.own not in self.sources:
            self.sources.append(self.own)

    @property
    def is_resting(self) -> bool:
        """Whether nobody wants it to go on, and no sweep has to end first."""
        return all(source.rests and not self.works_on(source) for source in self.sources)

    def has_ended(self, source: RowSource) -> bool:
        """Whether all that a source had has been answered."""
        return source.is_dry and not source.rows and not source.waiting

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that rows hold, or that the last one left."""
        return sum(row.held for row in self.rows) or self._left.tokens

    def go_on(self, until: Check, *, by_layer: bool = True) -> bool:
        """Admits rows and takes them through the layers until `until()` comes true; whether there is more to do.

        Args:
            by_layer: it is asked before each layer, and not only after each sweep.
        """
        self.model.leaves = until if by_layer else never
        with self._recorded(), self.model.threads():
            while self._is_sweeping():
                if by_layer and until():
                    if self._work[0].is_exact:
                        self._end_sweep()  # nothing of it has been computed
                    return True
                goes_on = self._continue()
                while goes_on and not by_layer:
                    goes_on = self._continue()
                if not goes_on and until():  # before the next one begins, perhaps with piggybacked rows
                    return True
        return False

    def works_on(self, source: RowSource) -> bool:
        """Whether rows of this source are in the sweep under way."""
        return self._sweep is not None and any(each.row in source.rows for each in self._work)

    def drop(self, source: RowSource) -> None:
        """Gives up a source and its rows; others begin their sweep again if it had any in it."""
        if self.works_on(source):
            self._end_sweep()
        for row in list(source.rows):
            self._leave(row)
        if source in self.sources:
            self.sources.remove(source)
        source.waiting.clear()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """What is recorded inside belongs to these rows."""
        if RECORDER.on and self._sweep is not None and self._request:
            RECORDER.resume_request(self._request)
        try:
            yield
        finally:
            RECORDER.end_request()
            if not self.rows:
                self._of_all = 0

    def _record(self, work: list[Work]) -> None:
        """A sweep begins: one of a single row belongs to that row's request."""
        if not RECORDER.on:
            self._request = 0
            return
        row = work[0].row
        is_single = len(self.rows) == 1 and work[0].is_exact
        request = row.recorded if is_single else self._of_all
        if not request:
            RECORDER.begin_request(seconds_ns(row.sequence.begun_s) if is_single else None)
            request = RECORDER.request
            if is_single:
                RECORDER.phase(lanes.PROMPT, 0)
                row.recorded = request
            else:
                self._of_all = request
        elif RECORDER.request != request:
            RECORDER.resume_request(request)
        self._request = request

    def _is_sweeping(self) -> bool:
        """Whether a sweep is under way; begins one if there are rows."""
        if self._sweep is not None and self._places != self.model.places_of_states:
            self._end_sweep()
        if self._sweep is None:
            self._sweep_s = 0.0
            self.model.heed(self.pool.fit)
            self._drop_cancelled()
            aside, failed = -1, self._failed
            while not (work := self._next()):
                if len(self._aside) in (0, aside) and failed == self._failed:
                    return False
                aside, failed = len(self._aside), self._failed  # some may have outgrown all pages
            expected_s = self._token_s * sum(each.tokens for each in work)
            # Rows of others are piggybacked, unless they would wait too long for their token.
            takes_others = (
                self.model.are_packed and not work[0].is_exact and 0 < expected_s <= _LONGEST_WITH_PIGGYBACKED_S
            )
            if takes_others and not self._has_dropped_piggybacked:
                work += [Work(row, row.width, is_piggybacked=True) for row in self.piggybacked() if row.takes_company]
            self._work, self._has_dropped_piggybacked = work, False
            self._record(work)
            self._sweep, self._places = self.model.sweep(self._work), self.model.places_of_states
            self.turns += 1
        return True

    def give_way(self) -> bool:
        """The newest row returns its pages to somebody with priority; whether there is any."""
        if not self.rows:
            return False
        newest = self.rows[-1]
        if any(each.row is newest for each in self._work):
            self._end_sweep()
        self._put_aside(newest)
        return True

    def _put_aside(self, row: PagedRow) -> None:
        self.rows.remove(row)
        row.step_aside()
        self._aside.appendleft(row)
        self._free_caches()

    def _free_caches(self) -> None:
        if isinstance(self.model.caches, LibraryCaches):
            self.pool.discard_free_states()  # each is as long as its row

    @property
    def has_piggybacked(self) -> bool:
        """Whether rows of others take part in the sweep under way, which have to leave before anybody else reads."""
        return self._sweep is not None and any(each.is_piggybacked for each in self._work)

    def drop_piggybacked(self) -> None:
        """Gives up the sweep under way if rows are piggybacked on it; none are on the next, or that would go on."""
        if self.has_piggybacked:
            self._end_sweep()
            self._has_dropped_piggybacked = True

    @property
    def held_bytes(self) -> int:
        return self.model.held_bytes(self.pool.filled)

    def close(self) -> None:
        for source in list(self.sources):
            self.drop(source)

    def free(self) -> None:
        """As `close`, and also releases the device memory: no further run is possible."""
        self.close()
        self._left.give_up()
        self._left.tokens = 0
        if self._above is None or self.model is not self._above.model:
            self.model.close()
            self.pool.leave(self._kind)
        if self._above is not None and self in self._above.below:
            self._above.below.remove(self)

    def _continue(self) -> bool:
        """Goes on with the current sweep by a layer; whether it goes on after that."""
        assert self._sweep is not None
        begun_s = clock.now()
        try:
            next(self._sweep)
        except StopIteration as end:
            self._sweep, self._pages_given = None, 0
            each_s = (self._sweep_s + clock.now() - begun_s) / sum(each.tokens for each in self._work)
            self._token_s += (_NEWEST if self._token_s else 1.0) * (each_s - self._token_s)
            self._take(end.value)
            return False
        except (RequestCancelled, SequenceError) as error:  # told while a single prompt is read
            work, self._work, self._sweep = self._work, [], None
            (only,) = work
            if isinstance(error, SequenceError):
                only.row.error = error
                self._ended(only.row)
            elif only.row.beams is not None:  # a search tells between steps that nobody wants it: there are none
                only.row.over = "cancelled"
            return False
        except BaseException as error:
            # No row has advanced: the next try overwrites what was computed.
            self._sweep = None
            for each in self._work:
                if each.is_certain and each.row.state is not None:  # which may be anything
                    (self if self._has(each.row) else self._above or self)._put_aside(each.row)
            is_memory = isinstance(error, EngineError) and error.code is ErrorCode.NOT_ENOUGH_MEMORY
            if not (is_memory or is_out_of_memory(error)):
                raise
            if not self._lighten(error):
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, _TAKEN) from None
            return False
        self._sweep_s += clock.now() - begun_s
        return True

    def give_up(self, error: BaseException) -> list[tuple[int, BaseException]]:
        """After an error: drops the row that was computed by itself, or all where rows share sweeps; the numbers of
        those that were begun by `submit`, and what each is to be told."""
        work, self._work, self._sweep = self._work, [], None
        if work and not (self.model.are_packed and work[0].row.takes_company):  # it may have been put aside
            self._leave(work[0].row)
            return [(work[0].row.request.row, wrong_with_one(error))]
        asked = [*(row.sequence for row in self.own.rows), *self.own.waiting]
        self.close()
        return [(each.request.row, error) for each in asked]

    def _lighten(self, error: BaseException) -> bool:
        """After a sweep for which there was not enough memory: makes the next one smaller, in parts or beside fewer
        experts, with fewer rows or less of a prompt; one that is too much by itself ends, unless others hold the
        memory.  Whether there was anything to be done."""
        work, self._work = self._work, []
        if any(each.is_piggybacked for each in work):
            self.piggybacked = list
        elif work and (
            self._gives_pages(1)
            or self.model.lighten(is_exact=work[0].is_exact)
            or (self.exact is not None and work[0].reads_exactly and self.exact.reads_less(work[0].tokens))
            or self._gives_pages(2)
        ):
            pass
        elif len(work) == 1 and work[0].tokens > PAGE_TOKENS and not work[0].is_exact:
            self._sweep_tokens = max(PAGE_TOKENS, work[0].tokens // 2)
        elif work and (count := len({*self.rows, *(each.row for each in work)})) > 1:  # the newest wait
            self._most_rows = max(1, count // 2)
            while len(self.rows) > self._most_rows:
                self.give_way()
        elif work and self.is_short():
            return False
        elif work:
            row = work[0].row
            said = error if isinstance(error, EngineError) else self._no_memory(row)
            self._leave(row).on_row(row.answer(error=said))
        return bool(work)

    def _gives_pages(self, level: int) -> bool:
        """Gives up memory of pages, with a level of 2 the prefix cache too: once, as the next try may take it again."""
        if self._pages_given >= level:
            return False
        self._pages_given = level
        return self.pool.fit(forgets=level == 2)

    def _no_memory(self, row: PagedRow) -> EngineError:
        tokens, room = len(row.prompt) + len(row.sequence.ids), self.model.room
        where, option = ("", "--ram") if room is None else (f" on {room.name}", "--vram")
        return EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"There is not enough memory{where} for {tokens:,} tokens of context: shorten the prompt, close other "
            f"programs or allow more memory with {option}.",
        )

    def _end_sweep(self) -> None:
        """No row has advanced: what was computed of it is computed again."""
        sweep, self._sweep, self._work = self._sweep, None, []
        if sweep is not None:
            sweep.close()

    def _leave(self, row: PagedRow) -> RowSource:
        """A row is over, wherever it stands: returns its pages, and who asked."""
        (self.rows if row in self.rows else self._aside).remove(row)
        source: RowSource = row.source
        source.rows.remove(row)
        row.close()  # last: a lost device fails here, and again whenever what is left is given up
        self._free_caches()
        # There may be memory for more again.
        self._most_rows, self._sweep_tokens = min(self._policy.rows, self._most_rows + 1), self._policy.sweep_tokens
        return source

    def _drop_cancelled(self) -> None:
        for new in list(self.own.waiting):
            is_cancelled = False
            with suppress(SequenceError):  # which is told once it is admitted
                is_cancelled = new.request.cancelled()
            if is_cancelled:
                self.own.waiting.remove(new)
                self.own.on_row(new.result())
        for row in [*self.rows, *self._aside]:
            with self._work_for(row):
                if row.beams is None and row.request.cancelled():
                    row.sequence.end("cancelled")
                    row.over = "cancelled"
            if row.over is not None and row.error is None:
                self._leave(row).on_row(row.answer(row.over))

    @property
    def _most_at_once(self) -> int:
        """Rows in progress; few that take turns, and one if a card's experts want the memory of its context."""
        model = self.model
        if not self._is_exact or model.are_packed:
            return self._most_rows
        return min(self._most_rows, 1 if model.has_card else _MOST_IN_TURNS)

    def _admit(self) -> None:
        """Admits rows while there are pages: first those that stepped aside, then new ones."""
        able = [source for source in self.sources if not source.rests]
        while (active := sum(not row.source.rests for row in self.rows)) < self._most_at_once:
            aside = next((row for row in self._aside if not row.source.rests), None)
            if aside is not None and self._reserve(aside):
                self._aside.remove(aside)
                self.rows.append(aside)
                continue
            if aside is not None and not self.rows and not self.pool.in_use:  # no other keeps it from having pages
                self._leave(aside).on_row(aside.answer(error=self._no_memory(aside)))
                continue
            if aside is not None and active:  # it is next; rows that rest may keep their pages for long
                return
            if not able:
                return
            source = min(able, key=lambda source: len(source.rows))
            able.append(able.pop(able.index(source)))
            new = source.take()
            try:
                has_room = new is None or self._admit_new(new, source)
            except BaseException:
                assert new is not None
                source.waiting.appendleft(new)  # for `give_up`: it has not been told of anything
                raise
            if new is None:
                able.remove(source)
            elif not has_room:
                return
            else:  # whoever has waited longest is next
                self.sources.append(self.sources.pop(self.sources.index(source)))

    def _admit_new(self, new: Sequence, source: RowSource) -> bool:
        """Whether there was room for a row, or it has ended before it began."""
        self._left.drop_written()
        try:
            with of_one():
                is_cancelled = new.request.cancelled()
                row = self.row_of(new, source)
        except SequenceError as error:
            source.on_row(new.result(error=error))
            return True
        if is_cancelled:
            source.on_row(new.result())
            return True
        needs = len(new.prompt) + (1 if self._policy.ahead is not None else new.max_tokens)
        if self.pool.needs(needs, self._kind) > self.pool.capacity:
            source.on_row(new.result(error=_too_long(new, self.pool.most_tokens(self._kind))))
            return True
        if not self._reserve(row):
            source.waiting.appendleft(new)
            return False
        self.rows.append(row)
        source.rows.append(row)
        self.most_rows = max(self.most_rows, len(self.rows))
        return True

    def row_of(self, new: Sequence, source: RowSource) -> PagedRow:
        """A row that has no place yet."""
        text, exact = self.model.answer_prefix(new), self.exact
        new.begin(text, self.model.logits_place)
        row = PagedRow(new, self.pool, self._kind, self._policy.ahead, source)
        if new.request.sampling.beams > 1:
            row.search = partial(decode_beams, asked=new, prefix=text)
        elif exact is not None and exact.guesses:
            if new.layout is None:  # it knows no positions of pictures
                row.drafter = exact.drafter()
            drafters = [row.drafter] if row.drafter is not None else []
            row.speculation = Speculation(self._prices, text, new.max_tokens, drafters)
        return row

    def _reserve(self, row: PagedRow) -> bool:
        """Room to begin, or to go on after stepping aside; the least that it needs, if it is the only one."""
        return self._found(row.reserve) or (not self.rows and self._found(row.reserve_least))

    def _found(self, reserve: Check) -> bool:
        """Reserves pages, after others have given up theirs if need be."""
        while not reserve():
            offers = (self._above or self)._left.give_up()
            if not (offers or any(lane.give_way() for lane in self.below)):
                return False
        return True

    def _next(self) -> list[Work]:
        """One token of every decoding row, and prompt tokens of the other rows up to the limit of a sweep; of a round
        of sweeps one, where some of them are computed as if alone."""
        self._admit()
        for row in list(self.rows):  # a page for each next token of an answer, or the newest rows step aside
            while row in self.rows and not row.is_reading and not self._found(row.reserve_next):
                self.give_way()
        for _ in range(2):  # rows may have gone since the round began
            if (work := next(self._round, None)) is not None:
                return work
            rows = [row for row in self.rows if not row.source.rests]
            if self.exact is not None:
                self._round = self._sweeps(self.exact, rows)
            else:
                self._round = iter([work] if (work := self._packed(rows)) else [])
        return next(self._round, [])

    def _sweeps(self, exact: PagedSteps, rows: list[PagedRow]) -> Iterator[list[Work]]:
        """A round: the only prompt to be read, or one whose answer has to repeat, in a sweep of its own, as is any that
        takes no company; other prompts, and answers that are too many for exact steps, in one that they share; then
        exact steps of the rest."""
        waiting = self._waiting(rows)
        reading = [row for row in rows if row.is_reading and row not in waiting and self._finds_more(row)]
        writing = [row for row in rows if not row.is_reading]
        most, are_packed = exact.most_rows, self.model.are_packed
        able = {row for row in rows if are_packed and row.takes_company}
        only = next((row for row in reading if row.request.repeats), reading[0] if len(reading) == 1 else None)
        for row in reading:
            if (row is only or row not in able) and self._goes_on_now(row):
                most_read = exact.at_once(len(row.prompt) - row.held, row.undivided)
                if tokens := self._up_to(row, most_read):
                    yield [Work(row, tokens, is_exact=True)]
        shared = [row for row in reading if row in able and row is not only and not row.request.repeats]
        if are_packed and (shared or len(writing) > most):
            shared += [row for row in writing if row in able and not (row.request.repeats or row.beams)]
            writing = [row for row in writing if row not in shared]
        if work := self._packed([row for row in shared if row in self.rows]):
            yield work
        while writing := [row for row in writing if self._goes_on_now(row)]:
            count = max(1, bisect_right(list(accumulate(row.width for row in writing)), most))
            rows, writing = writing[:count], writing[count:]
            yield self._with_guesses(rows, most)

    def _goes_on_now(self, row: PagedRow) -> bool:
        """Whether a row is still there, and is not to begin again."""
        if row not in self.rows or row.source.rests:
            return False
        if row.is_to_begin_again:
            self._put_aside(row)
            return False
        return True

    def _with_guesses(self, rows: list[PagedRow], most: int) -> list[Work]:
        """The next tokens of answers, and what may come after them."""
        work, tokens = list[Work](), sum(row.width for row in rows)
        for row in rows:
            guess = None
            if tokens < most:
                with self._work_for(row):
                    guess = row.guess(1 + most - tokens, len(rows), tokens)
                if row.error is not None:
                    continue
            tried = len(guess.ids) if guess is not None else 0
            tokens += tried
            work.append(Work(row, row.width + tried, is_exact=True, guess=guess))
        return work

    def _packed(self, rows: list[PagedRow]) -> list[Work]:
        work, left = list[Work](), self._sweep_tokens
        being_read, waiting = set[bytes](), self._waiting(rows)
        for row in rows:
            if not row.is_reading:
                work.append(Work(row, row.width))
                continue
            if row in waiting or not self._finds_more(row) or left <= 0 or row.following in being_read:
                continue  # another row is computing what this one will share
            if row.following is not None and row.state is None:
                being_read.add(row.following)
            if tokens := self._up_to(row, min(left, len(row.prompt) - row.held)):
                work.append(Work(row, tokens))
            left -= tokens
        return work

    def _waiting(self, rows: list[PagedRow]) -> set[PagedRow]:
        """Those of some rows that wait for what others are reading of what both begin with, before they read
        themselves."""
        readers, waiting = list[PagedRow](), set[PagedRow]()
        for row in rows if self.pool.states else ():
            if not row.is_reading or row.request.repeats or not row.shares:
                continue
            if row.state is None and self._partings.waits(row, readers):
                waiting.add(row)
            else:
                readers.append(row)
        return waiting

    def _up_to(self, row: PagedRow, tokens: int) -> int:
        """How many of its next tokens a row reads before it leaves something for others; 0 if one of its pictures has
        ended it."""
        if row.state is not None and not row.request.repeats and not row.undivided:
            tokens = self._partings.up_to(row, row.up_to_state(tokens) if self._keeps else tokens)
        if row.layout is None:
            return tokens
        before = RECORDER.request  # what reads pictures is recorded before its sweep begins
        RECORDER.request = row.recorded or self._of_all or RECORDER.next_request
        with self._work_for(row):
            tokens = row.up_to(tokens)
        RECORDER.request = before
        return tokens if row.error is None else 0

    def _finds_more(self, row: PagedRow) -> bool:
        """Takes over what is there of a prompt; false if anything went wrong."""
        exact, begins, caches = self.exact, not row.held, self.model.caches
        with self._work_for(row):
            if caches is not None and caches.have_states:
                if row.state is None:
                    row.find_state(caches, self._kept)
            elif exact is not None and row.request.repeats:
                row.share_steady_pages(exact.chunk_tokens)
            elif row.may_take_over:
                row.share_pages()
                if isinstance(caches, PagedCaches):
                    if self._kept is not None:
                        row.bring_kept(self._kept, caches)
                    if exact is not None:
                        row.copy_part(caches)
            if exact is not None and begins and not row.sequence.ids:
                row.request.on_progress(row.held, len(row.prompt))
        return row.error is None

    def _take(self, logits: torch.Tensor) -> None:
        """After a sweep: samples a token for each row that needs one; rows leave after their last token."""
        work, self._work = self._work, []
        if work[0].is_exact and not work[0].row.is_reading:
            self._take_exact(work, logits)
            return
        choosing = [each.row for each in work if each.wants_logits]
        is_single = bool(work[0].is_exact and self._request == work[0].row.recorded)
        for each in work:
            with self._work_for(each.row):
                if each.row.is_reading and not each.row.sequence.ids:
                    each.row.request.on_progress(each.row.held + each.tokens, len(each.row.prompt))
                each.row.has_read(each.tokens, self.exact.chunk_tokens if each.is_exact and self.exact else 0)
                if isinstance(self.model.caches, LibraryCaches):
                    each.row.forget_last_state(self.model.caches)
                if each.row.is_reading and each.row.state is not None and (caches := self.model.caches) is not None:
                    parts = self._partings.ends(each.row, each.row.held)
                    if parts or (self._keeps and each.row.leaves_state(caches)):
                        each.row.leave_state(caches)  # others may go on from there
        if RECORDER.on and is_single:
            RECORDER.phase(lanes.PREFILL, work[0].tokens)
        for row, of_row in zip(choosing, logits, strict=False):
            if row.error is None:
                self._goes_on(row, of_row[None], None)
        if RECORDER.on and not is_single:
            RECORDER.phase(lanes.BATCH_STEP, sum(each.tokens for each in work))
        elif RECORDER.on and choosing:
            RECORDER.phase(lanes.SAMPLE, 1)
        for row in choosing:
            if row.over is not None and row.error is None:
                self._ended(row)

    def _take_exact(self, work: list[Work], logits: torch.Tensor) -> None:
        """After a step of answers, with what was tried."""
        tokens, at, chosen = sum(each.tokens for each in work), 0, 0
        is_usual = self.exact is None or self.exact.was_usual
        if tokens <= MOST_ROWS and is_usual:  # else they were several steps
            self._prices.took(tokens, self._sweep_s)
        for each in work:
            row, guess, of_row, lag = each.row, each.guess, logits[at : at + each.tokens], each.row.lag
            at += each.tokens
            taken = self._goes_on(row, of_row[lag:], guess)
            chosen += taken
            if row.error is not None or row.search is not None:
                continue
            if row.drafter is not None:
                row.drafter.take_back(each.tokens - lag - taken)
            if row.state is None or lag + taken == each.tokens:
                row.has_read(lag + taken)  # else its state is that of before, and these are computed once more
            if lag and len(work) == 1 and row.speculation is not None:
                row.speculation.took_back(self._sweep_s)
            if guess is not None and row.speculation is not None:
                others = tokens - len(guess.ids)
                row.speculation.settle(guess, taken - 1, self._sweep_s, rows=len(work), tokens=others)
        if RECORDER.on:
            is_single = len(work) == 1 and self._request == work[0].row.recorded
            RECORDER.phase(lanes.DECODE if is_single else lanes.BATCH_STEP, chosen)
        for each in work:
            if each.row.over is not None and each.row.error is None:
                self._ended(each.row)

    def _goes_on(self, row: PagedRow, logits: torch.Tensor, guess: Guess | None) -> int:
        """Chooses an answer's next token, and those after it that were tried, from logits [q, V]; returns how many."""
        if row.search is not None:
            caches = self.model.caches
            assert caches is not None
            with self._work_for(row):
                row.search_on(logits, caches)
            return 1
        tried = guess.ids if guess is not None else ()
        for place in range(logits.shape[0]):
            with self._work_for(row):
                token = int(row.sequence.choose(logits[place : place + 1]))
                text, row.over = row.sequence.take(token)
                row.sequence.tell(text, len(row.sequence.ids))
                if row.over is None and self._is_exact and row.request.cancelled():
                    text, row.over = row.sequence.end("cancelled")
                    row.sequence.tell(text, len(row.sequence.ids))
            if row.over is not None or row.error is not None or place == len(tried) or tried[place] != token:
                return place + 1
        return logits.shape[0]

    @contextmanager
    def _work_for(self, row: PagedRow) -> Iterator[None]:
        """Inside, something is done for this row alone: what goes wrong ends it, and no other."""
        try:
            with of_one():
                yield
        except SequenceError as error:
            row.error = error
            self._failed += 1
            self._ended(row)

    def _ended(self, row: PagedRow) -> None:
        """A row has its answer, or an error, whoever's it is; who lent it without being here looks at it by itself."""
        if self._has(row):
            if row.error is None:
                if self._keeps:
                    self._left.leave(row, self.model)
                elif row.state is not None:
                    row.leave_part()  # nobody could go on without its state
            answer = row.answer(row.over or "cancelled", row.error)
            self._leave(row).on_row(answer)
        elif self._above is not None:
            self._above._ended(row)

    def _has(self, row: PagedRow) -> bool:
        return row in self.rows or row in self._aside

    def able_to_write(self) -> list[PagedRow]:
        """Its rows that can take part in a sweep of others now, with room for a token."""
        able = []
        for row in [row for row in self.rows if not row.is_reading and row.sequence.ids and not row.request.repeats]:
            with self._work_for(row):
                if not row.request.cancelled() and row.reserve_next():
                    able.append(row)
        return able


def _too_long(new: Sequence, tokens: int) -> EngineError:
    return EngineError(
        ErrorCode.PROMPT_TOO_LONG,
        f"The row needs room for {len(new.prompt) + new.max_tokens:,} tokens, but the batch has memory for "
        f"{tokens:,}: shorten it, lower the token limit or allow more memory with --ram.",
    )
