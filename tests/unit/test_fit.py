"""Whether a model fits, before it is downloaded: rows, verdicts, what is recommended and why."""

from dataclasses import replace

import pytest

from engine.checkpoint.catalogue import Catalogue, CatalogueEntry, catalogue_dir, find_shape, read_catalogue
from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.hub import Candidate, RepoFile, Repository, quality_of
from engine.checkpoint.library import note_use
from engine.checkpoint.model_shape import ModelShape, read_model
from engine.checkpoint.names import resolve
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig
from engine.common.paths import models_dir
from engine.formats import AUTO
from engine.hardware.measured import machine_profile
from engine.planner.plan_parts import Limits, Plan
from engine.protocol import StartTuning
from engine.tuning import fit
from engine.tuning.fit import (
    FAST_TOKENS_PER_S,
    WORKS_TOKENS_PER_S,
    FitRow,
    Recommendation,
    fit_card,
    recommend,
    verdict_of,
)
from engine.tuning.machine_state import MachineLook, plan_here
from engine.tuning.run import tune
from tests.unit.made_up_tuning import MACHINE, MadeUpEngine, around, measurements

GIB = 2**30
OLMOE, QWEN = read_model("olmoe-1b-7b"), read_model("qwen3-30b-a3b")


def look(ram: int = 16, device: str = "", free: int | None = 2**40, *, measured: bool = True) -> MachineLook:
    probe = replace(MACHINE, ram_bytes=ram * GIB, ram_available_bytes=ram * GIB, models_disk_free_bytes=free)
    taken = measurements(probe) if measured else None
    return MachineLook(probe, device, taken, machine_profile(probe, taken))


def candidate(label: str, nbytes: float, *, problem: str = "") -> Candidate:
    repository = Repository("huggingface", "org/model", "c", (), "mit", "", False)
    file = RepoFile(f"{label}.gguf", round(nbytes))
    return Candidate(repository, label, (file,), quality_of(label), problem)


def quantised(shape: ModelShape, label: str, bits: float) -> tuple[Candidate, ModelShape]:
    nbytes = round(shape.total_weights * bits / 8)
    return candidate(label, nbytes), as_quantised(shape, label)


def row(found: tuple[Candidate, ModelShape | None], where: MachineLook, limits: Limits | None = None) -> FitRow:
    return fit_card([found], where, limits or Limits()).rows[0]


def test_verdicts_have_stated_thresholds() -> None:
    assert [verdict_of(rate) for rate in (FAST_TOKENS_PER_S, WORKS_TOKENS_PER_S, 0.9 * WORKS_TOKENS_PER_S)] == [
        "fast",
        "works",
        "batch-only",
    ]


def test_a_row_has_every_bar() -> None:
    one = row(quantised(OLMOE, "Q4_K_M", 4.85), look(), Limits(ram_of_others=3 * GIB, context_tokens=2048))
    assert one.speed is not None
    assert one.card is None
    assert one.ram.other_programs == 3 * GIB
    assert min(one.ram.weights, one.ram.experts, one.ram.kv) > 0
    assert one.disk.download == one.bytes == one.candidate.bytes
    assert one.verdict == verdict_of(one.speed.decode)
    assert one.speed.low < one.speed.decode < one.speed.high
    assert one.speed.timing == "estimated"
    assert 0 < one.speed.ttft_range[0] < one.speed.ttft < one.speed.ttft_range[1]
    assert one.kv_at_context == 2048 * OLMOE.kv_bytes_per_token()
    assert one.why
    assert one.load_anyway


def test_a_card_is_used_and_its_limit_follows() -> None:
    there = look(64, "emulated:pcie3-x8-8gb", measured=False)
    whole = row(quantised(QWEN, "Q4_K_M", 4.85), there)
    less = row(quantised(QWEN, "Q4_K_M", 4.85), there, Limits(vram_bytes=4 * GIB))
    assert whole.card.experts > less.card.experts > 0
    assert less.card.held <= 4 * GIB
    assert row(quantised(QWEN, "Q4_K_M", 4.85), there, Limits(use_card=False)).card is None


