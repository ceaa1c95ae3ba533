"""Who is computed where, and what strategies take: the best choice there is, from measurements fitted and kept."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.shared_experts import LayerStep
from benchmarks.strategies import StepCosts, StrategyModel
from engine.bench.report import Report, median_interval, row
from engine.common.costs import Cost
from engine.devices.opening import open_devices
from engine.experts import latency as latency_measurement
from engine.experts.latency import LatencyModel, fit_knee, fit_line, latency_file, load_latency, measure, save_latency
from engine.experts.shares import Estimate, split_among
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.torch_experts import TorchExperts
from tests.engine.made_up_records import SMALL, contents_of, random_records

# Mixtral 8x7B on an RTX 4090 with a few cores (CPU-GPU Collaborative, table I): whichever is chosen, it matters.
MIXTRAL = LatencyModel("bf16", 352_321_536, 0.012, 0.002, 0.0003, 512, 1e-6, 20e-6, 12.6e9)

_seconds = st.floats(1e-6, 0.1)
_misses = st.lists(st.integers(1, 64), max_size=8).map(lambda tokens: list(enumerate(tokens)))


def _makespan(model: LatencyModel, cpu: Sequence[int], fetched: Sequence[int], backlog_s: float) -> float:
    """When the later side is done; what is fetched is computed in the best order, most tokens first."""
    arrived_s, ended_s = backlog_s, 0.0
    for tokens in sorted(fetched, reverse=True):
        arrived_s += model.transfer_s
        ended_s = max(ended_s, arrived_s) + model.gpu_s(tokens)
    return max(ended_s, sum(model.cpu_s(tokens) for tokens in cpu))


def split(
    model: LatencyModel, misses: Sequence[tuple[int, int]], backlog_s: float = 0.0
) -> tuple[list[int], list[int]]:
    """Between the processor and the link: (on the CPU, fetched)."""
    here = Estimate(model.cpu_s, keeps_caller=True)
    on_cpu, fetched = split_among(misses, [here, Estimate(model.gpu_s, model.transfer_s, backlog_s)])
    return on_cpu, fetched


def _chosen(model: LatencyModel, misses: list[tuple[int, int]], backlog_s: float) -> float:
    cpu, fetched = split(model, misses, backlog_s)
    assert sorted([*cpu, *fetched]) == [key for key, _ in misses]
    tokens = dict(misses)
    return _makespan(model, [tokens[key] for key in cpu], [tokens[key] for key in fetched], backlog_s)


@given(
    misses=_misses,
    base=_seconds,
    each=_seconds,
    flat=_seconds,
    latency=_seconds,
    backlog=st.one_of(st.just(0.0), _seconds),
)
def test_no_other_split_ends_earlier(
    misses: list[tuple[int, int]], base: float, each: float, flat: float, latency: float, backlog: float
) -> None:
    model = LatencyModel("bf16", 4096, base, each, flat, 64, 0.0, latency, 1e9)
    tokens = [count for _, count in misses]
    best = min(
        _makespan(
            model,
            [count for count, away in zip(tokens, choice, strict=True) if not away],
            [count for count, away in zip(tokens, choice, strict=True) if away],
            backlog,
        )
        for choice in itertools.product((False, True), repeat=len(tokens))
    )
    assert _chosen(model, misses, backlog) <= best * (1 + 1e-6)


@given(
    misses=_misses,
    host=_seconds,
    others=st.lists(st.tuples(_seconds, _seconds, _seconds, _seconds, st.booleans()), max_size=3),
)
def test_more_ways_never_end_later(
    misses: list[tuple[int, int]], host: float, others: list[tuple[float, float, float, float, bool]]
) -> None:
    """Each miss is met once; what any way but the first gets ends before the first would have done it all."""
    ways = [
        Estimate(lambda tokens, each=host: each * tokens, keeps_caller=True),  # type: ignore[misc]
        *(
            Estimate(lambda tokens, each=each: each * tokens, bring_s, backlog_s, busy_s, keeps_caller)  # type: ignore[misc]
            for each, bring_s, backlog_s, busy_s, keeps_caller in others
        ),
    ]
    met = split_among(misses, ways)
    assert sorted(key for keys in met for key in keys) == [key for key, _ in misses]
    tokens = dict(misses)
    alone_s = sum(host * count for count in tokens.values())
    for way, keys in zip(ways[1:], met[1:], strict=True):
        if keys and not way.keeps_caller:
            arrived_s, ended_s = way.backlog_s, way.busy_s
            for key in keys:
                arrived_s += way.bring_s
                ended_s = max(ended_s, arrived_s) + way.seconds(tokens[key])
            assert ended_s <= max(alone_s, *(each.busy_s for each in ways))


@given(misses=_misses, base=_seconds, each=_seconds, flat=_seconds, slope=_seconds, knee=st.integers(1, 64))
def test_beyond_the_knee_it_is_no_worse_than_all_on_one_side(
    misses: list[tuple[int, int]], base: float, each: float, flat: float, slope: float, knee: int
) -> None:
    model = LatencyModel("bf16", 4096, base, each, flat, knee, slope, 1e-5, 1e9)
    tokens = [count for _, count in misses]
    one_sided = min(_makespan(model, tokens, [], 0.0), _makespan(model, [], tokens, 0.0))
    assert _chosen(model, misses, 0.0) <= one_sided * (1 + 1e-6)


@given(misses=_misses, host=_seconds, each=_seconds, bring_s=_seconds, backlog_s=_seconds, entry_s=_seconds)
def test_entering_the_first_way_is_paid_for_only_where_it_ends_sooner(
    misses: list[tuple[int, int]], host: float, each: float, bring_s: float, backlog_s: float, entry_s: float
) -> None:
    assume(entry_s > 0)
    first = Estimate(lambda tokens: host * tokens, keeps_caller=True, entry_s=entry_s)
    other = Estimate(lambda tokens: each * tokens, bring_s, backlog_s)
    here, there = split_among(misses, [first, other])
    assert sorted([*here, *there]) == [key for key, _ in misses]
    tokens = dict(misses)
    end_s = other.alone_s([tokens[key] for key in there]) if there else 0.0
    if here:
        end_s = max(end_s, entry_s + sum(host * tokens[key] for key in here))
    longest_first = sorted(tokens.values(), reverse=True)
    assert end_s <= max(other.alone_s(longest_first), other.backlog_s) * (1 + 1e-6)


def test_one_miss_goes_where_algorithm_1_says() -> None:
    for tokens in (1, 4, 7, 8, 9, 30, 500):
        on_cpu, fetched = split(MIXTRAL, [(3, tokens)])
        assert (on_cpu, fetched) == (([3], []) if MIXTRAL.prefers_cpu(tokens) else ([], [3]))
    assert MIXTRAL.prefers_cpu(1)
    assert not MIXTRAL.prefers_cpu(500)


def test_corrections_follow_a_trend_and_shrug_at_outliers() -> None:
    model = replace(MIXTRAL)
    before_s = model.cpu_s(1)
    model.costs.observe(Cost.CPU_EXPERT, 1, before_s * 1e6)
    assert model.cpu_s(1) < before_s * 1.04
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        model.costs.observe(Cost.H2D, model.record_nbytes, wrong)
    assert model.transfer_s == MIXTRAL.transfer_s
    for _ in range(300):
        model.costs.observe(Cost.CPU_EXPERT, (1, 1), 6 * before_s)
        model.costs.observe(Cost.H2D, model.record_nbytes, MIXTRAL.transfer_s / 4)
        model.observe_gpu([2], MIXTRAL.gpu_s(2) * 2)
    assert model.cpu_s(1) == pytest.approx(3 * before_s, rel=0.05)
    assert model.transfer_s == pytest.approx(MIXTRAL.transfer_s / 4, rel=0.05)
    assert model.gpu_s(2) == pytest.approx(MIXTRAL.gpu_s(2) * 2, rel=0.05)


def test_saved_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    device = "emulated:slow-link#0"
    assert load_latency(device, "bf16", 4096) is None
    other = replace(MIXTRAL, precision="int8", record_nbytes=4096)
    for model in (MIXTRAL, other, replace(MIXTRAL, cpu_base_s=1.0)):
        save_latency(device, model)
    assert load_latency(device, "bf16", MIXTRAL.record_nbytes) == replace(MIXTRAL, cpu_base_s=1.0)
    assert load_latency(device, "int8", 4096) == other
    assert load_latency("cuda:0", "bf16", 4096) is None
    path = latency_file(device)
    assert [path] == list(path.parent.iterdir())
    entry = json.loads(path.read_text())["models"][0]
    for broken in ("", "[]", '{"version": 1}', json.dumps({"version": 2, "models": []}), "{" * 10_000):
        path.write_text(broken)
        assert load_latency(device, "bf16", 4096) is None
    for wrong in (-1, "much", None):
        path.write_text(json.dumps({"version": 1, "models": [entry | {"cpu_base_s": wrong}]}))
        assert load_latency(device, entry["precision"], entry["record_nbytes"]) is None


@pytest.mark.parametrize("spec", ["cpu", "emulated:slow-link"])
def test_measures_real_kernels_and_copies(spec: str) -> None:
    layer = LayerRecords("experts", SMALL, random_records(contents_of([(4, SMALL)]))[0])
    layer.records.zero_()
    math = ExpertMath("gate_up_proj", None, None, lambda inner: inner[..., :32], False, None)

    def make(records: LayerRecords) -> TorchExperts:
        return TorchExperts(records, math)

    (device,) = open_devices(spec)
    with device:
        model = measure(device, layer, make(layer), make, 8, dtype=torch.bfloat16, precision="bf16", budget_s=0.1)
        assert device.memory.use().used == 0
    assert model.record_nbytes == SMALL.nbytes
    assert model.cpu_s(1) > 0
    assert model.gpu_s(1) > 0
    assert model.transfer_s > 0
    if spec != "cpu":
        assert model.transfer_s >= 20e-6


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.lists(st.integers(1, 8), max_size=6))
def test_the_device_is_left_alone_only_if_the_cpu_is_done_sooner(hits: list[int], misses: list[int]) -> None:
    here_s = sum(map(MIXTRAL.cpu_s, misses))
    both_s, alone_s = max(here_s, MIXTRAL.hits_s(hits)), here_s + sum(map(MIXTRAL.cpu_s, hits))
    sides = MIXTRAL.sides(hits, misses)
    assert sides == {True: pytest.approx(alone_s), False: pytest.approx(both_s)}
    assert replace(MIXTRAL).side(len(hits) + len(misses)).take(sides) == (alone_s < both_s)


# An RTX 4090 and int4 experts of Qwen3-30B-A3B: a launch takes 6 us, an expert's bytes 3 us more; the CPU takes 56 us.
RTX_4090 = LatencyModel("int4", 2_800_000, 50e-6, 6e-6, 9e-6, 16, 1e-6, 10e-6, 25e9, gpu_launch_s=6e-6)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_card_that_has_the_experts_is_not_left_idle(count: int) -> None:
    sides = RTX_4090.sides([1] * count, [1] * (8 - count))
    assert sides[False] < sides[True]


@given(st.lists(st.integers(1, 64), max_size=12))
def test_experts_on_the_device_share_a_launch(hits: list[int]) -> None:
    own_s = sum(RTX_4090.gpu_s(tokens) - RTX_4090.gpu_launch_s for tokens in hits)
    assert RTX_4090.hits_s(hits) == pytest.approx(own_s + RTX_4090.gpu_launch_s if hits else 0.0)


FREE = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
seconds = st.floats(1e-6, 1e-2)


def latency(cpu_s: float, gpu_s: float, transfer_s: float) -> LatencyModel:
    return LatencyModel("bf16", 1000, cpu_s, 0.0, gpu_s, 64, 0.0, 0.0, 1000 / transfer_s)


def step(hits: int, on_cpu: int, fetched: int, backlog: int = 0) -> LayerStep:
    return LayerStep(hits + on_cpu + fetched, hits, on_cpu, fetched, backlog, 0.0)


def test_both_sides_work_at_once_and_the_later_one_counts() -> None:
    model = StrategyModel(latency(2.0, 1.0, 4.0), FREE, 16)
    assert model.seconds_per_token("mixed", [step(3, 1, 0)], 1) == pytest.approx(3.0)
    assert model.seconds_per_token("mixed", [step(1, 3, 0)], 1) == pytest.approx(6.0)
    # It arrives after 4 s, is computed in 1, while the CPU has long ended.
    assert model.seconds_per_token("mixed", [step(1, 1, 1)], 1) == pytest.approx(5.0)
    assert model.seconds_per_token("mixed", [step(1, 1, 1, backlog=2)], 1) == pytest.approx(13.0)


@given(cpu_s=seconds, gpu_s=seconds, transfer_s=seconds, needed=st.integers(1, 12), layers=st.integers(1, 60))
def test_the_best_mix_is_never_predicted_slower_than_either_side_alone(
    cpu_s: float, gpu_s: float, transfer_s: float, needed: int, layers: int
) -> None:
    model = StrategyModel(latency(cpu_s, gpu_s, transfer_s), FREE, 64)
    steps = [step(0, needed, 0)]
    off = model.seconds_per_token("off", steps, layers)
    assert off <= model.seconds_per_token("cpu", steps, layers) * (1 + 1e-9)
    assert off <= model.seconds_per_token("fetch", steps, layers) * (1 + 1e-9)


def test_a_row_says_how_far_the_measurement_is_from_the_prediction() -> None:
    report = Report({})
    report.rows.append(row("decode", [10.0], "tokens/s", peer="another", peer_values=[5.0], predicted=1.6))
    report.rows.append(row("decode", [10.0], "tokens/s", predicted=20.0))
    ratio, value = report.rows
    assert ratio.deviation == pytest.approx(0.25)
    assert value.deviation == pytest.approx(-0.5)
    assert "+25%" in report.text()
    assert report.document()["rows"][0]["predicted"] == 1.6


def test_a_row_says_how_far_single_pairs_of_runs_differ() -> None:
    report = Report({})
    peers = [1.0] * 9
    report.rows.append(row("decode", [float(n) for n in range(1, 10)], "tokens/s", peer="p", peer_values=peers))
    report.rows.append(row("few", [1.0, 2.0], "tokens/s", peer="p", peer_values=[1.0, 1.0]))
    report.rows.append(row("one", [1.0], "tokens/s", peer="p", peer_values=[1.0]))
    many, few, one = report.text().splitlines()[1:]
    assert many.endswith("5.00x  pairs 1.00 to 9.00, 95%: 2.00 to 8.00")
    assert few.endswith("pairs 1.00 to 2.00")
    assert one.endswith("1.00x")
    assert report.document()["rows"][0]["likely"] == (2.0, 8.0)


@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (25, 7)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, left_out: int) -> None:
    """Tables of the binomial distribution, as in Conover 1999, table A3."""
    values = [float(number) for number in range(count)]
    assert median_interval(values) == (values[left_out], values[-1 - left_out])
    assert median_interval(values[:5]) is None


@given(cpu_s=seconds, gpu_s=seconds, transfer_s=seconds, needed=st.integers(1, 12), rest_s=seconds, layer_s=seconds)
def test_constants_are_added_once(
    cpu_s: float, gpu_s: float, transfer_s: float, needed: int, rest_s: float, layer_s: float
) -> None:
    free = StrategyModel(latency(cpu_s, gpu_s, transfer_s), FREE, 64)
    costly = StrategyModel(latency(cpu_s, gpu_s, transfer_s), StepCosts(rest_s, layer_s, 0.0, 0.0, 0.0, 0.0), 64)
    steps = [step(0, needed, 0)]
    for misses in ("cpu", "fetch", "off", "mixed"):
        more = costly.seconds_per_token(misses, steps, 5) - free.seconds_per_token(misses, steps, 5)
        assert more == pytest.approx(rest_s + 5 * layer_s, abs=1e-9)


class _Card:
    """A device whose launches are queued: a captured one takes its own time, any other that of the host."""

    compute_follows_caller = True
    torch_device = torch.device("cpu")

    def __init__(self, *, can_capture: bool) -> None:
        self.compute_stream, self.closed, self.abandoned, self._can_capture = self, 0, 0, can_capture
        self.now_s, self._capturing, self._experts = 0.0, False, 0

    def kernel(self, _hidden: torch.Tensor, index: torch.Tensor, _weights: torch.Tensor) -> None:
        self._experts = index.numel()
        if not self._capturing:
            self.now_s += 100e-6

    def new_capture(self) -> "_Card":
        return self

    def begin(self) -> None:
        self._capturing = True

    def end(self) -> "_Card":
        self._capturing = False
        if not self._can_capture:
            raise RuntimeError("a number was read back")
        return self

    def abandon(self) -> None:
        self._capturing = False
        self.abandoned += 1

    def close(self) -> None:
        self.closed += 1

    def replay(self) -> None:
        self.now_s += 6e-6 + 3e-6 * self._experts

    def submit(self, work: Callable[[], object]) -> SimpleNamespace:
        begun_s = self.now_s
        work()
        return SimpleNamespace(wait=lambda: None, started_s=begun_s, ended_s=self.now_s)


def test_launches_are_timed_as_the_card_runs_them_not_as_the_host_queues_them() -> None:
    card = _Card(can_capture=True)
    times = latency_measurement._launch_times(card, card.kernel, 8, 16, torch.float32)  # type: ignore[arg-type]
    assert [count for count, _ in times] == [1, 2, 4, 8]
    assert fit_line(times) == (pytest.approx(6e-6), pytest.approx(3e-6))
    assert (card.closed, card.abandoned) == (4, 0)


def test_what_cannot_be_captured_is_timed_as_it_is() -> None:
    card = _Card(can_capture=False)
    times = latency_measurement._launch_times(card, card.kernel, 1, 16, torch.float32)  # type: ignore[arg-type]
    assert times == [(1, pytest.approx(100e-6))]
    assert (card.closed, card.abandoned) == (1, 1)


def test_fits() -> None:
    assert fit_line([(t, 2.0 + 0.5 * t) for t in (1, 2, 4, 8)]) == pytest.approx((2.0, 0.5))
    assert fit_line([(1, 3.0)]) == (3.0, 0.0)
    assert fit_line([(1, 3.0), (2, 2.0)])[1] == 0.0
    assert fit_line([(1, 1.0), (10, 20.0)])[0] == 0.0
    assert fit_knee([(1, 1.0), (8, 1.1), (16, 1.0), (32, 9.0)]) == pytest.approx((1.0, 16, 0.5))
    assert fit_knee([(1, 1.0)]) == (1.0, 1, 0.0)
    measured = [(1, 0.9), (2, 0.8), (4, 1.0), (8, 1.2), (32, 1.7), (128, 3.4), (512, 8.0)]
    flat_s, knee, each_s = fit_knee(measured)
    assert all(abs(flat_s + each_s * max(0, t - knee) - s) < 0.35 * s for t, s in measured)
