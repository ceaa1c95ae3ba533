"""What a command line reads and says: sizes and devices as typed, progress for people, and no obeyed byte."""

import argparse
import io
import logging
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import cli
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import INSTEAD, few_marks, plain, plain_line
from engine.common.sizes import about, rounded_down, rounded_up
from engine.process.lifetime import log_to_file
from engine.verbs import output
from engine.verbs.models import library
from engine.verbs.models.library import ProgressLine, amount_words, drawn, duration
from engine.verbs.options import add_engine_options, device_name, engine_config, parse_size, positive_int


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5gb", 1_500_000_000),
        (".5GB", 500_000_000),
        ("4096B", 4096),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "8", "8 bananas", "GB", "-8GB", "0GB", "nanGB", "8G B", "8,5GB", "1e9B", "٨GB", "9999999TB", "8GBit"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="8GB"):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_a_clear_refusal(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except argparse.ArgumentTypeError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive_int(text)


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:1", "emulated:rtx-3060"])
def test_devices(text: str) -> None:
    assert device_name(text) == text


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "emulated:", "CPU", "cpu\n"])
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="auto, cpu, cuda"):
        device_name(text)


def test_options_become_the_settings_of_a_run() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    line = "--device cpu --vram 1GB --ram 2GiB --threads 3 --precision bf16"
    assert engine_config(parser.parse_args(line.split()), "m") == EngineConfig(
        "m", "cpu", "bf16", vram_bytes=10**9, ram_bytes=2 * 2**30, threads=3
    )
    assert engine_config(parser.parse_args([]), "m") == EngineConfig("m")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 bytes"), (3, "3 bytes"), (1500, "2 kB"), (1_230_000, "1.2 MB"), (85_000_000, "85 MB")),
        *((999_600_000, "1.0 GB"), (12_340_000_000, "12.3 GB")),
    ],
)
def test_the_nearest_figure(nbytes: int, text: str) -> None:
    assert about(nbytes) == text


@given(st.integers(0, 2**44))
def test_what_there_is_is_never_overstated_and_what_is_needed_never_understated(nbytes: int) -> None:
    assert _bytes(rounded_down(nbytes)) <= nbytes <= _bytes(rounded_up(nbytes))


@given(st.integers(1, 2**44), st.integers(1, 2**30))
def test_too_little_is_always_told_from_what_is_needed(less: int, missing: int) -> None:
    assert _bytes(rounded_down(less)) < _bytes(rounded_up(less + missing))


def _bytes(text: str) -> int:
    return int(text.removesuffix(" bytes")) if text.endswith("bytes") else parse_size(text.replace(",", ""))


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
