"""What a GGUF file says of its model, as config.json: complete, or refused in a sentence."""

import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf.checkpoint import gguf_tensors
from engine.checkpoint.gguf.file import Strings, read_gguf
from engine.checkpoint.profile import read_profile, suggested_sampling
from engine.checkpoint.shards import read_tensors
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from tests.combinations import some
from tests.refusals import refused
from tests.tiny_gguf import EXPERTS, HIDDEN, KEYS, TENSORS, WIDTH, write_mixtral

FILES = Path(__file__).parents[1] / "data" / "gguf"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(keys, **general)`: a Mixtral with these keys of its architecture, and others by their whole names."""

    def make(keys: dict[str, Any], general: dict[str, Any] | None = None) -> Path:
        return write_mixtral(tmp_path / "model.gguf", keys, general)

    return make


def test_the_configuration(write: Callable[..., Path]) -> None:
    config = read_config(write(KEYS, {"tokenizer.ggml.eos_token_id": 7}))
    assert (
        config.items()
        >= {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": 10,
            "max_position_embeddings": 100,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "eos_token_id": 7,
            "bos_token_id": None,
        }.items()
    )
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_experts_are_found_one_by_one_and_shapes_are_counted(write: Callable[..., Path]) -> None:
    file = write(KEYS)
    tensors = read_tensors(file)
    down = [tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"] for expert in range(EXPERTS)]
    assert {entry.shape for entry in down} == {(HIDDEN, WIDTH)}
    assert len({entry.offset for entry in down}) == EXPERTS
    profile = read_profile(file)
    assert (profile.experts, profile.experts_per_token) == (EXPERTS, 2)
    assert profile.parameters == sum(int(np.prod(shape)) for shape in TENSORS.values())
    assert profile.expert_parameters == 3 * EXPERTS * HIDDEN * WIDTH
    shape = find_shape(str(file))
    assert (shape.name, shape.expert_width, shape.moe_layers) == ("model", WIDTH, 1)


def test_the_width_of_heads_is_that_of_the_tensors_where_no_key_says_it(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, shape in TENSORS.items():
        if ".attn_" in name and len(shape) == 2:  # half as wide as usual
            halved = (shape[0], shape[1] // 2) if "output" in name else (shape[0] // 2, shape[1])
            monkeypatch.setitem(TENSORS, name, halved)
    file = write(KEYS)
    assert read_config(file)["head_dim"] == 2
    assert read_tensors(file)["model.layers.0.self_attn.q_proj.weight"].shape == (HIDDEN // 2, HIDDEN)
    with pytest.raises(EngineError) as damaged:
        read_tensors(write(KEYS | {"attention.key_length": 4}))
    assert "attn_q" in damaged.value.message
    assert "again" not in damaged.value.message


def test_sampling_hints(write: Callable[..., Path]) -> None:
    assert suggested_sampling(write(KEYS)) == SamplingParams()
    hints = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    assert suggested_sampling(write(KEYS, hints)) == SamplingParams(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    "missing", sorted(KEYS.keys() - {"attention.head_count_kv", "rope.freq_base", "expert_count", "context_length"})
)
def test_a_key_that_the_model_needs_is_named(missing: str, write: Callable[..., Path]) -> None:
    keys = {key: value for key, value in KEYS.items() if key != missing}
    with refused(ErrorCode.CHECKPOINT_DAMAGED, f"llama.{missing}"):
        read_config(write(keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_weights_norm", False),
        ("expert_weights_scale", 2.0),
        ("expert_gating_func", 2),
        ("attention.causal", False),
        ("attention.value_length", 8),
        ("rope.dimension_count", 2),
        ("attn_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
    ],
)
def test_what_the_library_would_compute_otherwise_is_refused(
    key: str, value: object, write: Callable[..., Path]
) -> None:
    with refused(ErrorCode.MODEL_UNSUPPORTED, f"llama.{key}"):
        read_config(write(KEYS | {key: value}))


@pytest.mark.parametrize("value", ["text", 0, -1, 2**31, 2**63, float("nan"), 1.5, [3, 1], True, [1] * 5])
def test_nonsense_is_refused_or_harmless(value: object, write: Callable[..., Path]) -> None:
    for key in [*KEYS, "rope.scaling.factor", "rope.scaling.type", "attention.key_length", "expert_weights_scale"]:
        for call in (read_profile, find_shape, suggested_sampling):
            file = write(KEYS | {key: value})
            try:
                call(file if call is not find_shape else str(file))  # type: ignore[operator]
            except EngineError as error:
                assert error.code.is_users  # noqa: PT017


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    "packed",
    some(sorted(FILES.glob("[!m]*.gguf.xz")) + sorted(FILES.glob("m[!m]*.gguf.xz"))),
    ids=lambda packed: packed.name,
)
def test_nonsense_of_every_architecture_is_refused_or_harmless(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(lzma.decompress(packed.read_bytes()))
    file = read_gguf(tmp_path / "model.gguf")
    gguf_tensors(file)
    for key in file.metadata:
        if not key.startswith(file.architecture):
            continue
        for value in ("text", 0, -1, float("nan"), np.array([3, 1]), np.array([1.5] * 3), Strings(0, b"")):
            changed = replace(file, metadata={**file.metadata, key: value})
            try:
                gguf_tensors(changed)
            except EngineError as error:
                assert error.code in (ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.MODEL_UNSUPPORTED)  # noqa: PT017
