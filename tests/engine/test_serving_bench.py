"""The clients of the serving bench, against our own server; and what they ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving_load import QUESTIONS, Asked, Load, Question, Timed, closed_loop, open_loop, read_questions
from engine.common.errors import EngineError
from tests.engine.test_serving import serving

ASKED = [Question((5, 6, 7 + number), 4 + number) for number in range(5)]


def test_each_load_asks_everything_once() -> None:
    with serving() as running:
        for load in (closed_loop(running.url, ASKED, 2), open_loop(running.url, ASKED, 1000.0, seed=1)):
            assert sorted(answer.tokens for answer in load.answers) == [4, 5, 6, 7, 8]
            assert all(0 < answer.first_s <= answer.whole_s <= load.seconds for answer in load.answers)
        with pytest.raises(EngineError, match="did not answer"):
            closed_loop(running.url, [Question((10**6,), 3)], 1)


def test_the_95th_percentile_is_one_of_the_waits() -> None:
    answers = tuple(Timed(float(number), 30.0, 2) for number in range(1, 21))
    load = Load(4.0, answers)
    assert (load.first_p95_s, load.tokens_per_s) == (19.0, 10.0)


def test_questions_come_from_a_file_of_either_kind(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "a", "tokens": 7}\n\n{"turns": ["b", "c"]}\n"d"\n', encoding="utf-8")
    assert read_questions(file) == (Asked("a", 7), Asked("b"), Asked("d"))
    assert all(asked.text and asked.tokens > 0 for asked in QUESTIONS)


@pytest.mark.parametrize("text", ["", "{", '{"other": 1}', "3", '{"prompt": 3}', '{"turns": []}'])
def test_a_file_without_questions_is_said(text: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(EngineError, match=r"questions\.jsonl"):
        read_questions(file)
    with pytest.raises(EngineError, match="cannot be read"):
        read_questions(tmp_path / "nothing")