def test_what_streams_from_disk_says_so() -> None:
    one = row(quantised(QWEN, "Q4_K_M", 4.85), look(8))
    assert one.from_disk > 0
    assert one.disk.bank == 0  # they are read from the file itself
    assert one.verdict != "fast"


def test_what_does_not_fit() -> None:
    big = read_model("deepseek-v3")
    one = row(quantised(big, "Q4_K_M", 4.85), look(1))
    assert (one.verdict, one.speed, one.ram, one.fits_alone) == ("too-large", None, None, False)
    busy = row(quantised(OLMOE, "Q4_K_M", 4.85), look(4), Limits(ram_of_others=round(3.9 * GIB)))
    assert (busy.verdict, busy.fits_alone) == ("too-large", True)


def test_a_full_disk() -> None:
    one = row(quantised(OLMOE, "Q4_K_M", 4.85), look(free=GIB))
    assert (one.verdict, one.disk.free) == ("too-large", GIB)
    assert one.ram is not None  # it would run


def test_what_cannot_run_keeps_its_reason() -> None:
    one = row((candidate("IQ2_XXS", 10**9, problem="It cannot be read."), None), look())
    assert (one.verdict, one.why) == ("too-large", "It cannot be read.")
    card = fit_card([(one.candidate, None)], look(), Limits())
    assert (card.recommended, card.why) == (None, "It cannot be read.")


def test_the_best_quality_that_is_fast_is_recommended() -> None:
    found = [quantised(OLMOE, label, bits) for label, bits in
             (("BF16", 16), ("Q8_0", 8.5), ("Q6_K", 6.6), ("Q4_K_M", 4.85), ("Q3_K_M", 3.9))]  # fmt: skip
    card = fit_card(found, look(32), Limits())
    assert card.recommended is not None
    assert card.rows[card.recommended].candidate.label == "Q6_K"  # no worse than 8 or 16 bits, and the smallest
    small = fit_card(found, look(5), Limits())
    assert small.recommended is not None
    assert small.rows[small.recommended].candidate.label == "Q4_K_M"
    assert fit_card([], look(), Limits()).recommended is None


def test_what_was_timed_here_is_said_of_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tuning.race.compute_threads", lambda: 4)
    made = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    folder = models_dir() / "tiny"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(made, target_is_directory=True)
    config = EngineConfig(str(folder))
    there = MachineLook(MACHINE, "", measurements(), machine_profile(MACHINE, measurements()))
    shape, limits = find_shape(str(made)), there.limits(config)
    before = plan_here(there, shape, config, limits)

    def speed(asked: EngineConfig) -> float:
        return before.speed.decode_tokens_per_s * (0.8 if asked.precision == before.precision else 0.1)

    request = StartTuning("t", config, even_if_busy=True)
    assert tune(MadeUpEngine(speed), request, lambda _event: None, lambda: False, around()).result is not None
    files = tuple(RepoFile(path.name, path.stat().st_size) for path in sorted(made.iterdir()))
    here = replace(candidate("BF16", 1), files=files)
    other = replace(here, files=(replace(files[0], size=files[0].size + 1), *files[1:]))
    found = fit_card([(here, shape), (other, shape)], there, limits)
    timings = [one.speed.timing for one in found.rows if one.speed is not None]
    assert timings == ["measured here", "estimated"]
    assert found.rows[0].speed is not None
    assert found.rows[0].speed.decode == pytest.approx(0.8 * before.speed.decode_tokens_per_s)


