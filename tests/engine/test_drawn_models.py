"""Models drawn at random say what transformers says of the same files: on the CPU, on a card and from disk, a question
alone and rows of a batch.

Sizes divide nothing, windows are shorter than prompts, rotary embeddings stretched.  `drawn_model(seed, which)` draws
one, every family before one comes a second time.  The tables of tiny_configs say what a family needs besides.
"""

import datetime
import os
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config_file import text_part
from engine.common.config import SamplingParams
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, spread
from tests.engine.single_streams import Alone
from tests.engine.test_disk_backed import on_disk
from tests.engine.tiny_configs import ADAPTED, DENSE, FAMILIES
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

DOZEN, ALL = 12, 118
NEW_TOKENS = 6
POLICY = BatchPolicy(rows=3, kv_bytes=2**22, sweep_tokens=40, micro_batch_tokens=25)


@dataclass(frozen=True)
class Expected:
    """What transformers says: logits [1, n, V] of the longest prompt, and greedy answers to all of them."""

    prompts: list[list[int]]
    logits: torch.Tensor
    answers: list[list[int]]


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("which", some(range(DOZEN)))
def test_a_drawn_model_answers_as_the_library_does(which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(FIXED_SEED, drawn_model(FIXED_SEED, which), tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", range(ALL))
def test_a_model_drawn_today_answers_as_the_library_does(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = nightly_seed()
    check(seed, drawn_model(seed, which), tmp_path, monkeypatch)


def test_all_families_are_drawn() -> None:
    assert {drawn_family(1, which) for which in range(ALL)} == {*FAMILIES, *ADAPTED}
    assert drawn_model(1, 5) == drawn_model(1, 5) != drawn_model(2, 5)


def check(seed: int, drawn: "DrawnModel", folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails with the way in which, and the place where, answers are not those of transformers."""
    print(f"{SEED_VARIABLE}={seed}: {drawn}\n{drawn.values}")  # noqa: T201 - pytest shows it where one fails
    tiny_checkpoint(drawn.family, folder, drawn=drawn.values, prepare=spread)
    expected = _expected(drawn, folder)
    _compare("cpu", on_devices.opened(folder, 0), expected)
    _compare("card", on_devices.opened(folder, 1, cache_slots=3), expected)
    if drawn.family not in DENSE:
        _compare("disk", on_disk(monkeypatch, folder, "fp32"), expected)


def _expected(drawn: "DrawnModel", folder: Path) -> Expected:
    config = tiny_config(drawn.family, drawn=drawn.values)
    model = model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(tokens, seed=row) for row, tokens in enumerate(drawn.prompts)]
    return Expected(prompts, _logits(model, prompts[0]), [_continued(model, prompt) for prompt in prompts])


def _continued(model: Any, prompt: list[int]) -> list[int]:
    if not model.config.is_encoder_decoder:
        return library_tokens(model, prompt, NEW_TOKENS)
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "max_new_tokens": NEW_TOKENS}
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return [int(index) for index in answer[0, 1:]]


def _logits(model: Any, prompt: list[int]) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([prompt])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[2, *prompt[:9]]])
    with torch.inference_mode():
        result: torch.Tensor = model(**inputs).logits
    return result


def _compare(place: str, opening: AbstractContextManager[LoadedModel], expected: Expected) -> None:
    with opening as loaded:
        difference = (_logits(loaded.model, expected.prompts[0]) - expected.logits).abs().max()
        assert difference < 2e-4 * expected.logits.std(), f"{place}: logits"
        session = Alone(loaded)
        alone = [
            list(session.generate_from_ids(prompt, _greedy(), end_ids=NO_END).token_ids) for prompt in expected.prompts
        ]
        session.clear()
        assert alone == expected.answers, f"{place}: alone"
        assert _in_a_batch(loaded, expected.prompts) == expected.answers, f"{place}: rows of a batch"


def _greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS)


def _in_a_batch(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    executor = BatchExecutor(loaded, POLICY)
    rows = [
        BatchRequest(row, ids=tuple(prompt), sampling=_greedy(), end_ids=NO_END) for row, prompt in enumerate(prompts)
    ]
    try:
        executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, list(answer.token_ids)))
    finally:
        executor.close()
    return [answers[row] for row in range(len(prompts))]


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
