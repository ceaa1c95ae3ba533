"""Replay of recorded routing: the curve equals simulation, no policy beats Belady, bad files are refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

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
