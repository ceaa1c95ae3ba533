"""The lanes of a timeline: what is recorded, analysed, exported and shown.

A lane is one entry here and whatever records into it: the numbers of spans, the tracks of traces, the columns of
tables, the simulator's lanes and the Monitor's rows, with their words, units and colours, are made from the entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["phase", "share", "bytes", "experts", "rate", "amount", "requests", "sweeps"]
Colour = Literal["gpu", "cpu", "pcie", "disk", "accent", "muted"]
Unit = Literal["%", "", "/s", "B/s", "GB", "W", "GHz", "°C"]


@dataclass(frozen=True, slots=True)
class Track:
    """What spans are recorded in.

    Attributes:
        name: in sessions, traces and tables.
        words: what is being done, in words that follow "61%".
        short: what it is called among figures.
        counts: what the `count` of its spans is.
        per_device: whether each card has its own.
        moves: whether its spans have bytes.
        is_work: whether steps wait for it; the simulator has lanes of work only.
    """

    name: str
    words: str = ""
    short: str = ""
    counts: Literal["experts", "tokens"] = "experts"
    per_device: bool = False
    moves: bool = False
    is_work: bool = True


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the timeline.

    Attributes:
        key: in tables and files.
        title: shown beside it.
        help: two sentences for a reader who is new to experts.
        kind: how it is drawn.
        unit: of its figures; memory in bytes, clocks in hertz, shares from 0 to 1.
        tracks: whose spans it shows.
        gauges: of sensors that it shows; the second is drawn as a dashed line.
        both_ways: the dashed line is the opposite direction, not the total that the area is part of.
        weight: its share of the height.
        needs: what has to be recorded for it to be shown: its own spans, anything of a card, or experts.
        in_strip: whether the strip on other pages has it.
    """

    key: str
    title: str
    help: str
    kind: Kind
    colour: Colour = "muted"
    unit: Unit = "%"
    tracks: tuple[Track, ...] = ()
    gauges: tuple[str, ...] = ()
    both_ways: bool = False
    weight: float = 1.0
    needs: Literal["", "copies", "spans", "experts"] = ""
    in_strip: bool = False


LANES: tuple[Lane, ...] = (
    Lane(
        "phase",
        "Phase",
        "What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch "
        "step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.",
        "phase",
        tracks=(Track("phase", counts="tokens"),),
    ),
    Lane(
        "requests",
        "Requests",
        "A row for each answer that is being worked on, for this window or other programs, here or at another server: "
        "waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too "
        "(outlined).",
        "requests",
        unit="",
        tracks=(Track("requests", counts="tokens", is_work=False),),
        weight=1.4,
        needs="spans",
    ),
    Lane(
        "sweeps",
        "Sweeps",
        "What goes through the layers together: one token of each answer that is being written, and (hatched) pieces "
        "of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with "
        "its tokens.",
        "sweeps",
        unit="/s",
        tracks=(Track("sweeps", counts="tokens", is_work=False),),
        weight=0.9,
        needs="spans",
    ),
    Lane(
        "gpu",
        "GPU",
        "How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for "
        "the processor.",
        "share",
        "gpu",
        tracks=(Track("gpu", "computing on the GPU", "GPU", per_device=True),),
        needs="copies",
        in_strip=True,
    ),
    Lane(
        "h2d",
        "To the GPU",
        "Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but "
        "not in the card's memory.",
        "bytes",
        "pcie",
        "B/s",
        (
            Track("h2d", "copying weights to the GPU", "to the GPU", per_device=True, moves=True),
            Track("small_copy", "passing results to the GPU", "results"),
        ),
        needs="copies",
        in_strip=True,
    ),
    Lane(
        "d2h",
        "From the GPU",
        "Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room "
        "on the card.",
        "bytes",
        "pcie",
        "B/s",
        (Track("d2h", "copying from the GPU", "from the GPU", per_device=True, moves=True),),
        weight=0.7,
        needs="copies",
    ),
    Lane(
        "cpu",
        "CPU",
        "How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a "
        "few, and with attention, which looks back at the text so far. Together they can fill the lane.",
        "share",
        "cpu",
        tracks=(
            Track("cpu_experts", "computing experts on the CPU", "CPU experts"),
            Track("cpu_attention", "attention and other layers on the CPU", "CPU attention"),
        ),
        in_strip=True,
    ),
    Lane(
        "pictures",
        "Pictures",
        "Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. "
        "Each is read once: the next question about it begins at once.",
        "share",
        "accent",
        tracks=(Track("pictures", "reading pictures", "pictures", counts="tokens"),),
        weight=0.7,
        needs="spans",
    ),
    Lane(
        "disk",
        "Disk",
        "Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a "
        "lower precision helps most.",
        "bytes",
        "disk",
        "B/s",
        (Track("disk", "reading from disk", "disk", moves=True),),
        weight=0.7,
        in_strip=True,
    ),
    Lane(
        "experts",
        "Experts",
        "Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or "
        "computed on the processor instead. More hits mean less waiting; without a graphics card everything is "
        "computed on the processor.",
        "experts",
        needs="experts",
        in_strip=True,
    ),
    Lane(
        "tokens",
        "Tokens/s",
        "How many tokens per second are written while the model is working. For a batch this counts the tokens of all "
        "rows, including their prompts.",
        "rate",
        unit="",
        in_strip=True,
    ),
)
"""What the engine records, from top to bottom."""

