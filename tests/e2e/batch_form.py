"""What a person does on the Batch page to begin a job."""

import csv
from pathlib import Path

from tests.e2e.waiting import eventually
from tests.e2e.window_process import RealWindow


def write_questions(file: Path, rows: int, wish: str) -> None:
    """A csv of numbered rows: "`wish` about the number 7."."""
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["number", "text"])
        writer.writerows([number, f"{wish} about the number {number}."] for number in range(rows))


def choose_file(window: RealWindow, file: Path) -> None:
    """In the dialog that asks for files."""
    window.click("Choose a file…")
    eventually(lambda: window.widget("File name:", "text").is_focused, "the dialog had the keyboard")
    window.screen.type(str(file))
    eventually(lambda: window.accessible.text(window.widget("File name:", "text")) == str(file), "the path was typed")

    def is_closed() -> bool:
        if window.shows("File name:"):
            window.screen.press("Return")  # the first one may only close the list of names that fit
        return not window.shows("File name:")

    eventually(is_closed, "the dialog closed")
    window.screen.focus_window_of(window.process.pid)


def press_by_keys(window: RealWindow, name: str) -> None:
    """Goes to a button with Tab, which brings it into view, and presses it."""

    def is_there() -> bool:
        if window.widget(name).is_focused:
            return True
        window.screen.press("Tab")
        return False

    eventually(is_there, f"Tab led to {name!r}")
    window.screen.press("space")


def limit_answers(window: RealWindow, tokens: int) -> None:
    """Sets how long an answer may be."""
    window.click("System prompt")
    window.screen.press("Tab")  # by the keys, which bring into view what lies below the edge
    eventually(lambda: window.widget("Max tokens per answer").is_focused, "Tab led on")
    window.screen.press("ctrl+a")
    window.screen.type(str(tokens))
    window.screen.press("Tab")
