"""Results on disk: one JSON file for each machine, model and question, in the data folder."""

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
from engine.common.foreign_file import read_foreign
from engine.common.json_fields import from_fields
from engine.common.paths import data_dir
from engine.hardware.measured import Measurements
from engine.hardware.measurement_files import described, save_measurements
from engine.hardware.probe import probe
from engine.tuning.result import Correction, Fact, TuningResult

_VERSION = 1
_MARK = 16
_WEIGHTS = (".safetensors", ".gguf", ".json")


def model_mark(folder: Path) -> str:
    """What tells a model from others of any name: its configuration, and its files' names and sizes.

    Reads next to nothing: it is asked each time that a model is loaded.  A copy of a model has the same mark.
    """
    digest = hashlib.sha256()
    try:
        digest.update(read_foreign(folder / CONFIG_NAME, MAX_CONFIG_BYTES))
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        digest.update(json.dumps([(path.name, path.stat().st_size) for path in files]).encode())
    except OSError:  # whoever loads it says what is wrong
        digest.update(str(folder).encode())
    return digest.hexdigest()[:_MARK]


def facts(machine: Mapping[str, str]) -> tuple[Fact, ...]:
    """What a machine is, as `engine.hardware.measurement_files.described` says it."""
    return tuple(Fact(name, value) for name, value in machine.items())


def save_result(result: TuningResult) -> Path:
    """Keeps it, in place of an earlier one of the same machine, model and question.

    Raises:
        OSError: it could not be written; what was there is still there.
    """
    path = _file(result)
    write_private(path, json.dumps({"version": _VERSION, **asdict(result)}, indent=1))
    return path


def keep_anyway(result: TuningResult | None, measurements: Measurements | None) -> None:
    """Keeps what a run did not, because other programs were busy meanwhile: the user wants it all the same.

    Raises:
        OSError: it could not be written.
    """
    if measurements is not None:
        save_measurements(measurements)
    if result is not None and result.winner:
        save_result(result)


def results_of(mark: str) -> list[TuningResult]:
    """All that are kept of a model, the latest first; what cannot be understood is left out."""
    found = (read_result(path) for path in _folder().glob(f"{mark}-*.json"))
    return sorted((one for one in found if one is not None), key=lambda one: one.taken_at, reverse=True)


def all_results() -> list[TuningResult]:
    """All that are kept, the latest first."""
    return results_of("*")


def kept_corrections(mark: str, machine: Mapping[str, str]) -> tuple[Correction, ...]:
    """Of all that was timed of a model on this machine and can be trusted: for each way of running it the latest."""
    here = [one for one in results_of(mark) if one.machine == facts(machine) and one.is_trusted]
    found: dict[tuple[str, bool, int], Correction] = {}
    for result in here:
        for one in result.corrections:
            found.setdefault((one.precision, one.on_card, one.threads), one)
    return tuple(found.values())


def corrections_here(model: str) -> tuple[Correction, ...]:
    """The same of whatever a user calls a model, on this machine; none for one that is not here."""
    try:
        mark = model_mark(resolve(model))
    except EngineError:
        return ()
    return kept_corrections(mark, described(probe())) if results_of(mark) else ()


def read_result(path: Path) -> TuningResult | None:
    """The result in a file; None if there is none, or it is not what we wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        result = from_fields(TuningResult, content)
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError, RecursionError, EngineError):
        return None
    return result if isinstance(result, TuningResult) else None


def is_same_question(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether both leave the engine the same of the machine, whatever else they say."""
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
