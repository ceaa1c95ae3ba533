"""`auto` precision: the best that fits, and what is said about it."""

import random
from contextlib import closing
from pathlib import Path

import pytest

from engine.common.errors import EngineError
from engine.planner.placement import Note, NoteCode
from engine.runtime.load.model import placement_note
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import open_model
from tests.engine.tiny_families import tiny_checkpoint

PRECISIONS = ("bf16", "int8", "int4")


def load(folder: Path, **options: object) -> LoadedModel:
    return open_model(folder, **{"precision": "auto", **options})


def fits_in_ram(folder: Path, precision: str, budget: int) -> bool:
    try:
        model = load(folder, ram_bytes=budget, precision=precision)
    except EngineError:
        return False
    try:
        return model.disk_backed is None
    finally:
        model.close()


def test_both_figures_are_said() -> None:
    note = Note(NoteCode.COARSER_FOR_RAM, 61 * 10**9, 40 * 10**9, precision="int8", instead_of="bf16")
    said = placement_note(note)
    assert all(fact in said for fact in ("int8", "bf16", "61.0 GB", "40.0 GB"))
    for code in NoteCode:
        said = placement_note(Note(code, 61 * 10**9, 40 * 10**9, "card#1", "int8", "bf16"))
        assert said.endswith(".")
        assert "61.0 GB" in said
        assert "40.0 GB" in said


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_random_budgets(family: str, tmp_path: Path) -> None:
    """Never more than the budget, never a worse precision than need be, and always said."""
    folder = tiny_checkpoint(family, tmp_path)
    rng = random.Random(7)
    whole = load(folder)
    dense, experts = whole.info.weights_bytes, whole.info.experts_bytes
    whole.close()
    seen = set()
    for _ in range(10):
        budget = dense + int(experts * rng.uniform(0.2, 3))
        try:
            model = load(folder, ram_bytes=budget)
        except EngineError:
            assert not fits_in_ram(folder, "int4", budget)
            continue
        try:
            chosen, note = model.info.precision, model.info.device_note
            where = "disk" if model.disk_backed is not None else "RAM"
            seen.add((chosen, where))
            assert model.info.weights_bytes + model.info.experts_bytes <= budget
            assert ("bf16 needs" in note) == (chosen != "bf16")
            assert where == "RAM" or chosen == "int4"
            assert ("read from disk" in note) == (where == "disk")
        finally:
            model.close()
        if chosen != "bf16":
            assert not fits_in_ram(folder, PRECISIONS[PRECISIONS.index(chosen) - 1], budget)
    assert {("bf16", "RAM"), ("int4", "disk")} <= seen


@pytest.mark.parametrize("precision", PRECISIONS)
def test_who_asks_for_a_precision_gets_it(precision: str, tmp_path: Path) -> None:
    with closing(load(tiny_checkpoint("mixtral", tmp_path), precision=precision)) as model:
        assert model.info.precision == precision
        assert "because" not in model.info.device_note
