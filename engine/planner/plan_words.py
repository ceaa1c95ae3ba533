"""A plan's findings in sentences for the user."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about
from engine.hardware.machine import HardwareProfile, usual_row_s
from engine.planner.costs import Cards, Costs
from engine.planner.engine_memory import EngineMemory
from engine.planner.plan_parts import Help, PicturePlan, Workload
from engine.planner.plan_search import Question, quick_best
from engine.planner.simulator.request import Outcome
from engine.planner.step_time import costs_of_step

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
        sooner = usual_row_s(change.disk_bytes_per_s) / usual_row_s(changed.disk_bytes_per_s)
        row_s = sooner * changed.disk_row_s
        changed = replace(changed, disk_bytes_per_s=change.disk_bytes_per_s, disk_row_s=row_s)
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


_OF_LAYERS = " Layers are read for each token: rows of a file share that, and gain most."


def bottleneck_sentence(outcome: Outcome, costs: Costs, memory: EngineMemory, workload: Workload) -> str:
    """What limits decoding: the busiest lane, and why it is."""
    use, lane = outcome.utilisation, outcome.busiest
    if lane in ("cpu_experts", "cpu_attention"):
        busy = use.get("cpu_experts", 0.0) + use.get("cpu_attention", 0.0)
        if lane == "cpu_experts" and _bound_by_arithmetic(costs, workload):
            return (
                f"CPU arithmetic limits the speed: the CPU is busy {busy:.0%} of the time, and computing experts takes "
                "longer than reading them from RAM."
            )
        rate = costs.cpu_bytes_per_s / 1e9
        rest = "the other weights and the KV cache" if costs.model.experts > 1 else "the weights and the KV cache"
        what = "expert weights" if lane == "cpu_experts" else rest
        return f"Reading {what} from RAM limits the speed: the CPU is busy {busy:.0%} of the time, at {rate:.3g} GB/s."
    if lane == "h2d":
        return (
            f"The link to the card limits the speed: it is busy {use[lane]:.0%} of the time, "
            f"at {costs.machine.link.h2d / 1e9:.3g} GB/s."
        )
    if lane == "disk":
        without_room = [(memory.disk, "of experts"), (memory.streamed, "of whole layers")]
        told = " and ".join(f"{nbytes / 1e9:.3g} GB {what}" for nbytes, what in without_room if nbytes)
        return (
            f"The disk limits the speed: it is busy {use[lane]:.0%} of the time, at "
            f"{costs.machine.disk_bytes_per_s / 1e9:.3g} GB/s, because {told or 'rows of large embeddings'} do not fit "
            f"into RAM.{_OF_LAYERS if memory.streamed else ''}"
        )
    step = costs_of_step(costs, "mixed", disk_share=float(memory.disk > 0), has_all=memory.all_experts)
    launches = (step.launches.layer + step.launches.experts) * costs.model.layers * step.efficiency.operator_s
    if outcome.batch is None and launches > 0.5 * outcome.tpot_s:
        return (
            f"Launching many small operations on the card limits the speed: {launches * 1e3:.3g} ms of the "
            f"{outcome.tpot_s * 1e3:.3g} ms per token."
        )
    return (
        f"The graphics card limits the speed: it is busy {use.get(lane, 0.0):.0%} of the time, "
        f"reading at {costs.card_bytes_per_s / 1e9:.3g} GB/s."
        if costs.machine.gpu is not None
        else "The CPU limits the speed."
    )


def picture_words(pictures: PicturePlan | None) -> str:
    """`pictures: 0.4 s each (1024 x 1024) on the CPU, 620 MB`; empty for a model that reads text only."""
    if pictures is None:
        return ""
    where = "the graphics card" if pictures.on_card else "the CPU"
    return f"pictures: {pictures.seconds:.2g} s each (1024 x 1024) on {where}, {about(pictures.nbytes)}"


def sharing_sentence(outcome: Outcome, costs: Costs, others: list[Outcome]) -> str:
    """How several cards share the model, and what that means; empty where there is one, or none is used.

    Args:
        others: the outcomes of the same policy under the other ways to share.
    """
    gpu = costs.machine.gpu
    if gpu is None or gpu.count < 2 or not outcome.vram_bytes:
        return ""
    if outcome.cards is Cards.EXPERTS:
        said = f"The {gpu.count} cards share each layer's experts, and bring them over a link each."
    else:
        said = (
            f"Each of the {gpu.count} cards has a run of layers: an answer passes through them one after the other, no "
            "faster than through one, but more of the model fits."
        )
    other = max(others, key=lambda one: one.tokens_per_s, default=None)
    if other is None:
        return said
    way = "sharing layers" if other.cards is Cards.LAYERS else "sharing each layer's experts"
    return f"{said} By {way} it would be {other.tokens_per_s:.3g} tokens/s."


def help_sentence(helps: tuple[Help, ...], workload: Workload) -> str:
    """The change with the biggest gain: in decode steps for one sequence, in total tokens for several."""
    if not helps:
        return "No single change of memory, link, disk or precision would make a noticeable difference."
    best = helps[0]
    change = best.change[0].upper() + best.change[1:]
    gain = f"{best.gain:.2f}" if best.gain < 1.95 else f"{best.gain:.2g}"
    if workload.sequences == 1:
        faster = f"{best.decode_tokens_per_s:.3g} tokens/s, {gain} times as fast with the prompt included"
    else:
        faster = f"{best.tokens_per_s:.3g} tokens/s, about {gain} times as fast"
    return f"{change} would help most: {faster}."


def _bound_by_arithmetic(costs: Costs, workload: Workload) -> bool:
    """Whether the CPU takes longer to compute an expert of a decode step than to read it."""
    model = costs.model
    rows = max(1.0, workload.sequences * workload.beams * model.experts_per_token / model.experts)
    return costs.cpu_experts(rows) > 1.05 * costs.expert_bytes / costs.cpu_bytes_per_s
