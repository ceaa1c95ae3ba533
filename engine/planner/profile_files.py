"""Machines and models that come with the program: JSON in `resources/machines` and `resources/models`.

What a file says is checked: a number that no machine has is refused with a sentence, not computed with.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.errors import EngineError, ErrorCode
from engine.paths import resources_dir
from engine.planner.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile, PowerProfile
from engine.planner.model_shape import Attention, ModelShape

_GIGA = 1e9
_OPTIONAL_COUNTS = ("dense_layers", "shared_width", "dense_width")
_MOST_NEAR, _NEAR_ENOUGH = 4, 0.5
_WITH_DEFAULT = {"expert_matrices": 3, "other_weights": 0, "kv_numbers": 0, "left_out_weights": 0}


def machines_dir() -> Path:
    """Whole machines to plan for, with processor, RAM, disk and card; `resources/hardware` beside it holds the cards
    that an emulated device can be, no more than their memory and their link."""
    return resources_dir() / "machines"


def models_dir() -> Path:
    return resources_dir() / "models"


def machine_names(folder: Path | None = None) -> list[str]:
    """Names of all machines, sorted."""
    return sorted(path.stem for path in (folder or machines_dir()).glob("*.json"))


def model_names(folder: Path | None = None) -> list[str]:
    """Names of all models, sorted."""
    return sorted(path.stem for path in (folder or models_dir()).glob("*.json"))


def read_machine(name: str, folder: Path | None = None) -> HardwareProfile:
    """The machine of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or if what its file says cannot be.
    """
    path = _find(name, folder or machines_dir(), machine_names(folder), "machine")
    file = _File(path)
    gpu = file.part("gpu", optional=True)
    link, cpu = file.part("link"), file.part("cpu")
    power = file.part("power", optional=True)
    return HardwareProfile(
        name=path.stem,
        description=file.text("description"),
        source=file.text("source"),
        gpu=None
        if gpu is None
        else GpuProfile(
            name=gpu.text("name"),
            memory_bytes=gpu.whole("memory_bytes", 2**28, 2**42),
            flops=gpu.number("tflops", 0.01, 1e5) * 1e12,
            bytes_per_s=gpu.number("gbps", 1, 1e5) * _GIGA,
            count=gpu.whole("count", 1, 64),
        ),
        link=LinkProfile(
            h2d=link.number("h2d_gbps", 0.001, 2000) * _GIGA,
            d2h=link.number("d2h_gbps", 0.001, 2000) * _GIGA,
            h2d_pageable=link.number("h2d_pageable_gbps", 0.001, 2000) * _GIGA,
            latency_s=link.number("latency_us", 0, 1e5) * 1e-6,
        ),
        cpu=CpuProfile(
            name=cpu.text("name"),
            cores=cpu.whole("cores", 1, 4096),
            flops=cpu.number("tflops", 0.001, 1e4) * 1e12,
            ram_bytes_per_s=cpu.number("ram_gbps", 0.1, 1e4) * _GIGA,
            ram_bytes=cpu.whole("ram_bytes", 2**28, 2**46),
            weights_bytes_per_s=cpu.by_threads("weights_gbps_by_threads"),
        ),
        disk_bytes_per_s=file.number("disk_gbps", 0.001, 1000) * _GIGA,
        power=None
        if power is None
        else PowerProfile(
            power.number("cpu_base_w", 0, 1e4), power.number("cpu_per_core_w", 0, 1e3), power.number("gpu_w", 0, 1e4)
        ),
    )


def read_model(name: str, folder: Path | None = None) -> ModelShape:
    """The model of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or if what its file says cannot be.
    """
    path = _find(name, folder or models_dir(), model_names(folder), "model")
    file = _File(path)
    attention = file.part("attention")
    values: dict[str, Any] = {
        field.name: file.whole(field.name, 0 if field.name in _OPTIONAL_COUNTS else 1, 10**9)
        for field in fields(ModelShape)
        if field.type == "int" and field.name not in _WITH_DEFAULT
    }
    values |= {name: file.whole(name, 0, 10**13, default=usual) for name, usual in _WITH_DEFAULT.items()}
    if values["experts_per_token"] > values["experts"] or values["dense_layers"] >= values["layers"]:
        raise _refused(path, "uses more experts per token, or has more dense layers, than there are")
    return ModelShape(
        name=path.stem,
        hub_id=file.text("hub_id"),
        licence=file.text("licence"),
        source=file.text("source"),
        attention=Attention(
            heads=attention.whole("heads", 1, 10**4),
            kv_heads=attention.whole("kv_heads", 1, 10**4),
            head_dim=attention.whole("head_dim", 1, 10**4),
            latent=attention.whole("latent", 0, 10**5, default=0),
            query_latent=attention.whole("query_latent", 0, 10**5, default=0),
        ),
        parameters=file.number("parameters", 1e6, 1e14),
        tied_embeddings=bool(file.content.get("tied_embeddings", False)),
        expert_biases=bool(file.content.get("expert_biases", False)),
        **values,
    )


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """Those that may have been meant, likeliest first; capitals do not matter."""
    plain = {each.casefold(): each for each in names}
    wanted = name.casefold().rpartition("/")[2]
    holding = [each for each in plain if wanted and wanted in each]
    close = difflib.get_close_matches(wanted, plain, _MOST_NEAR, _NEAR_ENOUGH)
    return [plain[each] for each in dict.fromkeys([*holding, *close])][:_MOST_NEAR]


def _find(name: str, folder: Path, names: list[str], kind: str) -> Path:
    if name.endswith(".json"):
        return Path(name)
    exact = {each.casefold(): each for each in names}.get(name.casefold())
    if exact is None:
        near = near_names(name, names)
        known = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names) or '(none)'}."
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is no profile of a {kind} called {name!r}: {known} A JSON file of your own does as well.",
        )
    return folder / f"{exact}.json"


class _File:
    """A JSON object whose fields are checked as they are read; `prefix` names it inside its file."""

    def __init__(self, path: Path, content: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        if content is None:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no profile {path}: name another.") from None
            except (OSError, ValueError, RecursionError) as error:
                raise _refused(path, f"cannot be read ({error})") from None
            if not isinstance(content, dict):
                raise _refused(path, "is not one JSON object")
        self.content: Mapping[str, Any] = content

    def part(self, key: str, *, optional: bool = False) -> Any:
        value = self.content.get(key)
        if optional and value is None:
            return None
        if not isinstance(value, dict):
            raise _refused(self.path, f"has no object {self.prefix + key!r}")
        return _File(self.path, value, f"{key}.")

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not value.strip():
            raise _refused(self.path, f"has no text in {self.prefix + key!r}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        return self._checked(self.content.get(key), key, low, high)

    def whole(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self.content.get(key, default)
        checked = self._checked(value, key, low, high)
        if checked != int(checked):
            raise _refused(self.path, f"has {value!r} in {self.prefix + key!r}, which must be a whole number")
        return int(checked)

    def by_threads(self, key: str) -> dict[int, float]:
        table = self.content.get(key) or {}
        if not isinstance(table, dict) or not all(str(threads).isdecimal() for threads in table):
            raise _refused(self.path, f"has no table of threads in {self.prefix + key!r}")
        return {int(threads): self._checked(rate, key, 0.01, 1e4) * _GIGA for threads, rate in table.items()}

    def _checked(self, value: Any, key: str, low: float, high: float) -> float:
        # bool is an int to Python, and JSON as Python reads it has NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(self.path, f"has no number in {self.prefix + key!r}")
        if not low <= value <= high:
            raise _refused(self.path, f"has {value!r} in {self.prefix + key!r}, which must be from {low:g} to {high:g}")
        return float(value)


def _refused(path: Path, what: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, f"The profile {path} {what}: mend it or use another profile.")
