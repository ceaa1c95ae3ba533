"""Saved results: one JSON file per machine, model and settings, in the data folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES
from engine.checkpoint.names import resolve
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.foreign import read_foreign
from engine.common.json_fields import from_fields
from engine.common.paths import data_dir
from engine.hardware.measured import Measurements, described, save_measurements
from engine.hardware.probe import probe
from engine.tuning.result import Correction, Fact, TuningResult

_VERSION = 1
_MARK = 16
_WEIGHTS = (".safetensors", ".gguf", ".json")


def model_mark(folder: Path) -> str:
    """Identifies a model, whatever its name, by its configuration and its files' names and sizes.

    Cheap: called each time a model is loaded.  A copy of a model has the same mark.
    """
    digest = hashlib.sha256()
    try:
        digest.update(read_foreign(folder / CONFIG_NAME, MAX_CONFIG_BYTES))
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        digest.update(json.dumps([(path.name, path.stat().st_size) for path in files]).encode())
    except OSError:  # loading it reports the error
        digest.update(str(folder).encode())
    return digest.hexdigest()[:_MARK]


def facts(machine: Mapping[str, str]) -> tuple[Fact, ...]:
    """The machine's description from `engine.hardware.measured.described`."""
    return tuple(Fact(name, value) for name, value in machine.items())


def save_result(result: TuningResult) -> Path:
    """Saves it, replacing an earlier one of the same machine, model and settings.

    Raises:
        OSError: it could not be written; the old file is unchanged.
    """
    path = _file(result)
    write_private(path, json.dumps({"version": _VERSION, **asdict(result)}, indent=1))
    return path


def keep_anyway(result: TuningResult | None, measurements: Measurements | None) -> None:
    """Saves what a run did not save because other programs were busy, at the user's request.

    Raises:
        OSError: it could not be written.
    """
    if measurements is not None:
        save_measurements(measurements)
    if result is not None and result.winner:
        save_result(result)


def results_of(mark: str) -> list[TuningResult]:
    """All saved results of a model, latest first; unreadable ones are skipped."""
    found = (read_result(path) for path in _folder().glob(f"{mark}-*.json"))
    return sorted((one for one in found if one is not None), key=lambda one: one.taken_at, reverse=True)


def all_results() -> list[TuningResult]:
    """All saved results, latest first."""
    return results_of("*")


def kept_corrections(mark: str, machine: Mapping[str, str]) -> tuple[Correction, ...]:
    """The latest trusted correction of each configuration of a model on this machine."""
    here = [one for one in results_of(mark) if one.machine == facts(machine) and one.is_trusted]
    found: dict[tuple[str, bool, int], Correction] = {}
    for result in here:
        for one in result.corrections:
            found.setdefault((one.precision, one.on_card, one.threads), one)
    return tuple(found.values())


def corrections_here(model: str) -> tuple[Correction, ...]:
    """The same for a model by user-given name, on this machine; none if it is not here."""
    try:
        mark = model_mark(resolve(model))
    except EngineError:
        return ()
    return kept_corrections(mark, described(probe())) if results_of(mark) else ()


def read_result(path: Path) -> TuningResult | None:
    """The result in a file; None if there is none, or it is not one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        result = from_fields(TuningResult, content)
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError, RecursionError, EngineError):
        return None
    return result if isinstance(result, TuningResult) else None


def is_same_question(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether both leave the same resources to the engine."""
    return _question(one) == _question(other)


def _question(config: EngineConfig) -> EngineConfig:
    return EngineConfig(
        model="",
        device=config.device,
        vram_bytes=config.vram_bytes,
        ram_bytes=config.ram_bytes,
        context_tokens=config.context_tokens,
    )


def _file(result: TuningResult) -> Path:
    machine = [(fact.name, fact.value) for fact in result.machine]
    about = json.dumps([machine, asdict(replace(result.asked, model=""))], sort_keys=True)
    return _folder() / f"{result.model_mark}-{hashlib.sha256(about.encode()).hexdigest()[:_MARK]}.json"


def _folder() -> Path:
    return data_dir() / "tuning"
