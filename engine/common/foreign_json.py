"""Parses untrusted JSON: every defect is a ValueError, and nesting is limited."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
"""Limit for values that are written again, walked or passed to a library; no useful schema or row is deeper."""


def parse_json(
    text: str | bytes,
    *,
    deepest: int | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a JSON document.

    Args:
        deepest: refuse lists and objects nested deeper than this; None allows what Python's parser can read.

    Raises:
        ValueError: it is not JSON (or not UTF-8, or has a number of thousands of digits), or is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deepest is not None and text.count("[") + text.count("{") > deepest and _is_deeper(value, deepest):
        raise ValueError(f"it is nested more than {deepest} levels deep")
    return value


def _is_deeper(value: Any, deepest: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(deepest):
        entries = (entry for holder in level for entry in (holder.values() if isinstance(holder, dict) else holder))
        level = [entry for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return False
    return True
