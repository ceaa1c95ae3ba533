"""The trained predictor learns what is planted, is saved whole or not at all; a damaged file is told, not used."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.experts.prediction import mlp
from engine.experts.prediction.mlp import (
    UNREADABLE,
    ExpertMlp,
    FoldedMlp,
    Learning,
    MlpPredictor,
    RoutingStatistics,
    TrainedMlp,
    load_mlp,
    paths,
    save_mlp,
    train,
)
from engine.experts.prediction.prefetcher import make_prefetcher
from engine.experts.replay import RoutingTrace, write_trace
from tests.engine.slots_in_time import PlantedRoutes, SlotsInTime

LAYERS, EXPERTS, WIDTH = 4, 12, 2
TINY = (32, 16)


def routes(tokens: int, follows: float = 1.0, seed: int = 3) -> RoutingTrace:
    planted = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=follows, seed=seed)
    chosen = np.array([planted.step() for _ in range(tokens)], np.int16)
    return RoutingTrace(chosen, np.zeros(chosen.shape, np.float16), np.array([0, tokens]), EXPERTS)


@pytest.fixture(scope="module")
def trained() -> TrainedMlp:
    return train(routes(500), distance=1, widths=(64, 32), epochs=12, learning_rate=5e-3, seed=1)


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_statistics_are_shares(seed: int, distance: int) -> None:
    trace = routes(20, follows=0.5, seed=seed)
    statistics = RoutingStatistics.of(trace, distance)
    torch.testing.assert_close(statistics.popularity.sum(1), torch.ones(LAYERS))
    sums = statistics.affinity.sum(2)
    assert (torch.isclose(sums, torch.ones(())) | (sums == 0)).all()
    assert statistics.affinity.shape == (LAYERS - distance, EXPERTS, EXPERTS)


def test_it_learns_what_is_planted(trained: TrainedMlp) -> None:
    found = wanted = 0
    predictor = MlpPredictor(trained, WIDTH)
    try:
        planted = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=1.0)
        for _ in range(40):
            step = planted.step()
            for layer, experts in enumerate(step):
                predictor.observe(layer, experts, None)
                predictor.wait()
                assert predictor.predict(0) == ()
                if layer + 1 < LAYERS:
                    said = predictor.predict(layer + 1)
                    assert len(said) == WIDTH
                    found += len({expert for expert, _ in said} & set(step[layer + 1]))
                    wanted += WIDTH
        assert predictor.beside_s > 0
    finally:
        predictor.close()
        predictor.close()
    assert found > 0.9 * wanted


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_folded_is_the_same_network(seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ExpertMlp(LAYERS, EXPERTS, (16, 8, 8))
        for name, value in model.named_buffers():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5, non_blocking="var" in name)
        chosen = torch.randint(0, EXPERTS, (1, LAYERS, WIDTH))
        surroundings = torch.rand(1, 2 * EXPERTS)
    model.eval()
    path = paths(chosen, torch.tensor([2]), EXPERTS)
    expected = model(path, surroundings).sigmoid()[0]
    real = path[path != model.padding]
    torch.testing.assert_close(FoldedMlp(model)(real, surroundings[0]), expected)


@pytest.mark.parametrize("tokens", [1, 63])
def test_too_little_to_learn_from(tokens: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        train(routes(tokens), widths=TINY)
    with pytest.raises(ValueError, match="too few"):
        train(routes(100), distance=LAYERS, widths=TINY)


def test_saved_and_loaded_is_the_same(trained: TrainedMlp, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.safetensors"
    assert load_mlp(path, LAYERS, EXPERTS) == (None, None)
    save_mlp(trained, path)
    loaded, _ = load_mlp(path, LAYERS, EXPERTS)
    assert (loaded.widths, loaded.loss, loaded.statistics.distance) == (trained.widths, trained.loss, 1)
    assert torch.equal(loaded.statistics.affinity, trained.statistics.affinity)
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in trained.model.state_dict().items())
    assert os.listdir(path.parent) == [path.name]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_told_and_not_used(trained: TrainedMlp, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.safetensors"
    save_mlp(trained, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        header = 8 + int.from_bytes(content[:8], "little")
        content[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    loaded, note = load_mlp(path, LAYERS, EXPERTS)
    assert (loaded is None) == (note == UNREADABLE)  # some bits change nothing that matters


def test_a_disk_that_is_full_leaves_the_old_file(
    trained: TrainedMlp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_mlp(trained, path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == b"old"


@pytest.fixture
def not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trains in the background has the processor after all others, which here would be other tests."""
    monkeypatch.setattr(psutil.Process, "nice", lambda _process, _value: None)


