"""The engine at the papers' cases, on machines whose time is modelled, with a model of a few thousand weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers import QUICK, paper_cells, smaller_machine
from engine.bench.opened import resolve_model
from engine.common.errors import EngineError
from engine.hardware.machine import read_machine
from engine.hardware.profiles import lent, read_profile
from engine.planner.papers import FAR_OFF, MEASURED, PublishedCell
from tests.combinations import some
from tests.engine.tiny_families import tiny_checkpoint

SMALLER = 38_000
"""An expert of Mixtral has about so many times the weights of one of the tiny model's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        "mixtral",
        tmp_path_factory.mktemp("papers") / "mixtral",
        num_hidden_layers=8,
        num_local_experts=8,
        max_position_embeddings=512,
    )


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))  # which experts were used is kept there


def cells(folder: Path, *papers: str) -> dict[str, PublishedCell]:
    found = list(paper_cells(folder, replace(QUICK, smaller=SMALLER), papers, lambda _text: None))
    assert all(cell.kind == MEASURED and cell.predicted > 0 for cell in found)
    return {f"{cell.table}, {cell.cell}": cell for cell in found}


def test_a_machine_is_smaller_in_what_it_does_a_second() -> None:
    small = smaller_machine("gcp-t4", 64)
    assert small.has_clock
    assert 64 * small.link_h2d_gbps == pytest.approx(read_machine("gcp-t4").link.h2d / 1e9)
    with lent(small):
        assert read_profile(small.name) == small
    with pytest.raises(EngineError, match="no hardware profile"):
        read_profile(small.name)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("paper", "more", "less"),
    some(
        [
            ("collaborative", ["IV-B, RTX 4090, cache over CPU only"], []),
            (
                "fiddler",
                [
                    "fig. 4, single batch, over llama.cpp",
                    "fig. 5, Mixtral-Offloading, long prefill",
                    "fig. 6, beams, over llama.cpp",
                ],
                [],
            ),
            ("duoserve", [], ["2, RTX A5000, memory of a prompt, over whole layers"]),
        ]
    ),
)
def test_gains_of_single_requests(folder: Path, paper: str, more: list[str], less: list[str]) -> None:
    found = cells(folder, paper)
    assert all(found[f"engine: {cell}"].predicted >= 1 for cell in more)
    assert all(found[f"engine: {cell}"].predicted <= 1 for cell in less)


@pytest.mark.usefixtures("prepared")
def test_batches_come_beside_what_they_are_compared_with(folder: Path) -> None:
    plan = replace(QUICK, rows=4, micro_batch=2, tokens=2, repeats=1)
    found = [cell.cell for cell in paper_cells(folder, plan, ("lightning", "klotski"), lambda _text: None)]
    assert [cell.partition(" over ")[0] for cell in found] == ["CGOPipe"] * 2 + ["Klotski"] * 3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prepared")
def test_every_gain_with_a_model_of_mixtrals_shape() -> None:
    model = resolve_model("synthetic:mixtral-eighth", lambda _text: None)
    for cell in paper_cells(model, QUICK, (), lambda _text: None):
        assert abs(cell.deviation) <= FAR_OFF or cell.why, cell
