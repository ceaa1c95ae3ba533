"""Options of all verbs that run a model, and their value types."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from engine.common.config import EngineConfig, SamplingParams, is_device
from engine.common.schema import Choice, Number, Setting, Size, Switch, Texts, settings_of
from engine.common.settings import SCHEMAS

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
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


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


def device_name(text: str) -> str:
    """A value of `EngineConfig.device`."""
    if not is_device(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda, xpu, mps or emulated:NAME")
    return text


def _one_text(kind: Texts) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError("it must not be empty")
        return text.replace("\\n", "\n").replace("\\t", "\t") if kind.escapes else text

    return read


def _number(kind: Number) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value: float = int(text) if kind.whole else float(text)
        except ValueError:
            value = float("nan")
        if not kind.holds(value):
            raise argparse.ArgumentTypeError(f"it must be {kind.words}, not {text!r}")
        return value

    return read


def _how(setting: Setting[Any]) -> dict[str, Any]:
    """How argparse reads a setting of this kind."""
    kind = setting.kind
    match kind:
        case Switch():
            return {"action": argparse.BooleanOptionalAction}
        case Choice(others=None):
            return {"choices": tuple(kind.values)}
        case Choice():
            return {"type": device_name}
        case Number():
            return {"type": _number(kind)}
        case Size():
            return {"type": parse_size}
        case Texts():
            return {"action": "append", "type": _one_text(kind)}
    return {}


def add_settings(
    parser: argparse.ArgumentParser, settings: Iterable[Setting[Any]], *, defaults: bool = True, about: str = ""
) -> None:
    """Adds the options of settings, each under its heading; `args` has them by key.

    Args:
        defaults: False leaves what is not given at None.
        about: a sentence below the headings.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings:
        if setting.option:
            group = groups.get(setting.group) or parser.add_argument_group(setting.group, about or None)
            groups[setting.group] = group
            how = _how(setting)
            if setting.metavar is not None:
                how["metavar"] = setting.metavar
            default = setting.default if defaults else None
            group.add_argument(setting.option, dest=setting.key, default=default, help=setting.said, **how)


def engine_settings(*keys: str) -> list[Setting[Any]]:
    """Those that every verb has which runs a model; or these of them."""
    return [
        each for schema in SCHEMAS for each in settings_of(schema) if each.option and (not keys or each.key in keys)
    ]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, engine_settings())


def engine_config(args: argparse.Namespace, model: str) -> EngineConfig:
    return EngineConfig(model, **{each.key: getattr(args, each.key) for each in settings_of(EngineConfig)})


def add_sampling_options(parser: argparse.ArgumentParser, *, beams: bool = True) -> None:
    add_settings(
        parser,
        (each for each in settings_of(SamplingParams) if beams or each.key != "beams"),
        defaults=False,
        about="In this order: repetition penalty, DRY, top-k, top-p, min-p, temperature.  Tokens that end an answer "
        "are never penalised.",
    )


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {each.key: getattr(args, each.key, None) for each in settings_of(SamplingParams)}
    if given["dry_breakers"] == ["none"]:
        given["dry_breakers"] = []
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value is not None
    }


MODEL = "`starter`, the name of a model on this machine, a checkpoint directory or a GGUF file"

AddAction = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]
"""Adds an action, with `--json`, by its name, help and function; returns its parser for its other arguments."""
