"""Whether a model would run here, and how fast, before it is downloaded: the planner's answer, a row per candidate.

The memory is what loading would decide, by the same function, from the same sizes; the speed is the planner's
prediction of exactly those settings, or what was measured here of the same files: by Tune, else by their last answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from engine.checkpoint.catalogue import Catalogue, CatalogueEntry
from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.hub import QUALITIES, Candidate
from engine.checkpoint.library import LibraryEntry, is_any_known, list_models
from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_up
from engine.formats import AUTO
from engine.hardware.profiles import EMULATED
from engine.planner.engine_memory import context_tokens
from engine.planner.plan_parts import CHAT, Limits, PicturePlan, TierBytes
from engine.planner.predict import DecodePrediction, predict_decode
from engine.tuning.machine_state import MachineLook, plan_here
from engine.tuning.saved_results import all_results

FAST_TOKENS_PER_S = 10.0
"""From here on, text appears faster than most people read."""
WORKS_TOKENS_PER_S = 3.0
"""Below, a chat is a matter of minutes, and only a batch that may take all night makes sense."""
ASSUMED_LINE_BYTES_PER_S = 100e6 / 8
"""Of a download before any has been measured: 100 Mbit/s."""
_TO_SPARE = 2 * FAST_TOKENS_PER_S
"""From here on, a better quality is worth the time."""
_AT_MOST = {"int8": "near", "int4": "good"}
"""The quality class that is left once loading has brought a model into this precision."""
_NO_LOSS = ("original", "near")
ROLES = ("fast", "balanced", "best")


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """What a model takes on the disk that downloads go to, and on the library's.

    Attributes:
        free: before the download; 0 if unknown.
        download: of the files.
        bank: of what loading has to convert of them: experts that are read from disk, but are no ranges of the files.
        bank_free: of the library's disk, which holds those records; None if downloads go to that disk, too.
    """

    free: int
    download: int
    bank: int = 0
    bank_free: int | None = None


@dataclass(frozen=True, slots=True)
class FitSpeed:
    """How fast it would answer.

    Attributes:
        decode: tokens per second; low, high: its range.
        ttft: seconds to the first token of a chat.
        timing: `estimated`, or `measured here` if this model was timed or has answered on this machine.
    """

    decode: float
    low: float
    high: float
    ttft: float
    timing: str

    @property
    def ttft_range(self) -> tuple[float, float]:
        """(shortest, longest) time to the first token: as far from `ttft` as the others are from `decode`."""
        if not self.decode:
            return self.ttft, self.ttft
        return self.ttft * self.low / self.decode, self.ttft * self.high / self.decode


@dataclass(frozen=True, slots=True)
class FitRow:
    """One candidate on this machine.

    Attributes:
        candidate, bytes, quality: what it is; `bytes` to download.
        card: bars of the graphics card's memory; None if it is not used.
        ram, disk: bars of the others; `ram` is None if the model does not fit.
        from_disk: bytes of experts and layers that do not fit into memory, and are read again and again.
        speed: None if the model does not fit.
        verdict: `fast`, `works`, `batch-only` or `too-large`.
        why: what the verdict rests on, in a sentence.
        load_anyway: what happens if it is loaded all the same, in a sentence.
        precision: what it runs in, for people; empty if the model does not fit.
        pictures: what reading them takes; None for a model that reads text only.
        kv_at_context: bytes of keys and values once the wanted context is full; room for it is taken from the cache.
        fits_alone: whether it would fit if no other program held any memory.
    """

    candidate: Candidate
    bytes: int
    quality: str
    card: TierBytes | None
    ram: TierBytes | None
    disk: DiskBytes
    from_disk: int
    speed: FitSpeed | None
    verdict: str
    why: str
    load_anyway: str
    precision: str = ""
    kv_at_context: int = 0
    pictures: PicturePlan | None = None
    fits_alone: bool = True


@dataclass(frozen=True, slots=True)
class FitCard:
    """All candidates of a repository on this machine.

    Attributes:
        rows: in the order given.
        recommended: index of the row to take; None if none can run.
        why: what speaks for it, in a sentence.
    """

    rows: tuple[FitRow, ...]
    recommended: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model of the catalogue on this machine, in the file that suits it.

    Attributes:
        role: `fast`, `balanced` or `best`, if it is one of those to take first; else empty.
        entry: the model; reference: for `engine.checkpoint.hub.find_candidate`.
        bytes: to download.
        speed: predicted; None if it does not fit.
        verdict: as in `FitRow`.
        sentence: what it is good at, and what to expect of it here, or why it does not fit.
        prepare_s: seconds to load it the first time.
        from_disk: it is read from the disk again and again.
    """

    role: str
    entry: CatalogueEntry
    reference: str
    bytes: int
    speed: FitSpeed | None
    verdict: str
    sentence: str
    prepare_s: float = 0.0
    from_disk: bool = False

    @property
    def decode(self) -> float:
        """Tokens per second; 0 if it does not fit."""
        return self.speed.decode if self.speed is not None else 0.0

    def seconds_to_first_answer(self, bytes_per_s: float) -> float:
        """From the click: the download at this speed, preparing the model, and its first token."""
        return self.bytes / bytes_per_s + self.prepare_s + (self.speed.ttft if self.speed is not None else 0.0)


