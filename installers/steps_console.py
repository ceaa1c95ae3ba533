"""Console output of set-up: short named steps with their time; output of pip and apt goes into a log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TAIL_LINES = 15
STILL_WORKING_S = 30


class SetupError(Exception):
    """Set-up failed; the message says in one sentence what happened and what to do."""


class Step:
    """One named step on the terminal.  Use as a context manager; call `tick` while it runs.

    On a terminal its line is updated with the elapsed time; in a log file a line is added every half minute.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.note = ""
        self._started = time.monotonic()
        self._last_shown = self._started
        self._is_terminal = sys.stdout.isatty()

    def __enter__(self) -> Step:
        print(f"* {self.name} ...", end="" if self._is_terminal else "\n", flush=True)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        end = "stopped" if kind is KeyboardInterrupt else "failed" if kind else "done"
        self._show(f"{end} in {elapsed(time.monotonic() - self._started)}{self.note}", "\n")

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_terminal:
            self._show(elapsed(now - self._started), "")
        elif now - self._last_shown >= STILL_WORKING_S:
            self._last_shown = now
            self._show(f"still working, {elapsed(now - self._started)}", "\n")

    def _show(self, state: str, end: str) -> None:
        line = f"\r* {self.name} ... {state}   " if self._is_terminal else f"  {state}"
        print(line, end=end, flush=True)


def elapsed(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else "{} min {} s".format(*divmod(whole, 60))


def run_logged(step: Step, command: list[str], log: Path, variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command with its output in the log; returns its exit code and output.

    Raises:
        KeyboardInterrupt: after ending the command.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write("\n$ {}\n".format(" ".join(command)).encode())
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    step.tick()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    with log.open("rb") as written:
        written.seek(begin)
        return code, written.read().decode("utf-8", errors="replace")


def tail(output: str, log: Path) -> str:
    """The last lines of a failed command, shown after the error."""
    lines = [line for line in output.splitlines() if line.strip()][-TAIL_LINES:]
    return "Last lines (full output in {}):\n{}".format(log, "\n".join("    " + line for line in lines))


def variables_for_children() -> dict[str, str]:
    """This process's environment without variables that would misdirect the private Python or pip."""
    leave_out = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "__PYVENV_LAUNCHER__")
    variables = {name: value for name, value in os.environ.items() if name not in leave_out}
    variables["PIP_USER"] = "0"
    return variables
