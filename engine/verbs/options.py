"""Options that every verb that runs a model has, and the values they take."""

from __future__ import annotations

import argparse
import re

from engine.common.config import CACHE_POLICIES, GRAPHS, MISSES, PREFETCHES, EngineConfig
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
        argparse.ArgumentTypeError: not a size, or not more than nothing.
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
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def seed(text: str) -> int:
    """A seed of the random numbers: any whole number from 0 to 2^63 - 1."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 9223372036854775807")
    return int(text)


def stop_string(text: str) -> str:
    """A string that ends an answer; an empty one would end every answer before it began."""
    if not text:
        raise argparse.ArgumentTypeError("an empty string would end the answer before it began")
    return text


def device_name(text: str) -> str:
    """A word that `EngineConfig.device` may be; whether the machine has it is asked when a model is loaded."""
    if text in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:\d+|emulated:[\w.-]+", text, re.ASCII):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a device; it is one of auto, cpu, cuda, emulated:NAME")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--vram`, `--ram`, `--threads`, `--precision` and those of the expert cache."""
    group = parser.add_argument_group("where and how the model runs")
    group.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="D",
        help="auto, cpu, cuda or emulated:NAME",
    )
    group.add_argument("--vram", type=parse_size, metavar="SIZE", help="most video memory to use, such as 8GB")
    group.add_argument("--ram", type=parse_size, metavar="SIZE", help="most memory to use, such as 512MiB")
    group.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads that compute")
    kinds = "; ".join(f"{name} is {FORMATS[name].words}" for name in PRECISIONS if name in FORMATS)
    group.add_argument("--precision", choices=PRECISIONS, default=AUTO, help=f"of the weights in memory: {kinds}")
    group.add_argument("--graphs", choices=GRAPHS, default="auto", help="whether a card repeats decode steps as graphs")
    cache = parser.add_argument_group("the expert cache, for models bigger than the graphics card")
    cache.add_argument(
        "--cache-slots", type=count, metavar="N", help="experts kept on each device; as many as fit, if not given"
    )
    cache.add_argument(
        "--cache-ways", type=positive_int, metavar="M", help="slots of each layer; one pool for all, if not given"
    )
    cache.add_argument(
        "--cache-policy", choices=CACHE_POLICIES, default="auto", help="eviction policy of the expert cache"
    )
    cache.add_argument(
        "--misses",
        choices=MISSES,
        default="mixed",
        help="how experts that are not on the device are met; all but mixed are for measurements",
    )
    cache.add_argument(
        "--prefetch", choices=PREFETCHES, default="auto", help="predictor of the experts of coming layers"
    )


def engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    """The settings of a run from the parsed options of `add_engine_options`."""
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
    )
