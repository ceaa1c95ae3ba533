"""The range of a predicted speed: what widens it, and which way."""

from dataclasses import replace

import pytest

from engine.checkpoint.model_shape import ModelShape, read_model
from engine.common.config import EngineConfig
from engine.hardware.machine import CallProfile, CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin
from engine.planner.plan_parts import Limits
from engine.planner.predict import DecodePrediction, predict_decode

CPU = CpuProfile("two cores", 2, 8e11, 40e9, 24 * 2**30, {1: 32e9, 2: 37e9})
TIMED = HardwareProfile(
    "here",
    "",
    "measured",
    None,
    LinkProfile(2e9, 2e9, 2e9),
    CPU,
    1e9,
    origins={"cpu.ram_bytes_per_s": Origin.MEASURED, "cpu.flops": Origin.MEASURED},
    calls=CallProfile(4e-6, 3e-5, 1.3e-4, 4e-5, 2e-4, 4e-5, 1.7e-5),
)
LARGE = read_model("qwen3-30b-a3b")


def tiny() -> ModelShape:
    """Next to no weights: calls are all that counts."""
    attention = replace(LARGE.attention, heads=2, kv_heads=1, head_dim=16)
    return replace(
        LARGE,
        layers=8,
        full_attention_layers=8,
        hidden=64,
        vocabulary=512,
        experts=16,
        experts_per_token=4,
        expert_width=32,
        attention=attention,
    )


def predicted(machine: HardwareProfile, model: ModelShape = LARGE, limits: Limits | None = None) -> DecodePrediction:
    return predict_decode(machine, model, EngineConfig("m", device="cpu", precision="int4", threads=2), limits=limits)


def width(found: DecodePrediction) -> tuple[float, float]:
    return found.low / found.tokens_per_s, found.high / found.tokens_per_s


@pytest.mark.parametrize("model", [LARGE, tiny()], ids=["large", "tiny"])
@pytest.mark.parametrize("cache_bytes", [0, 2**25, 2**40])
@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_on_a_measured_cpu_it_is_narrow_enough_to_be_of_use(model: ModelShape, cache_bytes: int, spread: float) -> None:
    machine = replace(TIMED, cpu=replace(CPU, cache_bytes=cache_bytes), spread=spread)
    low, high = width(predicted(machine, model))
    assert 0.6 <= low < 0.9
    assert 1.1 < high <= 1.6


def test_what_changed_while_it_was_measured_is_trusted_less() -> None:
    steady, unsteady = width(predicted(TIMED)), width(predicted(replace(TIMED, spread=0.3)))
    assert unsteady[0] < steady[0]
    assert unsteady[1] > steady[1]


def test_other_programs_lower_the_slow_end_alone() -> None:
    alone, beside = predicted(TIMED), predicted(TIMED, limits=Limits(use_card=False, cpu_of_others=0.5))
    assert (alone.tokens_per_s, alone.high) == (beside.tokens_per_s, beside.high)
    assert beside.low == pytest.approx(alone.low / 2, rel=0.1)


def test_data_sheets_are_trusted_least() -> None:
    known = width(predicted(TIMED))
    assumed = width(predicted(replace(TIMED, origins={}, calls=CallProfile())))
    assert assumed[0] < known[0]
    assert assumed[1] > known[1]


def test_timed_calls_rule_a_small_model_and_hardly_a_large_one() -> None:
    slower = replace(TIMED, calls=replace(TIMED.calls, native_s=8e-6))
    assert predicted(slower, tiny()).tokens_per_s < 0.6 * predicted(TIMED, tiny()).tokens_per_s
    assert predicted(slower).tokens_per_s > 0.9 * predicted(TIMED).tokens_per_s


def test_with_all_experts_an_emulated_card_is_as_fast_as_the_cpu_that_computes_for_it() -> None:
    card = GpuProfile("emulated:slow-link", 4 * 2**30, 8e11, 40e9)
    found = predict_decode(
        replace(TIMED, gpu=card), tiny(), EngineConfig("m", device="emulated:slow-link", precision="bf16", threads=1)
    )
    on_cpu = predict_decode(TIMED, tiny(), EngineConfig("m", device="cpu", precision="bf16", threads=1))
    assert found.memory.all_experts
    assert found.tokens_per_s == pytest.approx(on_cpu.tokens_per_s, rel=0.1)
