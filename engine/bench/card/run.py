"""Runs the parts one after the other, and writes what is known after each: a failure loses nothing before it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_whole
from engine.common.paths import python_module
from engine.common.untrusted import reason

MODEL = "synthetic:qwen3-30b-a3b?layers=8&vocab=4096"
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run.

    Attributes:
        title: for people.
        name: of the function in `parts`; `tests` runs the tests of cards.
        limit_s: after which it is ended.
        is_fresh: whether nothing that earlier parts have kept may be used.
    """

    title: str
    name: str
    limit_s: float
    is_fresh: bool = False


TESTS = "tests"
ALL = (
    Part("Versions", "machine", 120),
    Part("Kernels, for the first time", "kernels", 240, is_fresh=True),
    Part("Kernels, once they are kept", "kernels", 120),
    Part("Tests on the card", TESTS, 240),
    Part("What stands between products", "between", 120),
    Part("Link and launches", "link", 120),
    Part("Experts as the dispatcher measures them", "experts", 180),
    Part("Decoding, all experts on the card", "resident", 180),
    Part("Decoding, half of the experts on the card", "mixed", 180),
    Part("Decoding, the other half on the CPU", "on_cpu", 180),
    Part("Tokens that the card runs by itself", "tokens", 180),
    Part("Decoding, the other half fetched", "fetched", 180),
    Part("Reading a prompt", "prompt", 180),
    Part("What a token asks of the card", "profile", 180),
)
"""In this order: what later ones need, earlier ones prove."""

Run = Callable[[Sequence[str], float, dict[str, str]], tuple[int, str, str]]
"""(exit code, output, errors) of a command within so many seconds; TimeoutError after them."""


def bench_card(
    device: str,
    model: str,
    folder: Path,
    say: Callable[[str], None],
    *,
    parts: Sequence[Part] = ALL,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measures a card and writes `DATE-CARD.json` and `.md` into `folder`, again after each part.

    Args:
        device: `cuda`, `cuda:1`, or an emulated one, to see what it does.
        run: runs a command; for tests.

    Returns:
        What was written.

    Raises:
        EngineError: `INVALID_REQUEST` if the folder cannot be written to.
    """
    run = run or _run
    begun = datetime.now(UTC)
    document: dict[str, Any] = {
        "date": begun.isoformat(timespec="seconds"),
        "device": device,
        "model": model,
        "parts": [],
    }
    with tempfile.TemporaryDirectory(prefix="switchyard-card-") as home:
        for part in parts:
            say(f"{part.title} ...")
            done = _done(part, device, model, Path(home), run)
            document["parts"].append(done)
            document.setdefault("card", device)
            document["card"] = done["figures"].get("card", document["card"])
            _write(document, folder, begun)
            say(f"  {done['outcome']}{': ' + done['why'] if done['why'] else ''}")
            for name, value in done["figures"].items():
                say(f"  {name}: {_shown(value)}")
    return document


def _done(part: Part, device: str, model: str, home: Path, run: Run) -> dict[str, Any]:
    command, variables = python_module("engine.bench.card.parts")
    command = [*command, part.name, device, model]
    if part.name == TESTS:
        root = Path(__file__).resolve().parents[3]
        if not (root / "tests" / "gpu").is_dir() or not device.startswith("cuda"):
            why = "this is no checkout" if device.startswith("cuda") else "they are for real cards"
            return _outcome(part, "skipped", 0.0, why)
        command, variables = [sys.executable, "-m", "pytest", "-q", "--no-header", str(root / "tests" / "gpu")], {}
    if part.name == "kernels":  # twice the same home: what the first one compiles, the second one finds
        variables = {**variables, "SWITCHYARD_HOME": str(home)}
    begun_s = time.monotonic()
    try:
        code, out, errors = run(command, part.limit_s, variables)
    except TimeoutError:
        return _outcome(part, "ended", time.monotonic() - begun_s, f"it took longer than {part.limit_s:.0f} s")
    except OSError as error:
        return _outcome(part, "failed", time.monotonic() - begun_s, reason(error))
    took_s = time.monotonic() - begun_s
    if part.name == TESTS:
        counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", out)}
        return _outcome(part, "done" if code == 0 else "failed", took_s, "" if code == 0 else _last(out), counts)
    try:
        figures = json.loads(out.strip().splitlines()[-1]) if code == 0 else {}
    except (ValueError, IndexError):
        code, figures = 1, {}
    return _outcome(part, "done" if code == 0 else "failed", took_s, "" if code == 0 else _last(errors), figures)


def _outcome(
    part: Part, outcome: str, took_s: float, why: str = "", figures: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "part": part.name,
        "title": part.title,
        "outcome": outcome,
        "seconds": round(took_s, 1),
        "why": why,
        "figures": figures or {},
    }


def _last(text: str) -> str:
    """The last line that says something, which is that of the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LAST_WORDS] if lines else "it said nothing"


def _write(document: dict[str, Any], folder: Path, begun: datetime) -> None:
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(document["card"])).strip("-").lower()[:60]
    path = folder / f"{begun:%Y-%m-%d-%H%M%S}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{begun:%Y-%m-%d-%H%M%S}-*"):
            if old.stem != path.name:  # the card's name was not known yet
                old.unlink()
        write_whole(path.with_name(f"{path.name}.json"), json.dumps(document, indent=1) + "\n")
        write_whole(path.with_name(f"{path.name}.md"), as_markdown(document))
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{folder} cannot be written to ({reason(error)}): choose another folder with --folder.",
        ) from error


def as_markdown(document: dict[str, Any]) -> str:
    """A page with a table for people."""
    lines = [
        f"# {document['card']}",
        "",
        f"{document['date']}, device {document['device']}, `{document['model']}` in int4.",
        "Made by `switchyard bench card`.",
        "",
        "| part | figure | value |",
        "|---|---|---|",
    ]
    for done in document["parts"]:
        outcome = done["outcome"] + (f": {done['why']}" if done["why"] else f" in {done['seconds']:.0f} s")
        lines.append(f"| {done['title']} | | {outcome.replace('|', '/')} |")
        lines += [f"| | {name} | {_shown(value)} |" for name, value in done["figures"].items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/")


def _run(command: Sequence[str], limit_s: float, variables: dict[str, str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **variables},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError from late
    return done.returncode, done.stdout, done.stderr
