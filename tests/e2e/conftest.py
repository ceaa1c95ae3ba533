"""The private screen, for every end-to-end test that runs in this session."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real_packages import Made, packages_in
from tests.e2e.screen import Screen, missing_programs, private_screen
from tests.starter import starter_for_tests


@pytest.fixture(scope="session")
def screen() -> Iterator[Screen]:
    """Skips where a private screen cannot be had; fails there in CI, where it must be."""
    if sys.platform != "linux":
        pytest.skip("the private screen is an X server on Linux")
    if missing := missing_programs():
        told = f"{', '.join(missing)} not found: sudo apt-get install xvfb xdotool dbus"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    with tempfile.TemporaryDirectory(prefix="x-") as folder, private_screen(Path(folder)) as screen:
        yield screen


@pytest.fixture(scope="session")
def starter() -> Path:
    """Folder of the starter checkpoint.  Read-only."""
    return starter_for_tests()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Packages of two versions; `SWITCHYARD_PACKAGES` names a folder that keeps them for the next run."""
    kept = os.environ.get("SWITCHYARD_PACKAGES")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("packages")
    yield packages_in(folder)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
