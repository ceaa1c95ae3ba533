"""The real window as its own process: `python -m app`, driven by keys and clicks, watched from outside.

What it shows is seen over the accessibility bus, what it keeps in its chat database, what runs in the process table.
"""

import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.accessibility import AccessibleWindow, Widget
from tests.e2e.closing import ask_to_close
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StoredMessage:
    """A message as the chat database holds it."""

    id: str
    parent_id: str | None
    role: str
    content: str
    state: str
    reason: str
    reason_code: str
    chosen: bool


class RealWindow:
    """One running window with a Switchyard folder of its own."""

    def __init__(
        self, screen: Screen, accessible: AccessibleWindow, home: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.screen = screen
        self.accessible = accessible
        self.process = process
        self._home = home

    # --- what it shows ----------------------------------------------------------------------------

    def widget(self, name: str, role: str | None = None) -> Widget:
        """Waits until a widget of that accessible name shows."""

        def look() -> Widget | None:
            assert self.process.poll() is None, f"the window ended with code {self.process.returncode}"
            return self.accessible.find(name, role)

        return eventually(look, f"{role or 'something'} named {name!r} showed")

    def shows(self, name: str) -> bool:
        return self.accessible.find(name) is not None

    def transcript(self) -> str:
        """All text of the window that a screen reader would read out, in order."""
        return "\n".join(self.accessible.texts())

    # --- what a person does -----------------------------------------------------------------------

    def click(self, name: str, *, role: str | None = None, last: bool = False) -> None:
        """Clicks the middle of the first (or last) widget of that name, once it may be clicked and lies still."""
        seen: list[Widget] = []

        def look() -> Widget | None:
            named = [w for w in self.accessible.showing() if w.name == name and role in (None, w.role)]
            found = [widget for widget in named if widget.is_enabled]
            seen.append(found[-1 if last else 0] if found else Widget("", "", "", 0))
            return seen[-1] if found and len(seen) > 1 and seen[-1] == seen[-2] else None

        there = eventually(look, f"{name!r} could be clicked")
        self.screen.click(there.x + there.width // 2, there.y + there.height // 2)

    def fill(self, name: str, value: str) -> None:
        """Types a value into a number's field, over the one that stands there."""
        field = self.widget(name, "spin box")
        self.screen.click(field.x + field.width // 3, field.y + field.height // 2)
        eventually(lambda: self.widget(name, "spin box").is_focused, f"{name!r} had the keyboard")
        self.screen.press("ctrl+a")
        self.screen.type(value)
        self.screen.press("Tab")

    # --- what it keeps ----------------------------------------------------------------------------

    def messages(self) -> list[StoredMessage]:
        """Every message in the database, the oldest first."""
        path = self._home / "data" / "chats.sqlite3"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
            try:
                rows = connection.execute(
                    "SELECT id, parent_id, role, content, state, reason, reason_code, chosen FROM messages ORDER BY seq"
                ).fetchall()
            except sqlite3.OperationalError:  # the tables are not made yet
                return []
        return [StoredMessage(*row[:-1], chosen=bool(row[-1])) for row in rows]

    def answers(self) -> list[StoredMessage]:
        return [message for message in self.messages() if message.role == "assistant"]

    def wait_for_answer(self, number: int, *states: str) -> StoredMessage:
        """The answer of that number, counted from 1, once it is in one of those states."""

        def look() -> StoredMessage | None:
            answers = self.answers()
            return answers[number - 1] if len(answers) >= number and answers[number - 1].state in states else None

        return eventually(look, f"answer {number} was {' or '.join(states)}", 2 * PATIENCE_S)

    def wait_for_text(self, number: int) -> StoredMessage:
        """The answer of that number while it is being written, once it has some text."""

        def look() -> StoredMessage | None:
            answers = self.answers()
            return answers[number - 1] if len(answers) >= number and answers[number - 1].content else None

        answer = eventually(look, f"answer {number} had some text")
        assert answer.state == "streaming", "the answer was over before it could be interrupted"
        return answer

    # --- what runs --------------------------------------------------------------------------------

    def workers(self) -> list[psutil.Process]:
        """The window's living engine processes."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "engine.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def close(self) -> int:
        """Closes the window as the frame's cross would; the exit code of its process."""
        ask_to_close(self.screen, self.process.pid)
        return self.process.wait(timeout=PATIENCE_S)


@contextlib.contextmanager
def real_window(
    screen: Screen, home: Path, model: Path | None, environment: Mapping[str, str] | None = None
) -> Iterator[RealWindow]:
    """A window that has just come up; a new folder gets `model` as the model to load at the start, if there is one.

    Args:
        environment: variables beside those of the screen.
    """
    settings = home / "config" / "settings.json"
    if model is not None and not settings.exists():
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps({"default_model": str(model), "theme": "light"}), encoding="utf-8")
    home.mkdir(parents=True, exist_ok=True)
    log = home / "stderr.txt"
    with contextlib.ExitStack() as stack:
        # Its sockets lie in the temporary folder; a window that is killed leaves them there.
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="w-"))
        variables = {**screen.variables, "SWITCHYARD_HOME": str(home), "TMPDIR": temporary}
        variables |= environment or {}
        accessible = stack.enter_context(AccessibleWindow(screen.bus_address))
        errors = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", "app"], cwd=CHECKOUT, env=variables, stdin=subprocess.DEVNULL, stderr=errors
        )
        window = RealWindow(screen, accessible, home, process)
        try:
            window.widget("Switchyard", "frame")
            screen.focus_window_of(process.pid)
            yield window
        except BaseException:
            shown, said = accessible.describe(), log.read_text(encoding="utf-8", errors="replace")
            sys.stderr.write(f"--- what showed\n{shown}\n--- what the window wrote\n{said}")
            raise
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            psutil.wait_procs(children, timeout=PATIENCE_S)
    said = log.read_text(encoding="utf-8", errors="replace")
    if "Traceback" in said:
        pytest.fail(f"the window wrote a traceback:\n{said}")
