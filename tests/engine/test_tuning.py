"""Tuning with the real engine on tiny models: what it loads, times and keeps, and what loading makes of that."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine import cli
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig
from engine.hardware.measured import Measurements, described, load_measurements, save_measurements
from engine.hardware.probe import Probe
from engine.hardware.probe import probe as probe_machine
from engine.process.requests import RequestQueue
from engine.protocol import Event, StartTuning, TuningFinished, TuningPlans, TuningProgress, TuningTimed, decode, encode
from engine.runtime.engine import Engine, time_decode
from engine.tuning import measuring
from engine.tuning.measuring import MeasuredMachine
from engine.tuning.race import RacePace
from engine.tuning.result import Contestant, Timed, TuningResult
from engine.tuning.run import TuningEvent, TuningSurroundings, tune
from engine.tuning.saved_results import facts, model_mark, results_of, save_result
from engine.verbs import tune as verb
from engine.verbs.doctor import Status, tuning_findings
from engine.worker import run_tuning
from tests.engine.loaded_tiny import opened_model
from tests.unit.made_up_tuning import MACHINE, measurements, others_take

PACE = RacePace(tokens=6, seconds=5.0, repeats=1, again_s=0.0)


@pytest.fixture
def model() -> Path:
    return make_synthetic("synthetic:qwen3-moe-tiny?layers=2&vocab=512")


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.unload()


def around(device: str = "") -> TuningSurroundings:
    """The machine as it is, as if it had been measured."""

    def measure(probe: Probe, *_args: object, **_named: object) -> MeasuredMachine:
        return MeasuredMachine(measurements(probe, device), device, kept=True)

    # Whatever else this machine does, nobody takes anything of the processor.
    return TuningSurroundings(
        measure=measure,
        paces=lambda _kind: PACE,
        watch=others_take(lambda: 0.0),
        pause=lambda _seconds: None,
    )


def load(engine: Engine, config: EngineConfig) -> str:
    return engine.load(config, on_progress=lambda _done, _total: None, cancelled=lambda: False).device_note


def test_on_the_cpu_the_winner_is_what_is_loaded_from_then_on(engine: Engine, model: Path) -> None:
    config = EngineConfig(str(model))
    load(engine, config)
    events: list[TuningEvent] = []
    ending = tune(engine, StartTuning("t", config), events.append, lambda: False, around())
    assert ending.finished
    assert ending.note == ""
    result = ending.result
    won = result.won
    assert all(one.tokens_per_s > 0 for one in result.timed)
    assert ending.loaded == engine.info
    assert engine.info.precision == won.precision
    assert "Tuned on" in engine.info.device_note
    assert {event.stage for event in events if isinstance(event, TuningProgress)} >= {"loading", "timing", "restoring"}
    # All that was told survives the pipe.
    for event in events:
        assert decode(encode(event)) == event
    finished = TuningFinished("t", ending.finished, result, ending.reloaded, ending.loaded, ending.note)
    assert decode(encode(finished)) == finished


def test_on_an_emulated_card_the_ways_of_meeting_misses_race(engine: Engine, model: Path) -> None:
    config = EngineConfig(
        str(model), device="emulated:slow-link", precision="bf16", vram_bytes=2**20, context_tokens=64, threads=1
    )
    events: list[TuningEvent] = []
    ending = tune(engine, StartTuning("t", config), events.append, lambda: False, around("emulated:slow-link"))
    assert ending.problem == ""
    (plans,) = [event for event in events if isinstance(event, TuningPlans)]
    assert plans.plan.roofline.gpu_flops > 0
    timed = [event.timed for event in events if isinstance(event, TuningTimed)]
    assert all(one.contestant.config.device == "emulated:slow-link" for one in timed)
    assert any(one.tokens_per_s for one in timed)
    assert engine.info is None
    assert load(engine, config).count("Tuned on") == 1
    assert load(engine, EngineConfig(str(model), device="cpu")) == ""  # that question was not asked


def test_a_tuning_that_is_no_longer_possible_is_not_insisted_on(engine: Engine, model: Path) -> None:
    config = EngineConfig(str(model))
    tune(engine, StartTuning("t", config), lambda _event: None, lambda: False, around())
    (result,) = results_of(model_mark(model))
    won = result.won
    gone = replace(won, contestant=replace(won.contestant, config=replace(won.contestant.config, device="cuda:7")))
    save_result(replace(result, timed=(gone,)))
    note = load(engine, config)
    assert "not possible now" in note
    assert engine.info is not None


def test_measurements_of_this_machine_are_not_taken_again(model: Path) -> None:
    machine = probe_machine()
    kept = measurements(machine)
    save_measurements(kept)
    found = measuring.measured_machine(
        machine,
        EngineConfig(str(model), device="cpu"),
        "quick",
        again=False,
        before_measuring=lambda: pytest.fail("nothing is to be measured"),
        on_progress=lambda *_args: None,
        cancelled=lambda: False,
    )
    assert found == MeasuredMachine(kept, "", kept=True)
    assert kept.machine == described(machine)
    assert isinstance(found.measurements, Measurements)


def test_the_verb_prints_one_document(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.tuning.run.TuningSurroundings", lambda: around())
    assert cli.main(["tune", "--model", str(model), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["winner"] in [one["contestant"]["name"] for one in document["timed"]]
    assert document["tokens_per_s"] > 0
    assert cli.main(["doctor", "--json"]) in (0, 2)
    findings = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert document["model"] in findings["tuning"]["detail"]


def test_in_the_engine_process_a_run_ends_once(engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tuning.run.TuningSurroundings", lambda: around())
    sent: list[Event] = []
    requests = RequestQueue(sent.append)
    request = StartTuning("t", EngineConfig(str(model)))
    requests.accept(request)
    requests.take()
    ending = run_tuning(engine, request, requests, sent.append)
    requests.end(ending)
    assert [event for event in sent if isinstance(event, TuningFinished)] == [ending]
    assert ending.finished
    waiting = StartTuning("later", EngineConfig(str(model)))
    requests.accept(waiting)
    requests.cancel("later")
    assert sent[-1] == TuningFinished("later", False, None, False, None)


def test_the_verb_does_not_keep_what_other_programs_spoiled(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = replace(around(), watch=others_take(lambda: 0.9))
    monkeypatch.setattr("engine.tuning.run.TuningSurroundings", lambda: busy)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody is there to be asked
    assert cli.main(["tune", "--model", str(model), "--json"]) == 2
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["winner"]
    assert (document["saved"], document["others"]) == (False, 0.9)
    assert "--even-if-busy" in said.err
    assert results_of(model_mark(model)) == []
    assert cli.main(["tune", "--model", str(model), "--json", "--even-if-busy"]) == 0
    assert json.loads(capsys.readouterr().out)["saved"]
    assert [one.was_busy for one in results_of(model_mark(model))] == [True]


@pytest.mark.parametrize(("answer", "kept"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_at_a_terminal_somebody_is_asked(
    switchyard_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, kept: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", shown)
    ending = TuningFinished("", finished=True, saved=False, others=0.5, unsaved=measurements(MACHINE))
    assert verb._confirmed(ending) is kept
    assert "50%" in shown.getvalue()
    assert (load_measurements(MACHINE, "") is not None) is kept


def test_doctor_advises_to_tune_again_what_is_not_to_be_trusted(switchyard_home: Path) -> None:
    way = Contestant("way", EngineConfig("m"), 0.0, 0.0, 0.0)
    good = TuningResult(
        "m", "f" * 16, EngineConfig("m"), "quick", "2026-11-22T08:00:00+00:00", facts(described(MACHINE)),
        (Timed(way, 20.0),), "way",
    )  # fmt: skip
    for result, status, word in (
        (good, Status.OK, "20.0"),
        (replace(good, others=0.9), Status.ADVICE, "90%"),
        (replace(good, outrun=60.0), Status.ADVICE, "60.0"),
    ):
        save_result(result)
        (finding,) = tuning_findings(MACHINE)
        assert finding.status is status
        assert word in finding.detail


def test_timing_ends_when_it_is_told_to_and_leaves_no_context(model: Path) -> None:
    with opened_model(model, "auto") as loaded:
        heard: list[int] = []
        found = time_decode(loaded, [3, 4, 5], 20, on_token=lambda count, _rate: heard.append(count))
        assert found.tokens == 20
        assert heard == list(range(1, 21))
        assert found.tokens_per_s > 0
        assert time_decode(loaded, [3, 4, 5], 200, seconds=0.0).tokens < 20
        assert time_decode(loaded, [3, 4, 5], 200, cancelled=lambda: True).tokens_per_s == 0
