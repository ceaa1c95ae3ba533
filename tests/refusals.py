"""Errors that users meet, as tests expect them."""

from typing import Any

import pytest

from engine.common.errors import EngineError, ErrorCode


def refused(code: ErrorCode, match: str | None = None, kind: type[EngineError] = EngineError) -> Any:
    """What is inside raises an error of this code, whose sentence has `match`, as `pytest.raises` reads it."""
    return pytest.raises(kind, match=match, check=lambda error: error.code is code)
