"""`switchyard bench machines`: what the engine chooses against every choice that could be made once and for all.

On cards and links of `resources/emulated_machines.json`, whose time is modelled, a model decodes a text and reads a
prompt: once as the engine would have it, and once in each way that never changes.  The cache has room for the part of
the experts that the card would have of Qwen3-30B-A3B in int4.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from engine.bench.opened import decode_seconds, hybrid_layers, opened, prefill_seconds, random_text, vocabulary_of
from engine.bench.report import Report, in_turn
from engine.common.errors import EngineError, ErrorCode
from engine.experts.cache.tier import BURST_STEPS
from engine.hardware.profiles import EMULATED, DeviceProfile, timed_profiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.bench.opened import ForcedText
    from engine.common.config import EngineConfig, Misses
    from engine.runtime.loaded_model import LoadedModel

_BESIDE_BYTES = 2_600_000_000
"""What else is on a card: the rest of Qwen3-30B-A3B, 4,096 tokens of context, activations, and the desktop."""
_EXPERTS_BYTES = 48 * 128 * 2_801_664
"""Its experts in int4."""
_PROMPT_TOKENS = 32
_WARM_UP, _FIXED_WARM_UP = BURST_STEPS + 32, 96
"""Tokens before those that are timed: until the cache has compared its policies, which takes no modelled time."""
_TAUGHT_LAYERS = 48
"""Layers of prompts before those that are timed, after a first one: as many as a prompt of Qwen3-30B-A3B has."""
_SETTLING = 8
"""Tokens before those of each repeat: the choice before has left the processor's caches to itself."""
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to use a machine, for good.

    Attributes:
        misses: see `EngineConfig.misses`; None: the processor alone.
        has_cache: whether experts are kept on the card.
        fills: how the cache is filled, if by nothing that happens: with whole layers, or what is used most.
    """

    misses: Misses | None
    has_cache: bool = True
    fills: str = ""


CHOICES = {
    OURS: Choice("mixed"),
    "all on the CPU": Choice(None, has_cache=False),
    "experts on the CPU": Choice("cpu", has_cache=False),
    "whole layers": Choice("cpu", fills="layers"),
    "static hot set": Choice("cpu", fills="hot"),
    "fetch always": Choice("fetch"),
    "cache off": Choice("off", has_cache=False),
}


@dataclass(frozen=True, slots=True)
class MachinesPlan:
    """What to run.

    Attributes:
        machines: names; all if there are none.
        beside: names of the choices that ours is run with, which are all held in RAM at once; all if there are none.
        tokens: decoded in each repeat, after others.
        prompt_tokens: of the prompt that is read.
        is_fixed: whether the host's time is modelled, too, so that figures can be repeated; otherwise it is measured.
    """

    machines: Sequence[str] = ()
    beside: Sequence[str] = ()
    tokens: int = 96
    prompt_tokens: int = 512
    repeats: int = 1
    is_fixed: bool = True


def resident_share(vram_bytes: int) -> float:
    """The part of Qwen3-30B-A3B's experts in int4 that a card has room for."""
    return min(1.0, max(0.0, (vram_bytes - _BESIDE_BYTES) / _EXPERTS_BYTES))


