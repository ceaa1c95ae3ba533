"""`switchyard plan` and `switchyard models fit`, without torch and without running anything."""

import json
from typing import Any

import pytest

from engine.checkpoint.library import note_use
from engine.cli import main
from engine.common.config import EngineConfig
from engine.protocol import StartTuning
from engine.tuning.run import tune
from tests.unit.made_up_tuning import MACHINE, MadeUpEngine, around, others_take, tiny_model


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "mixtral-8x7b", "--hardware", "desktop-no-gpu-64gb", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["policy"] == "CPU only"
    assert plan["speed"]["low"] < plan["speed"]["decode_tokens_per_s"] < plan["speed"]["high"]
    assert plan["ram"]["experts"] > 0
    assert plan["alternatives"]


def test_a_plan_for_people_names_bytes_and_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "olmoe-1b-7b", "--hardware", "desktop-rtx-3060-12gb", "--workload", "64x8"]) == 0
    text = capsys.readouterr().out
    assert "graphics card" in text
    assert "GB/s" in text or "ms per token" in text
    assert "other ways" in text


def test_keys_and_values_in_bytes_take_half_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    def kv(hardware: str, precision: str) -> int:
        where = ["--hardware", hardware, "--kv-precision", precision, "--workload", "512x8", "--json"]
        assert main(["plan", "--model", "gpt-oss-20b", *where]) == 0
        plan = json.loads(capsys.readouterr().out)
        return int(plan["ram"]["kv"] + (plan["card"] or {"kv": 0})["kv"])

    assert kv("desktop-no-gpu-64gb", "int8") < 0.55 * kv("desktop-no-gpu-64gb", "auto")
    assert kv("desktop-rtx-4090-24gb", "int8") == kv("desktop-rtx-4090-24gb", "auto")


def test_fit_says_yes_or_no(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--hardware", "desktop-no-gpu-64gb", "--workload", "64x8", "--json"]
    assert main(["models", "fit", "qwen3-30b-a3b", *where]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["models", "fit", "deepseek-v3", *where, "--ram", "2GB"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert "with its experts and layers read from disk" in document["why"]
    assert "GB of RAM" in document["why"]


def test_fit_knows_the_room_on_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted and read from disk needs room there; what is read from a model's own files needs none."""
    monkeypatch.setattr("engine.verbs.models.hub.free_disk_bytes", lambda _folder: 10**9)

    def said(precision: str) -> tuple[int, dict[str, object]]:
        asked = [
            "models",
            "fit",
            "qwen3-30b-a3b",
            "--device",
            "cpu",
            "--precision",
            precision,
            "--ram",
            "8GB",
            "--json",
        ]
        code = main(asked)
        return code, json.loads(capsys.readouterr().out)

    code, converted = said("int4")
    assert code == 2
    assert "it lacks" in str(converted["why"])
    assert "1.0 GB are free" in str(converted["why"])
    code, ranges = said("bf16")
    assert (code, ranges["fits"], ranges["written_bytes"]) == (0, True, 0)
    assert ranges["disk_bytes"]


def test_fit_says_where_its_speed_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()

    def said(*more: str) -> str:
        assert main(["models", "fit", str(model), "--device", "cpu", *more]) == 0
        return capsys.readouterr().out

    assert "Estimated: this model has not answered here yet." in said()
    note_use(model, "cpu, bf16", 30.0, 100)
    assert "in bf16 on cpu, at 30 tokens/s, measured here" in said("--precision", "int4")
    measured = said("--precision", "bf16")
    assert "about 30 tokens/s" in measured
    assert "Measured here, with real tokens" in measured
    assert "stimated" not in measured
    assert "stimated" not in said("--hardware", "desktop-no-gpu-64gb")  # another machine: all of it is


@pytest.mark.parametrize("wrong", [["--workload", "nothing"], ["--hardware", "toaster"], ["--ram", "8"]])
def test_what_makes_no_sense_is_refused_in_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "olmoe-1b-7b", *wrong]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_this_machine_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "olmoe-1b-7b", "--device", "cpu", "--workload", "64x8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == "this machine"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3-30b", "did you mean qwen3-30b-a3b"),
        ("Mixtral", "mixtral-8x7b"),
        ("zzzz", "dbrx"),
    ],
)
def test_an_unknown_model_is_told_what_may_be_meant(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fit", model]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "folder" in error
    assert "hub id" in error


def test_capitals_do_not_matter_to_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--hardware", "Desktop-No-GPU-64GB", "--workload", "64x8", "--json"]
    for model in ("OLMoE-1B-7B", "allenai/olmoe-1b-7b-0924-instruct"):
        assert main(["plan", "--model", model, *where]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "olmoe-1b-7b"


def test_emulated_cards_of_different_sizes_are_planned_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.tuning.machine_state.probe_machine", lambda: MACHINE)
    where = ["--workload", "64x8", "--json", "--precision", "int4"]
    device = "emulated:link25-8gb,emulated:link12-6gb"
    assert main(["plan", "--model", "gpt-oss-20b", "--device", device, *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["card"]["total"] == 14 * 2**30
    assert "2 cards" in found["sharing_words"]
    assert main(["plan", "--model", "qwen3-30b-a3b", "--device", "emulated:nothing", *where]) == 2
    assert "no hardware profile called 'nothing'" in capsys.readouterr().err


def test_what_was_timed_here_is_the_figure_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.tuning.machine_state.probe_machine", lambda: MACHINE)
    monkeypatch.setattr("engine.tuning.race.compute_threads", lambda: 4)
    model = str(tiny_model())

    def planned(*options: str) -> dict[str, Any]:
        assert main(["plan", "--model", model, *options, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    modelled, others = planned(), planned("--workload", "64x8")
    assert (modelled["timing"], modelled["speed"]["timed_at"]) == ("", "")

    def speed(asked: EngineConfig) -> float:
        rate: float = 0.5 * modelled["speed"]["decode_tokens_per_s"]
        return rate if asked.precision == modelled["precision"] else 0.1 * rate

    request = StartTuning("t", EngineConfig(model), even_if_busy=True)
    around_us = around(watch=others_take(lambda: 0.0))
    result = tune(MadeUpEngine(speed), request, lambda _event: None, lambda: False, around_us).result
    (timed,) = [one for one in result.timed if one.contestant.is_plan]
    found = planned()
    assert found["speed"]["decode_tokens_per_s"] == timed.tokens_per_s
    assert found["speed"]["predicted"] == timed.contestant.predicted_tokens_per_s
    assert found["speed"]["timed_at"] == result.taken_at
    assert "too high" in found["timing"]
    assert main(["plan", "--model", model]) == 0
    assert found["timing"] in capsys.readouterr().out
    # Neither another machine's nor another question's: nothing else was timed.
    assert not planned("--hardware", "desktop-no-gpu-64gb")["timing"]
    assert not planned("--ram", "1GB")["timing"]
    other = planned("--workload", "64x8")
    assert not other["timing"]
    assert other["speed"]["decode_tokens_per_s"] < others["speed"]["decode_tokens_per_s"]
