"""Options of all verbs that run a model, and their value types."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Protocol

from engine.common.config import (
    CACHE_POLICIES,
    GRAPHS,
    GUESSES,
    KV_PRECISIONS,
    MISSES,
    PREFETCHES,
    SHARINGS,
    EngineConfig,
)
from engine.formats import AUTO, FORMATS, PRECISIONS

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as `8GB` (8 x 1000^3) or `512MiB` (512 x 1024^2); a unit is required.

    Raises:
        argparse.ArgumentTypeError: not a size, or not positive.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it with a unit, such as 8GB or 512MiB")
    size = int(float(match[1]) * factor)
    if not 0 < size < 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid size; write, for example, 8GB or 512MiB")
    return size


def positive_int(text: str) -> int:
    """A positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def count(text: str) -> int:
    """A non-negative integer."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def amount(text: str) -> float:
    """A number above 0, such as a price."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def two_prices(text: str) -> tuple[float, float]:
    """Prices of a million tokens read, and written."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} are not two prices; write, for example, 0.10,0.40")
    return amount(parts[0]), amount(parts[1])


def time_span(text: str) -> float:
    """Seconds of a time such as `90m`, `12h` or `3d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0
    if not 0 < seconds < 1e10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write, for example, 90m, 12h or 3d")
    return seconds


def seed(text: str) -> int:
    """A random seed: an integer from 0 to 2^63 - 1."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 9223372036854775807")
    return int(text)


def stop_string(text: str) -> str:
    """A string that ends an answer; must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("a stop string must not be empty")
    return text


def breaker(text: str) -> str:
    r"""A text that ends repetitions for DRY; `\n` and `\t` mean the characters, which a shell cannot easily give."""
    if not text:
        raise argparse.ArgumentTypeError("a breaker must not be empty")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def device_name(text: str) -> str:
    """A value of `EngineConfig.device`; whether the device exists is checked when a model is loaded."""
    if text in ("auto", "cpu", "cuda", "xpu", "mps") or re.fullmatch(
        r"(cuda|xpu):\d+(,\1:\d+)*|emulated:[\w.-]+(\?host=(fixed|only))?", text, re.ASCII
    ):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda, xpu, mps or emulated:NAME")


def add_kv_precision(parser: argparse._ActionsContainer) -> None:
    """Add `--kv-precision`."""
    parser.add_argument(
        "--kv-precision",
        choices=KV_PRECISIONS,
        default="auto",
        help="of keys and values: int8 takes about half the memory, so that longer contexts and more rows fit",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--vram`, `--ram`, `--threads`, `--precision` and those of the expert cache."""
    group = parser.add_argument_group("where and how the model runs")
    group.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="auto, cpu, cuda, xpu or emulated:NAME",
    )
    group.add_argument("--vram", type=parse_size, metavar="SIZE", help="limit of video memory, such as 8GB")
    group.add_argument("--ram", type=parse_size, metavar="SIZE", help="limit of RAM, such as 512MiB")
    group.add_argument("--threads", type=positive_int, metavar="N", help="number of CPU threads")
    kinds = "; ".join(f"{name} is {FORMATS[name].words}" for name in PRECISIONS if name in FORMATS)
    group.add_argument("--precision", choices=PRECISIONS, default=AUTO, help=f"of the weights in memory: {kinds}")
    add_kv_precision(group)
    group.add_argument("--graphs", choices=GRAPHS, default="auto", help="whether a card replays decode steps as graphs")
    group.add_argument(
        "--speculation",
        choices=GUESSES,
        default="auto",
        help="speculative decoding: answers that quote are drafted and checked together where that is faster; answers "
        "stay the same. heads: also loads a model's own layer for drafting (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5)",
    )
    group.add_argument(
        "--sharing",
        choices=SHARINGS,
        default="auto",
        help="several cards: layers gives each a run of layers, experts each a part of every layer's experts",
    )
    cache = parser.add_argument_group("the expert cache, for models bigger than the graphics card")
    cache.add_argument(
        "--cache-slots", type=count, metavar="N", help="experts cached on each device (default: as many as fit)"
    )
    cache.add_argument(
        "--cache-ways", type=positive_int, metavar="M", help="slots per layer (default: one pool for all layers)"
    )
    cache.add_argument(
        "--cache-policy", choices=CACHE_POLICIES, default="auto", help="eviction policy of the expert cache"
    )
    cache.add_argument(
        "--misses",
        choices=MISSES,
        default="mixed",
        help="how cache misses are served; all but mixed are for measurements",
    )
    cache.add_argument("--prefetch", choices=PREFETCHES, default="auto", help="predictor of later layers' experts")


def engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    """The engine settings from the options of `add_engine_options`."""
    return EngineConfig(
        model=model,
        device=args.device,
        precision=args.precision,
        vram_bytes=args.vram,
        ram_bytes=args.ram,
        threads=args.threads,
        cache_slots=args.cache_slots,
        cache_ways=args.cache_ways,
        cache_policy=args.cache_policy,
        misses=args.misses,
        prefetch=args.prefetch,
        graphs=args.graphs,
        sharing=args.sharing,
        speculation=args.speculation,
        kv_precision=args.kv_precision,
    )


MODEL = "`starter`, the name of a model on this machine, a checkpoint directory or a GGUF file"


class AddAction(Protocol):
    """Adds an action, with `--json`; returns its parser for its other arguments."""

    def __call__(
        self, name: str, help_text: str, function: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser: ...
