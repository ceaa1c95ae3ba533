"""What every test of the window needs: a theme and settings of its own, and no colours left behind."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
from PySide6.QtCore import QCoreApplication, QEvent
from PySide6.QtWidgets import QApplication

import app.services.hub as hub
import app.services.planning as planning
import app.widgets.chart  # noqa: F401  # as in a window that has been open for a second
from app.main import collect_if_due
from app.services.formulas import formulas
from app.services.planning import PlanAnswer
from app.services.settings import Settings
from app.theme import BODY_PX, ThemeController
from engine.checkpoint.catalogue import read_catalogue
from engine.tuning.fit import Recommendation
from engine.tuning.machine_state import MachineLook
from tests.app import tuning_results as made

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in another process: this one stands for the window, which never imports torch."""
    folder = tmp_path_factory.mktemp("models") / "tiny-mixtral"
    script = "import sys, pathlib; from tests.engine.tiny_families import tiny_checkpoint as make; "
    script += "make('mixtral', pathlib.Path(sys.argv[1]), max_position_embeddings=4096)"
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=CHECKOUT, check=True, capture_output=True)
    return folder


@pytest.fixture
def settings(qapp: QApplication, switchyard_home: Path) -> Iterator[Settings]:
    """Settings in the test's own folder, written when it ends."""
    result = Settings()
    yield result
    result.save()
    result.deleteLater()


_catalogue_here = hub.catalogue_here


@cache
def _few_judged(device: str, download_free: int | None = None) -> tuple[MachineLook, tuple[Recommendation, ...]]:
    whole = read_catalogue()
    with patch("engine.checkpoint.catalogue.read_catalogue", lambda: replace(whole, entries=whole.entries[::-9])):
        return _catalogue_here(device, download_free)


@pytest.fixture(autouse=True)
def a_few_models_of_the_catalogue_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To plan all of them takes seconds, which a window that closes meanwhile waits for."""
    monkeypatch.setattr(hub, "catalogue_here", _few_judged)


@pytest.fixture
def plans_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever is asked for, the same plan, for tests that look at other things."""
    plan = partial(made.plan, made.look(made.gpu()))
    monkeypatch.setattr(planning, "answer", lambda question: PlanAnswer(question, plan()))


@pytest.fixture(scope="module", autouse=True)
def garbage_stays_on_this_thread() -> Iterator[None]:
    """As in the window; around the whole file, so that it holds until the threads of the last test have ended.

    What is left is collected here: a later test's thread would, and timers cannot be stopped from there.
    """
    gc.disable()
    yield
    gc.collect()
    _delete_what_was_closed()
    gc.enable()


@pytest.fixture(autouse=True)
def closed_widgets_are_gone(leak_check: None) -> Iterator[None]:
    yield
    _delete_what_was_closed()
    collect_if_due()


def _delete_what_was_closed() -> None:
    """Deletes now what `deleteLater` was called on.

    That waits for an event loop, which most tests never run: the closed widgets of every test before would stay, and
    each change of the theme would style all of them.
    """
    if QApplication.instance() is not None:
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


@pytest.fixture(autouse=True)
def clipboard_is_left_empty() -> Iterator[None]:
    """Offscreen, Qt deletes what is in the clipboard after Python has ended; what Python made crashes then."""
    yield
    if QApplication.instance() is not None:
        QApplication.clipboard().clear()


@pytest.fixture(scope="session")
def qapp(qapp: QApplication) -> Iterator[QApplication]:
    """The application in the light theme at 14 px, once for all tests: to dress it means to style every widget."""
    ThemeController("light", parent=qapp)
    yield qapp
    formulas().close()  # pytest never quits it


@pytest.fixture
def theme(qapp: QApplication) -> Iterator[ThemeController]:
    """What dresses the application; it is light and of 14 px again after the test."""
    controller = qapp.findChild(ThemeController)
    yield controller
    controller.set_choice("light")
    controller.set_font_px(BODY_PX)
