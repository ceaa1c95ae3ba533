"""The peers of the benches that the user of this machine has built: tests have homes of their own, where nothing is."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.peers.editions import EDITIONS, Edition


def _users_home(edition: Edition) -> Path:
    with patch.dict(os.environ):
        os.environ.pop("SWITCHYARD_HOME", None)
        return edition.home()


_HOMES = {edition.name: _users_home(edition) for edition in EDITIONS}


def users_home(edition: Edition) -> Path:
    """Where the user of this machine builds it."""
    return _HOMES[edition.name]


def python_of(edition: Edition) -> Path | None:
    """The interpreter that runs the user's build; `None` if there is none."""
    with patch.object(Edition, "home", lambda edition: _HOMES[edition.name]):
        return edition.python()


def built(edition: Edition) -> bool:
    """Whether it is built, for the user or where the home is now."""
    return python_of(edition) is not None


BUILT = [
    pytest.param(
        edition,
        id=edition.name,
        marks=pytest.mark.skipif(not built(edition), reason=f"not built: {edition.how_to_build()}"),
    )
    for edition in EDITIONS
]
"""Both, skipped where they are not built."""


@pytest.fixture
def users_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's builds, although the home is another."""
    monkeypatch.setattr(Edition, "home", lambda edition: _HOMES[edition.name])
