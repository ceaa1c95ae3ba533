"""The benches run on tiny models and say what they measured; how fast is asserted nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import disk, speculation
from benchmarks.cache import made_up_trace
from benchmarks.cut import Cut, add_whole
from benchmarks.loops import most_repeated
from benchmarks.mmap_peer import memory_group
from benchmarks.peers.editions import EDITIONS
from benchmarks.peers.library import OFFLOAD
from engine import cli
from engine.bench import decode, telemetry
from engine.bench.report import Report
from engine.checkpoint.library import converted_dir
from engine.checkpoint.synthetic import SHAPES
from engine.common.config import EngineConfig
from engine.common.paths import data_dir
from engine.experts.container import ContainerWriter
from engine.experts.replay import write_trace
from engine.planner import placement
from engine.runtime.load import conversion
from tests.engine.tiny_families import tiny_checkpoint
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.peers import users_peers  # noqa: F401 - a fixture
from tests.tiny_gguf import write_model

TINY = "synthetic:qwen3-moe-tiny"
SLOW_LINK = ("--device", "emulated:slow-link", "--vram", "64MB")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["bench", *arguments, "--repeats", "1", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["machine"]
    for row in document["rows"]:
        assert row["value"] > 0
        assert row["repeats"] == 1
    return document


def rows(document: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    found = (row for row in document["rows"] if not row["name"].startswith("hits"))
    return {row["peer"]: row for row in found if not (row["peer"] or "").startswith(("llama.cpp", "ik_llama.cpp"))}


def not_run(document: dict[str, Any]) -> set[str]:
    """Whose absence is told; llama.cpp's binding is built on some machines."""
    return {
        skipped["peer"]
        for skipped in document["peers_not_run"]
        if not skipped["peer"].startswith(("llama.cpp", "ik_llama.cpp"))
    }


def test_telemetry_is_compared_with_its_absence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_COLLECTED_S", 0.05)
    document = bench(capsys, "telemetry", "--model", f"{TINY}?layers=1", "--tokens", "2", "--device", "cpu")
    assert rows(document).keys() == {"telemetry off"}
    assert not telemetry.RECORDER.on


def test_strategies_are_compared_as_measured_and_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "decode", "--strategies", "--model", f"{TINY}?layers=3", "--tokens", "6", *SLOW_LINK)
    found = rows(document)
    assert found.keys() == {
        None, "on-demand fetch", "all experts on the CPU", "whole-layer prefetch", "the cache off",
    }  # fmt: skip
    for row in found.values():
        assert row["name"] == "decode, 25% of the experts on emulated:slow-link"
        assert row["predicted"] > 0
        assert row["deviation"] > -1


def test_a_prefetch_that_would_hold_the_whole_model_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--device", "emulated:slow-linkx2", "--vram", "64MB")
    document = bench(capsys, "decode", "--strategies", "--model", TINY, "--tokens", "4", *two)
    assert not_run(document) == {"whole-layer prefetch"}
    assert rows(document)[None]["name"] == "decode, 25% of the experts on emulated:slow-linkx2"


def test_strategies_need_a_device_that_shares_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "decode", "--strategies", "--model", TINY, "--device", "cpu"]) == 2
    assert "--device cuda or emulated:NAME" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the offload is run")
def test_a_long_prompt_against_single_strategies_and_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(
        capsys, "prefill", "--model", TINY, "--prompt-tokens", "100", "--tokens", "6", "--strategies", "--peers",
        *SLOW_LINK,
    )  # fmt: skip
    assert rows(document).keys() == {
        None, "on-demand fetch", "all experts on the CPU", "transformers on the CPU", "the better of these two",
    }  # fmt: skip
    (hits,) = (row for row in document["rows"] if row["name"].startswith("hits"))
    assert hits["peer"] == "before it"
    assert hits["value"] <= 100
    assert not_run(document) == {OFFLOAD}


def test_a_long_prompt_on_the_cpu_names_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "prefill", "--model", TINY, "--prompt-tokens", "100", "--device", "cpu")
    assert rows(document).keys() == {None}
    assert not_run(document) == {
        "on-demand fetch, all experts on the CPU",
        "transformers on the CPU",
    }


