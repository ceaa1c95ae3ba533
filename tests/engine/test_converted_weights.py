"""What was converted once is read from disk the next time, and nothing that goes wrong there stops a model.

Nor does a data folder that was copied from another machine: another processor, another place of the model, another
version of a library.
"""

import errno
import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.checkpoint.library import (
    converted_dir,
    converted_of,
    converted_path,
    leftovers,
    note_use,
    remove_converted,
    remove_leftovers,
    show,
)
from engine.common.config import EngineConfig
from engine.common.errors import RequestCancelled
from engine.common.paths import data_dir
from engine.experts import container
from engine.formats import STORED
from engine.kernels.native import linear
from engine.kernels.native.library import Isa, usable_isas
from engine.planner import placement
from engine.runtime.load import conversion
from engine.runtime.load.conversion import Conversion
from engine.runtime.load.model import load_model
from tests.combinations import some
from tests.engine.test_stored_precision import SIZES, type_of
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no native kernels here")


@pytest.fixture(autouse=True)
def all_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WORTH_KEEPING", 0)
    monkeypatch.setattr(conversion, "_LEFT_FREE", 0)
    monkeypatch.setattr(linear, "SMALLEST", 256)


def _gguf(tmp_path: Path, *, tied: bool) -> Path:
    sizes = {"use_sliding_window": False, "norm_topk_prob": True, "tie_word_embeddings": tied, **SIZES}
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", **sizes)  # type: ignore[arg-type]
    return write_model(folder, tmp_path / "model.gguf", "qwen3moe", quantised=type_of)


@pytest.fixture(params=some(["mixtral int4", "mixtral int8", "deepseek_v3 int4", "gguf", "gguf tied"], every=4))
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """A small model whose weights have to be converted."""
    family, _, precision = request.param.partition(" ")
    if family == "gguf":
        monkeypatch.setattr("engine.runtime.load.plan.lies_in_place", lambda *_: False)  # as of irregular files
        return EngineConfig(str(_gguf(tmp_path, tied=precision == "tied")), device="cpu")
    folder = tiny_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    return EngineConfig(str(folder), device="cpu", precision=precision)


