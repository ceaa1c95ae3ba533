"""Frozen dataclasses as lines of JSON and back: what processes of this program tell each other.

One message is one line of UTF-8: `{"type": "Generate", ...fields}`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import from_fields


class MessageLines:
    """Writes and reads messages of these kinds."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._by_name = {kind.__name__: kind for kind in kinds}

    @staticmethod
    def encode(message: Any) -> bytes:
        """One message as one line, newline included."""
        fields = dataclasses.asdict(message)
        whole = {"type": type(message).__name__, **fields}
        text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), default=str)
        # A lone surrogate (half an emoji, say) is not valid UTF-8: replace it instead of breaking the stream.
        return text.encode("utf-8", errors="replace") + b"\n"

    def decode(self, line: bytes) -> Any:
        """The message on one line.

        Raises:
            EngineError: `PROTOCOL`, if the line is none of these messages.
        """
        try:
            raw = json.loads(line)
            return from_fields(self._by_name[raw.pop("type")], raw)
        except EngineError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            # Neither the line nor the error's text is quoted: both can contain user text.
            message = f"A line of {len(line)} bytes is not a message of this version ({type(error).__name__})."
            raise EngineError(ErrorCode.PROTOCOL, message) from None
