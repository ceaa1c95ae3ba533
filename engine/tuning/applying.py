"""Fills settings left to the engine with the tuned ones, if they were tuned on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

from engine.common.config import EngineConfig
from engine.hardware.measured import described
from engine.hardware.probe import Probe
from engine.hardware.probe import probe as probe_machine
from engine.tuning.keeping import is_same_question, model_mark, results_of, save_result
from engine.tuning.result import TuningResult

_ALWAYS_THE_USERS = ("model", "vram_bytes", "ram_bytes", "context_tokens")
OUTRUN = 1.5
"""Speedup over its timing at which a timing is no longer trusted: less is noise and heat."""
_CACHE = {"cache_slots", "cache_ways", "cache_policy", "misses", "prefetch"}


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
        """Whether any setting was tuned."""
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
    if given & _CACHE:
        return None  # do not mix a manual cache size with settings tuned for another
    filled = {
        entry.name: getattr(theirs, entry.name)
        for entry in fields(EngineConfig)
        if entry.name not in given and entry.name not in _ALWAYS_THE_USERS
    }
    return replace(config, **filled)


def machine_changes(result: TuningResult, machine: dict[str, str]) -> tuple[str, ...]:
    """What has changed since it was tuned, in sentences."""
    return tuple(
        f"The {fact.name} was {fact.value} and is now {machine.get(fact.name, 'unknown')}."
        for fact in result.machine
        if machine.get(fact.name) != fact.value
    )


def day(taken_at: str) -> str:
    """`21 Nov 2026` of an ISO time; the text itself if it is not a time."""
    try:
        moment = datetime.fromisoformat(taken_at).astimezone()
    except ValueError:
        return taken_at
    return f"{moment.day} {moment:%b %Y}"


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
