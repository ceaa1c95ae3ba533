"""Whether rows pass through a model together, how many, how their keys and values are stored, and by which schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.common.choice import Choice
from engine.common.errors import EngineError
from engine.common.footprint import activation_token_bytes
from engine.devices.host_memory import available_ram
from engine.families import family_of
from engine.kernels.native.paged_attention import KvType
from engine.planner.batch_prediction import BATCH_ROWS, SWEEP_TOKENS
from engine.planner.plan_parts import CHUNKS_TOGETHER, BatchPlan
from engine.planner.schedules import CGOPIPE, HYBRID, KLOTSKI, SCHEDULES, Schedule
from engine.runtime.kv.library_attention import window_of_cache_alone
from engine.runtime.loaded_model import LoadedModel


class PlanOutdatedError(EngineError):
    """Rows are to be planned again: the machine is not what it was taken to be."""


_MICRO_BATCHES = 8
"""Micro-batches of one sweep on a device without a plan: attention runs two ahead, a bubble is an eighth of a layer."""
_KV_SHARE = 0.5
"""Share of the free RAM: the rest is for activations, the page cache of the input file, and other programs."""
_LEAST_KV_BYTES = 64 * 2**20
_CANDIDATES = (CGOPIPE, KLOTSKI, HYBRID)


def why_not_packed(model: Any) -> str:
    """Why rows cannot pass through this model's layers without padding, as the end of a sentence; empty if they can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or family_of(config.model_type).takes_turns:
        return f"layers of the {config.model_type} family do not take several at once"
    if window_of_cache_alone(model) < sys.maxsize:
        return "this model applies its sliding window in the cache and not in attention"
    return ""


def can_pack(model: Any) -> bool:
    """Whether rows can pass through this model's layers without padding."""
    return not why_not_packed(model)


def _never() -> str:
    return ""


@dataclass(frozen=True)
class BatchPolicy:
    """MoE-Lightning's N and mu, and the memory of keys and values.

    Attributes:
        rows: N, most rows in progress at once.
        kv_bytes: of all pages; rows wait while none are free.
        sweep_tokens: prompt tokens that one sweep through the layers reads, in addition to the rows that decode.
        micro_batch_tokens: mu in tokens: the size of one pass through a layer, and so of its activations.
        micro_batch_rows: mu in rows: most rows of one pass through a layer; 0 for all.
        schedule: on a device, the order of a layer's work; `None` for the measured fastest.
        planned, planned_reading: the schedules that the planner expects to be fastest, for decoding and for sweeps that
            read prompts: tried first.
        by_hand: whether sweeps of all rows follow these alone.
        resident: r_w, the share of each layer's experts that stays on the device; None for what there is memory for.
        cached: r_c, the share of keys and values that stays there.
        row_tokens: a row's tokens at its end, as planned, where keys and values stay on the device.
        outdated: asked after sweeps of all rows: why they are to be planned again, or an empty text.
        kv_type: storage type of keys and values; `None` for the model's own precision.
        on_device: whether keys and values lie where the layers are that they belong to, on a card; else in RAM.
        ahead: tokens of an answer for which a row reserves pages at a time; `None` for all of them before it begins, so
            that it never has to step aside for another of its kind.
        window, kept: if not 0, tokens only attend to the last `window` tokens and the first `kept` (StreamingLLM, Xiao
            et al.  2024): an approximation for long rows.
    """

    rows: int = BATCH_ROWS
    kv_bytes: int = 2**30
    sweep_tokens: int = SWEEP_TOKENS
    micro_batch_tokens: int = 2048
    micro_batch_rows: int = 0
    schedule: Schedule | None = None
    planned: Schedule | None = None
    planned_reading: Schedule | None = None
    by_hand: bool = False
    resident: float | None = None
    cached: float = 0.0
    row_tokens: int = 0
    outdated: Callable[[], str] = _never
    kv_type: KvType | None = None
    on_device: bool = False
    window: int = 0
    kept: int = 0
    ahead: int | None = None


