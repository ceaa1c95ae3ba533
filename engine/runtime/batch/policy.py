"""Whether rows go through a model together, how many, and how their keys and values are held."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import psutil

from engine.common.footprint import activation_token_bytes
from engine.families import family_of
from engine.kernels.native.paged_attention import KvType
from engine.planner.batch_prediction import ROWS_TOGETHER, SWEEP_TOKENS
from engine.planner.plan_parts import BatchPlan
from engine.planner.schedules import SCHEDULES, Schedule
from engine.runtime.kv.reuse import kinds_by_length
from engine.runtime.kv.window_masks import window_of_cache_alone
from engine.runtime.loaded_model import LoadedModel

_MICRO_BATCHES = 8
"""Of one sweep on a device, if there is no plan: attention runs two ahead, a bubble is an eighth of a layer."""
_KV_SHARE = 0.5
"""Of the RAM that is free: the rest is for activations, for the page cache of an input file, and for others."""
_LEAST_KV_BYTES = 64 * 2**20


def why_not_packed(model: Any) -> str:
    """Why rows cannot go through this model's layers without padding, as the end of a sentence; empty if they can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or not family_of(config.model_type).packs_rows:
        return f"layers of the {config.model_type} family do not take several at once"
    kinds = sorted(kinds_by_length(model))
    if kinds:
        return f"this model's rotary embedding ({', '.join(kinds)}) depends on the length of each row"
    if window_of_cache_alone(model) < sys.maxsize:
        return "this model's sliding window is one of its cache, and not of its attention"
    return ""


def can_pack(model: Any) -> bool:
    """Whether rows can go through this model's layers without padding."""
    return not why_not_packed(model)


@dataclass(frozen=True)
class BatchPolicy:
    """MoE-Lightning's N and mu, and the memory of keys and values.

    Attributes:
        rows: N, rows that are under way together at most.
        kv_bytes: of all pages; rows wait while none are left.
        sweep_tokens: of prompts, read in one sweep through the layers beside the rows that decode.
        micro_batch_tokens: mu, here in tokens: what goes through a layer at once, and so the size of activations.
        micro_batch_rows: mu, rows that go through a layer at once at most; 0 is all of them.
        schedule: on a device, the order of a layer's work; `None` is what turns out fastest.
        planned, planned_reading: the schedule that the planner expects to be, and the same of sweeps that read prompts:
            tried first.
        kv_type: how keys and values are held; `None` is the model's own precision.
        window, kept: if not 0, tokens see only the last `window` tokens and the first `kept` (StreamingLLM, Xiao et al.
            2024): for long rows, an approximation.
    """

    rows: int = ROWS_TOGETHER
    kv_bytes: int = 2**30
    sweep_tokens: int = SWEEP_TOKENS
    micro_batch_tokens: int = 2048
    micro_batch_rows: int = 0
    schedule: Schedule | None = None
    planned: Schedule | None = None
    planned_reading: Schedule | None = None
    kv_type: KvType | None = None
    window: int = 0
    kept: int = 0


def policy_for(loaded: LoadedModel, plan: BatchPlan | None = None) -> BatchPolicy:
    """What fits this machine: keys and values get half of the RAM that is free, or what the budget leaves of it.

    Args:
        plan: sizes that the planner found best, if it was asked.
    """
    rows = plan.sequences if plan is not None else ROWS_TOGETHER
    # Where weights come from disk or over a link, a prompt is read in long chunks: each brings them once.  On a card a
    # chunk is what its memory has room for.
    chunk = loaded.chunk_tokens
    at_once = max(chunk, rows) if loaded.devices is not None else max(BatchPolicy.micro_batch_tokens, chunk)
    kv_bytes = max(_LEAST_KV_BYTES, _room(loaded, at_once))
    sizes = BatchPolicy(rows, kv_bytes, max(BatchPolicy.sweep_tokens, chunk), at_once)
    if plan is None:
        return replace(sizes, micro_batch_rows=-(-rows // _MICRO_BATCHES)) if loaded.devices is not None else sizes
    planned, reading = SCHEDULES[plan.decode], SCHEDULES[plan.prefill]
    return replace(sizes, micro_batch_rows=plan.micro_batch, planned=planned, planned_reading=reading)


def _room(loaded: LoadedModel, tokens: int) -> int:
    """Bytes of RAM for keys and values, beside the weights there and the activations of so many tokens."""
    free = int(psutil.virtual_memory().available * _KV_SHARE)
    if loaded.ram_bytes is None:
        return free
    config = loaded.model.config.get_text_config(decoder=True)
    each = activation_token_bytes(_widest(config), loaded.info.experts_per_token, loaded.model.dtype.itemsize)
    weights = loaded.info.experts_bytes + (loaded.info.weights_bytes if loaded.devices is None else 0)
    return min(free, loaded.ram_bytes - weights - tokens * each)


def _widest(config: Any) -> int:
    """The width of hidden states, or of queries, which in some models are several times as wide."""
    hidden = int(config.hidden_size)
    try:
        return max(hidden, int(config.num_attention_heads * config.head_dim))
    except (AttributeError, TypeError, RuntimeError):  # it has none, or one for each layer
        return hidden
