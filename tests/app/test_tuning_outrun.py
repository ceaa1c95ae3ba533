"""A model that runs far faster than its tuning says: noticed once, and only of answers that say something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pytestqt.qtbot import QtBot

from app.services.tuning import TuningOutrun
from engine.common.config import EngineConfig
from engine.protocol import Finished
from engine.tuning.result import TuningResult
from tests.app import tuning_results as made
from tests.app.scripted_engine import STARTER, ScriptedEngine

TUNED = replace(STARTER, device_note="Tuned on 21 Nov 2026: 2.5 tokens/s.")


def answer(rate: float, tokens: int = 100) -> Finished:
    return Finished("r", "stop", 10, 0, tokens, 0.1, rate)


class Checks:
    """What was compared, and what came of it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.result: TuningResult | None = None

    def __call__(self, _path: str, _config: EngineConfig, rate: float) -> TuningResult | None:
        self.rates.append(rate)
        return self.result


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def watched(qtbot: QtBot, checks: Checks) -> Iterator[tuple[TuningOutrun, ScriptedEngine]]:
    engine = ScriptedEngine()
    engine.model, engine.config = TUNED, EngineConfig("starter")
    outrun = TuningOutrun(engine, check=checks)  # type: ignore[arg-type]
    yield outrun, engine
    outrun.close()


def test_a_much_faster_answer_is_noticed(
    qtbot: QtBot, watched: tuple[TuningOutrun, ScriptedEngine], checks: Checks
) -> None:
    outrun, engine = watched
    checks.result = replace(made.result(), outrun=53.1)
    with qtbot.waitSignal(outrun.noticed, timeout=60_000) as told:
        engine.answered.emit(answer(53.1))
    assert told.args == [checks.result]


def test_only_what_is_news_is_compared(
    qtbot: QtBot, watched: tuple[TuningOutrun, ScriptedEngine], checks: Checks
) -> None:
    outrun, engine = watched
    engine.answered.emit(answer(99.0, tokens=3))  # too short to say anything
    engine.model = STARTER
    engine.answered.emit(answer(99.0))  # was never tuned
    assert checks.rates == []
    engine.model = TUNED
    for rate in (20.0, 19.0, 21.0):
        engine.answered.emit(answer(rate))
        qtbot.waitUntil(lambda: not outrun._checking.is_busy, timeout=60_000)
    assert checks.rates == [20.0, 21.0]
