"""A tuning run from end to end with a made-up engine: what is told, kept and restored, whatever happens on the way."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.common.paths import data_dir
from engine.hardware.measured import described, load_measurements
from engine.protocol import StartTuning, TuningFinished, TuningMeasured, TuningPlans, TuningProgress, TuningTimed
from engine.tuning.measuring import _good_enough
from engine.tuning.result import TuningResult, report_text
from engine.tuning.run import TuningEvent, tune
from engine.tuning.saved_results import (
    apply_tuning,
    keep_anyway,
    kept_corrections,
    model_mark,
    note_outrun,
    read_result,
    results_of,
)
from tests.refusals import refused
from tests.unit.made_up_tuning import (
    MACHINE,
    MadeUpEngine,
    around,
    measurements,
    no_memory,
    others_take,
    tiny_model,
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("engine.tuning.race.compute_threads", lambda: 4)
    return tiny_model()


SCALE = 50.0
"""A tiny model is predicted to be fast: a factor beyond reason would be no correction."""


def speeds(config: EngineConfig) -> float:
    """int8 is twice as fast as bf16; two threads are the best."""
    base = {"auto": 100.0, "bf16": 100.0, "int8": 200.0, "int4": 210.0}[config.precision]
    return SCALE * base * (1.0 if config.threads == 2 else 0.8)


def run(
    engine: MadeUpEngine, config: EngineConfig, events: list[TuningEvent] | None = None, **asked: object
) -> TuningFinished:
    told: list[TuningEvent] = [] if events is None else events
    return tune(engine, StartTuning("t", config, **asked), told.append, lambda: False, around())  # type: ignore[arg-type]


def test_the_stages_are_told_in_order_and_the_winner_is_kept(model: Path) -> None:
    events: list[TuningEvent] = []
    ending = run(MadeUpEngine(speeds), EngineConfig(str(model)), events)
    result = ending.result
    assert ending.finished
    won = result.won
    assert (won.precision, won.contestant.config.threads) == ("int8", 2)
    assert result.before is not None
    assert result.gain == pytest.approx(200 / 80)
    order = [type(event) for event in events if not isinstance(event, TuningProgress)]
    plans = next(event for event in events if isinstance(event, TuningPlans))
    assert order[:2] == [TuningMeasured, TuningPlans]
    assert set(order[2:]) == {TuningTimed}
    assert {event.timed.contestant.name for event in events if isinstance(event, TuningTimed)} == {
        one.name for one in plans.contestants
    }
    stages = list(dict.fromkeys(event.stage for event in events if isinstance(event, TuningProgress)))
    assert stages == ["probing", "measuring", "planning", "loading", "timing"]
    assert results_of(model_mark(model)) == [result]
    assert "From now on" in report_text(result)


def test_each_is_timed_there_and_back_again_without_a_load_at_the_turn(model: Path) -> None:
    engine = MadeUpEngine(speeds)
    ending = run(engine, EngineConfig(str(model)))
    count = len(ending.result.timed)
    assert len(engine.diary) == 2 * count - 1
    assert engine.diary == engine.diary[::-1]
    assert all(len(one.rates) == 4 for one in ending.result.timed)


def test_explicit_settings_are_not_touched(model: Path) -> None:
    engine = MadeUpEngine(speeds)
    ending = run(engine, EngineConfig(str(model), precision="bf16", threads=4))
    assert {one.contestant.config.precision for one in ending.result.timed} == {"bf16"}
    assert {one.contestant.config.threads for one in ending.result.timed} == {4}


def test_what_runs_now_stays_unless_another_is_faster_by_more_than_noise(model: Path) -> None:
    ending = run(MadeUpEngine(lambda config: 101.0 if config.threads == 2 else 100.0), EngineConfig(str(model)))
    assert ending.result.won.contestant.is_before


@pytest.mark.parametrize("at_load", [True, False])
def test_a_plan_that_cannot_be_run_is_a_loser_with_a_reason(model: Path, *, at_load: bool) -> None:
    def speed(config: EngineConfig) -> float | Exception:
        return no_memory() if config.precision == "int8" else speeds(config)

    ending = run(MadeUpEngine(speed, at_load=at_load), EngineConfig(str(model)))
    result = ending.result
    lost = [one for one in result.timed if one.contestant.config.precision == "int8"]
    assert lost
    assert all("9 GB" in one.problem and not one.tokens_per_s for one in lost)
    assert result.won.precision != "int8"
    assert "9 GB" in report_text(result)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nmore")])
def test_nothing_can_be_run(model: Path, error: Exception) -> None:
    engine = MadeUpEngine(lambda _config: error)
    ending = run(engine, EngineConfig(str(model)))
    assert ending.finished
    assert ending.result.won is None
    assert results_of(model_mark(model)) == []
    assert engine.info is None
    assert "None of them" in report_text(ending.result)


STEPS = ("look", "measure", "load_exactly", "decode")


@pytest.mark.parametrize("when", [*((step, 1) for step in STEPS), ("load_exactly", 2), ("decode", 3), ("decode", 12)])
@pytest.mark.parametrize("held", [True, False])
def test_cancelled_at_any_stage_nothing_is_kept_and_what_was_loaded_is_again(
    model: Path, when: tuple[str, int], *, held: bool
) -> None:
    seen: list[str] = []
    engine = MadeUpEngine(speeds, step=lambda what: seen.append(what))
    config = EngineConfig(str(model))
    other = EngineConfig(str(model), precision="bf16", threads=3)
    if held:
        engine.load(other, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    ending = tune(
        engine,
        StartTuning("t", config),
        lambda _event: None,
        lambda: seen.count(when[0]) >= when[1],
        around(step=seen.append),
    )
    assert not ending.finished
    assert ending.result is None
    assert ending.problem == ending.note == ""
    assert results_of(model_mark(model)) == []
    assert engine.asked == (other if held else None)
    assert ending.loaded == (engine.info if ending.reloaded else None)
    assert ending.reloaded == (when[0] in STEPS[2:])


def test_a_model_that_cannot_be_had_again_is_said(model: Path) -> None:
    allowed = [True]

    def speed(config: EngineConfig) -> float | Exception:
        return speeds(config) if config.threads != 3 or allowed else no_memory()

    engine = MadeUpEngine(speed)
    engine.load(EngineConfig(str(model), threads=3), on_progress=lambda _done, _total: None, cancelled=lambda: False)
    allowed.clear()
    ending = run(engine, EngineConfig(str(model)))
    assert ending.finished
    assert ending.reloaded
    assert ending.loaded is None
    assert "qwen3-moe-tiny-layers2-v2" in ending.note
    assert "9 GB" in ending.note


def test_it_ends_where_it_was_asked_to(model: Path) -> None:
    engine = MadeUpEngine(speeds)
    for until, last in (("measured", TuningMeasured), ("planned", TuningPlans)):
        events: list[TuningEvent] = []
        ending = run(engine, EngineConfig(str(model)), events, until=until)
        assert ending == TuningFinished("t", finished=True)
        assert isinstance(events[-1], last)
    assert engine.diary == []


def test_a_model_that_is_not_there_is_told_before_anything_is_touched(tmp_path: Path) -> None:
    with refused(ErrorCode.MODEL_NOT_FOUND):
        run(MadeUpEngine(speeds), EngineConfig(str(tmp_path / "missing")))


def test_a_model_that_fits_nowhere_says_the_nearest(model: Path) -> None:
    ending = run(MadeUpEngine(speeds), EngineConfig(str(model), ram_bytes=1))
    assert not ending.finished
    assert ending.problem


# --- what a result is used for --------------------------------------------------------------------


def test_automatic_settings_become_what_won(model: Path) -> None:
    run(MadeUpEngine(speeds), EngineConfig(str(model)))
    applied = apply_tuning(EngineConfig(str(model)), model, lambda: MACHINE)
    assert (applied.config.precision, applied.config.threads) == ("int8", 2)
    assert all(fact in applied.note for fact in ("21 Nov 2026", "10000.0 tokens/s"))


def test_explicit_settings_overrule(model: Path) -> None:
    run(MadeUpEngine(speeds), EngineConfig(str(model)))
    for asked in (
        EngineConfig(str(model), precision="bf16"),
        EngineConfig(str(model), device="emulated:slow-link"),
        EngineConfig(str(model), ram_bytes=10**9),
        EngineConfig(str(model), cache_slots=3),
    ):
        applied = apply_tuning(asked, model, lambda: MACHINE)
        assert applied.config == asked
        assert applied.note == ""
    kept = apply_tuning(EngineConfig(str(model), threads=3), model, lambda: MACHINE)
    assert (kept.config.precision, kept.config.threads) == ("int8", 3)


def test_what_was_chosen_for_tuning_is_not_chosen_by_it(model: Path) -> None:
    on = EngineConfig(str(model), speculation="off", kv_precision="int8")
    result = run(MadeUpEngine(speeds), on).result
    assert result is not None
    assert all(one.contestant.config.kv_precision == "int8" for one in result.timed)
    for asked in (EngineConfig(str(model)), on):
        config = apply_tuning(asked, model, lambda: MACHINE).config
        assert config.precision == "int8"
        assert (config.speculation, config.kv_precision) == (asked.speculation, asked.kv_precision)


@pytest.mark.parametrize(("asked", "used"), [("auto", "cpu"), ("cpu", "auto")])
def test_where_there_is_no_card_automatic_is_the_processor(model: Path, asked: str, used: str) -> None:
    run(MadeUpEngine(speeds), EngineConfig(str(model), device=asked))
    applied = apply_tuning(EngineConfig(str(model), device=used), model, lambda: MACHINE)
    assert applied.config.device in ("cpu", used)
    assert applied.config.precision == "int8"


def test_another_machine_makes_it_stale_which_is_said(model: Path) -> None:
    run(MadeUpEngine(speeds), EngineConfig(str(model)))
    more = replace(MACHINE, ram_bytes=32 * 2**30)
    applied = apply_tuning(EngineConfig(str(model)), model, lambda: more)
    assert applied.config == EngineConfig(str(model))
    assert "not used" in applied.note
    assert "16 GiB" in applied.note
    assert not applied.is_tuned
    # Tuned again there, both are kept, each for its machine.
    engine = MadeUpEngine(speeds)
    tune(engine, StartTuning("t", EngineConfig(str(model))), lambda _event: None, lambda: False, around(more))
    assert apply_tuning(EngineConfig(str(model)), model, lambda: more).is_tuned
    assert apply_tuning(EngineConfig(str(model)), model, lambda: MACHINE).is_tuned


def test_what_was_timed_corrects_the_next_predictions(model: Path) -> None:
    engine = MadeUpEngine(speeds)
    first: list[TuningEvent] = []
    run(engine, EngineConfig(str(model)), first)
    found = kept_corrections(model_mark(model), described(MACHINE))
    assert {one.precision for one in found} >= {"bf16", "int8"}
    again: list[TuningEvent] = []
    ending = run(engine, EngineConfig(str(model)), again)
    won = ending.result.won
    assert won.contestant.predicted_tokens_per_s == pytest.approx(won.tokens_per_s, rel=0.02)
    (plans,) = [event for event in again if isinstance(event, TuningPlans)]
    assert plans.plan.speed.decode_tokens_per_s == pytest.approx(200 * SCALE, rel=0.1)


def test_a_broken_file_is_no_result(model: Path) -> None:
    run(MadeUpEngine(speeds), EngineConfig(str(model)))
    (path,) = (data_dir() / "tuning").glob("*.json")
    content = json.loads(path.read_text())
    for broken in ("", "[]", "{", json.dumps({**content, "version": 9}), json.dumps({**content, "timed": 3})):
        path.write_text(broken)
        assert read_result(path) is None
        assert apply_tuning(EngineConfig(str(model)), model, lambda: MACHINE).note == ""


def test_a_machine_that_slows_down_meanwhile_is_said_and_treats_all_alike(model: Path) -> None:
    heard = [0]

    def slowing(config: EngineConfig) -> float:
        heard[0] += 1
        return speeds(config) / (1 + 0.02 * heard[0])

    ending = run(MadeUpEngine(slowing), EngineConfig(str(model)))
    assert any("slower" in note for note in ending.result.notes)
    assert ending.result.won.precision == "int8"


def test_after_a_fault_of_ours_the_model_is_there_again(model: Path) -> None:
    def fault(event: TuningEvent) -> None:
        if isinstance(event, TuningTimed):
            raise ZeroDivisionError

    engine, held = MadeUpEngine(speeds), EngineConfig(str(model), threads=3)
    engine.load(held, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    with pytest.raises(ZeroDivisionError):
        tune(engine, StartTuning("t", EngineConfig(str(model))), fault, lambda: False, around())
    assert engine.asked == held
    assert results_of(model_mark(model)) == []


# --- other programs -------------------------------------------------------------------------------


def busy_run(
    model: Path, share: Callable[[], float], engine: MadeUpEngine | None = None, **asked: object
) -> TuningFinished:
    """A run beside other programs that take `share()` of the processor."""
    request = StartTuning("t", EngineConfig(str(model)), **asked)  # type: ignore[arg-type]
    return tune(
        engine or MadeUpEngine(speeds), request, lambda _e: None, lambda: False, around(watch=others_take(share))
    )


def test_what_was_timed_under_load_is_not_kept_and_says_so(model: Path) -> None:
    ending = busy_run(model, lambda: 0.94)
    result = ending.result
    assert ending.finished
    assert not ending.saved
    assert result.was_busy
    assert (ending.others, result.others) == (0.94, 0.94)
    assert "94%" in report_text(result, saved=False)
    assert "From now on" not in report_text(result, saved=False)
    assert results_of(model_mark(model)) == []
    assert list((data_dir() / "measurements").glob("*")) == []
    assert apply_tuning(EngineConfig(str(model)), model, lambda: MACHINE).note == ""
    # Confirmed, it is kept with its warning, and its figures are not taken for this machine's.
    keep_anyway(result, ending.unsaved)
    assert results_of(model_mark(model)) == [result]
    assert load_measurements(MACHINE, "") == ending.unsaved
    assert kept_corrections(model_mark(model), described(MACHINE)) == ()
    applied = apply_tuning(EngineConfig(str(model)), model, lambda: MACHINE)
    assert applied.is_tuned
    assert applied.config.precision == "int8"
    assert "tokens/s" not in applied.note


def test_a_run_that_was_told_to_keeps_it_without_waiting(model: Path) -> None:
    pauses: list[float] = []
    surroundings = around(watch=others_take(lambda: 0.5), pause=pauses.append)
    request = StartTuning("t", EngineConfig(str(model)), even_if_busy=True)
    ending = tune(MadeUpEngine(speeds), request, lambda _event: None, lambda: False, surroundings)
    assert ending.saved
    assert pauses == []
    (kept,) = results_of(model_mark(model))
    assert kept.was_busy


def test_it_waits_until_other_programs_have_ended(model: Path) -> None:
    shares = iter([0.9, 0.6])
    events: list[TuningEvent] = []
    surroundings = around(watch=others_take(lambda: next(shares, 0.02)))
    request = StartTuning("t", EngineConfig(str(model)))
    ending = tune(MadeUpEngine(speeds), request, events.append, lambda: False, surroundings)
    waiting = [event.name for event in events if isinstance(event, TuningProgress) and event.stage == "waiting"]
    assert waiting == ["90%", "60%"]
    assert ending.saved
    assert not ending.result.was_busy


def test_it_can_be_cancelled_while_it_waits(model: Path) -> None:
    looks: list[float] = []
    ending = tune(
        MadeUpEngine(speeds),
        StartTuning("t", EngineConfig(str(model))),
        lambda _event: None,
        lambda: len(looks) >= 2,
        around(watch=others_take(lambda: 0.9), pause=looks.append),
    )
    assert not ending.finished
    assert len(looks) == 2


def test_load_that_comes_while_tokens_are_timed_is_noticed(model: Path) -> None:
    busy: list[bool] = []
    engine = MadeUpEngine(speeds, step=lambda what: busy.append(True) if what == "decode" else None)
    ending = busy_run(model, lambda: 0.4 if busy else 0.0, engine)
    assert not ending.saved
    assert ending.unsaved is None  # what was measured before it came is sound, and kept
    assert load_measurements(MACHINE, "") is not None
    assert results_of(model_mark(model)) == []


def test_a_result_that_is_outrun_is_no_longer_believed(model: Path) -> None:
    config = EngineConfig(str(model))

    def outrun(rate: float) -> TuningResult | None:
        # What won on the processor did so for `cpu` as well: there is no card here.
        return note_outrun(model, replace(config, device="cpu"), rate, lambda: MACHINE)

    mark = model_mark(model)
    assert outrun(1e6) is None  # nothing is kept yet
    run(MadeUpEngine(speeds), config)
    assert kept_corrections(mark, described(MACHINE))
    (kept,) = results_of(mark)
    assert outrun(1.2 * kept.won.tokens_per_s) is None
    marked = outrun(3 * kept.won.tokens_per_s)
    assert not marked.is_trusted
    assert outrun(3 * kept.won.tokens_per_s) is None  # said once
    assert results_of(mark) == [marked]
    assert kept_corrections(mark, described(MACHINE)) == ()
    applied = apply_tuning(config, model, lambda: MACHINE)
    assert applied.config.precision == "int8"  # its settings hold
    assert f"{3 * kept.won.tokens_per_s:.1f}" in applied.note


def test_a_card_that_a_plan_does_not_get_is_a_reason_to_lose(model: Path) -> None:
    class FallsBack(MadeUpEngine):
        def _loaded(self, what, config, on_progress, cancelled):  # type: ignore[no-untyped-def]
            info = super()._loaded(what, config, on_progress, cancelled)
            self.info = replace(info, device="cpu", device_note="Runs on the CPU: no room.")
            return self.info

    ending = run(FallsBack(speeds), EngineConfig(str(model), device="emulated:slow-link"))
    for one in ending.result.timed:
        assert one.contestant.is_before or "no room" in one.problem


def test_measurements_taken_under_load_are_taken_again(model: Path) -> None:
    good = measurements()
    assert _good_enough(good, "quick") == good
    assert _good_enough(replace(good, others=0.5), "quick") is None