def learning() -> Learning:
    """That has recorded enough to train."""
    learnt = Learning(
        "a model", layers=LAYERS, experts=EXPERTS, per_token=WIDTH, limit=4, least_steps=100, widths=TINY, epochs=1
    )
    note(learnt)
    return learnt


def note(learnt: Learning, steps: int = 100) -> None:
    for token in routes(steps).experts.tolist():
        for layer, experts in enumerate(token):
            learnt.routes.note(layer, experts)


def test_the_process_that_trains_keeps_who_knows_more(
    trained: TrainedMlp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called here: `test_what_was_served_is_learnt_and_taken_over` starts it."""
    monkeypatch.setattr(mlp, "_end_with_parent", lambda: None)
    path, routes_file = tmp_path / "a.safetensors", tmp_path / "routes.npz"
    save_mlp(trained, path)
    before = path.read_bytes()

    def exit_code(tokens: int, distance: int) -> int:
        write_trace(routes(tokens), routes_file)
        options = {"widths": list(TINY), "epochs": 1, "seed": 0, "distance": distance}
        return mlp.main([str(routes_file), str(path), json.dumps(options)])

    assert exit_code(100, 1) == 0  # a tiny network, one epoch
    assert path.read_bytes() == before
    assert exit_code(10, 1) == 3  # too few
    assert path.read_bytes() == before
    assert exit_code(100, 2) == 0  # of another distance
    assert path.read_bytes() != before
    assert load_mlp(path, LAYERS, EXPERTS)[0] is not None


@pytest.mark.parametrize("code", [0, 3])
def test_one_trains_at_a_time_and_its_result_is_taken_once(
    code: int, trained: TrainedMlp, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [sys.executable, "-S", "-c", f"import sys; sys.stdin.read(); sys.exit({code})"], dict[str, str]()
    monkeypatch.setattr(mlp, "python_module", lambda _name: ends)
    learnt = learning()
    assert learnt.finished() is None
    assert learnt.begin(1)
    note(learnt)
    assert not learnt.begin(1)
    save_mlp(trained, learnt.path)
    child = learnt._child
    child.stdin.close()
    learnt.wait()
    assert (learnt.finished() is None) == (code != 0)
    assert not learnt.is_training
    assert learnt.finished() is None
    assert os.listdir(learnt.path.parent) == [learnt.path.name]
    learnt.close()


@pytest.mark.usefixtures("not_nice")
def test_a_training_that_is_ended_leaves_nothing() -> None:
    learnt = learning()
    assert learnt.begin(1)
    folder = learnt.path.parent
    (folder / f".{learnt.path.name}-half").write_bytes(b"half")  # as a child leaves it that is killed now
    learnt.close()
    learnt.close()
    assert os.listdir(folder) == []
    assert not learnt.is_training


def test_a_folder_that_cannot_be_written_is_no_disaster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mlp, "write_trace", refuse)
    learnt = learning()
    assert not learnt.begin(1)
    assert not learnt.is_training
    assert os.listdir(learnt.path.parent) == []


@pytest.mark.usefixtures("not_nice")
def test_what_was_served_is_learnt_and_taken_over() -> None:
    learnt = Learning(
        "a model", layers=LAYERS, experts=EXPERTS, per_token=WIDTH, limit=4, least_steps=100, widths=TINY, epochs=1
    )
    tier = SlotsInTime(20, EXPERTS, arrival_s=1e-4, miss_s=1e-3)
    prefetcher = make_prefetcher(
        tier,
        lambda: tier.times,
        layers=LAYERS,
        experts=EXPERTS,
        per_token=WIDTH,
        choice="mlp",
        learning=learnt,
    )
    assert prefetcher is not None
    try:
        assert prefetcher.adopted is None
        planted = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=1.0)

        def serve(steps: int) -> None:
            for _ in range(steps):
                for layer, experts in enumerate(planted.step()):
                    tier.want(layer, experts)
                    prefetcher.observe(layer, experts)

        serve(50)
        assert not prefetcher.learn_while_idle()  # not enough yet
        serve(70)
        assert prefetcher.learn_while_idle()
        assert prefetcher.report().is_training
        learnt.wait()
        serve(40)
        report = prefetcher.report()
        assert (report.adopted, report.is_training) == ("mlp", False)
        assert learnt.path.is_file()
        assert not prefetcher.learn_while_idle()
    finally:
        prefetcher.close()
        prefetcher.close()
    learnt.path.write_bytes(b"nonsense")
    again = Learning("a model", layers=LAYERS, experts=EXPERTS, per_token=WIDTH, limit=4)
    assert again.load() is None
    assert again.note == UNREADABLE
    again.close()
