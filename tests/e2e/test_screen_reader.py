"""What a screen reader is told on each page and in each dialog: every control says what it is, not what it holds."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.accessibility import AccessibleWindow, Widget
from tests.e2e.screen import Screen
from tests.e2e.waiting import eventually
from tests.e2e.window_process import RealWindow, real_window

USED = {"push button", "button menu", "toggle button", "check box", "radio button", "combo box", "text", "spin box"}
USED |= {"slider", "list", "table", "tree", "page tab list"}
OPENED = {
    "Chat": ("Model: starter · bf16", "System prompt", "Sampling: Recommended", "Saved prompts  /"),
    "Tune": ("What if…",),
    "Models": ("Folders…",),
    "Settings": ("Add a server",),
}
"""What opens over each page, by the name of what opens it; Escape closes it."""


def problems_of(window: AccessibleWindow, showing: list[Widget]) -> Iterator[str]:
    """One line for each control that says too little."""
    for widget in showing:
        if widget.role not in USED or not widget.is_enabled:
            continue
        label = window.label(widget)
        # On Linux Qt gives what is chosen as the name of a box with a list.
        name = label if widget.role == "combo box" else label or widget.name
        held = ""
        with contextlib.suppress(Exception):  # most have no text of their own
            held = window.text(widget)
        if not name.strip():
            yield f"{widget.role} {widget.name!r} at {widget.x},{widget.y} says not what it is for"
        elif name == held:
            yield f"{widget.role} {name!r} says only what it holds"
    names = Counter(widget.name for widget in showing if widget.role == "push button" and widget.is_enabled)
    yield from (f"{number} buttons are called {name!r}" for name, number in names.items() if number > 1)


def settled(window: RealWindow) -> list[Widget]:
    """All that shows, once that is the same twice."""
    seen: list[list[Widget]] = [[]]

    def look() -> list[Widget] | None:
        seen.append(window.accessible.showing())
        return seen[-1] if [w.path for w in seen[-1]] == [w.path for w in seen[-2]] else None

    return eventually(look, "the page came to rest")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_every_control_says_what_it_is(screen: Screen, starter: Path, switchyard_home: Path) -> None:
    found = []
    with real_window(screen, switchyard_home, starter) as window:
        eventually(lambda: "CPU, " in window.transcript(), "the model was loaded")
        for page in ("Chat", "Batch", "Monitor", "Tune", "Models", "Settings"):
            window.click(page, role="check box")
            at_first = settled(window)
            found += [f"{page}: {problem}" for problem in problems_of(window.accessible, at_first)]
            for opener in OPENED.get(page, ()):
                window.accessible.press(window.widget(opener))
                before = {widget.path for widget in at_first}
                showing = eventually(
                    lambda known=before: [w for w in settled(window) if w.path not in known], f"{opener} opened"
                )
                found += [f"{page} > {opener}: {problem}" for problem in problems_of(window.accessible, showing)]
                if opener == "What if…":  # a part of its page
                    continue
                closes = [w for w in showing if w.role == "push button" and w.name in ("Cancel", "Close")]
                opened = {w.path for w in showing if w.role in USED}
                if not closes:
                    screen.press("Escape")

                def is_closed(paths: set[str] = opened, closes: list[Widget] = closes) -> bool:
                    left = {w.path for w in window.accessible.showing()} & paths
                    if closes and closes[0].path in left:  # the keyboard is not always the dialog's, nor is it awake
                        window.accessible.press(closes[0])
                    return not left

                eventually(is_closed, f"{opener} closed")
        assert window.close() == 0
    assert not found, "\n".join(found)
