"""What a fit card says of a download, against what the engine holds once the same files are loaded."""

import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.bench.opened import OneSequence, decode_seconds, opened, random_text
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.hub import Candidate, RepoFile, Repository, quality_of
from engine.checkpoint.model_shape import ModelShape
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig
from engine.common.footprint import PAGE_TOKENS, pages_for
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import open_devices
from engine.formats import STORED
from engine.hardware.measured import machine_profile
from engine.hardware.probe import OtherPrograms, busy_now, probe
from engine.kernels.native.build import library_path
from engine.measure.measuring import QUICK, measure_machine
from engine.planner.engine_memory import context_tokens
from engine.planner.plan_parts import Limits
from engine.planner.predict import predict_decode, running_config
from engine.runtime.loaded_model import LoadedModel
from engine.tuning.fit import FitRow, fit_card
from engine.tuning.machine_state import MachineLook, look_at_machine
from tests.engine.loaded_tiny import opened_model
from tests.engine.on_devices import memory_use, slots
from tests.engine.test_stored_precision import type_of
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

MIB = 2**20
CARD = "emulated:slow-link"
SYNTHETIC = (
    "synthetic:qwen3-moe-small?layers=2&experts=16&vocab=1024",
    "synthetic:qwen3-moe-small?layers=3&experts=24&vocab=512",
    "synthetic:qwen3-moe-tiny?layers=2&experts=64&vocab=2048",
)
SIZES = {"hidden_size": 512, "head_dim": 64, "vocab_size": 2048, "num_key_value_heads": 4}
CASES = 100
PADDING = MIB // 4
"""What tiles and pages add to models so small; in real ones it does not show."""


@dataclass(frozen=True)
class Made:
    """A model on this disk, and as a hub would have it."""

    path: Path
    candidate: Candidate
    shape: ModelShape


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, ...]:
    home = tmp_path_factory.mktemp("fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_HOME", str(home))
        folders = [make_synthetic(name) for name in SYNTHETIC]
        tiny = tiny_checkpoint("qwen3_moe", home / "moe", **SIZES, moe_intermediate_size=512, norm_topk_prob=True)
        dense = tiny_checkpoint("llama", home / "dense", **SIZES, intermediate_size=1024)
        files = [
            write_model(tiny, home / "moe-Q8_0.gguf", "qwen3moe", quantised="Q8_0"),
            write_model(tiny, home / "moe-Q4_K_M.gguf", "qwen3moe", quantised=type_of),
            write_model(dense, home / "dense-Q4_K_M.gguf", "llama", quantised=type_of),
        ]
        return tuple(_made(path) for path in (*folders, *files))


def _made(path: Path) -> Made:
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    label = "BF16" if path.is_dir() else path.stem.partition("-")[2]
    files = tuple(RepoFile(file.name, file.stat().st_size) for file in paths)
    repository = Repository("huggingface", "org/model", "c", files, "", "", False)
    return Made(path, Candidate(repository, label, files, quality_of(label)), find_shape(str(path)))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_bytes_of_each_memory_for_many_drawn_configurations(models: tuple[Made, ...]) -> None:
    look, draw = look_at_machine(CARD, CARD), random.Random(16)
    on_card = [_case(models, look, draw) for _ in range(CASES)]
    assert sum(on_card) >= CASES // 4  # else little was tried


def test_bytes_of_a_few(models: tuple[Made, ...]) -> None:
    look, draw = look_at_machine(CARD, CARD), random.Random(1)
    assert sum(_case(models, look, draw) for _ in range(3))


