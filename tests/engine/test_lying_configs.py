"""What a config.json says is used as far as a model of its family needs it, and refused where no model has it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config_file import read_config
from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode, never_cancelled
from engine.runtime.adapters import adapter_for
from engine.runtime.engine import Engine
from engine.runtime.load.library_models import build_skeleton, model_class_for, quiet_library, read_library_config
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_checkpoint, tiny_config

LIES: list[Any] = [
    *(0, -1, 1, 2, 3, 99, 30_000_000, 10**9, 2**62, 1.5, -0.5, 1e-320, math.nan, math.inf, True, False, None),
    *("x", [], [1], [0] * 300, ["full_attention"], {}, {"a": 1}, {"__float__": "NaN"}),
]
OF_ALL = (
    *("num_labels", "id2label", "problem_type", "return_dict", "output_hidden_states", "output_router_logits"),
    *("output_attentions", "use_cache", "is_encoder_decoder", "chunk_size_feed_forward", "per_layer_config"),
    *("rope_theta", "rope_scaling", "sliding_window", "layer_types", "head_dim", "quantization_config"),
)


def _lied(true: dict[str, Any], name: tuple[str, ...], lie: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(true))
    part = config
    for key in name[:-1]:
        part = part[key]
    part[name[-1]] = lie
    return config


def _names(part: dict[str, Any], of: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [(*of, name) for name in part if name not in ("model_type", "architectures")]
    return found + [
        name for key, inner in part.items() if isinstance(inner, dict) for name in _names(inner, (*of, key))
    ]


def _built(folder: Path) -> None:
    raw = read_config(folder)
    adapter = adapter_for(raw["model_type"])
    with quiet_library():
        model_class, part = model_class_for(read_library_config(folder, raw), adapter)
        build_skeleton(model_class, part, torch.bfloat16, adapter)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "count", [1, pytest.param(60, marks=pytest.mark.exhaustive)], ids=lambda count: f"{count} lies each"
)
def test_a_lie_in_any_field_of_any_family_is_refused_or_harmless(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)
    file = tmp_path / "config.json"
    for family in {**FAMILIES, **ADAPTED}:
        with quiet_library():
            tiny_config(family).save_pretrained(tmp_path)
        true = json.loads(file.read_text())
        text = ("text_config",) if "text_config" in true else ()
        names = [*_names(true), *((*text, name) for name in OF_ALL)]
        for _ in range(count):
            name, lie = chance.choice(names), chance.choice(LIES)
            file.write_text(json.dumps(_lied(true, name, lie)))
            try:
                _built(tmp_path)
            except EngineError as error:
                assert error.code.is_users, (family, name, lie, error.message)  # noqa: PT017


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        *(("num_hidden_layers", lie) for lie in (0, -1, 5000)),
        *(("hidden_size", lie) for lie in (0, -32)),
        *(("num_experts_per_tok", lie) for lie in (99, -1, 0, 9)),
        *(("rope_theta", lie) for lie in (0, -1.0, math.nan, {"__float__": "NaN"})),
        *(("sliding_window", lie) for lie in (-1, 0, False)),
        ("num_key_value_heads", 3),
        ("n_group", 30_000_000),
    ],
)
def test_what_no_model_has_is_refused_by_name(tiny: Path, tmp_path: Path, name: str, lie: Any) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"use_sliding_window": True, name: lie}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError) as refused:
        read_config(tmp_path)
    assert refused.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert name in refused.value.message
    assert "again" not in refused.value.message


def test_what_a_family_does_not_need_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    lies = {
        "num_labels": 30_000_000,
        "id2label": {"0": "a"},
        "output_router_logits": True,
        "return_dict": False,
        "output_hidden_states": True,
        "output_attentions": True,
        "use_cache": False,
        "is_encoder_decoder": True,
        "chunk_size_feed_forward": -1,
        "_attn_implementation": "x",
        "attn_implementation": "x",
        "model": 7,
        "forward": None,
        "name_or_path": "elsewhere",
        "pruned_heads": {"0": [0]},
    }
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    answers = [_answer(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | lies))
    config = read_library_config(tmp_path, read_config(tmp_path))
    assert config.num_labels == 2
    answers.append(_answer(tmp_path))
    assert answers[0] == answers[1]


def test_what_fails_at_the_first_forward_is_told_of_the_configuration(tmp_path: Path) -> None:
    tiny_checkpoint("deepseek_v3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_group": -1, "topk_group": -1}))
    with pytest.raises(EngineError, match=r"does not fit its weights \(.+\): get both") as refused:
        _answer(tmp_path)
    assert refused.value.code is ErrorCode.CHECKPOINT_DAMAGED


def _answer(folder: Path) -> str:
    engine = Engine()
    try:
        engine.load(
            EngineConfig(model=str(folder), device="cpu"), on_progress=lambda *_: None, cancelled=never_cancelled
        )
        return engine.generate(
            (ChatMessage("user", "hello"),),
            SamplingParams(max_tokens=6),
            on_progress=lambda *_: None,
            on_text=lambda *_: None,
            cancelled=never_cancelled,
        ).text
    finally:
        engine.unload()
