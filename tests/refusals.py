"""What tests wait for: refusals by code and facts, so that messages can be reworded, and what comes in its own time."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.common.errors import EngineError, ErrorCode


def refused(code: ErrorCode, *facts: str, match: str | None = None, kind: type[EngineError] = EngineError) -> Any:
    """The block raises an error of this code whose message has these facts: a number, a path, an option."""
    return pytest.raises(
        kind, match=match, check=lambda error: error.code is code and all(fact in error.message for fact in facts)
    )


def until(holds: Callable[[], Any], patience_s: float = 60.0, look_s: float = 0.005) -> None:
    """Waits for what another thread or process does; time in which this process is stopped does not count."""
    for _ in range(int(patience_s / look_s)):
        if holds():
            return
        time.sleep(look_s)
    pytest.fail("it did not happen")
