"""Progress of the command line: a bar on a terminal, plain lines elsewhere, and never a byte on stdout."""

import io
import sys

import pytest

from engine.verbs.models import library
from engine.verbs.models.library import ProgressLine, amount_words, drawn, duration


class Screen(io.StringIO):
    """A terminal."""

    encoding = "utf-8"

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self.encoding = encoding  # type: ignore[misc]

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [line.partition("\x1b")[0] for line in self.getvalue().split("\r")[1:]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(library.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_gets_one_line_with_a_bar(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressLine("moving", in_bytes=True) as line:
        for done in range(0, 101, 10):
            line.update(done * 10**7, 10**9)
            clock[0] += 1.0
    assert "\n" not in screen.getvalue()
    assert [text.count("█") > 0 for text in screen.lines[:3]] == [False, True, True]
    assert "40 % 400 MB of 1.0 GB, 100 MB/s, 6 s left" in screen.lines[4]
    assert screen.lines[-2].count("█") == 24
    assert screen.lines[-1] == ""
    assert capsys.readouterr().out == ""


def test_elsewhere_it_is_a_line_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("verifying", in_bytes=True) as line:
        for done in range(101):
            line.update(done * 10**7, 10**9)
            clock[0] += 1.0
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0] == "verifying: 0 %, 0 bytes of 1.0 GB"
    assert len(lines) == 21
    assert lines[-1] == "verifying: 100 %, 1.0 GB of 1.0 GB, 10 MB/s"
    assert not any("█" in one or "\r" in one for one in lines)


@pytest.mark.parametrize("width", [200, 100, 79, 60, 40, 20, 5])
@pytest.mark.parametrize("label", ["moving", "Qwen3-Next-80B-A3B-Instruct-with-a-very-long-name-of-its-own Q4_K_M"])
def test_a_line_fits_its_terminal(width: int, label: str) -> None:
    for share in (-1.0, 0.0, 0.413, 1.0, 2.0):
        text = drawn(label, share, "7.1 GB of 17.3 GB, 46 MB/s, 3 min left", width)
        assert len(text) <= width
        assert width < 60 or "7.1 GB of 17.3 GB, 46 MB/s, 3 min left" in text


def test_a_terminal_without_blocks_gets_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen("ascii"))
    text = drawn("moving", 0.5, "", 40)
    assert text.isascii()
    assert 3 < text.count("-") <= text.count("#")


def test_words() -> None:
    assert [duration(each) for each in (4.4, 200, 5400, 7500)] == ["4 s", "3 min", "1 h 30 min", "2 h 05 min"]
    assert amount_words(5, 10, 0.0, None) == "5 bytes of 10 bytes"
    assert amount_words(10, 10, 5.0, 0.0) == "10 bytes of 10 bytes, 5 bytes/s"