def _case(models: tuple[Made, ...], look: MachineLook, draw: random.Random) -> bool:
    """Draws a model and limits until one fits, and loads it; returns whether it uses the card."""
    while True:
        made = draw.choice(models)
        whole = 2 * made.shape.total_weights
        limits = Limits(
            vram_bytes=max(MIB // 4, round(whole * draw.uniform(0.1, 2.0)) + draw.randrange(8 * MIB)),
            ram_bytes=None if draw.random() < 0.7 else round(whole * draw.uniform(0.4, 2.0)) + 4 * MIB,
            threads=1,
            context_tokens=draw.choice((None, 64, 200, 700, 2000)),
            use_card=draw.random() < 0.8,
        )
        row = fit_card([(made.candidate, made.shape)], look, limits).rows[0]
        if row.ram is not None:
            break
    config = EngineConfig(
        str(made.path),
        device=CARD if limits.use_card else "cpu",
        vram_bytes=limits.vram_bytes,
        ram_bytes=limits.ram_bytes,
        threads=1,
        context_tokens=limits.context_tokens,
    )
    _compare(row, config, replace(limits, vram_of_others=0, ram_of_others=0), look, f"{made.path.name}, {limits}")
    return row.card is not None


def _compare(row: FitRow, config: EngineConfig, limits: Limits, look: MachineLook, said: str) -> None:
    assert row.ram is not None
    assert row.speed is not None
    shape = find_shape(config.model)
    with opened_model(config) as loaded:
        info = loaded.info
        assert (info.device != "cpu") == (row.card is not None), f"{said}: {info.device_note}"
        assert limits.held(shape, look.profile).words(info.precision) == row.precision, said
        if row.card is None:
            assert row.ram.weights == pytest.approx(info.weights_bytes, rel=0.05, abs=PADDING), said
        else:
            used = memory_use(loaded)[0].by_category
            experts = used[MemoryCategory.EXPERTS] + used[MemoryCategory.STAGING]
            assert row.card.weights == pytest.approx(used[MemoryCategory.WEIGHTS], rel=0.05, abs=PADDING), said
            assert row.card.experts + row.card.staging == pytest.approx(experts, rel=0.05, abs=PADDING), said
        if row.ram.experts:
            held = loaded.bank.nbytes if loaded.bank is not None else 0
            assert row.ram.experts == pytest.approx(held or info.experts_bytes, rel=0.05, abs=PADDING), said
        _compare_kv(row, loaded, config, said)
        # What is predicted is the speed of what runs: with the precision and the slots that loading chose.
        running = running_config(info, config, slots(loaded) if loaded.caches else None)
        machine = look.machine(shape.measured_as(info.precision), shape.expert_bytes(info.precision))
        again = predict_decode(machine, shape, running, prompt_tokens=128, tokens=128, limits=limits)
        assert row.speed.low <= again.tokens_per_s <= row.speed.high, said


def _compare_kv(row: FitRow, loaded: LoadedModel, config: EngineConfig, said: str) -> None:
    """Fills the whole context, where it was limited, which never runs out of memory; else compares with what a
    token was seen to take."""
    context = loaded.context_tokens
    # A small card may have room for less than was wanted; a token of it takes as much.
    at_context = row.kv_at_context * context / context_tokens(find_shape(config.model), Limits.of(config))
    held = context * loaded.info.kv_bytes_per_token
    if config.context_tokens is not None:
        vocabulary = loaded.model.config.get_text_config().vocab_size
        sequence = OneSequence(loaded)
        sequence.read(random_text(vocabulary, context - 1, 0).prompt)
        held = sequence.nbytes * context // (pages_for(context) * PAGE_TOKENS)  # whole pages
        sequence.close()
    assert at_context == pytest.approx(held, rel=0.05), said


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_label_and_a_size_say_nearly_as_much_as_a_header(tmp_path: Path, kind: str) -> None:
    """What is recommended without a network goes by them."""
    tiny = tiny_checkpoint("qwen3_moe", tmp_path / "moe", **SIZES, moe_intermediate_size=512, norm_topk_prob=True)
    file = write_model(tiny, tmp_path / "m.gguf", "qwen3moe", quantised=kind)
    exact, guessed = find_shape(str(file)), as_quantised(find_shape(str(tiny)), kind)
    assert exact.stored is not None
    assert guessed.precisions == exact.precisions
    assert guessed.expert_bytes(STORED) == pytest.approx(exact.expert_bytes(STORED), rel=0.01)
    assert guessed.stored.dense_bytes == pytest.approx(exact.stored.dense_bytes, rel=0.15)


REAL_SHAPES = (
    "synthetic:qwen3-30b-a3b?layers=2&experts=32&vocab=4096",
    "synthetic:olmoe-1b-7b?layers=2&experts=24&vocab=4096",
    "synthetic:gpt-oss-20b?layers=2&experts=8&vocab=4096",
)
CARDS = (CARD, "emulated:pcie3-x8-8gb")
SPEED_CASES, WITHIN = 20, 18
WIDEST = (0.6, 1.6)
"""Of the expected speed: a wider range on the CPU says nothing."""


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_range_of_speeds_holds_the_timed_one(models: tuple[Made, ...], tmp_path: Path) -> None:
    """Eighteen of twenty drawn models and devices, tiny ones and real shapes of few layers.

    `SWITCHYARD_SPEED_CASES` draws fewer, to try it out: then only that each has a figure is asserted.
    """
    cases = int(os.environ.get("SWITCHYARD_SPEED_CASES", SPEED_CASES))
    draw = random.Random(18)
    made = {False: models, True: tuple(_made(make_synthetic(name)) for name in REAL_SHAPES)}
    os.sync()  # what was just written is on its way to the disk
    found = [
        _timed_case(made[number % 4 >= 2], ("cpu", CARDS[number // 4 % 2])[number % 2], tmp_path, draw)
        for number in range(cases)
    ]
    lines = "\n".join(f"{'inside' if inside else 'OUTSIDE'}: {said}" for inside, said in found)
    sys.stdout.write(f"{lines}\n")
    assert cases < SPEED_CASES or sum(inside for inside, _ in found) >= WITHIN, lines


def _measured_look(device: str, folder: Path) -> MachineLook:
    """The machine as a quick measurement finds it, but for the disk."""
    machine = probe()
    what = replace(QUICK, measurements=tuple(one for one in QUICK.measurements if one.name != "disk"))
    taken = OtherPrograms().watch()
    with open_devices(device)[0] as opened_device:
        found = replace(measure_machine(what, machine, opened_device, folder), others=taken())
    return MachineLook(machine, device, found, machine_profile(machine, found))


def _without_card(look: MachineLook) -> MachineLook:
    assert look.measurements is not None
    of_cpu = tuple(one for one in look.measurements.arithmetic if one.device == "cpu")
    found = replace(look.measurements, device="", device_bytes=0, arithmetic=of_cpu, copies=())
    return MachineLook(look.probe, "", found, machine_profile(look.probe, found))


def _timed_case(models: tuple[Made, ...], device: str, folder: Path, draw: random.Random) -> tuple[bool, str]:
    """(whether the speed of a real decode is in the range that was said before, what was said and timed).

    The machine is measured anew each time: the memory of a virtual one is now and then twice as fast as a minute ago.
    """
    made, is_cpu, row = draw.choice(models), device == "cpu", None
    look = _without_card(_measured_look(CARD, folder)) if is_cpu else _measured_look(device, folder)
    threads = draw.choice((1, 2)) if is_cpu else 1
    while row is None or row.speed is None:
        vram = None if is_cpu else round(2 * made.shape.total_weights * draw.uniform(0.2, 3.0)) + 4 * MIB
        limits = replace(Limits(vram_bytes=vram, threads=threads, use_card=not is_cpu), cpu_of_others=busy_now())
        row = fit_card([(made.candidate, made.shape)], look, limits).rows[0]
    with opened(EngineConfig(str(made.path), device=device, threads=threads, vram_bytes=vram)) as loaded:
        vocabulary = loaded.model.config.get_text_config().vocab_size
        texts = [random_text(vocabulary, 128, 128, seed=draw.randrange(2**16)) for _ in range(2)]
        decode_seconds(loaded, texts[0], 1.0)  # fills the cache
        steps = decode_seconds(loaded, texts[1], 2.0)[1:]
    speed, rate = row.speed, len(steps) / sum(steps)
    low, high = speed.low / speed.decode, speed.high / speed.decode
    said = (
        f"{made.path.name}, {device}, {vram}, {threads} threads: {speed.low:.1f} to {speed.high:.1f} "
        f"({low:.2f} to {high:.2f} of {speed.decode:.1f}) tokens/s, timed {rate:.1f}"
    )
    is_useful = not is_cpu or (low >= WIDEST[0] and high <= WIDEST[1]) or bool(limits.cpu_of_others)
    return speed.low <= rate <= speed.high and is_useful, said
