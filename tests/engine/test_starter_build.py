"""Making the starter in processes that are killed, stopped, or run at the same time."""

import os
import signal
import subprocess
import sys

import pytest

from engine.checkpoint.library import starter_is_built, verify
from engine.checkpoint.ownership import remove
from engine.checkpoint.starter import build_starter
from engine.common.errors import ErrorCode, RequestCancelled
from engine.common.paths import models_dir, python_module
from tests.refusals import refused
from tests.starter import lasting_wheel

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is at hand; the library is this test's own."""
    monkeypatch.setenv("SWITCHYARD_STARTER_WHEEL", str(lasting_wheel()))


def _pull() -> subprocess.Popen[str]:
    command, variables = python_module("engine.cli")
    return subprocess.Popen(
        [*command, "models", "pull", "starter", "--json"],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_until_it_works(pull: subprocess.Popen[str]) -> None:
    assert "%" in pull.stderr.readline()


@pytest.mark.exhaustive
def test_killed_then_made_by_two_at_once() -> None:
    with _pull() as killed:
        _wait_until_it_works(killed)
        killed.kill()
    assert not starter_is_built()
    assert list(models_dir().iterdir()) != []
    with _pull() as first, _pull() as second:
        said = [pull.communicate()[1] for pull in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert verify("starter").damaged == {}
    assert [entry.name for entry in models_dir().iterdir()] == ["starter"]
    (models_dir() / "starter" / "tokenizer.json").write_text("{}")
    build_starter()
    assert verify("starter").damaged == {}
    remove("starter", permanently=True)
    assert not starter_is_built()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_asked_to_stop_it_leaves_nothing() -> None:
    with _pull() as pull:
        _wait_until_it_works(pull)
        pull.send_signal(signal.SIGTERM)
        pull.communicate()
    assert pull.returncode == 130
    assert list(models_dir().iterdir()) == []


def test_what_is_not_the_starters_is_never_replaced() -> None:
    (models_dir() / "starter").mkdir(parents=True)
    mine = models_dir() / "starter" / "mine.txt"
    mine.write_text("mine")
    with refused(ErrorCode.INVALID_REQUEST, "mine.txt is not the starter"):
        build_starter()
    assert mine.read_text() == "mine"


def test_cancelled_between_layers() -> None:
    reached: list[int] = []
    half = 800

    def on_progress(done: int, total: int) -> None:
        assert total == 1000
        reached.append(done)

    with pytest.raises(RequestCancelled):
        build_starter(on_progress, cancelled=lambda: bool(reached) and reached[-1] >= half)
    assert reached == sorted(reached)
    assert list(models_dir().iterdir()) == []