def test_cache_policies_on_recorded_routing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.cache._LAYERS", 4)
    write_trace(made_up_trace(30, 2, 16, 4), tmp_path / "mine.npz")
    document = bench(capsys, "cache", "--trace", str(tmp_path / "mine.npz"))
    names = [row["name"] for row in document["rows"]]
    assert names[:3] == ["mine, hits at 10%", "mine, hits at 25%", "mine, hits at 50%"]
    for row in document["rows"][:3]:
        assert 0 < row["of_limit"] <= 1
    assert all("4 x 256" in name for name in names[3:])
    assert len(names) == 5


def test_made_up_routing_repeats_itself_and_has_favourites() -> None:
    trace = made_up_trace(200, 3, 32, 4)
    assert (trace.experts == made_up_trace(200, 3, 32, 4).experts).all()
    for token in trace.experts.reshape(-1, 4):
        assert len(set(token.tolist())) == 4
    uses = np.bincount(trace.experts[:, 0].reshape(-1), minlength=32)
    assert uses.max() > 2 * uses.mean()


def test_experts_on_disk_and_nothing_left_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(disk, "memory_group", refused)
    document = bench(capsys, "disk", "--model", TINY, "--tokens", "6", "--device", "cpu")
    names = {row["name"] for row in document["rows"]}
    assert names == {
        "converting, bytes read and written",
        "loading what was converted",
        "decode, all experts in RAM",
        "decode, RAM for 50% of the experts",
    }
    (skipped,) = document["peers_not_run"]
    assert skipped["peer"] == "experts in a plain mmap"
    assert "Operation not permitted" in skipped["reason"]
    assert list((data_dir() / "converted").glob("*.gguf")) == []


