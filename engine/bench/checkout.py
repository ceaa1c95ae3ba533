"""What maintainers measure with is `benchmarks`, beside `engine` in a checkout, and not packaged."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def from_checkout(module: str) -> Any:
    """The module of `benchmarks`; `None` where Switchyard is installed without it."""
    if not (_ROOT / "benchmarks" / f"{module}.py").is_file():
        return None
    if str(_ROOT) not in sys.path:  # `switchyard` as a command knows only what is packaged
        sys.path.append(str(_ROOT))
    return importlib.import_module(f"benchmarks.{module}")
