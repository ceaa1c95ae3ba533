"""Predicted decode speed of the engine on the CPU, against what `bench decode` measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.bench.synthetic.shapes import SHAPES, config_of, tensors_of
from engine.checkpoint.headers import TensorEntry
from engine.config import EngineConfig, Precision
from engine.errors import EngineError, ErrorCode
from engine.planner.checkpoint_shape import shape_of
from engine.planner.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin
from engine.planner.model_shape import Attention, ModelShape
from engine.planner.predict import predict_decode
from engine.planner.profile_files import read_model
from tests.unit.made_up_headers import entries_of

XEON = HardwareProfile(
    "two cores of a Xeon",
    "",
    "its own reads, 2 threads",
    None,
    LinkProfile(2e9, 2e9, 2e9),
    CpuProfile("Xeon", 2, 2e11, 33e9, 24 * 2**30),
    1e9,
    origins={"cpu.ram_bytes_per_s": Origin.MEASURED, "cpu.flops": Origin.MEASURED},
)
"""What the README's figures were measured on."""

STARTER = ModelShape(
    "starter", "", "", "", 30, 0, 30, 576, 49152, 8, 7, 192, 0, 0, Attention(9, 3, 64), 8192, 1.35e8, True
)


def four_layers() -> ModelShape:
    shape = SHAPES["qwen3-30b-a3b"].changed(layers=4, vocab=4096)
    return shape_of("qwen3-4-layers", config_of(shape), entries_of(tensors_of(shape)))


@pytest.mark.parametrize(
    ("model", "precision", "measured"),
    [
        ("starter", "bf16", 86.2),
        ("starter", "int8", 162.0),
        ("starter", "int4", 190.0),
        ("qwen3", "bf16", 45.5),
        ("qwen3", "int8", 95.4),
        ("qwen3", "int4", 145.0),
    ],
)
def test_as_measured(model: str, precision: Precision, measured: float) -> None:
    shape = STARTER if model == "starter" else four_layers()
    found = predict_decode(XEON, shape, EngineConfig(model, device="cpu", precision=precision, threads=2))
    assert found.tokens_per_s == pytest.approx(measured, rel=0.15)
    assert found.low < measured < found.high


def test_headers_give_what_a_profile_says() -> None:
    whole = SHAPES["qwen3-30b-a3b"]
    counted = shape_of("counted", config_of(whole), entries_of(tensors_of(whole)))
    known = read_model("qwen3-30b-a3b")
    assert counted.total_weights == pytest.approx(known.total_weights, rel=0.001)
    assert counted.expert_bytes("bf16") == known.expert_bytes("bf16")
    assert counted.kv_bytes_per_token() == known.kv_bytes_per_token()
    slower = predict_decode(XEON, known, EngineConfig("m", device="cpu", precision="int4", ram_bytes=12 * 10**9))
    assert slower.memory.disk > 0
    with pytest.raises(EngineError) as refused:
        predict_decode(XEON, known, EngineConfig("m", device="cpu", precision="bf16", ram_bytes=10**9))
    assert refused.value.code is ErrorCode.NOT_ENOUGH_MEMORY


def test_a_card_behind_a_slow_link_leaves_misses_to_the_cpu() -> None:
    card = GpuProfile("emulated:slow-link", 4 * 2**30, 1e11, 10e9)
    machine = replace(XEON, gpu=card, origins={**XEON.origins, "gpu.bytes_per_s": Origin.MEASURED})
    speeds = {
        misses: predict_decode(
            machine,
            four_layers(),
            EngineConfig("m", device="emulated:slow-link", precision="bf16", misses=misses, cache_slots=128),
        ).tokens_per_s
        for misses in ("mixed", "cpu", "fetch", "layer")
    }
    assert speeds["mixed"] >= speeds["cpu"] > speeds["fetch"] > speeds["layer"]


def test_entries_have_the_bytes_of_their_shapes() -> None:
    found: list[TensorEntry] = entries_of(tensors_of(SHAPES["qwen3-moe-tiny"]))
    assert all(entry.nbytes == 2 * entry.numel for entry in found)