def fit_card(found: Sequence[tuple[Candidate, ModelShape | None]], look: MachineLook, limits: Limits) -> FitCard:
    """How each candidate would run on this machine; pure but for what was measured here before, which it reads.

    Args:
        found: candidates and what they are; None where `Candidate.problem` says that it cannot run.
        limits: the budgets, the wanted context and precision; the memory of the card bounds the cache.
    """
    here = list_models() if all_results() or is_any_known() else ()  # a scan of all model directories: once per card
    rows = tuple(_row(candidate, shape, look, limits, here) for candidate, shape in found)
    at, why = _recommended(rows)
    return FitCard(rows, at, why)


@dataclass(frozen=True, slots=True)
class _Run:
    """A model that fits: its memory, what it writes, what it runs in, and its speed."""

    card: TierBytes | None
    ram: TierBytes
    from_disk: int
    written: int
    precision: str
    speed: FitSpeed
    pictures: PicturePlan | None


def _row(
    candidate: Candidate,
    shape: ModelShape | None,
    look: MachineLook,
    limits: Limits,
    here: Sequence[LibraryEntry] = (),
) -> FitRow:
    apart = None if look.download_free is None else look.probe.models_disk_free_bytes or 0
    disk = DiskBytes(look.free_for_files, candidate.bytes, bank_free=apart)
    row = FitRow(candidate, candidate.bytes, candidate.quality, None, None, disk, 0, None, "too-large", "", "")
    if shape is None:
        why = candidate.problem or "What it is could not be read."
        return replace(row, why=why, load_anyway="It cannot be loaded.", fits_alone=False)
    held = limits.held(shape, look.profile)
    in_pages = not (limits.use_card and look.profile.gpu is not None)
    row = replace(row, kv_at_context=round(held.context_bytes(context_tokens(shape, limits), in_pages=in_pages)))
    try:
        run = _run(shape, look, limits, _installed(candidate, here))
    except EngineError as error:
        if error.code is not ErrorCode.NOT_ENOUGH_MEMORY:
            raise
        return _too_large(row, shape, look, limits, error)
    row = replace(
        row,
        card=run.card,
        ram=run.ram,
        disk=replace(disk, bank=run.written),
        from_disk=run.from_disk,
        speed=run.speed,
        precision=held.words(run.precision),
        pictures=run.pictures,
        quality=_left(candidate.quality, run.precision),
    )
    return _without_room(row) or _judged(row, run)