class ScheduleChoice:
    """The schedule of each sweep, for sweeps of about one size: measurements override predictions.

    Args:
        planned, reading: the schedules that the planner expects to be the fastest, for decoding and for sweeps that
            read prompts: taken first.
        by_hand: whether no others are tried.

    Sizes within a factor of two count as one.  The number of experts that a sweep uses, and the arithmetic per expert,
    decide between a link that transfers all of them and a CPU that computes some.
    """

    def __init__(
        self, planned: Schedule | None = None, reading: Schedule | None = None, *, by_hand: bool = False
    ) -> None:
        self._others = () if by_hand else _CANDIDATES
        self._first = {False: planned, True: reading}
        self._choices: dict[tuple[int, bool], Choice[Schedule]] = {}

    def of(self, tokens: int, *, reads: bool = False) -> Schedule:
        """The schedule for a sweep of `tokens` tokens; `reads` if some are prompt tokens."""
        choice = self._choice(tokens, reads)
        return choice.take(dict.fromkeys(choice.arms, 1.0))

    def took(self, schedule: Schedule, tokens: int, seconds: float, *, reads: bool = False) -> None:
        """Records the time of a sweep under a schedule."""
        choice = self._choice(tokens, reads)
        if schedule in choice.arms:
            choice.observe(schedule, seconds / tokens, 1.0)

    def _choice(self, tokens: int, reads: bool) -> Choice[Schedule]:
        first = self._first[reads]
        arms = tuple(dict.fromkeys(self._others if first is None else (first, *self._others)))
        return self._choices.setdefault((tokens.bit_length(), reads), Choice(arms, run=1, first=2, in_common=1.0))


def policy_for(loaded: LoadedModel, plan: BatchPlan | None = None) -> BatchPolicy:
    """The policy that fits this machine: keys and values get half of the free RAM, or what the budget leaves of it.

    Args:
        plan: sizes chosen by the planner, if it ran.
    """
    rows = plan.sequences if plan is not None else BATCH_ROWS
    # Where weights come from disk or over a link, prompts are read in long chunks, because each chunk loads them once.
    # On a card a chunk is as long as its memory allows.
    chunk = loaded.chunk_tokens
    at_once = max(chunk, rows) if loaded.devices is not None else max(BatchPolicy.micro_batch_tokens, chunk)
    kv_bytes = max(_LEAST_KV_BYTES, _room(loaded, at_once))
    sizes = BatchPolicy(rows, kv_bytes, max(BatchPolicy.sweep_tokens, chunk), at_once, kv_type=loaded.kv_type)
    if plan is None:
        return replace(sizes, micro_batch_rows=-(-rows // _MICRO_BATCHES)) if loaded.devices is not None else sizes
    return replace(
        sizes,
        sweep_tokens=CHUNKS_TOGETHER * at_once,
        micro_batch_rows=plan.micro_batch,
        planned=SCHEDULES[plan.decode],
        planned_reading=SCHEDULES[plan.prefill],
        by_hand=plan.by_hand,
        resident=plan.weights_on_card,
        cached=plan.cache_on_card,
        row_tokens=plan.row_tokens,
    )


def _room(loaded: LoadedModel, tokens: int) -> int:
    """Bytes of RAM for keys and values, next to the weights there and the activations of `tokens` tokens."""
    free = int(available_ram() * _KV_SHARE)
    if loaded.ram_bytes is None:
        return free
    config = loaded.model.config.get_text_config(decoder=True)
    each = activation_token_bytes(_widest(config), loaded.info.experts_per_token, loaded.model.dtype.itemsize)
    weights = loaded.info.experts_bytes + (loaded.info.weights_bytes if loaded.devices is None else 0)
    weights += loaded.kept.ram_budget if loaded.kept is not None else 0
    return min(free, loaded.ram_bytes - weights - tokens * each)


def _widest(config: Any) -> int:
    """The width of hidden states, or of queries, which are several times as wide in some models."""
    hidden = int(config.hidden_size)
    try:
        return max(hidden, int(config.num_attention_heads * config.head_dim))
    except (AttributeError, TypeError, RuntimeError):  # it has none, or one per layer
        return hidden
