"""Tuning by hand, with the real engine: cancelled on the way, then to its end, and what the next start makes of it."""

import json
from pathlib import Path

import pytest

from engine.common.paths import data_dir
from engine.hardware.measured import load_measurements
from engine.hardware.probe import probe
from engine.tuning.saved_results import all_results
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import RealWindow, real_window

RUN_PATIENCE_S = 10 * PATIENCE_S


def wait_for(window: RealWindow, text: str, patience_s: float = RUN_PATIENCE_S) -> str:
    """The line of the window with that text."""

    def look() -> str:
        return next((line for line in window.transcript().splitlines() if text in line), "")

    return eventually(look, f"the window said {text!r}", patience_s)


def start_run(window: RealWindow) -> None:
    name = "Tune again" if window.accessible.find("Tune again", "push button") else "Tune"
    window.click(name, role="push button")
    window.widget("Cancel", "push button")


def tuned_files() -> list[Path]:
    return sorted((data_dir() / "tuning").glob("*"))


@pytest.mark.timeout(3600)
@pytest.mark.exhaustive
def test_tuned_by_hand_and_used_from_then_on(screen: Screen, starter: Path, switchyard_home: Path) -> None:
    with real_window(screen, switchyard_home, starter) as window:
        wait_for(window, "CPU, ")  # the model is loaded
        window.click("Tune", role="check box")
        wait_for(window, "Not measured yet")
        wait_for(window, "predicted, between")  # a plan is there before anything is measured

        # Cancelled while it measures: nothing is kept, and it can be begun again.
        start_run(window)
        wait_for(window, "Measuring")
        window.click("Cancel")
        wait_for(window, "Cancelled: nothing was saved")
        assert load_measurements(probe(), "") is None
        assert tuned_files() == []
        wait_for(window, "CPU, ")

        # Cancelled while tokens are timed, by the keyboard: the measurements stay, no result does.
        start_run(window)
        wait_for(window, "Timing real tokens")
        was_busy = "Other programs" in window.transcript()  # then they are not kept without being asked
        screen.press("Escape")
        wait_for(window, "Cancelled: nothing was saved")
        assert was_busy or load_measurements(probe(), "") is not None
        assert tuned_files() == []
        wait_for(window, "CPU, ")

        # To its end: the winner is kept, and the model runs with it.
        start_run(window)
        eventually(lambda: window.accessible.find("Tune again", "push button"), "the run had ended", RUN_PATIENCE_S)
        if window.shows("Save anyway"):  # this machine was busy with something else
            assert tuned_files() == []
            window.click("Save anyway", role="push button")
            eventually(tuned_files, "the result was saved")
        (result,) = all_results()
        won = result.won
        assert won.tokens_per_s == max(
            one.tokens_per_s for one in result.timed if one.precision == won.precision and not one.problem
        )
        assert "winner" in window.transcript()
        assert f"{won.precision} · tuned" in wait_for(window, " · tuned")
        assert window.close() == 0

    # The next start loads the model with it, and says so.
    with real_window(screen, switchyard_home, starter) as window:
        said = wait_for(window, " · tuned")
        assert f"{won.threads} thread" in said
        assert won.precision in said
        assert not window.shows("Dismiss")
        assert window.close() == 0

    # Other hardware: the result is not used, and both the window and the model's line say so.
    (file,) = tuned_files()
    content = json.loads(file.read_text(encoding="utf-8"))
    for fact in content["machine"]:
        if fact["name"] == "processor":
            fact["value"] = "another processor"
    file.write_text(json.dumps(content), encoding="utf-8")
    with real_window(screen, switchyard_home, starter) as window:
        window.widget("Dismiss")
        wait_for(window, "another processor")
        wait_for(window, "CPU, ")
        assert " · tuned" not in window.transcript()
        window.click("Tune", role="push button")  # of the line that says it
        window.widget("Step 1: Your machine")
        wait_for(window, "Tune again.")
        assert window.close() == 0