def bench_machines(config: EngineConfig, plan: MachinesPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: tokens per second on each machine of ours, and against the best of the others."""
    if unknown := [name for name in plan.beside if name not in CHOICES or name == OURS]:
        known = ", ".join(name for name in CHOICES if name != OURS)
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{unknown[0]!r} is not a choice to run beside ours: use {known}.")
    for profile in timed_profiles():
        if plan.machines and profile.name not in plan.machines:
            continue
        with ExitStack() as held:
            models = _warmed_up(config, plan, profile, held, say)
            turns = {name: partial(_rates, plan, profile, name, loaded) for name, loaded in models.items()}
            found = in_turn(turns, plan.repeats, report, say, warm_ups=0, what=profile.name, order=_shuffled)
        for number, kind in enumerate(("decode", "prompt")):
            rates = {name: [each[number] for each in values] for name, values in found.items()}
            _rows(f"{profile.name}, {kind}", rates, report)


def _shuffled(repeat: int, names: list[str]) -> list[str]:
    return Random(repeat).sample(names, len(names))


def _rates(
    plan: MachinesPlan, profile: DeviceProfile, name: str, loaded: LoadedModel, repeat: int
) -> tuple[float, float]:
    """Tokens per second of decoding, and of reading a prompt."""
    slower = _slowdown(plan, profile, CHOICES[name])
    seconds = sum(decode_seconds(loaded, _text(loaded, _SETTLING + plan.tokens, repeat))[_SETTLING:]) * slower
    prompt = random_text(vocabulary_of(loaded), plan.prompt_tokens, 1, repeat).prompt
    return plan.tokens / seconds, plan.prompt_tokens / (prefill_seconds(loaded, prompt) * slower)


def _warmed_up(
    config: EngineConfig, plan: MachinesPlan, profile: DeviceProfile, held: ExitStack, say: Callable[[str], None]
) -> dict[str, LoadedModel]:
    """The model once for each choice, all open at once: they are timed in turn, as this machine's speed varies."""
    warm_up = _FIXED_WARM_UP if plan.is_fixed else _WARM_UP
    with _opened(config, plan, profile, CHOICES[OURS]) as loaded:
        decode_seconds(loaded, _text(loaded, warm_up, 0))  # so that every choice knows what is used most
    models = {}
    for name, choice in CHOICES.items():
        if name != OURS and (name not in (plan.beside or CHOICES) or not _exists(config, profile, choice)):
            continue
        say(f"{profile.name}: {name}")
        models[name] = loaded = held.enter_context(_opened(config, plan, profile, choice))
        if loaded.foresight is not None:
            loaded.foresight.forget_uses()
        decode_seconds(loaded, _text(loaded, warm_up if name == OURS else _FIXED_WARM_UP, 0))
        for seed in range(-1 - -(-_TAUGHT_LAYERS // loaded.info.layers), 0):
            prefill_seconds(loaded, random_text(vocabulary_of(loaded), plan.prompt_tokens, 1, seed).prompt)
    return models


def _exists(config: EngineConfig, profile: DeviceProfile, choice: Choice) -> bool:
    """Whether it is another one than the rest: where not one layer fits, whole layers are experts on the CPU."""
    from engine.checkpoint.profile import read_profile as read_model

    model = read_model(Path(config.model))
    return choice.fills != "layers" or resident_share(profile.vram_bytes) * model.layers >= 1


def _slowdown(plan: MachinesPlan, profile: DeviceProfile, choice: Choice) -> float:
    """Of a processor that is timed without a card, beside this one."""
    return profile.cpu_slowdown if choice.misses is None and not plan.is_fixed else 1.0


def _rows(name: str, rates: dict[str, list[float]], report: Report) -> None:
    """Ours against all others, the best of them first."""
    others = sorted((peer for peer in rates if peer != OURS), key=lambda peer: -statistics.median(rates[peer]))
    for peer in others:
        report.add(name, rates[OURS], "tokens/s", peer=peer, peer_values=rates[peer])


def _text(loaded: LoadedModel, tokens: int, seed: int) -> ForcedText:
    return random_text(vocabulary_of(loaded), _PROMPT_TOKENS, tokens, seed)


@contextmanager
def _opened(config: EngineConfig, plan: MachinesPlan, profile: DeviceProfile, choice: Choice) -> Iterator[LoadedModel]:
    from engine.checkpoint.profile import read_profile as read_model

    model = read_model(Path(config.model))
    if choice.misses is None:
        device = f"{EMULATED}{profile.name}?host=only" if plan.is_fixed else "cpu"
        wanted = replace(config, device=device)
    else:
        every = model.layers * model.experts
        share = resident_share(profile.vram_bytes)
        slots: int | None = round(share * every) if choice.has_cache else 0
        wanted = replace(
            config,
            device=f"{EMULATED}{profile.name}{'?host=fixed' * plan.is_fixed}",
            misses=choice.misses,
            cache_slots=None if choice.misses == "mixed" and share == 1 else slots,
            cache_policy="static" if choice.fills == "hot" else "auto",
            cache_ways=model.experts if choice.fills == "layers" else None,
        )
    with ExitStack() as held:
        loaded = held.enter_context(opened(wanted))
        if choice.fills == "layers":
            fill_layers(loaded)
        yield loaded


def fill_layers(loaded: LoadedModel) -> None:
    """Brings all experts of the layers that have slots."""
    for _, layer in hybrid_layers(loaded.model):
        experts = range(layer.source.num_experts)
        while layer.cache.slots and layer.cache.free_slots(layer.layer):
            absent = layer.cache.absent(layer.layer, experts)
            held = layer.source.acquire(absent)
            begun = layer.cache.post_fetch(layer.layer, absent, held)
            held.release()
            layer.cache.wait()
            if not begun:
                return
