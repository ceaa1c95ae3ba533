"""What people want of a runner, by mouse in the real window: no terminal, and no restart."""

import json
import shutil
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.accessibility import Widget
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import RealWindow, real_window

LONG = "Write a long story about a lighthouse keeper and the sea, with many chapters."


class Mouse:
    """Clicks and turns of the wheel, on what is on the page that shows."""

    def __init__(self, window: RealWindow) -> None:
        self.window = window

    def page(self, name: str) -> None:
        self.window.click(name, role="check box")

    def bring(self, name: str, role: str | None = None) -> Widget:
        """Turns the wheel until a widget lies within the window, and still."""
        frame = self.window.widget("Switchyard", "frame")
        top, bottom = frame.y + 80, frame.y + frame.height - 60
        for _ in range(80):
            seen = self.window.widget(name, role)
            if top <= seen.y and seen.y + seen.height <= bottom:
                return eventually(lambda: self._still(name, role), f"{name!r} lay still")
            self.window.screen.wheel(frame.x + frame.width // 2, frame.y + frame.height // 2, down=seen.y > top)
        raise AssertionError(f"the wheel did not bring {name!r} into the window")

    def _still(self, name: str, role: str | None) -> Widget | None:
        first = self.window.accessible.find(name, role)
        return first if first is not None and first == self.window.accessible.find(name, role) else None

    def click(self, name: str, role: str | None = None, share: float = 0.5) -> None:
        """At that share of its width."""
        there = self.bring(name, role)
        self.window.screen.click(there.x + round(share * there.width), there.y + there.height // 2)

    def choose(self, label: str, letters: str) -> None:
        """Opens a choice by its label and takes what begins with the letters."""
        accessible = self.window.accessible
        boxes = [w for w in accessible.showing() if w.role == "combo box" and accessible.label(w) == label]
        self.window.screen.click(boxes[0].x + boxes[0].width // 2, boxes[0].y + boxes[0].height // 2)
        self.window.screen.type(letters)
        self.window.screen.press("Return")

    def find(self, field: str, typed: str) -> None:
        """Types a few letters of what is looked for into a field over what stands there."""
        there = self.bring(field, "text")
        self.window.screen.click(there.x + there.width // 3, there.y + there.height // 2)
        self.window.screen.press("ctrl+a")
        self.window.screen.type(typed)
        self.window.screen.press("Return")

    def line(self, *parts: str, patience_s: float = PATIENCE_S) -> str:
        """The line of the window that has all these parts."""

        def look() -> str:
            lines = self.window.transcript().splitlines()
            return next((line for line in lines if all(part in line for part in parts)), "")

        return eventually(look, f"the window said {parts}", patience_s)


def _asked(port: int, model: str) -> str:
    """What a program gets from the window's server."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=4 * PATIENCE_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_what_if_another_model_a_budget_and_a_language(screen: Screen, starter: Path, switchyard_home: Path) -> None:
    second = switchyard_home / "data" / "models" / "second"
    shutil.copytree(starter, second)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = switchyard_home / "config" / "settings.json"
    settings.parent.mkdir(parents=True)
    chosen = {"default_model": str(starter), "theme": "light", "serve_port": port}
    settings.write_text(json.dumps(chosen), encoding="utf-8")
    with real_window(screen, switchyard_home, starter) as window:
        mouse = Mouse(window)
        mouse.line("CPU, ")  # the model is loaded

        # A model of the catalogue, on a card that is not here.
        mouse.page("Tune")
        window.click("What if…", role="check box")
        mouse.find("Model", "qwen3 30b")
        mouse.find("Graphics card", "4090")
        assert "RTX 4090" in mouse.line("GeForce RTX 4090")
        mouse.line("tokens/s", "about")

        # Another program asks for another model by name, while a chat goes on.
        mouse.page("Settings")
        mouse.click("Let apps use the models of this PC", "check box", share=0.95)
        mouse.line(f":{port}")
        mouse.page("Chat")
        window.click("Message")
        screen.type(LONG)
        screen.press("Return")
        so_far = window.wait_for_text(1).content
        with ThreadPoolExecutor(1) as programs:
            other = programs.submit(_asked, port, "second")
            eventually(lambda: len(window.answers()[0].content) > len(so_far), "the chat went on")
            assert other.result(timeout=4 * PATIENCE_S)
        screen.press("Escape")
        window.wait_for_answer(1, "partial", "complete")

        # A budget of memory, with what it would give beside it, then timed.
        mouse.page("Settings")
        mouse.line("tokens/s", " to ")
        mouse.click("RAM to use", "slider", share=0.4)
        mouse.line("at most ")
        mouse.click("Time it", "push button")
        mouse.line("tokens/s, measured just now", patience_s=4 * PATIENCE_S)

        # Another language, and back.
        mouse.bring("Theme: Light")
        mouse.choose("Language", "De")
        mouse.window.widget("Einstellungen", "check box")
        mouse.choose("Sprache", "En")
        mouse.window.widget("Settings", "check box")
        assert window.close() == 0
