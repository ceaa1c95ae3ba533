"""`switchyard bench papers`: what five papers gain over what they compare with, by this engine on their machines.

Neither their cards nor room for Mixtral are here, so both are scaled down alike: a model with a 64th of Mixtral's
weights (`synthetic:mixtral-eighth`), and cards, links and processors with a 64th of the rates that `simulate papers`
gives the machines of the papers.  What belongs to one request runs on cards whose time is modelled, processor and all.
Batches run on cards whose link alone is emulated, beside one core of this machine, in turn.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machines import fill_layers
from benchmarks.schedules import SIMPLE, SchedulesPlan, schedule_rates
from engine.bench.opened import (
    ForcedText,
    decode_seconds,
    hybrid_layers,
    opened,
    prefill_seconds,
    random_text,
    vocabulary_of,
)
from engine.bench.report import Report
from engine.checkpoint.model_shape import read_model
from engine.checkpoint.profile import read_profile as read_dimensions
from engine.common import clock
from engine.common.config import EngineConfig, Misses, SamplingParams
from engine.common.errors import EngineError
from engine.hardware.machine import read_machine
from engine.hardware.profiles import EMULATED, DeviceProfile, lent
from engine.planner.costs import Costs
from engine.planner.papers import MEASURED, PublishedCell
from engine.planner.papers.collaborative import PAPER as COLLABORATIVE
from engine.planner.papers.duoserve import PAPER as DUOSERVE
from engine.planner.papers.fiddler import PAPER as FIDDLER
from engine.planner.papers.klotski import PAPER as KLOTSKI
from engine.planner.papers.moe_lightning import PAPER as MOE_LIGHTNING
from engine.planner.schedules import (
    CGOPIPE,
    HOT_ONLY_ON_CARD,
    KLOTSKI_ON_CARD,
    MULTI_BATCH,
    MULTI_BATCH_ON_CARD,
    S3,
    S4,
)
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.common.config import Misses
    from engine.runtime.loaded_model import LoadedModel

_EXPERTS = 256
"""Of Mixtral: the papers say how many of them are on a card."""
_ROOM = 2**36
"""How many experts are on a card is said in slots."""
_LINK_ONLY = {"gcp-t4": 0.3, "gcp-l4": 0.4, "klotski-rtx-3090": 0.45}
"""GB/s beside one core of a PC: slow enough to bound the batches that are run here, as links do there."""


_REPEATED_KEYS = (
    "FlexGen's attention on the CPU repeats keys and values for every query head; here S3 is the same order of work "
    "with a kernel that does not"
)


@dataclass(frozen=True, slots=True)
class PapersPlan:
    """What to run.

    Attributes:
        smaller: how much smaller than Mixtral's an expert of the model is.
        generated: tokens of an answer; prompts: lengths of long prompts; beams: widths of searches.
        every_machine: of a paper's machines; else the first one.
        rows: of a batch; 0 for no batches.
        repeats: of batches, whose time is this machine's.
    """

    smaller: float = 64.0
    generated: int = 64
    prompts: tuple[int, ...] = (512, 2048)
    beams: tuple[int, ...] = (4, 16)
    every_machine: bool = True
    rows: int = 16
    micro_batch: int = 4
    tokens: int = 4
    repeats: int = 3


LONG = PapersPlan()
QUICK = PapersPlan(generated=16, prompts=(256,), beams=(4,), every_machine=False, rows=0)


def paper_cells(
    model: Path, plan: PapersPlan, papers: Sequence[str], say: Callable[[str], None]
) -> Iterator[PublishedCell]:
    """Gains of the papers' mechanisms, theirs beside the engine's.

    Args:
        model: shaped like Mixtral.
        papers: parts of names of those to run; all if there are none.
    """
    run: dict[str, Callable[[_Bench], Iterator[PublishedCell]]] = {
        COLLABORATIVE: _collaborative,
        FIDDLER: _fiddler,
        DUOSERVE: _duoserve,
        MOE_LIGHTNING: _moe_lightning,
        KLOTSKI: _klotski,
    }
    for paper, cells in run.items():
        if not papers or any(part.lower() in paper.lower() for part in papers):
            say(paper)
            yield from cells(_Bench(model, plan, say))


def smaller_machine(name: str, smaller: float) -> DeviceProfile:
    """A card with a clock of its own, and the processor beside it: a paper's machine, at a part of its rates."""
    costs = Costs(read_machine(name), read_model("mixtral-8x7b"))
    link, of_rate = costs.machine.link, 1e9 * smaller
    return DeviceProfile(
        name=f"smaller-{name}",
        description=costs.machine.description,
        vram_bytes=_ROOM,
        link_h2d_gbps=link.h2d / of_rate,
        link_d2h_gbps=link.d2h / of_rate,
        link_latency_us=link.latency_s * 1e6,
        card_gbps=costs.card_bytes_per_s / of_rate,
        card_tflops=costs.card_flops / of_rate / 1e3,
        cpu_gbps=costs.cpu_bytes_per_s / of_rate,
        cpu_tflops=costs.cpu_flops / of_rate / 1e3,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    model: Path
    plan: PapersPlan
    say: Callable[[str], None]

    def machines(self, *names: str) -> tuple[str, ...]:
        return names if self.plan.every_machine else names[:1]

    @contextlib.contextmanager
    def opened(
        self,
        machine: str,
        slots: int,
        misses: Misses,
        *,
        policy: str = "auto",
        ways: int | None = None,
        vram_bytes: int | None = None,
    ) -> Iterator[LoadedModel]:
        """The model on a paper's machine.

        Args:
            slots: of Mixtral's experts, how many are on the card.
            policy: of the cache; `layers`: whole layers hold them, for good.
        """
        dimensions = read_dimensions(self.model)
        config = EngineConfig(
            str(self.model),
            device=f"{EMULATED}smaller-{machine}?host=fixed",
            precision="bf16",
            threads=1,
            cache_slots=round(slots / _EXPERTS * dimensions.layers * dimensions.experts),
            misses=misses,
            vram_bytes=vram_bytes,
            speculation="off",
        )
        if policy == "layers":
            config = replace(config, cache_ways=dimensions.experts)
        elif policy != "auto":
            config = replace(config, cache_policy=policy)  # type: ignore[arg-type]
        if ways is not None:
            config = replace(config, cache_ways=ways)
        with lent(smaller_machine(machine, self.plan.smaller)), opened(config) as loaded:
            if policy == "layers":
                fill_layers(loaded)
            elif slots:
                decode_seconds(loaded, self.text(loaded, 0))
            yield loaded

    def text(self, loaded: LoadedModel, seed: int, prompt: int = 32) -> ForcedText:
        return random_text(vocabulary_of(loaded), prompt, self.plan.generated, seed)

    def answer_s(self, loaded: LoadedModel) -> float:
        """Seconds of a short prompt and its answer."""
        text = self.text(loaded, 1)
        return prefill_seconds(loaded, text.prompt) + sum(decode_seconds(loaded, text))

    def step_s(self, loaded: LoadedModel) -> float:
        return statistics.fmean(decode_seconds(loaded, self.text(loaded, 1)))

    def prompts_s(self, loaded: LoadedModel) -> list[float]:
        return [prefill_seconds(loaded, self.text(loaded, 2, length).prompt) for length in self.plan.prompts]

    def beams_s(self, loaded: LoadedModel, width: int) -> float:
        """Seconds of a search with so many beams."""
        sampling = SamplingParams(max_tokens=self.plan.generated, beams=width)
        asked = BatchRequest(0, ids=tuple(self.text(loaded, 3).prompt), sampling=sampling, end_ids=frozenset())
        scheduler = Scheduler(loaded)
        try:
            begun_s = clock.now()
            scheduler.answer(asked)
            return clock.now() - begun_s
        finally:
            scheduler.close()


_cell = partial(PublishedCell, unit="x", kind=MEASURED)


def _collaborative(bench: _Bench) -> Iterator[PublishedCell]:
    """The cache over all experts on the CPU, and fewer indexes of more ways over 2 ways."""
    machine, slots = "threadripper-7960x-rtx-4090", 56
    found = {}
    for name, held, ways in (
        ("none", 0, None),
        ("2", slots, 2),
        ("4", slots, 4),
        ("8", slots, 8),
        ("one pool", slots, None),
    ):
        with bench.opened(machine, held, "cpu", ways=ways) as loaded:
            found[name] = bench.step_s(loaded)
            bench.say(f"  {name}: {1 / found[name]:.1f} tokens/s")
    best = min(seconds for name, seconds in found.items() if name != "none")
    yield _cell(
        COLLABORATIVE,
        "engine: IV-B, RTX 4090",
        "cache over CPU only",
        1.25,
        found["none"] / best,
        note="published: 1.15 to 1.35",
    )
    yield _cell(
        COLLABORATIVE,
        "engine: fig. 5, RTX 4090",
        "best over 2 ways",
        4.8 / 2.2,
        found["2"] / best,
        why="published: 2 ways wait for the link; here a copy under way is no hit, and nothing waits for it",
    )


def _fiddler(bench: _Bench) -> Iterator[PublishedCell]:
    """Single batch, long prompts and beams, over ways to use a card that do not choose."""
    single, whole, fetched, beams = (list[float]() for _ in range(4))
    ways: tuple[tuple[Misses, list[float]], ...] = (("layer", whole), ("fetch", fetched))
    for machine in bench.machines("fiddler-quadro-rtx-6000", "fiddler-rtx-6000-ada"):
        slots = 56 if "quadro" in machine else 125
        with bench.opened(machine, slots, "mixed") as loaded:
            ours, long = bench.answer_s(loaded), bench.prompts_s(loaded)
            searched = [bench.beams_s(loaded, width) for width in bench.plan.beams]
        with bench.opened(machine, slots, "cpu", policy="layers") as loaded:
            split = bench.answer_s(loaded)
        for misses, gains in ways:
            with bench.opened(machine, 0 if misses == "layer" else slots, misses) as loaded:
                gains += [theirs / mine for theirs, mine in zip(bench.prompts_s(loaded), long, strict=True)]
        single.append(split / ours)
        beams += [width * split / mine for width, mine in zip(bench.plan.beams, searched, strict=True)]
    note = "llama.cpp: whole layers on the card, the others' experts on the CPU"
    yield _cell(FIDDLER, "engine: fig. 4", "single batch, over llama.cpp", 1.26, statistics.fmean(single), note=note)
    yield _cell(
        FIDDLER,
        "engine: fig. 5, DeepSpeed-MII",
        "long prefill",
        1.07,
        statistics.fmean(whole),
        note="DeepSpeed-MII: every layer's experts, one layer ahead",
        why="Fiddler's code copies one expert after the other; here copies go on while others are computed, and the "
        "CPU takes those with few tokens",
    )
    note = "Mixtral-Offloading: every miss is fetched"
    yield _cell(
        FIDDLER, "engine: fig. 5, Mixtral-Offloading", "long prefill", 1.65, statistics.fmean(fetched), note=note
    )
    yield _cell(
        FIDDLER,
        "engine: fig. 6",
        "beams, over llama.cpp",
        11.57,
        statistics.fmean(beams),
        note="one beam after the other on whole layers",
        why="llama.cpp's beams of that time also decoded again, for each beam, all tokens since the beams parted",
    )


def _duoserve(bench: _Bench) -> Iterator[PublishedCell]:
    """The card's memory at the peak of a prompt on the smallest card that takes it, over that of whole layers."""
    machine = "duoserve-rtx-a5000"
    with bench.opened(machine, 0, "layer") as loaded:
        bench.prompts_s(loaded)
        whole = _peak(loaded)
    with bench.opened(machine, 0, "mixed") as loaded:
        expert = hybrid_layers(loaded.model)[0][1].cache.layout.nbytes
    for vram_bytes in range(expert, whole, expert):
        with (
            contextlib.suppress(EngineError),  # too small a card
            bench.opened(machine, 0, "mixed", vram_bytes=vram_bytes) as loaded,
        ):
            bench.prompts_s(loaded)
            if hybrid_layers(loaded.model):
                least = _peak(loaded)
                break
    else:
        least = whole
    bench.say(f"  {least / 1e6:.2f} MB, whole layers {whole / 1e6:.2f} MB")
    yield _cell(
        DUOSERVE,
        "engine: 2, RTX A5000",
        "memory of a prompt, over whole layers",
        3.91 / 4.24,
        least / whole,
        note="all that is on the card at the peak; published with its predictor",
        why="published of weights in 4 bits beside 2.15 GB that is no expert; here experts are in 16 bits like the "
        "rest, and a larger part of all",
    )


def _peak(loaded: LoadedModel) -> int:
    assert loaded.devices is not None
    return loaded.devices.devices[0].memory.use().peak


def _moe_lightning(bench: _Bench) -> Iterator[PublishedCell]:
    """CGOPipe over FlexGen's schedules, with attention on the CPU (S3) and on the card (S4); S2 has no figure there."""
    published = {"gcp-t4": (26.349 / 16.903, 26.349 / 22.691), "gcp-l4": (105.29 / 20.015, 105.29 / 50.138)}
    for machine in bench.machines(*published) if bench.plan.rows else ():
        rates = _rates(bench, machine, (CGOPIPE.name, MULTI_BATCH.name, S3.name, S4.name))
        bench.say(f"  CGOPipe over S2: {rates[CGOPIPE.name] / rates[MULTI_BATCH.name]:.2f}")
        for schedule, gain in zip((S3, S4), published[machine], strict=True):
            found = rates[CGOPIPE.name] / rates[schedule.name]
            cell, why = f"CGOPipe over {schedule.name.upper()}", _REPEATED_KEYS if schedule == S3 else ""
            yield _cell(MOE_LIGHTNING, f"engine: 4, {machine}", cell, gain, found, why=why)


def _klotski(bench: _Bench) -> Iterator[PublishedCell]:
    """Its pipeline over the three before it."""
    if not bench.plan.rows:
        return
    before = {SIMPLE: 5.721, MULTI_BATCH_ON_CARD.name: 18.24, HOT_ONLY_ON_CARD.name: 19.074}
    rates = _rates(bench, "klotski-rtx-3090", (KLOTSKI_ON_CARD.name, *before))
    for name, published in before.items():
        found = rates[KLOTSKI_ON_CARD.name] / rates[name]
        yield _cell(KLOTSKI, "engine: 3, RTX 3090", f"Klotski over {name}", 22.414 / published, found)


def _rates(bench: _Bench, machine: str, names: Sequence[str]) -> dict[str, float]:
    """Median tokens per second of schedules, in turn."""
    rate, plan = _LINK_ONLY[machine], bench.plan
    card = DeviceProfile(f"link-of-{machine}", f"the link of {machine}", 2**33, rate, rate, 10.0)
    config = EngineConfig(
        str(bench.model), device=f"{EMULATED}{card.name}", precision="bf16", ram_bytes=3 * 2**29, speculation="off"
    )
    sizes = SchedulesPlan(plan.rows, plan.tokens, plan.repeats, plan.micro_batch)
    with lent(card):
        found = schedule_rates(config, sizes, names, Report({}), bench.say)
    return {name: statistics.median(values) for name, values in found.items()}
