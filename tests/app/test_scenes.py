"""Every page in each of its states: nothing is clipped, covered, out of reach or without a name, and it rests."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QLocale, QObject, QSize, Qt
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel

from app.languages import ENGLISH, LANGUAGES, Languages, compile_translation, translations_dir
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.main_window.window import SMALLEST
from tests.app.layout_walker import layout_problems, without_name
from tests.app.stage import SCENES, Stage, staged
from tests.combinations import some

SCREEN = QSize(720, 450)
"""What a notebook of 1440 x 900 pixels shows at a scale of 2."""

SIZES = (QSize(900, 600), QSize(1280, 800), SCREEN)
TEXTS = (12, 14, 20)
EVERY = tuple(itertools.product(range(3), range(3)))
ROUNDS = 50


class Requests(QObject):
    """Counts how often a window is asked to be laid out or painted again."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.LayoutRequest, QEvent.Type.UpdateRequest):
            self.counted[type(watched).__name__] += 1
        return False


def _check(stage: Stage, theme: ThemeController, wanted: tuple[tuple[int, int], ...]) -> list[str]:
    found: list[str] = []
    for size, text in wanted:
        theme.set_font_px(TEXTS[text])
        stage.window.resize(SIZES[size])
        stage.settle()
        window = stage.window if stage.dialog is None else stage.dialog
        problems = layout_problems(window, SCREEN)
        # A layout that asks for itself again would take a whole core of an idle window.  Layouts ask upwards.
        requests = Requests()
        window.installEventFilter(requests)
        for _ in range(ROUNDS):
            QApplication.processEvents()
        window.removeEventFilter(requests)
        # A second may pass meanwhile, at whose end a clock or a sensor's figure changes.
        if max(requests.counted.values(), default=0) >= ROUNDS / 5:
            problems.append(f"asks to be laid out again: {requests.counted}")
        at = f"{SIZES[size].width()}x{SIZES[size].height()}, text {TEXTS[text]}"
        found += [f"{at}: {problem}" for problem in problems]
    return found


@pytest.fixture
def stage(settings: Settings, theme: ThemeController, tmp_path: Path) -> Iterator[Stage]:
    with staged(settings, theme, tmp_path) as result:
        result.show(SIZES[1])
        yield result


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The translations as packages have them."""
    folder = tmp_path_factory.mktemp("translations")
    for language in LANGUAGES:
        name = f"switchyard_{language}"
        assert language == ENGLISH or compile_translation(translations_dir() / f"{name}.ts", folder / f"{name}.qm")
    return folder


@pytest.mark.parametrize("name", some(SCENES))
def test_everything_has_room_and_a_name_and_comes_to_rest(
    theme: ThemeController, name: str, request: pytest.FixtureRequest
) -> None:
    number = list(SCENES).index(name)
    theme.set_choice("dark" if number % 2 else "light")  # before there is a window to dress anew
    stage: Stage = request.getfixturevalue("stage")
    SCENES[name](stage)
    # Ordinary text in a larger window, large text on the smallest screen: a change of text styles every widget anew.
    assert _check(stage, theme, ((number % 2, 1), (2, 2))) == []
    for window in {stage.window, stage.dialog or stage.window}:
        assert without_name(window) == []


@pytest.mark.parametrize("name", some(SCENES, every=3, first=1))
def test_everything_has_room_in_the_longest_language(
    qapp: QApplication, compiled: Path, settings: Settings, theme: ThemeController, tmp_path: Path, name: str
) -> None:
    assert _problems_in("de", ((0, 1),), name, qapp, compiled, settings, theme, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", SCENES)
def test_everything_has_room_in_every_language(
    qapp: QApplication,
    compiled: Path,
    settings: Settings,
    theme: ThemeController,
    tmp_path: Path,
    name: str,
    language: str,
) -> None:
    assert _problems_in(language, ((0, 1), (1, 1), (2, 2)), name, qapp, compiled, settings, theme, tmp_path) == []


def _problems_in(
    language: str,
    wanted: tuple[tuple[int, int], ...],
    name: str,
    qapp: QApplication,
    compiled: Path,
    settings: Settings,
    theme: ThemeController,
    folder: Path,
) -> list[str]:
    before, languages = QLocale(), Languages(qapp, language, folder=compiled)
    try:
        with staged(settings, theme, folder) as stage:
            stage.show(SIZES[1])
            SCENES[name](stage)
            nameless = [
                each for window in {stage.window, stage.dialog or stage.window} for each in without_name(window)
            ]
            return _check(stage, theme, wanted) + nameless
    finally:
        languages.uninstall()
        languages.deleteLater()
        QLocale.setDefault(before)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("days", [1, 2, 3])
def test_the_end_of_a_job_on_another_day_has_room(stage: Stage, theme: ThemeController, days: int) -> None:
    SCENES["batch-servers-running"](stage)
    stage.engine.tell(306, 500, failed=1, rate=1253.4, left=days * 86_400.0)
    stage.until(lambda: "306" in stage.batch.job_view.progress.accessibleDescription())
    assert _check(stage, theme, ((2, 2),)) == []


def test_the_composer_has_room_when_larger_text_makes_it_narrower(stage: Stage, theme: ThemeController) -> None:
    SCENES["chat-context-full"](stage)
    assert _check(stage, theme, ((0, 0), (0, 1))) == []


@pytest.mark.parametrize("font_px", [14, 18])
def test_a_conversation_fits_the_smallest_window(stage: Stage, theme: ThemeController, font_px: int) -> None:
    theme.set_font_px(font_px)
    SCENES["chat-conversation"](stage)
    stage.window.resize(SMALLEST)
    stage.settle()
    transcript = stage.chat.transcript
    area = transcript.viewport()
    shown = [
        each
        for each in transcript.findChildren(QLabel) + transcript.findChildren(QAbstractButton)
        if each.isVisible() and each.mapTo(area, each.rect().topRight()).x() > area.width()
    ]
    assert shown == []
    assert transcript.widget().width() <= area.width()
    assert transcript.horizontalScrollBarPolicy() == Qt.ScrollBarPolicy.ScrollBarAlwaysOff


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["light", "dark"])
@pytest.mark.parametrize("name", SCENES)
def test_everything_has_room_in_every_combination(stage: Stage, theme: ThemeController, name: str, choice: str) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    SCENES[name](stage)
    assert _check(stage, theme, EVERY) == []
