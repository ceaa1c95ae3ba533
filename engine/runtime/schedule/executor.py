"""Answers thousands of rows with one loaded model, for job files and the worker.

Rows join between sweeps through the layers, and leave as soon as they are answered (continuous batching).  Families
whose layers cannot take many rows at once are answered row by row, as chats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.common.errors import RequestCancelled
from engine.jobs.rows import BatchOutcome, Check, never
from engine.planner.schedules import HYBRID
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.decode.paged_steps import attends_there, has_pages
from engine.runtime.kv.library_caches import LibraryCaches
from engine.runtime.kv.reuse import kinds_by_length
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.request import AnswerCallback, BatchRequest, Preparation


def lane_for(loaded: LoadedModel, policy: BatchPolicy, above: ContinuousBatch | None = None) -> ContinuousBatch:
    """Where rows are answered.

    Args:
        above: whose pages they share, if they can.
    """
    is_alike = not policy.window and policy.kv_type is loaded.kv_type
    if is_alike and not policy.by_hand and attends_there(loaded):
        policy = on_device(loaded, policy)
    if loaded.devices is not None and above is not None and not (policy.on_device and above.model.room is not None):
        above = None  # what they hold lies elsewhere
    model = above.model if above is not None and is_alike else PackedModel(loaded, policy)
    most = model.together_tokens if model.packs() else 0
    if most < loaded.context_tokens:
        kinds = ", ".join(sorted(kinds_by_length(loaded.model)))
        why = model.apart or f"this model's rotary embedding ({kinds}) depends on the length of each row"
        if most and (above is None or above.model is model):
            lane = ContinuousBatch(model, policy, above=above, kept=loaded.kept, exact=True)
            lane.note = f"Rows that get longer than {most:,} tokens are answered one by one: {why}."
            if lane.exact is not None:
                return lane
            lane.free()
        policy = replace(policy, rows=1)
        if above is not None and above.exact is not None:
            lane = ContinuousBatch(above.model, policy, above=above, exact=True)
        else:
            policy = on_device(loaded, policy)
            lane = ContinuousBatch(PackedModel(loaded, policy, opens=False), policy, exact=True)
        lane.note = f"Rows are answered one by one: {why}."
        return lane
    if above is not None and model is not above.model and isinstance(model.caches, LibraryCaches):
        above = None  # whose pages hold other states
    return ContinuousBatch(model, policy, above=above, kept=loaded.kept)


def on_device(loaded: LoadedModel, policy: BatchPolicy) -> BatchPolicy:
    """With keys and values where the layers are."""
    return replace(policy, on_device=True, schedule=HYBRID) if loaded.devices is not None else policy


AHEAD_TOKENS = 256
"""Tokens of an answer for which a request reserves memory at a time: few answers are as long as they may be."""


def batch_for(loaded: LoadedModel, kept: PrefixCache | None) -> ContinuousBatch:
    """Where requests are answered."""
    policy = on_device(loaded, replace(policy_for(loaded), ahead=AHEAD_TOKENS))
    for opens in (True, False):
        model = PackedModel(loaded, policy, opens=opens and has_pages(loaded) and loaded.stream is None)
        batch = ContinuousBatch(model, policy, kept=kept, keeps=True, exact=True)
        if batch.exact is not None:
            return batch
        batch.free()
    raise AssertionError("the library's own caches always do")


class BatchExecutor:
    """The rows of one job.  Not thread-safe; the model may answer chats while no `run` is active.

    Rows are answered as if each were alone.  In fp32 a greedy answer equals that of a chat, token for token.  In bf16
    it does except for near ties: products over many rows round in another order, which moves logits by up to a tenth of
    their standard deviation, and by more where two experts score almost equally.  With quantised weights, for which a
    chat also quantises its single vectors, logits move by up to four tenths.  A row's own seed makes sampling
    repeatable.

    Args:
        policy: number of rows at once and other limits; `None` for what fits this machine.

    Attributes:
        note: why rows cannot share this model's layers, for the user; empty if they can.
    """

    def __init__(self, loaded: LoadedModel, policy: BatchPolicy | None = None) -> None:
        self.policy = policy or policy_for(loaded)
        self._preparation = Preparation(loaded)
        self._batch: ContinuousBatch | None = lane_for(loaded, self.policy)
        self.note = self._batch.note

    def run(
        self,
        rows: Iterator[BatchRequest],
        on_row: AnswerCallback,
        should_yield: Check = never,
        cancelled: Check = never,
    ) -> BatchOutcome:
        """Answers rows, reading them as places become free; answers come in any order.

        Args:
            rows: the remaining ones if an earlier call has yielded: the rows in progress come first.
            on_row: called once for each row, including those that cannot be answered.
            should_yield: whether another request needs the machine; `run` then returns within one layer and keeps all
                rows.
            cancelled: whether to stop: as quickly, but without keeping anything.

        Raises:
            EngineError: the model cannot be run; the rows in progress are kept for another try.
        """
        assert self._batch is not None
        prepared = self._preparation.rows(rows, on_row, cancelled)
        try:
            return self._batch.run(prepared, on_row, should_yield, cancelled)
        except RequestCancelled:  # while preparing a row's prompt
            return BatchOutcome.CANCELLED

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep through the weights now, and the tokens generated for them."""
        return self._batch.own.under_way if self._batch is not None else (0, 0)

    def forget_prefixes(self) -> None:
        """Stops sharing earlier prompt prefixes with later rows: for measurements."""
        if self._batch is not None:
            self._batch.pool.forget_prefixes()

    def close(self) -> None:
        """Frees keys and values.  Safe to call twice."""
        if self._batch is not None:
            self._batch.free()
            self._batch = None