_SENSORS: tuple[tuple[str, str, Kind, Colour, Unit, tuple[str, ...], str], ...] = (
    ("gpu_busy", "GPU busy", "share", "gpu", "%", ("gpu_busy",), "How busy the graphics card is, for all programs."),
    (
        "cpu_all",
        "CPU busy",
        "share",
        "cpu",
        "%",
        ("cpu_ours", "cpu_all"),
        "How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two "
        "is what other programs use.",
    ),
    (
        "ram",
        "RAM",
        "amount",
        "cpu",
        "GB",
        ("ram_ours", "ram_used"),
        "Memory in use: filled for Switchyard, dashed for all programs.",
    ),
    (
        "vram",
        "VRAM",
        "amount",
        "gpu",
        "GB",
        ("vram_ours", "vram_used"),
        "The card's memory in use: filled for Switchyard, dashed for all programs.",
    ),
    (
        "pcie",
        "PCIe",
        "amount",
        "pcie",
        "B/s",
        ("pcie_rx", "pcie_tx"),
        "Traffic on the graphics card's slot, both ways, of all programs.",
    ),
    (
        "faults",
        "Page faults",
        "amount",
        "muted",
        "/s",
        ("minor_faults",),
        "Memory pages that the system had to map first: many slow things down.",
    ),
    (
        "disk_io",
        "Disk I/O",
        "amount",
        "disk",
        "B/s",
        ("disk_read", "disk_write"),
        "Reads from the disk and (dashed) writes to it, of all programs.",
    ),
    ("gpu_power", "GPU power", "amount", "gpu", "W", ("gpu_power",), "The power that the graphics card draws."),
    ("cpu_power", "CPU power", "amount", "cpu", "W", ("cpu_power",), "The power that the processor draws."),
    (
        "gpu_clock",
        "GPU clock",
        "amount",
        "gpu",
        "GHz",
        ("gpu_clock",),
        "The graphics card's clock rate: it falls when the card is too hot.",
    ),
    (
        "cpu_clock",
        "CPU clock",
        "amount",
        "cpu",
        "GHz",
        ("cpu_clock",),
        "The processor's clock rate: it falls when too hot or saving power.",
    ),
    ("gpu_temperature", "GPU heat", "amount", "gpu", "°C", ("gpu_temperature",), "How hot the graphics card is."),
    ("cpu_temperature", "CPU heat", "amount", "cpu", "°C", ("cpu_temperature",), "How hot the processor is."),
)

SENSOR_LANES: tuple[Lane, ...] = tuple(
    Lane(key, title, words, kind, colour, unit, gauges=gauges, both_ways=unit == "B/s", weight=0.9)
    for key, title, kind, colour, unit, gauges, words in _SENSORS
)
"""What sensors and drivers say, where the machine has them."""


TRACKS: tuple[Track, ...] = tuple(
    sorted((track for lane in LANES for track in lane.tracks), key=lambda track: not track.is_work)
)
"""Each has the number of its place: those of work come first."""
WORK: tuple[str, ...] = tuple(track.name for track in TRACKS if track.is_work)


def track_number(name: str) -> int:
    return next(number for number, track in enumerate(TRACKS) if track.name == name)
