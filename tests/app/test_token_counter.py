"""Counting tokens in a process of its own, and by length where that is not to be had."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pytestqt.qtbot import QtBot
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from app.services import token_counter
from app.services.token_counter import TOKENS_PER_TURN, TokenCounter
from engine.untrusted_text.child import serve
from tests.untrusted_tokenizers import SLOW_TEXT, write_slow_tokenizer

WAIT_MS = 30_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint whose tokens are words."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def counter(qtbot: QtBot) -> Iterator[TokenCounter]:
    counter = TokenCounter()
    yield counter
    counter.close()
    counter.deleteLater()


def test_tokens_are_counted_with_the_models_tokenizer(counter: TokenCounter, model: Path, qtbot: QtBot) -> None:
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
        counter.count("k", str(model), ["one two three", "four"])
    assert told.args == ["k", 4 + 2 * TOKENS_PER_TURN]
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
        counter.count("k", str(model), ["one two three", "four", "five six"])
    assert told.args == ["k", 6 + 3 * TOKENS_PER_TURN]


def test_the_counting_process_knows_nothing_of_our_environment(
    counter: TokenCounter, model: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS):
        counter.count("k", str(model), ["one"])
    assert "hidden" not in psutil.Process(counter._process.processId()).environ().values()


def test_only_the_newest_question_is_answered(counter: TokenCounter, model: Path, qtbot: QtBot) -> None:
    told: list[tuple[str, int]] = []
    counter.counted.connect(lambda key, tokens: told.append((key, tokens)))
    for number in range(1, 50):
        counter.count(str(number), str(model), ["word " * number])
    qtbot.waitUntil(lambda: bool(told), timeout=WAIT_MS)
    assert told == [("49", 49 + TOKENS_PER_TURN)]


def test_without_a_tokenizer_length_serves(counter: TokenCounter, tmp_path: Path, qtbot: QtBot) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    for path in (str(tmp_path), ""):
        with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
            counter.count("k", path, ["x" * 41])
        assert told.args == ["k", 11 + TOKENS_PER_TURN]


def test_a_process_that_cannot_be_started_or_dies_is_no_trouble(
    counter: TokenCounter, model: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counter, "confined_module", lambda _: (["/nowhere/python"], {}))
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
        counter.count("k", str(model), ["abcd"])
    assert told.args == ["k", 1 + TOKENS_PER_TURN]
    other = model / "other"
    other.mkdir()
    monkeypatch.setattr(token_counter, "confined_module", lambda _: (["false"], {}))
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
        counter.count("k", str(other), ["abcd"])
    assert told.args == ["k", 1 + TOKENS_PER_TURN]


def test_the_process_answers_line_by_line(model: Path) -> None:
    requests = [
        {"do": "count", "seconds": 60, "folder": folder, "texts": texts}
        for folder, texts in ((str(model), ["a b", ""]), ("", ["a"]))
    ]
    answers = io.BytesIO()
    serve(io.BytesIO(b"".join(json.dumps(request).encode() + b"\n" for request in requests)), answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [{"result": [2, 0]}, {"result": None}]


@pytest.mark.parametrize("limit", ["COUNTING_S", "MOST_BYTES"])
def test_a_tokenizer_that_takes_too_much_is_given_up(
    counter: TokenCounter, model: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(token_counter, limit, 0.3 if limit == "COUNTING_S" else 1)
    write_slow_tokenizer(model)
    with qtbot.waitSignal(counter.counted, timeout=WAIT_MS) as told:
        counter.count("k", str(model), [SLOW_TEXT])
    assert told.args == ["k", -(-len(SLOW_TEXT) // token_counter.CHARACTERS_PER_TOKEN) + TOKENS_PER_TURN]
