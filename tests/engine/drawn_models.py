"""Models of every family in shapes drawn at random: sizes that divide nothing, windows shorter than prompts, stretched
rotary embeddings.

`drawn_model(seed, which)` draws one, every family before one comes a second time.  The tables of tiny_configs say
what a family needs besides.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.config_file import text_part
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_config

SEED_VARIABLE = "SWITCHYARD_DRAWN_SEED"
"""Set to a number, that seed is drawn from and not today's."""

FIXED_SEED = 20261122
"""Of the dozen that every run of the tests draws."""

_WIDTHS = {
    72: [(9, 3, 8), (9, 1, 8), (6, 2, 12), (4, 2, 18)],
    88: [(11, 1, 8), (4, 2, 22)],
    100: [(10, 5, 10), (10, 2, 10)],
}
"""Hidden size -> numbers of heads and of heads with keys and values, and the size of a head."""

_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


_CHOSEN = {"zaya": 1, "switch_transformers": 1, "nllb-moe": 2, "longcat_flash": 2}
"""Of families that know one number only; the library's LongCat fails with a single one."""

_PLAIN_ROPE = ("ernie4_5_vl_moe",)
"""Families whose positions cannot be stretched."""

_KEPT = {
    **dict.fromkeys(
        ("deepseek_v4", "mimo_v2_flash"), ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
    ),
    **dict.fromkeys(("hy_v4_vl", "phimoe"), ("rope_parameters",)),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), ("head_dim",)),
}
"""Values that stay as in the tables, for others hang on them."""


@dataclass(frozen=True)
class DrawnModel:
    """One of them.

    Attributes:
        values: of its configuration, by their names in `COMMON`.
        prompts: numbers of tokens of the rows that it is asked, the longest first.
    """

    family: str
    hidden: int
    experts: int
    chosen: int
    window: int
    rope: str
    values: dict[str, Any] = field(repr=False)
    prompts: Sequence[int]


def nightly_seed() -> int:
    """Another one each day, unless the environment fixes it."""
    return int(os.environ.get(SEED_VARIABLE) or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))


def drawn_model(seed: int, which: int) -> DrawnModel:
    """The same one for the same numbers."""
    return _draw(drawn_family(seed, which), random.Random(f"{seed} {which}"))


def drawn_family(seed: int, which: int) -> str:
    """Of that model: each family comes once before one comes again."""
    families = sorted({*FAMILIES, *ADAPTED})
    turn, place = divmod(which, len(families))
    random.Random(f"{seed} {turn}").shuffle(families)
    return families[place]


def _draw(family: str, rng: random.Random) -> DrawnModel:
    hidden = rng.choice(sorted(_WIDTHS))
    heads, kv_heads, head_dim = rng.choice(_WIDTHS[hidden])
    experts, chosen, window = rng.choice([5, 7, 12]), rng.randint(1, 3), rng.choice([5, 8, 13, 21])
    chosen = _CHOSEN.get(family, chosen)
    rope = "default" if family in _PLAIN_ROPE else rng.choice(sorted(_ROPES))
    intermediate, moe_intermediate = rng.choice([40, 52, 72]), rng.choice([20, 24, 36])
    prompts = (rng.randint(window + 10, 60), rng.randint(1, window), rng.randint(window, 40))
    values: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "d_model"), hidden),
        **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads"), heads),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
        "num_sliding_attention_heads": heads * 2,
        **dict.fromkeys(("num_key_value_heads", "kv_n_heads"), kv_heads),
        "head_dim": head_dim,
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), experts),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), chosen),
        "top_k_experts": chosen,
        "n_group": 1,
        "intermediate_size": intermediate,
        **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size"), moe_intermediate),
        **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), window),
        "use_sliding_window": rng.random() < 0.7,
        "max_window_layers": rng.randint(0, 1),
        # Scores of a tiny model's index of important tokens are often equally zero: it keeps them all.
        "index_topk": 256,
        "indexer_budget": 256,
        # In a file of a family without windows: the library's cache goes by it all the same.
        "stray_window": window if rng.random() < 0.3 else None,
    }
    plain = text_part(tiny_config(family).to_dict())
    if plain.get("num_key_value_heads") == plain.get("num_attention_heads"):  # latent: one of each, in sizes of its own
        values["num_key_value_heads"] = heads
        del values["head_dim"]
    if isinstance(plain.get("moe_intermediate_size"), list):
        values["moe_intermediate_size"] = [moe_intermediate, moe_intermediate - 8]
    kept = _KEPT.get(family, ())
    stretched = _stretched(plain.get("rope_parameters"), rope, values.get("head_dim", 8))
    if stretched is None or "rope_parameters" in kept:
        rope = "its own"
    else:
        values["rope_parameters"] = stretched
    for name in kept:
        values.pop(name, None)
    return DrawnModel(family, hidden, experts, chosen, window, rope, values, prompts)


def _stretched(plain: dict[str, Any] | None, rope: str, head_dim: int) -> dict[str, Any] | None:
    """The family's rotary embeddings, those that are nothing special changed into `rope`."""
    if not plain:
        return None
    if "rope_type" not in plain:
        return {kind: _stretched(each, rope, head_dim) for kind, each in plain.items()}
    if plain["rope_type"] != "default":
        return plain
    changed = {**plain, "rope_type": rope, **_ROPES[rope]}
    if "mrope_section" in plain:
        changed["mrope_section"] = [1, 1, head_dim // 2 - 2]
    share = plain.get("partial_rotary_factor", 1.0)
    if share < 1 and (int(head_dim * share) % 2 or head_dim * share < 4):
        changed["partial_rotary_factor"] = 1.0  # too few numbers to rotate
    return changed
