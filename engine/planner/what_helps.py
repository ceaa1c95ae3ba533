"""The effect of other hardware: predicts what a change of the machine would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.common.errors import EngineError, ErrorCode
from engine.hardware.machine import HardwareProfile
from engine.planner.plan_parts import Help
from engine.planner.plan_search import Question, quick_best

_LEAST_GAIN = 1.02
_RAM = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_VRAM = (4, 6, 8, 10, 12, 16, 24, 32, 48, 80, 96, 144, 192, 288)
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Change:
    """Other hardware; None keeps a part.

    Attributes:
        gpu: machine from `resources/machines` whose card and link are used.
        vram_bytes: of all cards together.
        ram_bytes: installed.
        link_bytes_per_s: in both directions, pinned.
        disk_bytes_per_s: sequential reads.
    """

    gpu: HardwareProfile | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    link_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None


def what_if(machine: HardwareProfile, change: Change) -> HardwareProfile:
    """The machine with other hardware.

    Raises:
        EngineError: `INVALID_REQUEST`, the memory of a card is changed but there is none.
    """
    changed = machine
    if change.gpu is not None:
        changed = replace(changed, gpu=change.gpu.gpu, link=change.gpu.link)
    if change.vram_bytes is not None and changed.gpu is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{machine.name} has no graphics card: choose one first.")
    changed = changed.with_memory(vram_bytes=change.vram_bytes, ram_bytes=change.ram_bytes)
    if change.link_bytes_per_s is not None:
        faster = change.link_bytes_per_s / changed.link.h2d
        link = replace(
            changed.link,
            h2d=change.link_bytes_per_s,
            d2h=changed.link.d2h * faster,
            h2d_pageable=changed.link.h2d_pageable * faster,
        )
        changed = replace(changed, link=link)
    if change.disk_bytes_per_s is not None:
        changed = replace(changed, disk_bytes_per_s=change.disk_bytes_per_s)
    return changed


def what_helps(question: Question) -> tuple[Help, ...]:
    """Changes that make it faster, the biggest gain first; each is simulated."""
    before = quick_best(question)
    if before is None:
        return ()
    found = []
    for words, changed in _candidates(question):
        after = quick_best(changed)
        if after is not None and after.tokens_per_s > _LEAST_GAIN * before.tokens_per_s:
            gain = after.tokens_per_s / before.tokens_per_s
            found.append(Help(words, after.tokens_per_s, after.decode_tokens_per_s, gain))
    return tuple(sorted(found, key=lambda one: -one.gain))


def _candidates(question: Question) -> list[tuple[str, Question]]:
    machine, limits = question.machine, question.limits
    tries: list[tuple[str, Question]] = []

    def with_change(words: str, change: Change, **of_limits: object) -> None:
        changed = replace(question, machine=what_if(machine, change))
        tries.append((words, replace(changed, limits=replace(limits, **of_limits))))  # type: ignore[arg-type]

    more_ram = _next(_RAM, machine.cpu.ram_bytes)
    if more_ram:
        with_change(f"{more_ram} GB of RAM", Change(ram_bytes=more_ram * _GIB), ram_bytes=None)
    if machine.gpu is not None and limits.use_card:
        more_vram = _next(_VRAM, machine.gpu.memory_bytes)
        if more_vram:
            change = Change(vram_bytes=more_vram * _GIB * machine.gpu.count)
            with_change(f"a card with {more_vram} GB", change, vram_bytes=None)
        with_change("a link to the card that is twice as fast", Change(link_bytes_per_s=2 * machine.link.h2d))
    with_change("a disk that is twice as fast", Change(disk_bytes_per_s=2 * machine.disk_bytes_per_s))
    cores = machine.cpu.cores
    if limits.threads and limits.threads < cores:
        tries.append((f"all {cores} threads", replace(question, limits=replace(limits, threads=None))))
    twice = replace(machine.cpu, ram_bytes_per_s=2 * machine.cpu.ram_bytes_per_s)
    measured = {threads: 2 * rate for threads, rate in machine.cpu.weights_bytes_per_s.items()}
    twice = replace(twice, weights_bytes_per_s=measured)
    tries.append(("RAM that is twice as fast", replace(question, machine=replace(machine, cpu=twice))))
    model = question.model
    asked = model.expert_bytes(question.precision)
    lower = next((each for each in model.precisions if model.expert_bytes(each) < asked), None)
    if lower is not None:
        tries.append(
            (f"{model.words(lower)} instead of {model.words(question.precision)}", replace(question, precision=lower))
        )
    return tries


def _next(sizes: tuple[int, ...], nbytes: int) -> int | None:
    """The next common size in GiB that is at least a quarter larger."""
    return next((size for size in sizes if size * _GIB >= 1.25 * nbytes), None)
