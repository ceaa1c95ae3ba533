"""Policies of batches, planned and by hand: the engine loads a model with their settings, and answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import cli
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.planner.batch_plan import policy_of
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.planner.schedules import S4, SCHEDULES, Schedule
from engine.runtime.batch.pipeline.device_pipeline import DevicePipeline
from tests.engine.loaded_tiny import opened_model
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

MIB = 2**20
CARD = "emulated:slow-link"
VRAM = 96 * MIB


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    return make_synthetic("synthetic:qwen3-moe-small?layers=2&experts=16&vocab=1024")


@pytest.mark.parametrize("policy", ["Switchyard mixed", "CPU-GPU collaborative", "whole-layer prefetch"])
def test_it_is_carried_out(policy: str, folder: Path) -> None:
    answer_with(policy, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ENGINE_SETTINGS)
@pytest.mark.parametrize("ways", [None, 4])
def test_each_is_carried_out(policy: str, ways: int | None, folder: Path) -> None:
    answer_with(policy, folder, ways)


def answer_with(policy: str, folder: Path, ways: int | None = None) -> None:
    """A few tokens, with what `Plan.engine_config` makes of the policy."""
    settings = {"device": CARD, "vram_bytes": VRAM, "cache_ways": ways, **ENGINE_SETTINGS[policy]}
    with opened_model(folder, context_tokens=128, **settings) as loaded:
        assert (loaded.info.device == "cpu") == (settings["device"] == "cpu"), loaded.info.device_note
        session = Alone(loaded)
        answer = session.generate_from_ids([5, 6, 7], SamplingParams(max_tokens=4), end_ids=frozenset())
        assert answer.generated_tokens == 4
        session.clear()


POLICY = {
    "prefill": "s4",
    "decode": "s4",
    "sequences": 3,
    "micro_batch": 1,
    "weights_on_card": 0.25,
    "cache_on_card": 0.5,
}
MACHINE = ("--model", "gpt-oss-20b", "--hardware", "laptop-rtx-4060-8gb", "--workload", "256x32x64")


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main(["plan", *MACHINE, "--json", *options])
    told = capsys.readouterr()
    return code, json.loads(told.out) if code == 0 else {}, told.err


def test_what_a_plan_prints_is_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole, _ = plan(capsys)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(whole))
    _, same, _ = plan(capsys, "--policy", str(file))
    assert same["batch"] == whole["batch"] | {"by_hand": True}
    assert same["speed"]["tokens_per_s"] == pytest.approx(whole["batch"]["tokens_per_s"])
    file.write_text(json.dumps(whole["batch"] | {"micro_batch": 16, "sequences": 48}))
    _, other, _ = plan(capsys, "--policy", str(file))
    assert (other["batch"]["micro_batch"], other["batch"]["sequences"]) == (16, 48)
    assert other["batch"]["tokens_per_s"] < whole["batch"]["tokens_per_s"]
    assert other["gave_way"] == ""
    file.write_text(json.dumps(whole["batch"] | {"weights_on_card": 1}))
    _, own, _ = plan(capsys, "--policy", str(file))
    assert own["batch"] == whole["batch"]
    assert own["gave_way"].startswith("The policy that was given gives way to the planner's own: it takes ")
    assert own["gave_way"].endswith("more than the graphics card has.")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"decode": "fastest"}, "batch.decode is 'fastest', but must be one of cgopipe, "),
        ({"micro_batch": 0}, "batch.micro_batch is 0, but must be from 1 to 3"),
        ({"micro_batch": 4}, "batch.micro_batch is 4, but must be from 1 to 3"),
        ({"sequences": "many"}, "batch.sequences is 'many', which is not a whole number"),
        ({"weights_on_card": 1.5}, "batch.weights_on_card is 1.5, but must be from 0 to 1"),
        ({"cache_on_card": True}, "batch.cache_on_card is True, which is not a number"),
        ({"decode": "cgopipe"}, "batch.cache_on_card must be 0 where attention is computed by the CPU"),
        ({"sharing": "heads"}, "batch.sharing is 'heads', which is not auto, layers or experts"),
        ({"mu": 4}, "batch.mu is no part of a policy"),
        ({"prefill": None}, "batch.prefill is None, which is not a text"),
    ],
    ids=str,
)
def test_one_that_cannot_be_is_refused_by_its_field(
    changes: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"batch": POLICY | changes}))
    code, _, told = plan(capsys, "--policy", str(file))
    assert code == 2
    assert told.startswith(f"switchyard: The policy {file} cannot be used: {why}")
    assert told.count("\n") == 1
    (tmp_path / "rows.csv").write_text("text\na\n")
    assert cli.main(["batch", str(tmp_path / "rows.csv"), "--policy", str(file)]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"batch": null}', '{"batch": 3}', "NaN"])
def test_a_file_that_is_no_policy_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    code, _, told = plan(capsys, "--policy", str(file))
    assert code == 2
    assert str(file) in told
    assert told.count("\n") == 1


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*POLICY, "schedule", "row_tokens", "batches", "fewest_batches", "sharing", "x"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(-3, 10**9), st.floats(), st.sampled_from([*SCHEDULES, "experts", ""])
        ),
    )
)
def test_whatever_is_written_is_a_policy_or_an_error_of_one_sentence(changes: dict[str, Any]) -> None:
    try:
        found = policy_of(json.loads(json.dumps(POLICY | changes)))
    except EngineError as error:
        found = error
    if isinstance(found, EngineError):
        assert found.message.startswith("batch")
        assert "\n" not in found.message
        return
    assert 1 <= found.micro_batch <= found.sequences
    assert 0 <= found.weights_on_card <= 1
    assert 0 <= found.cache_on_card <= 1


def test_a_job_is_run_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "model", num_hidden_layers=3)
    rows, file, run = tmp_path / "rows.csv", tmp_path / "policy.json", set[tuple[str, int]]()
    rows.write_text("text\n" + "".join(f"row {row} of a table\n" for row in range(6)))
    sweep = DevicePipeline.sweep

    def watched(pipeline: DevicePipeline, batches: Any, schedule: Schedule) -> Any:
        run.add((schedule.name, max(len(batch.wanted) for batch in batches)))
        return sweep(pipeline, batches, schedule)

    monkeypatch.setattr(DevicePipeline, "sweep", watched)

    def answers(name: str, *options: str, device: str = "emulated:slow-link") -> tuple[list[str], dict[str, Any]]:
        run.clear()
        fixed = ("--model", str(folder), "--device", device, "--precision", "fp32", "--threads", "1")
        more = (
            "--vram",
            "8MB",
            "--cache-slots",
            "3",
            "--max-tokens",
            "6",
            "--json",
            "-o",
            str(tmp_path / f"{name}.jsonl"),
            *options,
        )
        assert cli.main(["batch", str(rows), *fixed, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        return [json.loads(line)["answer"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()], told

    wanted, _ = answers("own")
    file.write_text(json.dumps(POLICY))
    found, told = answers("given", "--policy", str(file))
    assert found == wanted
    assert (told["gave_way"], told["note"]) == ("", "")
    assert run == {(S4.name, 1)}
    found, told = answers("none", "--policy", str(file), device="cpu")
    assert found == wanted
    assert told["gave_way"].startswith(
        "The policy that was given gives way to the engine's own sizes: the model is on no"
    )
