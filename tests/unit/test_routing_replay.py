"""Recorded routing: replayed, counted, and what papers' predictors make of it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.bench.predictors import answers, network_rows, recorded_trace, table_rows
from engine.cli import main
from engine.common.errors import EngineError, ErrorCode
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.replay import (
    ADOPTED,
    RoutingTrace,
    belady_hits,
    hit_ratio_curve,
    popularity_of,
    read_trace,
    replay,
    stack_distances,
    write_trace,
)
from engine.planner.papers import FAR_OFF, REPLAYED
from engine.planner.papers.report import in_order, rank_correlation
from engine.runtime.telemetry.experts import ExpertUses
from tests.refusals import refused

_EXPERTS = 6


@st.composite
def _traces(draw: st.DrawFn, width: int | None = None) -> RoutingTrace:
    tokens, layers = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    k = width or draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    experts = np.stack([[random.permutation(_EXPERTS)[:k] for _ in range(layers)] for _ in range(tokens)])
    absent = draw(arrays(bool, (tokens, layers), elements=st.sampled_from([False, False, False, True])))
    experts[absent] = -1
    return _trace(experts)


def _trace(experts: np.ndarray) -> RoutingTrace:
    weights = np.ones(experts.shape, np.float16)
    return RoutingTrace(experts.astype(np.int16), weights, np.array([0, len(experts)]), _EXPERTS)


@settings(max_examples=60)
@given(trace=_traces(width=1), per_layer=st.booleans())
def test_the_curve_is_what_lru_caches_of_each_size_hit(trace: RoutingTrace, per_layer: bool) -> None:
    if not trace.accesses:
        return
    counts = stack_distances(trace, per_layer=per_layer)
    curve = hit_ratio_curve(counts)
    assert counts.sum() == trace.accesses
    assert (np.diff(curve) >= 0).all()
    for slots in (1, 2, 4, len(curve) - 1):
        simulated = replay(trace, "lru", slots, per_layer=per_layer).hits.sum()
        assert curve[slots] * trace.accesses == pytest.approx(simulated)


@settings(max_examples=60)
@given(trace=_traces(), per_layer=st.booleans(), slots=st.integers(1, 12))
def test_no_policy_beats_belady(trace: RoutingTrace, per_layer: bool, slots: int) -> None:
    bound = belady_hits(trace, slots, per_layer=per_layer).sum()
    for policy in (*POLICY_NAMES, ADOPTED):
        done = replay(trace, policy, slots, per_layer=per_layer, popularity=popularity_of(trace))
        assert done.hits.sum() <= bound
        assert done.accesses.sum() == trace.accesses


@settings(max_examples=25)
@given(trace=_traces(width=1), slots=st.integers(1, 3))
def test_belady_is_what_exhaustive_search_finds(trace: RoutingTrace, slots: int) -> None:
    keys = [int(key) for key in trace.experts[:, 0, 0] if key >= 0][:9]
    if not keys:
        return
    single = _trace(np.array(keys).reshape(-1, 1, 1))
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for key in keys:
        reached: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            now = hits + (key in resident)
            union = resident | {key}
            for size in range(min(slots, len(union)) + 1):
                for choice in itertools.combinations(sorted(union), size):
                    kept = frozenset(choice)
                    reached[kept] = max(reached.get(kept, 0), now)
        best = reached
    assert belady_hits(single, slots, per_layer=False).sum() == max(best.values())


def test_a_trace_survives_the_disk(tmp_path: Path) -> None:
    trace = _trace(np.arange(12).reshape(4, 1, 3) % _EXPERTS)
    write_trace(trace, tmp_path / "routing.npz")
    again = read_trace(tmp_path / "routing.npz")
    assert (again.experts == trace.experts).all()
    assert (again.tokens, again.layers, again.per_token, again.num_experts) == (4, 1, 3, _EXPERTS)
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npz"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a trace"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with refused(ErrorCode.INVALID_REQUEST, "bad.npz"):
        read_trace(path)


def test_pickled_arrays_and_nonsense_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, experts=np.array([{"a": 1}], dtype=object), num_experts=3)
    with pytest.raises(EngineError):
        read_trace(path)
    np.savez(path, experts=np.full((2, 1, 1), 7, np.int16), num_experts=3)
    with pytest.raises(EngineError, match="outside"):
        read_trace(path)
    with refused(ErrorCode.INVALID_REQUEST, "routing trace"):
        read_trace(tmp_path / "absent.npz")


def test_the_verb_prints_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(3)
    write_trace(_trace(np.stack([[random.permutation(_EXPERTS)[:2]] for _ in range(40)])), tmp_path / "t.npz")
    assert main(["cache", str(tmp_path / "t.npz"), "--slots", "3", "--policy", "lru", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rates = {entry["policy"]: entry["hit_rate"] for entry in document["results"]}
    assert rates["lru"] <= rates["belady"]
    assert len(document["lru_miss_ratio_curve"]) == _EXPERTS + 1
    assert main(["cache", str(tmp_path / "t.npz"), "--slots", "3"]) == 0
    assert main(["cache", str(tmp_path / "t.npz"), "--policy", "static"]) == 2
    assert main(["cache", str(tmp_path / "t.npz"), "--policy", "mru"]) == 2
    assert main(["cache", str(tmp_path / "none.npz")]) == 2


LAYERS, WIDTHS = (1, 2, 5), (4, 4, 3)
USE = st.tuples(
    st.integers(0, 20),
    st.sampled_from([*LAYERS, -1, 3, 99]),
    st.lists(st.integers(-1, 5), max_size=4, unique=True),
)


@given(st.lists(st.lists(USE, max_size=6), max_size=5))
def test_every_use_is_counted_once(batches: list[list[tuple[int, int, list[int]]]]) -> None:
    uses = ExpertUses(LAYERS, WIDTHS)
    expected = np.zeros((3, 4), int)
    last = np.zeros((3, 4), int)
    for batch in batches:
        for step, layer, experts in batch:
            uses.entries.append((step, layer, experts, tuple(experts[:1])))
            for expert in experts:
                if layer in LAYERS and 0 <= expert < 4:
                    place = LAYERS.index(layer), expert
                    expected[place] += 1
                    last[place] = max(last[place], step + 1)
        uses.settle()
    np.testing.assert_array_equal(uses.uses, expected)
    np.testing.assert_array_equal(uses.last_step, last)
    assert (uses.hits <= uses.uses).all()
    assert (uses.heat <= uses.uses).all()


def test_layers_counted_together_count_as_those_counted_alone() -> None:
    alone, together = ExpertUses(LAYERS, WIDTHS), ExpertUses(LAYERS, WIDTHS)
    entries = [(0, 1, [0, 3]), (0, 2, [1, 9]), (1, 5, [2]), (1, 3, [0])]
    alone.entries.extend((*entry, ()) for entry in entries)
    steps, layers = (np.array([entry[place] for entry in entries]) for place in (0, 1))
    experts = np.array([expert for entry in entries for expert in entry[2]])
    together.entries.append((steps, layers, experts, np.array([len(entry[2]) for entry in entries]), None))
    for uses in (alone, together):
        uses.settle()
    np.testing.assert_array_equal(alone.uses, together.uses)
    np.testing.assert_array_equal(alone.last_step, together.last_step)


def test_the_curve_of_few_layers_is_that_of_a_replay() -> None:
    rng = np.random.default_rng(1)
    routing = np.stack([[rng.choice(8, 3, replace=False) for _ in range(3)] for _ in range(100)]).astype(np.int16)
    uses = ExpertUses((0, 1, 2), (8, 8, 8))
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            uses.entries.append((step, layer, experts.tolist(), ()))
    uses.settle()
    slots, rates = uses.curve()
    trace = RoutingTrace(routing, np.zeros(routing.shape, np.float16), np.array([0, 100]), 8)
    expected = hit_ratio_curve(stack_distances(trace, per_layer=False))
    np.testing.assert_allclose(rates, expected[slots])
    assert slots[-1] == 24


def test_there_is_no_curve_before_enough_was_seen() -> None:
    uses = ExpertUses((0,), (4,))
    uses.entries.append((0, 0, [1], ()))
    uses.settle()
    assert len(uses.curve()[0]) == 0
    assert len(ExpertUses((), ()).curve()[0]) == 0


def made_up(tokens: int, *, follows: bool) -> RoutingTrace:
    """Four layers, of eight experts two: each the neighbours of those of the layer before, or any."""
    random = np.random.default_rng(3)
    first = random.permuted(np.tile(np.arange(8), (tokens, 1)), axis=1)[:, :2]
    layers = [first]
    for _ in range(3):
        after = (layers[-1] + 1) % 8
        layers.append(after if follows else random.permuted(np.tile(np.arange(8), (tokens, 1)), axis=1)[:, :2])
    chosen = np.stack(layers, axis=1).astype(np.int16)
    starts = np.linspace(0, tokens, 17).astype(np.int64)
    return RoutingTrace(chosen, np.zeros(chosen.shape, np.float16), starts, 8)


def test_what_is_packaged_is_whole_answers() -> None:
    trace = recorded_trace()
    assert (trace.layers, trace.num_experts, trace.per_token) == (24, 32, 4)
    assert len(trace.sequence_starts) == 18
    assert answers(trace, 0, 8).tokens + answers(trace, 8).tokens == trace.tokens


def test_a_table_on_recorded_routing_is_near_what_its_paper_says() -> None:
    rows = list(table_rows(recorded_trace()))
    assert rank_correlation(rows) == pytest.approx(1.0)
    assert all(row.kind == REPLAYED and row.note for row in rows)
    assert all(abs(row.deviation) < FAR_OFF for row in rows)
    assert in_order(rows) == rows


@pytest.mark.parametrize("follows", [True, False])
def test_a_table_finds_who_follows_whom_and_nothing_else(follows: bool) -> None:
    alone = {row.cell: row.predicted for row in table_rows(made_up(640, follows=follows))}[
        "right for one sequence alone"
    ]
    assert alone == pytest.approx(100) if follows else alone < 40


def test_a_network_finds_who_follows_whom() -> None:
    found = {row.cell: row for row in network_rows(made_up(1280, follows=True), widths=(64, 32), epochs=15)}
    assert found["at least one right"].predicted > 80
    assert found["all right"].why


@pytest.mark.exhaustive
def test_a_network_on_recorded_routing_is_near_what_its_paper_says() -> None:
    found = {row.cell: row for row in network_rows(recorded_trace())}
    assert abs(found["at least one right"].deviation) < 0.1
    assert found["all right"].why
