"""Ten minutes on a card: what is known is written after each part, whatever the next one does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine import cli
from engine.bench.card import parts, run
from engine.bench.card.run import ALL, TESTS, Part, Shape, as_markdown, bench_card, works
from engine.common.errors import EngineError
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native.build import library_path
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler

CARD = "emulated:slow-link"


def silent(_text: str) -> None:
    pass


def test_every_part_is_there() -> None:
    assert {part.name for part in ALL} - {TESTS} == set(parts.PARTS)


class _Commands:
    """Answers of the parts' processes."""

    def __init__(self, folder: Path, fails: int) -> None:
        self._folder, self._fails, self.seen, self.homes = folder, fails, 0, set[str]()

    def __call__(self, command: Sequence[str], limit_s: float, variables: dict[str, str]) -> tuple[int, str, str]:
        self.seen += 1
        if "kernels" in command:
            self.homes.add(variables["SWITCHYARD_HOME"])
        written = list(self._folder.glob("*.json"))
        assert len(written) == (self.seen > 1)
        if written:
            known = [part for part in json.loads(written[0].read_text("utf-8"))["parts"] if part["part"] != TESTS]
            assert len(known) == self.seen - 1
        if self.seen == self._fails:
            return -11, "half a li", "Traceback\nRuntimeError: the card has fallen off the bus\n"
        if self.seen == self._fails + 1:
            raise TimeoutError
        if self.seen == self._fails + 2:
            return 0, "no json\n", ""
        if "machine" in command:
            return 0, json.dumps({"card": "RTX 4090 | 24 GiB"}) + "\n", ""
        return 0, "a warning\n" + json.dumps({"tokens/s": 81.25, "hits, %": 0.5, "name": "x"}) + "\n", ""


@pytest.mark.parametrize("fails", [1, 3, 6])
def test_a_part_that_fails_loses_nothing_before_or_after_it(fails: int, tmp_path: Path) -> None:
    commands = _Commands(tmp_path, fails)
    document = bench_card(CARD, "starter", tmp_path, silent, run=commands)
    assert commands.seen == len(ALL) - 1  # the tests are for real cards
    assert len(commands.homes) <= 1
    outcomes = [part["outcome"] for part in document["parts"] if part["part"] != TESTS]
    assert outcomes[fails - 1 : fails + 2] == ["failed", "ended", "failed"]
    assert set(outcomes[: fails - 1] + outcomes[fails + 2 :]) <= {"done"}
    failed = next(part for part in document["parts"] if part["outcome"] == "failed")
    assert failed["why"] == "RuntimeError: the card has fallen off the bus"
    (kept,) = tmp_path.glob("*.json")
    assert json.loads(kept.read_text("utf-8")) == document
    assert ("rtx-4090-24-gib" if fails > 1 else "emulated-slow-link") in kept.stem
    page = kept.with_suffix(".md").read_text("utf-8")
    assert page == as_markdown(document)
    assert "| | tokens/s | 81.2 |" in page
    assert all(line.count("|") in (0, 4) for line in page.splitlines()[1:])


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="choose another folder"):
        bench_card(CARD, "starter", tmp_path / "file", silent, parts=ALL[:1], run=_Commands(tmp_path, 99))


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps(_module: str) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", "import time; time.sleep(60)"], {}

    monkeypatch.setattr("engine.bench.card.run.python_module", sleeps)
    document = bench_card(CARD, "starter", tmp_path, silent, parts=(Part("Slow", "machine", 0.2),))
    assert document["parts"][0]["outcome"] == "ended"


def test_calls_of_the_runtime_are_counted_for_each_token() -> None:
    calls = {"cudaLaunchKernel": 40, "cuLaunchKernelEx": 10, "cudaGraphLaunch": 5, "cudaStreamSynchronize": 15}
    calls |= {"cudaMemcpyAsync": 20, "aten::add": 99, "Memcpy HtoD": 7, "hipLaunchKernel": 5}
    assert parts.per_token(calls, 5) == {
        "launches a token": 11.0,
        "graphs a token": 1.0,
        "waits a token": 3.0,
        "copies a token": 4.0,
    }


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    "part",
    ["link", "between", *(pytest.param(part, marks=pytest.mark.exhaustive) for part in ("mixed", "tokens", "all"))],
)
def test_on_an_emulated_card_the_parts_measure(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "synthetic:qwen3-30b-a3b?layers=2&vocab=512&experts=8"
    monkeypatch.setattr(run, "REPEATS", 3)
    if part != "all":
        assert parts.main([part, CARD, model]) == 0
        found = json.loads(capsys.readouterr().out)
        wanted = {"link": "pinned to card, GB/s", "mixed": "tokens/s", "tokens": "hand-over of a layer, us"}
        assert found[wanted.get(part, "router by operators, us")] > 0
        return
    assert cli.main(["bench", "card", "--device", CARD, "--model", model, "--folder", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {done["outcome"] for done in document["parts"]} == {"done", "skipped"}


@needs_compiler
def test_what_is_measured_beside_operators_gives_the_same() -> None:
    card = EmulatedCudaCard(8)
    products = CudaProducts(card)
    kernels = CardKernels(products, products.most_visits, None)
    shape = Shape(hidden=64, heads=4, kv_heads=2, head_dim=16, experts=12, per_token=3)
    seen = []
    with torch.inference_mode():
        for name, own, operators in works(shape, torch.device("cpu"), card, kernels):
            assert own is not None
            seen.append(name)
            for mine, its in zip(own(), operators(), strict=True):
                torch.testing.assert_close(mine.float(), its.float().view(mine.shape), rtol=0.02, atol=0.02)
        assert len(seen) == 4
        assert all(own is None for _, own, _ in works(shape, torch.device("cpu"), None, None))