def _without_room(row: FitRow) -> FitRow | None:
    """The row that says so if the disk, or one of the two, has too little room."""
    disk = row.disk
    here = disk.download + (disk.bank if disk.bank_free is None else 0)
    if disk.free and (short := here - disk.free) > 0:
        whose = "The disk of the models" if disk.bank_free is None else "The disk that downloads go to"
        return replace(
            row,
            why=f"{whose} has {about(disk.free)} free: {rounded_up(short)} short.",
            load_anyway=f"The download begins once {rounded_up(short)} more are free, or in a folder on another disk.",
        )
    if disk.bank_free and (short := disk.bank - disk.bank_free) > 0:
        return replace(
            row,
            why=f"Its experts are converted on the library's disk, which has {about(disk.bank_free)} free: "
            f"{rounded_up(short)} short.",
            load_anyway=f"It loads once {rounded_up(short)} more are free there.",
        )
    return None


def _too_large(row: FitRow, shape: ModelShape, look: MachineLook, limits: Limits, error: EngineError) -> FitRow:
    alone = replace(limits, ram_of_others=0, vram_of_others=0)
    fits = True
    try:
        _run(shape, look, alone, None)
    except EngineError:
        fits = False
    held = limits.ram_of_others
    hint = (
        f" With the {about(held)} that other programs hold it would fit: close some of them." if fits and held else ""
    )
    return replace(
        row,
        why=f"{error.message}{hint}",
        load_anyway="Loading is refused with the same figures as long as no more memory is free; nothing is lost.",
        fits_alone=fits,
    )


def _judged(row: FitRow, run: _Run) -> FitRow:
    rate, verdict = run.speed.decode, verdict_of(run.speed.decode)
    where = (
        f"{about(run.from_disk)} of it are read from disk again and again"
        if run.from_disk
        else "its experts stay in RAM"
        if run.card is None
        else "the graphics card and RAM share it"
        if run.ram.experts
        else "all of it is on the graphics card"
    )
    if verdict == "batch-only":
        minutes = 300 / max(rate, 1e-6) / 60
        what = "too slow for a chat"
        then = f"It loads and answers, but an answer of 300 tokens takes about {minutes:.0f} minutes."
    else:
        what = "faster than most people read" if verdict == "fast" else "a calm reading speed"
        then = f"It loads, runs {row.precision}, and answers at that speed."
    return replace(row, verdict=verdict, why=f"{_about(rate)}, {what}: {where}.", load_anyway=then)


def verdict_of(tokens_per_s: float) -> str:
    """The verdict on a decode speed; see `FAST_TOKENS_PER_S` and `WORKS_TOKENS_PER_S`."""
    if tokens_per_s >= FAST_TOKENS_PER_S:
        return "fast"
    return "works" if tokens_per_s >= WORKS_TOKENS_PER_S else "batch-only"


def _about(tokens_per_s: float) -> str:
    digits = 0 if tokens_per_s >= FAST_TOKENS_PER_S else 1 if tokens_per_s >= 1 else 2
    return f"About {tokens_per_s:.{digits}f} tokens/s"


def _run(shape: ModelShape, look: MachineLook, limits: Limits, installed: Path | None) -> _Run:
    """How loading would place the model, and how fast it would be."""
    own_device = look.device if look.device.startswith(EMULATED) else "auto"
    config = EngineConfig(
        str(installed or shape.name),
        device=own_device if limits.use_card or not look.device else "cpu",
        precision=limits.precision,
        vram_bytes=limits.vram_bytes,
        ram_bytes=limits.ram_bytes,
        threads=limits.threads,
        context_tokens=limits.context_tokens,
        kv_precision=limits.kv_precision,
        sharing=limits.sharing,
    )
    if installed is not None and (timed := _timed(shape, look, limits, config)) is not None:
        return timed
    first = shape.precisions[0] if limits.precision == AUTO else limits.precision
    found = _predicted(shape, look, limits, config, first)
    if found.precision != first and look.measurements is not None:  # the rates are those of another precision
        found = _predicted(shape, look, limits, replace(config, precision=found.precision), found.precision)
    if installed is not None and limits.precision == AUTO:
        # Tuning may choose a coarser precision than loading does by itself: that one may have answered here.
        one = found.precision
        timed = _timed(shape, look, replace(limits, precision=one), replace(config, precision=one))
        if timed is not None:
            return timed
    memory = found.memory
    speed = FitSpeed(found.tokens_per_s, found.low, found.high, found.ttft_s, "estimated")
    from_disk = memory.disk + memory.streamed
    return _Run(memory.card, memory.ram, from_disk, memory.written, found.precision, speed, memory.pictures)