@pytest.fixture
def mixtral(tmp_path: Path) -> EngineConfig:
    folder = tiny_checkpoint("mixtral", tmp_path / "model", dtype=torch.bfloat16)
    return EngineConfig(str(folder), device="cpu", precision="int4")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each tensor that was converted."""
    found: list[int] = []
    own = Conversion.make

    def make(self: Conversion, index: int, *arguments: object) -> None:
        found.append(index)
        own(self, index, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Conversion, "make", make)
    return found


def _answer(
    config: EngineConfig,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[torch.Tensor, str, tuple[Path, ...]]:
    """Logits, what is said about the model, and what the next start reads."""
    with closing(load_model(config, on_progress=on_progress, cancelled=cancelled)) as loaded:
        with torch.inference_mode():
            logits = loaded.model(torch.arange(3, 11)[None]).logits.clone()
        return logits, loaded.info.device_note, loaded.prepared


def _file(config: EngineConfig) -> Path:
    (file,) = converted_of(Path(config.model))
    return file


def test_a_second_start_converts_nothing(model: EngineConfig, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as nothing:
        nothing.setenv(conversion.KEEP_VARIABLE, "0")
        plain, plain_note, _ = _answer(model)
    assert converted_of(Path(model.model)) == []
    assert not made
    steps: list[tuple[int, int]] = []
    first, note, for_next = _answer(model, lambda done, total: steps.append((done, total)))
    file = _file(model)
    assert for_next == (file,)
    assert len(made) > 5
    precision = model.precision if model.precision != "auto" else STORED
    assert file == converted_path(Path(model.model), precision)
    assert show(model.model).converted_bytes == file.stat().st_size
    assert all(0 <= done <= total for done, total in steps)
    assert steps[-1][0] == steps[-1][1] > 0
    made.clear()
    second, same_note, for_next = _answer(model)
    assert not made
    assert for_next == (file,)
    assert plain_note == note == same_note
    assert torch.equal(first, second)
    assert torch.equal(first, plain)
    remove_converted([file])
    third, _, _ = _answer(model)
    assert made
    assert torch.equal(first, third)


def test_a_model_that_changed_is_converted_again_with_a_notice(model: EngineConfig, made: list[int]) -> None:
    first, _, _ = _answer(model)
    path, count = Path(model.model), len(made)
    os.utime(path if path.is_file() else path / "model.safetensors", ns=(1, 1))
    second, note, _ = _answer(model)
    assert len(made) == 2 * count
    assert "The weights were converted again because the model that they were made from has changed" in note
    assert torch.equal(first, second)
    assert "again" not in _answer(model)[1]
    if path.is_dir():
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
        assert "the model that they were made from has changed" in _answer(model)[1]


@pytest.mark.parametrize("what", ["version", "library"])
def test_one_of_another_version_is_made_again_and_why_is_said(
    mixtral: EngineConfig, made: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as there:
        if what == "version":
            there.setattr(container, "VERSION", 2)
        if what == "library":
            there.setattr(conversion, "_CONVERTER", "transformers 4.99")
        first, _, _ = _answer(mixtral)
    made.clear()
    second, note, _ = _answer(mixtral)
    assert made
    reason = {
        "version": "another version of Switchyard made them",
        "library": "they were made with transformers 4.99, and here is transformers",
    }[what]
    assert f"The weights were converted again because {reason}" in note
    assert torch.equal(first, second)
    made.clear()
    _answer(mixtral)
    assert not made


@pytest.mark.parametrize("damage", ["a record", "a seal", "cut short", "something else", "empty"])
def test_a_damaged_one_is_made_again_with_a_notice(mixtral: EngineConfig, made: list[int], damage: str) -> None:
    first, _, _ = _answer(mixtral)
    file, count = _file(mixtral), len(made)
    content = bytearray(file.read_bytes())
    if damage == "a record":
        content[-4096] ^= 1
    elif damage == "a seal":
        content[content.index(b"switchyard.digests") + 60] ^= 1
    elif damage == "something else":
        content[:8] = b"whatever"
    else:
        del content[len(content) // 2 if damage == "cut short" else 0 :]
    file.write_bytes(content)
    made.clear()
    second, note, _ = _answer(mixtral)
    assert torch.equal(first, second)
    assert "converted again because" in note
    assert len(made) == (1 if damage in ("a record", "a seal") else count)  # only what is damaged
    made.clear()
    third, note, _ = _answer(mixtral)
    assert not made
    assert "again" not in note
    assert torch.equal(first, third)


def test_a_full_disk_keeps_nothing_and_says_so(model: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_LEFT_FREE", 2**60)
    first, note, for_next = _answer(model)
    assert for_next == ()
    assert "What was converted is not kept for the next start. Converting " in note
    assert "free some space there" in note
    assert converted_of(Path(model.model)) == []
    monkeypatch.setattr(conversion, "_LEFT_FREE", 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(container.DirectFile, "sync", full)
    second, note, _ = _answer(model)
    assert "not kept for the next start." in note
    assert converted_of(Path(model.model)) == []
    assert torch.equal(first, second)


def test_a_start_that_is_stopped_goes_on_the_next_time(
    mixtral: EngineConfig, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_TOGETHER", 1)
    with pytest.raises(RequestCancelled):
        _answer(mixtral, cancelled=lambda: len(made) > 3)
    file = converted_path(Path(mixtral.model), "int4")
    assert not file.exists()
    assert not file.with_name(f"{file.name}.lock").exists()
    stopped = len(made)
    _, note, _ = _answer(mixtral)
    assert "again" not in note
    total = len(set(made))
    assert stopped <= len(made) < total + stopped


# --- other machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("here_is_newer", [True, False])
def test_one_of_another_processor_is_used_as_it_is(
    mixtral: EngineConfig, made: list[int], monkeypatch: pytest.MonkeyPatch, precision: str, here_is_newer: bool
) -> None:
    isas, config = usable_isas(), EngineConfig(mixtral.model, device="cpu", precision=precision)
    oldest, newest = Isa(min(isas)).name, Isa(max(isas)).name
    there, here = (oldest, newest) if here_is_newer else (newest, oldest)
    monkeypatch.setenv("SWITCHYARD_ISA", there)
    _answer(config)
    file = _file(config)
    theirs = file.read_bytes()
    monkeypatch.setenv("SWITCHYARD_ISA", here)
    made.clear()
    with_theirs, note, _ = _answer(config)
    assert not made
    assert "again" not in note
    file.unlink()
    with_own, _, _ = _answer(config)
    assert made
    torch.testing.assert_close(with_theirs, with_own)
    assert file.read_bytes() == theirs


def test_where_there_are_no_kernels_the_experts_of_it_are_used(
    mixtral: EngineConfig, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _, _ = _answer(mixtral)
    made.clear()
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    here, note, _ = _answer(mixtral)
    assert not made
    assert "again" not in note
    assert (here - there).abs().max() < 0.05 * there.abs().max()


def test_it_follows_its_model_to_another_place(mixtral: EngineConfig, made: list[int]) -> None:
    first, _, _ = _answer(mixtral)
    before = _file(mixtral).name
    elsewhere = Path(mixtral.model).parent / "elsewhere" / "model"
    elsewhere.parent.mkdir()
    Path(mixtral.model).rename(elsewhere)
    made.clear()
    second, note, _ = _answer(EngineConfig(str(elsewhere), device="cpu", precision="int4"))
    assert not made
    assert "again" not in note
    assert torch.equal(first, second)
    assert list(converted_dir().iterdir()) == [converted_path(elsewhere, "int4")]
    assert before != converted_path(elsewhere, "int4").name


# --- leftovers --------------------------------------------------------------------------------------


def test_what_nothing_needs_any_more_is_removed_with_a_word(mixtral: EngineConfig, tmp_path: Path) -> None:
    gone, unplugged = tmp_path / "gone", tmp_path / "disk" / "unplugged"
    old = data_dir() / "banks" / "gone-int4-0123456789ab.bank"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(10_000_000))
    files = [converted_path(model, "int4") for model in (gone, unplugged)]
    files[0].parent.mkdir(parents=True)
    for model, file in zip((gone, unplugged), files, strict=True):
        note_use(model, "cpu int4")
        file.write_bytes(b"tiles")
    assert set(leftovers()) == {old, files[0]}
    _, note, _ = _answer(mixtral)
    assert "Removed 10 MB of converted weights that no model here needs any more." in note
    assert not old.parent.exists()
    assert [file.exists() for file in files] == [False, True]
    assert _file(mixtral).exists()
    assert remove_leftovers() == 0
