"""Predicted decode speed of the engine on the CPU, against what `bench decode` measured."""

from dataclasses import replace

import numpy as np
import pytest

from engine.checkpoint.counted_shape import shape_of
from engine.checkpoint.model_shape import AttentionShape, ModelShape
from engine.checkpoint.synthetic import SHAPES, config_of, tensors_of
from engine.common.config import EngineConfig
from engine.common.model_info import ModelInfo
from engine.hardware.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin
from engine.planner.predict import predict_decode, recorded_config, running_config
from tests.unit.made_up_headers import entries_of

XEON = HardwareProfile(
    "two cores of a Xeon",
    "",
    "its own reads, 2 threads",
    None,
    LinkProfile(2e9, 2e9, 2e9),
    CpuProfile("Xeon", 2, 2e12, 29e9, 24 * 2**30),
    1e9,
    origins={"cpu.ram_bytes_per_s": Origin.MEASURED, "cpu.flops": Origin.MEASURED},
)
"""What `bench decode --predict` was run on."""
READ = {"bf16": 29.6e9, "int8": 28.9e9, "int4": 27.4e9}
"""Bandwidths of experts that it found then, with two threads."""

STARTER = ModelShape(
    "starter", "", "", "", 30, 0, 30, 576, 49152, 8, 7, 192, 0, 0, AttentionShape(9, 3, 64), 8192, 1.35e8, True
)


def layers_of(name: str, layers: int) -> ModelShape:
    shape = SHAPES[name].changed(layers=layers, vocab=4096)
    return shape_of(name, config_of(shape), entries_of(tensors_of(shape)))


@pytest.mark.parametrize(
    ("model", "precision", "measured"),
    [
        ("starter", "bf16", 88.5),
        ("starter", "int8", 152.5),
        ("starter", "int4", 187.3),
        ("qwen3-30b-a3b", "bf16", 114.7),
        ("qwen3-30b-a3b", "int8", 224.1),
        ("qwen3-30b-a3b", "int4", 392.9),
        ("olmoe-1b-7b", "bf16", 102.7),
        ("olmoe-1b-7b", "int8", 191.5),
        ("mixtral-8x7b", "int8", 66.0),
        ("mixtral-8x7b", "int4", 109.3),
    ],
)
def test_as_measured(model: str, precision: str, measured: float) -> None:
    layers = 1 if model == "mixtral-8x7b" else 2
    shape = STARTER if model == "starter" else layers_of(model, layers)
    machine = replace(XEON, cpu=replace(XEON.cpu, weights_bytes_per_s={1: READ[precision] / 2, 2: READ[precision]}))
    found = predict_decode(machine, shape, EngineConfig(model, device="cpu", precision=precision, threads=2))
    assert found.tokens_per_s == pytest.approx(measured, rel=0.15)
    assert found.low < measured < found.high


@pytest.mark.parametrize(
    ("model", "precision", "slots", "rate", "measured"),
    [
        ("starter", "bf16", 60, 15.4e9, 20.1),
        ("qwen3-30b-a3b", "bf16", 64, 15.1e9, 53.9),
        ("qwen3-30b-a3b", "int8", 64, 14.7e9, 76.8),
        ("qwen3-30b-a3b", "int4", 64, 14.3e9, 118.8),
    ],
)
def test_beside_an_emulated_card_as_measured(
    model: str, precision: str, slots: int, rate: float, measured: float
) -> None:
    shape = STARTER if model == "starter" else layers_of(model, 2)
    machine = replace(
        XEON,
        gpu=GpuProfile("emulated:pcie3-x8-8gb", 8 * 2**30, 1.1e12, 13e9),
        link=LinkProfile(6.4e9, 6.4e9, 6.4e9),
        cpu=replace(XEON.cpu, weights_bytes_per_s={1: rate, 2: 2 * rate}),
        origins={**XEON.origins, "gpu.bytes_per_s": Origin.MEASURED, "gpu.flops": Origin.MEASURED},
    )
    config = EngineConfig(model, device="emulated:x", precision=precision, threads=1, cache_slots=slots)
    # Two thirds of the uses went to what a cache of a quarter held: random routers have favourites.
    draw = np.random.default_rng(0)
    odds = np.geomspace(1, 1e-3, shape.experts) / np.geomspace(1, 1e-3, shape.experts).sum()
    k = shape.experts_per_token
    choose = [draw.choice(shape.experts, k, replace=False, p=odds) for _ in range(32 * shape.moe_layers)]
    routing = np.array(choose, np.int16).reshape(32, shape.moe_layers, k)
    found = predict_decode(machine, shape, config, routing=routing if shape.experts > 8 else None)
    assert found.hit_rate is not None
    assert found.tokens_per_s == pytest.approx(measured, rel=0.2)


def test_a_card_behind_a_slow_link_leaves_misses_to_the_cpu() -> None:
    card = GpuProfile("emulated:slow-link", 4 * 2**30, 1e11, 10e9)
    machine = replace(XEON, gpu=card, origins={**XEON.origins, "gpu.bytes_per_s": Origin.MEASURED})
    speeds = {
        misses: predict_decode(
            machine,
            layers_of("qwen3-30b-a3b", 4),
            EngineConfig("m", device="emulated:slow-link", precision="bf16", misses=misses, cache_slots=128),
        ).tokens_per_s
        for misses in ("mixed", "cpu", "fetch", "layer")
    }
    assert speeds["mixed"] >= speeds["cpu"] > speeds["fetch"] > speeds["layer"]


def test_the_engine_is_predicted_as_it_runs() -> None:
    asked_for = EngineConfig("somewhere", device="auto", ram_bytes=2**30, misses="cpu")
    loaded = ModelInfo("Starter", "", "mixtral", "cpu", "bf16", 2, 1, 1, 1, 1, 8192, 1, 1, 1)
    config = running_config(loaded, asked_for, 40)
    assert (config.device, config.precision, config.threads) == ("cpu", "bf16", 2)
    assert (config.ram_bytes, config.misses, config.cache_slots) == (2**30, "cpu", 40)
    about = {"model": "starter", "device": "cpu", "precision": "int8", "threads": 2, "config": {"misses": "fetch"}}
    config = recorded_config(about, None)
    assert (config.model, config.precision, config.misses) == ("starter", "int8", "fetch")
    assert recorded_config({"config": "nonsense", "precision": 7}, None).precision == "auto"
