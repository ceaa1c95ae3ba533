"""Checks of refusals by code and facts, so that messages can be reworded."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.common.errors import EngineError, ErrorCode


@contextmanager
def refused(code: ErrorCode, *facts: str) -> Iterator[None]:
    """The block raises an `EngineError` of this code whose message has these facts: a number, a path, an option."""
    with pytest.raises(EngineError) as caught:
        yield
    assert caught.value.code is code, caught.value.message
    for fact in facts:
        assert fact in caught.value.message
