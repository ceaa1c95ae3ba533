"""Downloads and installations of Switchyard's own parts that do what a test says."""

import sys
from collections.abc import Callable
from pathlib import Path

from app.services.downloads import Downloads
from app.services.settings import Settings
from engine.checkpoint.downloads.queue import Download


class ScriptedDownloads(Downloads):
    """Notes what is asked for; nothing is fetched."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, command=["/no/such/program"])
        self.asked: list[str] = []

    def add_part(self, adding: Callable[[], Download]) -> None:
        self.asked.append("add")

    def pause(self, key: str) -> None:
        self.asked.append(f"pause {key}")

    def resume(self, key: str) -> None:
        self.asked.append(f"resume {key}")

    def cancel(self, key: str) -> None:
        self.asked.append(f"cancel {key}")

    def show(self, *found: Download) -> None:
        self._entries = found
        self.changed.emit()


def script(tmp_path: Path, text: str) -> list[str]:
    """A process that stands for the installation."""
    file = tmp_path / "installs.py"
    file.write_text(f"import json, sys, time\ndef say(**what): print(json.dumps(what), flush=True)\n{text}\n")
    return [sys.executable, str(file)]