def _timed(shape: ModelShape, look: MachineLook, limits: Limits, config: EngineConfig) -> _Run | None:
    """What was measured of this model here; None if nothing was, of this device and precision."""
    plan = plan_here(look, shape, config, limits)
    if not plan.speed.timed_at:
        return None
    told = plan.speed
    speed = FitSpeed(told.decode_tokens_per_s, told.low, told.high, told.ttft_s, "measured here")
    from_disk = plan.disk_bytes + plan.streamed_bytes
    return _Run(plan.card, plan.ram, from_disk, plan.written_bytes, plan.precision, speed, plan.pictures)


def _predicted(
    shape: ModelShape, look: MachineLook, limits: Limits, config: EngineConfig, precision: str
) -> DecodePrediction:
    """The prediction; kept, because a card is asked for again with each candidate that becomes known."""
    key = shape, limits, config, precision
    kept = _kept.get(key)
    if kept is not None and kept[0] == look:
        return kept[1]
    found = predict_decode(
        look.machine(shape.measured_as(precision), shape.expert_bytes(precision)),
        shape,
        config,
        prompt_tokens=CHAT.prompt_tokens,
        tokens=CHAT.generated_tokens,
        limits=limits,
    )
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = look, found
    return found


_MOST_KEPT = 200
_kept: dict[tuple[ModelShape, Limits, EngineConfig, str], tuple[MachineLook, DecodePrediction]] = {}


def _left(quality: str, precision: str) -> str:
    """The quality class of what runs: a download in 16 bits that loading brings into 4 is no original any more."""
    most = _AT_MOST.get(precision, quality)
    return max(quality, most, key=QUALITIES.index)


def _installed(candidate: Candidate, here: Sequence[LibraryEntry]) -> Path | None:
    """Where the candidate's files are among the models of this machine, by their names and sizes."""
    wanted = [(PurePosixPath(file.path).name, file.size) for file in candidate.files]
    for entry in here:
        folder = entry.path if entry.path.is_dir() else entry.path.parent
        try:
            if wanted and all((folder / name).stat().st_size == size for name, size in wanted):
                return entry.path
        except OSError:
            continue
    return None


def _recommended(rows: Sequence[FitRow]) -> tuple[int | None, str]:
    """(index of the row to take, why): the best quality that answers fast, of equal ones the smallest.

    What people do not notice is no quality: 16 bits are no better than 8, and twice the download.
    """
    able = [(at, row) for at, row in enumerate(rows) if row.speed is not None and row.verdict != "too-large"]
    for verdict in ("fast", "works", "batch-only"):
        there = [(at, row) for at, row in able if row.verdict == verdict]
        there = [(at, row) for at, row in there if not row.from_disk] or there
        if not there:
            continue
        at, row = min(there, key=lambda one: _worth(one[1]))
        return at, _why(row, better=any(_class(other) < _class(row) for _, other in able))
    if rows and all(row.candidate.problem for row in rows):
        return None, rows[0].candidate.problem
    return None, "None of these can run on this machine as it is now."


def _class(row: FitRow) -> int:
    return 0 if row.quality in _NO_LOSS else QUALITIES.index(row.quality)


def _worth(row: FitRow) -> tuple[int, int, float]:
    # Where all are slow, speed counts more than the last bit of quality.
    rate = row.speed.decode if row.speed is not None else 0.0
    return (_class(row) if row.verdict == "fast" else max(_class(row), QUALITIES.index("good"))), row.bytes, -rate


