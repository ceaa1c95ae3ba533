"""The benches run on tiny models, on real devices and on machines whose time is modelled, and say what they measured;
how fast is asserted nowhere but in modelled time."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import disk, predicted_decode, speculation
from benchmarks.cache import made_up_trace
from benchmarks.mmap_peer import memory_group
from benchmarks.papers import QUICK, paper_cells, smaller_machine
from benchmarks.peers.editions import EDITIONS
from benchmarks.peers.library import OFFLOAD
from benchmarks.serving_load import QUESTIONS, Asked, Question, closed_loop, open_loop, read_questions
from engine import cli
from engine.bench import decode, kernels, telemetry
from engine.bench.card import parts, run
from engine.bench.card.run import ALL, TESTS, Part, Shape, as_markdown, bench_card, works
from engine.bench.opened import resolve_model
from engine.checkpoint.library import converted_dir
from engine.checkpoint.synthetic import SHAPES
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.paths import data_dir
from engine.experts.container import ContainerWriter
from engine.experts.replay import write_trace
from engine.hardware.machine import read_machine
from engine.hardware.measured import Measurements, save_measurements
from engine.hardware.probe import Probe, probe
from engine.hardware.profiles import lent, read_profile
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native.build import library_path
from engine.measure.run import NotMeasuredError
from engine.planner import placement
from engine.planner.papers import FAR_OFF, MEASURED, PublishedCell
from engine.runtime.load import conversion
from tests.combinations import some
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.native_isas import isas
from tests.engine.test_serving import serving
from tests.engine.tiny_families import tiny_checkpoint
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.peers import users_peers  # noqa: F401 - a fixture
from tests.tiny_gguf import write_model
from tests.unit.made_up_tuning import measurements

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
    for name in ("decode after 20 tokens", "decode after 200 tokens", "ready after opening"):
        peers = {row["peer"] for row in document["rows"] if row["name"] == name and row["peer"]}
        of_same_shape = {f"transformers, bf16 ({each} experts)" for each in ("default", "eager")}
        assert peers & of_same_shape == (set() if name == "ready after opening" else of_same_shape)
        assert {peer.split(",")[0] for peer in peers - of_same_shape} == built
        assert all(", same file, -fa o" in peer for peer in peers - of_same_shape)


def test_a_model_with_fewer_layers_says_so_and_what_all_of_them_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "decode", "--model", f"{TINY}?layers=1&vocab=300", "--tokens", "4", "--device", "cpu")
    whole = SHAPES["qwen3-moe-tiny"]
    words = f"300 of {whole.vocab:,} words"
    assert [row["name"] for row in document["rows"]] == [f"decode, 1 of {whole.layers} layers, {words}"]
    assert not_run(document) == {f"decode of all {whole.layers} layers"}
    document = bench(capsys, "prefill", "--model", f"{TINY}?vocab=300", "--prompt-tokens", "40", "--device", "cpu")
    assert {row["name"].partition(", ")[2] for row in document["rows"]} == {words}


def test_a_model_without_experts_has_nothing_to_prepare(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    tiny_checkpoint("llama", folder)
    save_tiny_tokenizer(folder)
    assert cli.main(["bench", "disk", "--model", str(folder)]) == 2
    assert "no experts" in capsys.readouterr().err


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


TWO_LAYERS = "synthetic:qwen3-moe-tiny?layers=2"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    given = [
        "bench",
        "decode",
        *arguments,
        "--model",
        TWO_LAYERS,
        "--tokens",
        "12",
        "--repeats",
        "1",
        "--json",
    ]
    assert cli.main(given) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_predictions_stand_beside_measurements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted_decode, "_measured", lambda machine, *_args: measurements(machine))
    document = predicted(capsys, "--predict", "--device", "cpu", "--threads", "1")
    names = [row["name"] for row in document["rows"]]
    assert names == [f"qwen3-moe-tiny, {precision}, cpu" for precision in ("bf16", "int8", "int4")]
    assert all(row["value"] > 0 and row["predicted"] > 0 for row in document["rows"])


def test_what_cannot_be_measured_loses_no_other_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(machine: Probe, config: EngineConfig, *_args: object) -> Measurements:
        if config.precision == "int8":
            raise NotMeasuredError("too little free RAM for one expert")
        return measurements(machine)

    monkeypatch.setattr(predicted_decode, "_measured", measured)
    document = predicted(capsys, "--predict", "--device", "cpu", "--threads", "1")
    assert [row["name"].split(", ")[1] for row in document["rows"]] == ["bf16", "int4"]
    (missing,) = document["peers_not_run"]
    assert missing == {"peer": "qwen3-moe-tiny, int8, cpu", "reason": "too little free RAM for one expert"}


def test_every_setting_is_held_against_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    save_measurements(measurements(probe()))
    document = predicted(capsys, "--brute-force", "--device", "cpu", "--precision", "int8")
    *each, plan, settled = document["rows"]
    assert each
    assert all(row["peer"] is None and row["name"].startswith("int8, CPU only") for row in each)
    assert plan["name"].startswith("the plan: ")
    assert settled["name"].startswith("what tuning settles on: ")
    assert plan["ratio"] <= 1
    assert settled["ratio"] <= 1


def test_every_row_has_a_limit_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = isas()
    monkeypatch.setattr(kernels, "_COLD_BYTES", 2**20)
    monkeypatch.setattr(kernels, "_CALL_SECONDS", 1e-3)
    before = torch.get_num_threads()
    try:
        report = kernels.bench_kernels(1, 2, shapes=(kernels.KernelShape("small", 256, 256, 2),))
    finally:
        torch.set_num_threads(before)
    names = {row.name for row in report.rows}
    assert names == {f"small top-2 {each.name} {isa.name}" for each in kernels.WEIGHTS for isa in found}
    assert report.machine["read_bandwidth_gb_per_s"] > 0
    for row in report.rows:
        assert row.value > 0
        assert row.limit is not None
        assert row.limit > 0
        assert (row.peer == "torch") == ("bf16" in row.name)
        assert (row.ratio is not None) == ("bf16" in row.name or "lut4" in row.name)


ASKED = [Question((5, 6, 7 + number), 4 + number) for number in range(5)]


def test_each_load_asks_everything_once() -> None:
    with serving() as running:
        for load in (closed_loop(running.url, ASKED, 2), open_loop(running.url, ASKED, 1000.0, seed=1)):
            assert sorted(answer.tokens for answer in load.answers) == [4, 5, 6, 7, 8]
            assert all(0 < answer.first_s <= answer.whole_s <= load.seconds for answer in load.answers)
        with pytest.raises(EngineError, match="did not answer"):
            closed_loop(running.url, [Question((10**6,), 3)], 1)


def test_questions_come_from_a_file_of_either_kind(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "a", "tokens": 7}\n\n{"turns": ["b", "c"]}\n"d"\n', encoding="utf-8")
    assert read_questions(file) == (Asked("a", 7), Asked("b"), Asked("d"))
    assert all(asked.text and asked.tokens > 0 for asked in QUESTIONS)


@pytest.mark.parametrize("text", ["", "{", '{"other": 1}', "3", '{"prompt": 3}', '{"turns": []}'])
def test_a_file_without_questions_is_said(text: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(EngineError, match=r"questions\.jsonl"):
        read_questions(file)
    with pytest.raises(EngineError, match="cannot be read"):
        read_questions(tmp_path / "nothing")


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


CARD = "emulated:slow-link"


def silent(_text: str) -> None:
    pass


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
            seen.append(name)
            for mine, its in zip(own(), operators(), strict=True):
                torch.testing.assert_close(mine.float(), its.float().view(mine.shape), rtol=0.02, atol=0.02)
        assert len(seen) == 4
        assert all(own is None for _, own, _ in works(shape, torch.device("cpu"), None, None))
