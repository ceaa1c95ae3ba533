"""Synthetic models: every shape loads, behaves, and is made once."""

from pathlib import Path

import pytest
import torch

from engine.bench.opened import OneSequence, random_text, resolve_model
from engine.checkpoint import synthetic as synthetic_module
from engine.checkpoint.synthetic import SHAPES, Shape, is_synthetic, make_synthetic
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import cache_dir
from engine.runtime.telemetry.experts import RoutingRecorder
from tests.engine.loaded_tiny import opened_model
from tests.refusals import refused

TINY = "synthetic:qwen3-moe-tiny"


def small(family: str) -> Shape:
    """The family's shape with everything but its proportions taken away."""
    shape = next(shape for shape in SHAPES.values() if shape.family == family)
    kv_heads = 4 if shape.kv_heads == shape.heads else 2
    return Shape(family, "", 2, 64, 32, 8, min(shape.top_k, 4), 4, kv_heads, 16, 300, 512, shape.rope_theta, 48)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", sorted({shape.family for shape in SHAPES.values()}))
def test_every_family_loads_and_stays_finite_over_a_long_context(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(synthetic_module.SHAPES, "small", small(family))
    folder = make_synthetic("synthetic:small")
    with opened_model(folder, "auto") as loaded:
        assert loaded.info.family == family
        recorder = RoutingRecorder(loaded)
        recorder.begin_sequence()
        sequence = OneSequence(loaded)
        logits = sequence.read(random_text(300, 400, 0).prompt)
        assert torch.isfinite(logits).all()
        assert logits.float().std() > 0.01
        sequence.close()
        assert recorder.save(tmp_path / "routing.npz") > 300


def test_other_tokens_choose_other_experts(tmp_path: Path) -> None:
    from engine.experts.replay import read_trace

    folder = make_synthetic(TINY)
    with opened_model(folder, "auto") as loaded:
        recorder = RoutingRecorder(loaded)
        recorder.begin_sequence()
        sequence = OneSequence(loaded)
        sequence.read(random_text(512, 200, 0).prompt)
        sequence.close()
        recorder.save(tmp_path / "routing.npz")
    trace = read_trace(tmp_path / "routing.npz")
    for layer in range(trace.layers - 1):  # the last layer of a prompt may run for its last token only
        chosen = {tuple(sorted(token)) for token in trace.experts[:, layer].tolist()}
        assert len(chosen) > 20
        assert len({expert for token in chosen for expert in token}) == trace.num_experts


def test_it_is_made_once_and_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = make_synthetic(TINY, said.append)
    assert len(said) == 1
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert make_synthetic(TINY, said.append) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert len(said) == 1

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic_module, "write_safetensors", fail)
    with refused(ErrorCode.DISK_FULL):
        make_synthetic(TINY + "?layers=1")
    assert [entry.name for entry in (cache_dir() / "synthetic").iterdir()] == [folder.name]


def test_options_change_the_shape() -> None:
    from engine.checkpoint.profile import read_profile

    profile = read_profile(make_synthetic(TINY + "?layers=3&experts=5&vocab=400"))
    assert (profile.layers, profile.experts) == (3, 5)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("synthetic:nothing", "nothing"),
        (TINY + "?layers=0", "layers=0"),
        (TINY + "?width=3", "width=3"),
        (TINY + "?layers=x", "layers=x"),
        (TINY + "?vocab=10", "vocab=10"),
        (TINY + "?experts=2", "uses 4 experts"),
    ],
)
def test_nonsense_is_one_clear_sentence(model: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        make_synthetic(model)


def test_other_names_are_resolved_as_everywhere() -> None:
    assert not is_synthetic("starter")
    with refused(ErrorCode.MODEL_NOT_FOUND):
        resolve_model("no-such-model", lambda _text: None)
