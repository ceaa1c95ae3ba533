"""Nothing that a terminal would obey reaches it, and nothing of anybody's writing is lost."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import cli
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import INSTEAD, few_marks, plain, plain_line
from engine.process.lifetime import log_to_file
from engine.verbs import output

CLEAR = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202egnp.exe"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> bool:
    return any(mark in text for mark in "\x1b\x07\x9b\r\u202e\ud800")


@pytest.mark.parametrize(
    "text", ["Zażółć", "नमस्ते", "می\u200cخواهم", "👨\u200d👩\u200d👧", "a\u00a0b\u202fc\u3000d", "\tx\ny"]
)
def test_writing_of_every_kind_stays(text: str) -> None:
    assert plain(text) == text


def test_what_a_terminal_obeys_is_replaced() -> None:
    assert not obeyed(plain(CLEAR + "\ud800"))
    assert INSTEAD in plain(CLEAR)
    assert plain_line("a\n b\r\nc") == "a b c"


def test_errors_notes_and_tables_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    output.report_error(EngineError(ErrorCode.INVALID_REQUEST, f"No {CLEAR}\nfile."), as_json=False)
    output.note(CLEAR)
    output.emit({}, as_json=False, human=CLEAR)
    out, err = capsys.readouterr()
    assert not obeyed(out)
    assert not obeyed(err)
    assert len(err.splitlines()) == 2


def test_progress_is_plain_and_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    output.show_progress(f"Loading {CLEAR}\n")
    assert stream.getvalue().startswith("\rLoading ")
    assert not obeyed(stream.getvalue()[1:].removesuffix("\x1b[K"))
    assert "\n" not in stream.getvalue()


def test_an_answer_is_exact_in_a_pipe_and_plain_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_text(CLEAR)
    assert capsys.readouterr().out == CLEAR
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    output.write_text(f"{CLEAR} 👨\u200d👩\u200d👧 a\u00a0b")
    assert not obeyed(stream.getvalue())
    assert stream.getvalue().endswith(" 👨\u200d👩\u200d👧 a\u00a0b")


def test_a_folder_of_a_bad_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "show", str(tmp_path / CLEAR)]) == 2
    assert cli.main(["models", CLEAR]) == 2
    assert not obeyed(capsys.readouterr().err)


def test_the_log_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = log_to_file("test.log", also_stderr=True)
    try:
        logging.getLogger("x").warning("The file %s is odd", CLEAR)
    finally:
        end()
    assert not obeyed(capsys.readouterr().err)


def test_what_is_no_exception_is_told_as_a_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        pass

    def panic(_arguments: list[str]) -> int:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(cli, "_run", panic)
    assert cli.main(["models"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@given(st.text(alphabet=st.sampled_from("ab é\u0301\u0334\u20dd\ufe0fि한中 \n"), max_size=300))
def test_letters_keep_the_marks_that_writing_has(text: str) -> None:
    shown = few_marks(text)
    assert re.sub("[\u0301\u0334\u20dd\ufe0fि]", "", shown) == re.sub("[\u0301\u0334\u20dd\ufe0fि]", "", text)
    assert not re.search("[\u0301\u0334\u20dd\ufe0fि]{31}", shown)
    if not re.search("[\u0301\u0334\u20dd\ufe0fि]{31}", text):
        assert shown == text
