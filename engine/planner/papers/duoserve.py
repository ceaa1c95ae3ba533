"""DuoServe-MoE: tables 2 and 3, cost of the predictor, and the range of its speed-ups."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.model_shape import ModelShape, read_model
from engine.formats import format_of
from engine.hardware.machine import read_machine
from engine.planner.costs import EFFICIENCY, Costs
from engine.planner.papers import DERIVED, THROUGHPUT, PublishedCell
from engine.planner.plan_parts import RUNTIME_BYTES, Workload
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import DUOSERVE, ON_DEMAND, WHOLE_LAYER, Strategy

LAYER_WIDTHS = (2048, 1024, 512, 256, 128, 64)
"""Widths of the predictor's hidden layers: seven fully connected layers including the output."""
PAPER = "DuoServe-MoE"
_PREDICTOR_BYTES = 300e6
_CONTEXT = 4096
_NON_EXPERTS_8X7B = 2.15e9  # its section 1
_PREDICTOR_OPERATORS = 4 * (len(LAYER_WIDTHS) + 1)  # product, normalisation, activation, dropout
_MODELS = {"mixtral-8x7b": "8x7B", "mixtral-8x22b": "8x22B"}
_PEAKS = {"mixtral-8x7b": (3.63, 3.91, 4.24, 25.14), "mixtral-8x22b": (8.06, 8.44, 9.13, 138.0)}
_BOTH_RIGHT = {
    ("mixtral-8x7b", "Orca"): (66.85, 95.45),
    ("mixtral-8x7b", "SQuAD"): (60.23, 92.31),
    ("mixtral-8x22b", "Orca"): (56.21, 90.45),
    ("mixtral-8x22b", "SQuAD"): (54.16, 90.31),
}
ALL_RIGHT, ONE_RIGHT = (statistics.fmean(column) for column in zip(*_BOTH_RIGHT.values(), strict=True))
"""Its table 3, percent of tokens, mean of all: both experts of a layer were predicted; at least one was."""


def rows() -> Iterator[PublishedCell]:
    for name, title in _MODELS.items():
        yield from _peaks(name, title)
    latency = 1e3 * _PREDICTOR_OPERATORS * EFFICIENCY.operator_s
    yield PublishedCell(PAPER, "6.4: predictor, latency", "one prediction", 0.6, latency, "ms", THROUGHPUT)
    shape = read_model("mixtral-8x7b")
    megabytes = 4 * predictor_weights(shape) * (shape.layers - 1) / 1e6
    note = "a predictor with 32-bit weights for each layer but the first"
    yield PublishedCell(PAPER, "6.4: predictor, memory", "all layers", 300, megabytes, "MB", DERIVED, note=note)
    yield from _speed_ups()


def _four_bit(shape: ModelShape) -> float:
    """Bytes of the non-expert weights: as published for 8x7B, scaled by size for other shapes."""

    def packed(model: ModelShape) -> float:
        return model.matrix_weights * format_of("awq4").bytes_per_weight + 2.0 * model.embedding_weights

    return _NON_EXPERTS_8X7B * packed(shape) / packed(read_model("mixtral-8x7b"))


def _peaks(name: str, title: str) -> Iterator[PublishedCell]:
    shape = read_model(name)
    cases = (
        ("on-demand", shape.experts_per_token, 0.0),
        ("DuoServe-MoE", shape.experts_per_token, _PREDICTOR_BYTES),
        ("whole layer", shape.experts, 0.0),
        ("all on GPU", shape.experts * shape.layers, 0.0),
    )
    for (cell, held, predictor), published in zip(cases, _PEAKS[name], strict=True):
        peak = peak_memory(shape, "awq4", held, non_experts=_four_bit(shape), context=_CONTEXT, predictor=predictor)
        note = "published: 8 bits per weight, though the paper says 4" if published > 100 else ""
        yield PublishedCell(PAPER, f"2: {title}", cell, published, peak / 1e9, "GB", DERIVED, note=note)


def _speed_ups() -> Iterator[PublishedCell]:
    ratios = []
    work = Workload("question", prompt_tokens=160, generated_tokens=128)
    for machine in ("duoserve-rtx-a5000", "duoserve-rtx-a6000"):
        for name in _MODELS:
            costs = Costs(read_machine(machine), read_model(name), "awq4")
            both = [pair[0] for (model, _), pair in _BOTH_RIGHT.items() if model == name]
            accuracy = (sum(both) / len(both) / 100) ** 0.5

            def seconds(strategy: Strategy, costs: Costs = costs) -> float:
                outcome = run_requests(strategy, Setting(costs, work))
                assert outcome is not None
                return outcome.seconds

            ours = seconds(replace(DUOSERVE, prefetch_accuracy=accuracy))
            ratios += [seconds(replace(other, pinned=False)) / ours for other in (ON_DEMAND, WHOLE_LAYER)]
    note = "the baselines copy from pageable memory: pinned memory is part of this paper's implementation"
    yield PublishedCell(PAPER, "fig. 5: end to end", "least", 1.42, min(ratios), "x", THROUGHPUT, note=note)
    yield PublishedCell(PAPER, "fig. 5: end to end", "most", 7.54, max(ratios), "x", THROUGHPUT, note=note)


def peak_memory(
    model: ModelShape, precision: str, experts_held: int, *, non_experts: float, context: int, predictor: float = 0.0
) -> float:
    """Bytes on the card with `experts_held` expert records there at once: k, a layer's, or all of them.

    Args:
        non_experts: bytes of the weights that always stay on the card.
        context: tokens whose keys and values are there.
        predictor: bytes of the predictor of experts.
    """
    # A prefill unpacks one expert's quantised weights into 16 bits.
    unpacked = 2.0 * model.expert_weights if format_of(precision).bytes_per_weight < 1 else 0.0
    experts, kv = experts_held * model.expert_bytes(precision), model.kv_bytes_per_token() * context
    return non_experts + experts + kv + unpacked + predictor + RUNTIME_BYTES


def predictor_weights(model: ModelShape) -> int:
    """Parameters of one layer's predictor: path so far, popularity and affinity in, experts out (eqs. 4, 5)."""
    inputs = model.moe_layers * model.experts_per_token + model.experts + model.experts * model.experts_per_token
    widths = (inputs, *LAYER_WIDTHS, model.experts)
    return sum(wide * (narrow_to + 1) for wide, narrow_to in itertools.pairwise(widths))
