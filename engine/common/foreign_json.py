"""JSON that somebody else wrote: what is wrong with it is one kind of error, and nothing in it is nested beyond use."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
"""What we write again, walk through or hand to a library is not nested deeper; no schema or row of use is."""


def parse_json(
    text: str | bytes,
    *,
    deepest: int | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a JSON document.

    Args:
        deepest: refuse lists and objects nested deeper than this; None leaves it at what Python can read at all.

    Raises:
        ValueError: it is not JSON (or no UTF-8, or a number of thousands of digits), or nested too deeply.
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
