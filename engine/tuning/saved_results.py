"""Saved results: one JSON file per machine, model and settings, in the data folder.

They fill the settings that were left to the engine, if they were tuned on this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from engine.checkpoint.shards import content_digest
from engine.common.config import CACHE_FIELDS, EngineConfig
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.json_fields import from_fields
from engine.common.paths import data_dir
from engine.hardware.measured import Measurements, described, save_measurements
from engine.hardware.probe import Probe
from engine.hardware.probe import probe as probe_machine
from engine.tuning.result import Correction, Fact, TuningResult, day

_VERSION = 1
_MARK = 16


def model_mark(folder: Path) -> str:
    """Identifies a model, whatever its name: see `content_digest`.

    Cheap: called each time a model is loaded.  A copy of a model has the same mark.
    """
    try:
        return content_digest(folder)[:_MARK]
    except EngineError:  # loading it reports the error
        return hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:_MARK]


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


def read_result(path: Path) -> TuningResult | None:
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


_ALWAYS_THE_USERS = ("model", "vram_bytes", "ram_bytes", "context_tokens", "speculation", "kv_precision")
OUTRUN = 1.5
"""Speedup over its timing at which a timing is no longer trusted: less is noise and heat."""


@dataclass(frozen=True, slots=True)
class AppliedTuning:
    """The settings for loading a model.

    Attributes:
        config: with tuned values for everything left to the engine.
        note: a sentence for the user; empty if nothing was tuned.
    """

    config: EngineConfig
    note: str = ""

    @property
    def is_tuned(self) -> bool:
        return self.note.startswith("Tuned")


def apply_tuning(config: EngineConfig, folder: Path, look: Callable[[], Probe] = probe_machine) -> AppliedTuning:
    """Applies a saved result to these settings.

    Explicit settings take precedence: a precision or device other than the winner's leaves everything unchanged; other
    settings of the user's stay, and the rest is filled in. A result of another machine is not used; the note says so.

    Args:
        folder: the model's folder.
        look: detects the machine; called only if there is a result to compare with.
    """
    found = [one for one in results_of(model_mark(folder)) if one.won and answers(one, config)]
    if not found:
        return AppliedTuning(config)
    now = described(look())
    here = next((one for one in found if not machine_changes(one, now)), None)
    if here is None:
        changed = machine_changes(found[0], now)[0]
        return AppliedTuning(
            config, f"The tuning of {day(found[0].taken_at)} is not used: {_lower(changed)} Tune this model again."
        )
    tuned = tuned_config(config, here)
    won = here.won
    if tuned is None or won is None:
        return AppliedTuning(config)
    when = f"Tuned on {day(here.taken_at)}"
    if here.outrun:
        return AppliedTuning(tuned, f"{when}; it has since run faster, at {here.outrun:.1f} tokens/s: tune it again.")
    if here.was_busy:
        return AppliedTuning(tuned, f"{when} while other programs were busy: tune it again.")
    return AppliedTuning(tuned, f"{when}: {won.tokens_per_s:.1f} tokens/s.")


def note_outrun(
    folder: Path, asked: EngineConfig, tokens_per_s: float, look: Callable[[], Probe] = probe_machine
) -> TuningResult | None:
    """Marks the applied result if the model has run far faster than its timing.

    From then on its figure is neither shown nor used to correct predictions; its settings stay in use.

    Args:
        folder: the model's folder.
        look: as for `apply_tuning`.

    Returns:
        the result as saved; None if there is none, or it is not marked.

    Raises:
        OSError: it could not be written.
    """
    found = [one for one in results_of(model_mark(folder)) if one.won and answers(one, asked)]
    now = described(look()) if found else {}
    result = next((one for one in found if not machine_changes(one, now)), None)
    won = result.won if result is not None else None
    if result is None or won is None or result.outrun or tokens_per_s < OUTRUN * won.tokens_per_s:
        return None
    marked = replace(result, outrun=tokens_per_s)
    save_result(marked)
    return marked


def answers(result: TuningResult, config: EngineConfig) -> bool:
    """Whether the result was tuned for these settings: the same budgets and device.

    A result on the CPU holds for both `cpu` and `auto` if there is no card that `auto` could use.
    """
    if is_same_question(result.asked, config):
        return True
    won = result.won
    if won is None or won.device != "cpu" or {result.asked.device, config.device} != {"auto", "cpu"}:
        return False
    has_card = any(fact.name == "graphics card" and fact.value != "none" for fact in result.machine)
    allowed = config.device == "cpu" or not has_card
    return allowed and is_same_question(replace(result.asked, device=config.device), config)


def tuned_config(config: EngineConfig, result: TuningResult) -> EngineConfig | None:
    """The winner's settings where `config` leaves them to the engine; None if they do not apply."""
    won, plain = result.won, EngineConfig("")
    if won is None:
        return None
    given = {
        entry.name
        for entry in fields(EngineConfig)
        if entry.name not in _ALWAYS_THE_USERS and getattr(config, entry.name) != getattr(plain, entry.name)
    }
    theirs = won.contestant.config
    if "precision" in given and config.precision != won.precision:
        return None
    if given.intersection(CACHE_FIELDS):
        return None  # do not mix a manual cache size with settings tuned for another
    filled = {
        entry.name: getattr(theirs, entry.name)
        for entry in fields(EngineConfig)
        if entry.name not in given and entry.name not in _ALWAYS_THE_USERS
    }
    return replace(config, **filled)


def machine_changes(result: TuningResult, machine: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        f"The {fact.name} was {fact.value} and is now {machine.get(fact.name, 'unknown')}."
        for fact in result.machine
        if machine.get(fact.name) != fact.value
    )


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
