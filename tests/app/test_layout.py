"""Nothing is clipped, elided without a tooltip, covered or out of reach, at any size of window and text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QSize

from app.services.settings import Settings
from app.theme import ThemeController
from tests.app.layout_walker import layout_problems
from tests.app.stage import SCENES, Stage, staged

SCREEN = QSize(720, 450)
"""What a notebook of 1440 x 900 pixels shows at a scale of 2."""

SIZES = (QSize(900, 600), QSize(1280, 800), SCREEN)
TEXTS = (12, 14, 20)
EVERY = tuple(itertools.product(range(3), range(3)))


def _pairs(number: int) -> tuple[tuple[int, int], ...]:
    """Every size and every text size once; which of them meet differs from scene to scene."""
    return tuple((size, (size + number) % 3) for size in range(3))


def _check(stage: Stage, theme: ThemeController, wanted: tuple[tuple[int, int], ...]) -> list[str]:
    found: list[str] = []
    for size, text in wanted:
        theme.set_font_px(TEXTS[text])
        stage.window.resize(SIZES[size])
        stage.settle()
        window = stage.window if stage.dialog is None else stage.dialog
        at = f"{SIZES[size].width()}x{SIZES[size].height()}, text {TEXTS[text]}"
        found += [f"{at}: {problem}" for problem in layout_problems(window, SCREEN)]
    return found


@pytest.fixture
def stage(settings: Settings, theme: ThemeController, tmp_path: Path) -> Iterator[Stage]:
    with staged(settings, theme, tmp_path) as result:
        result.show(SIZES[1])
        yield result


@pytest.mark.parametrize("number", range(len(SCENES)), ids=SCENES)
def test_everything_has_room(stage: Stage, theme: ThemeController, number: int) -> None:
    enter = tuple(SCENES.values())[number]
    theme.set_choice("dark" if number % 2 else "light")
    enter(stage)
    assert _check(stage, theme, _pairs(number)) == []


@pytest.mark.parametrize("days", [1, 2, 3])
def test_the_end_of_a_job_on_another_day_has_room(stage: Stage, theme: ThemeController, days: int) -> None:
    SCENES["batch-servers-running"](stage)
    stage.engine.tell(306, 500, failed=1, rate=1253.4, left=days * 86_400.0)
    stage.until(lambda: "306" in stage.batch.job_view.progress.accessibleDescription())
    assert _check(stage, theme, ((2, 2),)) == []


def test_the_composer_has_room_when_larger_text_makes_it_narrower(stage: Stage, theme: ThemeController) -> None:
    SCENES["chat-context-full"](stage)
    assert _check(stage, theme, ((0, 0), (0, 1))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["light", "dark"])
@pytest.mark.parametrize("name", SCENES)
def test_everything_has_room_in_every_combination(stage: Stage, theme: ThemeController, name: str, choice: str) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    SCENES[name](stage)
    assert _check(stage, theme, EVERY) == []