@pytest.fixture
def split_file(tmp_path: Path) -> Path:
    """The second part of a GGUF file."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    options = {"use_sliding_window": False, "norm_topk_prob": True}
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", **sizes, **options)
    (tmp_path / "parts").mkdir()
    write_model(folder, tmp_path / "parts" / "tiny.gguf", "qwen3moe", quantised="Q8_0", split_max_tensors=12)
    return sorted((tmp_path / "parts").iterdir())[1]


@pytest.mark.exhaustive
def test_a_gguf_file_is_opened_against_the_disk(split_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "opening", "--model", str(split_file), "--device", "cpu", "--repeats", "1")
    opening, before, *memory = document["rows"]
    assert opening["peer_value"] > 0
    assert before["peer"] is None
    if sys.platform == "linux":
        weights, besides, highest = (row["value"] for row in memory)
        assert 0 < weights < 1
        assert weights + besides < highest


@pytest.mark.exhaustive
@pytest.mark.usefixtures("users_peers")
def test_a_gguf_file_is_decoded_by_us_and_by_what_was_built(
    split_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {edition.name for edition in EDITIONS if edition.python() is not None}
    arguments = (
        "decode",
        "--model",
        str(split_file),
        "--tokens",
        "4",
        "--device",
        "cpu",
        "--peers",
        "--contexts",
        "20,200",
    )
    document = bench(capsys, *arguments)
    assert {"transformers (default experts)", "transformers (eager experts)"} <= not_run(document)
    for name in ("decode after 20 tokens", "decode after 200 tokens", "ready after opening"):
        peers = [row["peer"] for row in document["rows"] if row["name"] == name and row["peer"]]
        assert {peer.split(",")[0] for peer in peers} == built
        assert all(", same file, -fa o" in peer for peer in peers)


def test_a_model_with_fewer_layers_says_so_and_what_all_of_them_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "decode", "--model", f"{TINY}?layers=1&vocab=300", "--tokens", "4", "--device", "cpu")
    whole = SHAPES["qwen3-moe-tiny"]
    words = f"300 of {whole.vocab:,} words"
    assert [row["name"] for row in document["rows"]] == [f"decode, 1 of {whole.layers} layers, {words}"]
    assert not_run(document) == {f"decode of all {whole.layers} layers"}
    document = bench(capsys, "prefill", "--model", f"{TINY}?vocab=300", "--prompt-tokens", "40", "--device", "cpu")
    assert {row["name"].partition(", ")[2] for row in document["rows"]} == {words}


def test_layers_and_head_apart() -> None:
    cut = Cut(layers=4, whole_layers=48, vocabulary=4096, whole_vocabulary=151936, shorter="")
    report = Report({})
    # A layer takes 1 ms of ours and 2 ms of the peer's, the rest 4 and 1 ms; the third contestant only noise.
    rates = {"ours": [[1 / 0.008, 1 / 0.006]], "peer": [[1 / 0.009, 1 / 0.005]], "noise": [[100.0, 100.0]]}
    add_whole("decode", cut, {**rates, "memory": [[1.0]]}, report)
    found = {(row.name, row.peer): (row.value, row.ratio) for row in report.rows}
    few = ", but 4,096 of 151,936 words"
    assert found["decode: a layer", "peer"] == pytest.approx((1.0, 2.0))
    assert found[f"decode: head and the rest{few}", "peer"] == pytest.approx((4.0, 0.25))
    assert found[f"decode of all 48 layers{few}", "peer"] == pytest.approx((1 / 0.052, 97 / 52))
    assert [skipped["peer"] for skipped in report.peers_not_run] == ["noise, decode of all 48 layers"]


def test_a_model_without_experts_has_nothing_to_prepare(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    tiny_checkpoint("llama", folder)
    save_tiny_tokenizer(folder)
    assert cli.main(["bench", "disk", "--model", str(folder)]) == 2
    assert "no experts" in capsys.readouterr().err


def test_loops_are_counted_with_dry_and_without(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_checkpoint("mixtral", folder)
    save_tiny_tokenizer(folder)
    assert cli.main(["bench", "loops", "--model", str(folder), "--seeds", "1", "--tokens", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 6
    assert {row["repeats"] for row in document["rows"]} == {20}


@pytest.mark.exhaustive
def test_answers_that_quote_and_others_with_guesses_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--tokens", "40", "--prompt-tokens", "200")
    document = bench(capsys, "speculation", "--model", f"{TINY}?layers=3", "--device", "cpu", *lengths)
    assert [row["name"] for row in document["rows"]] == [
        "an answer that edits code", "an answer that quotes sentences",
        "an answer in prose that quotes nothing", "an answer in code that quotes nothing",
    ]  # fmt: skip
    assert all(row["peer"] == "single tokens" and row["ratio"] > 0 for row in document["rows"])


def test_other_benches_guess_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What repeats itself, as random weights do, would be timed as if all answers did."""
    asked: list[EngineConfig] = []
    monkeypatch.setattr(decode, "bench_decode", lambda config, *_rest: asked.append(config))
    monkeypatch.setattr(speculation, "bench_speculation", lambda config, *_rest: asked.append(config))
    for kind in ("decode", "speculation"):
        assert cli.main(["bench", kind, "--model", TINY, "--speculation", "heads", "--json"]) == 0
    capsys.readouterr()
    assert [config.speculation for config in asked] == ["off", "heads"]


def test_four_tokens_in_a_row_are_counted() -> None:
    assert most_repeated([1, 2, 3]) == 0
    assert most_repeated([1, 2, 3, 4]) == 1
    assert most_repeated([1, 2, 3, 4, 9, 1, 2, 3, 4, 1, 2, 3, 4, 5]) == 3
    assert most_repeated([7] * 10) == 7


@pytest.mark.exhaustive
def test_experts_in_a_mapped_file_where_memory_can_be_limited(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with memory_group():
            pass
    except OSError as error:
        pytest.skip(f"control groups: {error}")
    document = bench(capsys, "disk", "--model", TINY, "--tokens", "6", "--device", "cpu", "--threads", "1")
    assert not_run(document) == set()
    assert rows(document)["experts in a plain mmap"]["ratio"] > 0


def test_what_is_prepared_of_a_synthetic_model_is_not_left_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    own = ContainerWriter.finish

    def finish(self: ContainerWriter) -> None:
        own(self)
        written.append(self.path)

    monkeypatch.setattr(placement, "WORTH_KEEPING", 0)
    monkeypatch.setattr(conversion, "_LEFT_FREE", 0)
    monkeypatch.setattr(ContainerWriter, "finish", finish)
    bench(capsys, "decode", "--model", TINY, "--tokens", "2", "--device", "cpu", "--precision", "int4")
    assert written
    assert not any(path.exists() for path in written)
    assert list(converted_dir().iterdir()) == []