def _why(row: FitRow, *, better: bool) -> str:
    label = row.candidate.label
    if row.verdict == "fast":
        more = "; better ones are slower" if better else ""
        return f"{label} is the best quality that answers faster than most people read{more}."
    if row.verdict == "works":
        return f"{label} is the smallest of good quality, and none answers faster than most people read."
    return f"{label} is the smallest of good quality; all are too slow for a chat here."


# Recommendations


def recommend(catalogue: Catalogue, look: MachineLook, limits: Limits) -> tuple[Recommendation, ...]:
    """At most three models of the catalogue for this machine: the fastest, the best in balance, the best that fits."""
    named = {one.role: one for one in offers(catalogue, look, limits)}
    return tuple(named[role] for role in ROLES if role in named)


def offers(catalogue: Catalogue, look: MachineLook, limits: Limits) -> tuple[Recommendation, ...]:
    """All models of the catalogue on this machine, in its order; those that `recommend` gives have a role.

    Needs no network. The catalogue's order decides which model is better: the best ones are first in it. What would
    have to be read from disk again and again is recommended only if nothing else is fast enough for a chat.
    """
    found = [_offer(entry, look, limits) for entry in catalogue.entries]
    able = [one for one in found if one.verdict in ("fast", "works")]
    able = [one for one in able if not one.from_disk] or able
    roles: dict[str, str] = {}
    if able:
        best, *rest = able
        balanced = _first_from(rest, max(FAST_TOKENS_PER_S, 1.5 * best.decode))
        rest = [one for one in rest if one is not balanced]
        base = balanced or best
        fast = _first_from(rest, max(3 * FAST_TOKENS_PER_S, 2 * base.decode))
        if fast is None:
            fast = max((one for one in rest if one.decode > base.decode), key=lambda one: one.decode, default=None)
        chosen = zip(ROLES, (fast, balanced, best), strict=True)
        roles = {one.entry.name: role for role, one in chosen if one is not None}
    return tuple(replace(one, role=roles.get(one.entry.name, "")) for one in found)


def _first_from(able: Sequence[Recommendation], tokens_per_s: float) -> Recommendation | None:
    return next((one for one in able if one.decode >= tokens_per_s), None)


def _offer(entry: CatalogueEntry, look: MachineLook, limits: Limits) -> Recommendation:
    """A model in the quantisation to take here: the smallest of good quality; a better one where that leaves speed to
    spare."""
    free = look.free_for_files
    usual = [file for file in entry.files if QUALITIES.index(file.quality) <= QUALITIES.index("good")]
    taken: Recommendation | None = None
    for file in sorted(usual, key=lambda file: file.bytes):
        is_better = taken is not None and QUALITIES.index(file.quality) < QUALITIES.index("good")
        if (free and file.bytes > free) or (taken is not None and not is_better):
            continue
        try:
            run = _run(as_quantised(entry.shape, file.label), look, limits, None)
        except EngineError as error:
            return taken or _too_large_offer(entry, error.message)
        rate, verdict = run.speed.decode, verdict_of(run.speed.decode)
        if taken is not None and (rate < _TO_SPARE or run.from_disk):
            break
        sentence = f"{entry.strengths} {_about(rate)} here."
        prepare_s = file.bytes / max(look.profile.disk_bytes_per_s, 1.0)
        taken = Recommendation(
            "", entry, file.reference, file.bytes, run.speed, verdict, sentence, prepare_s, bool(run.from_disk)
        )
        if is_better or rate < _TO_SPARE or run.from_disk:
            break
    return taken or _too_large_offer(
        entry, f"The disk has {about(free)} free, and it needs {about(entry.usual.bytes)}."
    )


def _too_large_offer(entry: CatalogueEntry, why: str) -> Recommendation:
    return Recommendation("", entry, entry.usual.reference, entry.usual.bytes, None, "too-large", why)