def test_what_its_last_answers_took_is_said_of_the_same_files() -> None:
    made = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    folder = models_dir() / "tiny"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(made, target_is_directory=True)
    files = tuple(RepoFile(path.name, path.stat().st_size) for path in sorted(made.iterdir()))
    here, shape = replace(candidate("BF16", 1), files=files), find_shape(str(made))

    def speed(limits: Limits) -> tuple[str, float]:
        found = row((here, shape), look(), limits).speed
        return found.timing, found.decode

    timing, predicted = speed(Limits())
    assert timing == "estimated"
    precision = next(one for one in shape.precisions if shape.words(one) == row((here, shape), look()).precision)
    for rate in (30.0, 20.0, 25.0):
        note_use(resolve(str(folder)), f"cpu, {precision}", rate, 100)
    assert speed(Limits()) == ("measured here", 25.0)
    assert speed(Limits(ram_bytes=2**33))[0] == "estimated"  # what it had then is not known
    note_use(resolve(str(folder)), "cuda:0, int8", 99.0, 100)
    assert speed(Limits()) == ("estimated", pytest.approx(predicted))


def test_an_answer_counts_in_the_precision_that_loading_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning would choose a coarser one, which nobody has tried."""
    made = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    shape, asked = find_shape(str(made)), Limits()
    loaded = fit._run(shape, look(), asked, None).precision
    coarser = next(one for one in shape.precisions if one != loaded)
    plans: list[str] = []

    def plan_in(where: MachineLook, of: ModelShape, config: EngineConfig, limits: Limits) -> Plan:
        plans.append(limits.precision)
        wanted = coarser if limits.precision == AUTO else limits.precision
        return plan_here(where, of, replace(config, precision=wanted), replace(limits, precision=wanted))

    monkeypatch.setattr(fit, "plan_here", plan_in)
    note_use(made, f"cpu, {loaded}", 30.0, 100)
    run = fit._run(shape, look(), asked, made)
    assert (run.precision, run.speed.timing, run.speed.decode) == (loaded, "measured here", 30.0)
    assert plans == [AUTO, loaded]


def test_downloads_take_room_where_they_go() -> None:
    found = quantised(QWEN, "Q4_K_M", 4.85)
    here = look(ram=64, free=2 * GIB)
    assert "The disk of the models has" in row(found, here).why
    other = replace(here, download_free=900 * GIB)
    fits = row(found, other)
    assert (fits.disk.free, fits.disk.bank_free) == (900 * GIB, 2 * GIB)
    assert fits.verdict != "too-large"
    short = row(found, replace(here, download_free=3 * GIB))
    assert short.verdict == "too-large"
    assert short.why.startswith("The disk that downloads go to has 3.2 GB free")
    unknown = row(found, replace(here, download_free=0))  # it does not answer
    assert unknown.verdict != "too-large"
    small = replace(look(free=2 * GIB), download_free=900 * GIB)
    in_place = row(found, small)  # its experts are read from the file itself
    assert in_place.from_disk
    assert (in_place.disk.bank, in_place.verdict) == (0, "batch-only")
    catalogue = read_catalogue()
    catalogue = replace(catalogue, entries=catalogue.entries[:4])
    assert len(recommend(catalogue, other, Limits())) > len(recommend(catalogue, here, Limits()))


# Recommendations


def of(found: tuple[Recommendation, ...]) -> dict[str, CatalogueEntry]:
    return {one.role: one.entry for one in found}


def test_three_models_of_the_shipped_catalogue() -> None:
    catalogue = read_catalogue(catalogue_dir() / "catalogue.json")
    few = replace(catalogue, entries=catalogue.entries[4::3])
    found = recommend(few, look(64, measured=False), Limits())
    assert {one.role for one in found} <= {"fast", "balanced", "best"}
    assert len({one.entry.name for one in found}) == len(found) >= 2
    best = next(one for one in found if one.role == "best")
    for one in found:
        assert one.verdict in ("fast", "works")
        assert one.speed.decode >= best.speed.decode
        assert one.reference in [file.reference for file in one.entry.files]
        assert one.seconds_to_first_answer(1e6) > one.bytes / 1e6
        assert few.entries.index(one.entry) >= few.entries.index(best.entry)


def test_nothing_is_recommended_where_nothing_runs() -> None:
    catalogue = read_catalogue(catalogue_dir() / "catalogue.json")
    large = Catalogue(catalogue.date, catalogue.entries[:2])
    assert recommend(large, look(4, measured=False), Limits()) == ()
    assert recommend(large, look(512, free=10**9, measured=False), Limits()) == ()
