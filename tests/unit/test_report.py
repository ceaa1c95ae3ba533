"""The file that people attach to a report of a fault says much of the machine, and nothing of them."""

import getpass
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import cli
from engine.common.anonymous import of_log, without_names
from engine.common.paths import log_dir

SECRET = "Zyxwvut"
"""In names that must not be seen."""


@pytest.mark.parametrize(
    "text",
    [
        f"/home/{SECRET}/models/x.gguf cannot be read",
        f"cannot open '/media/Max {SECRET}/my model/a.gguf' now",
        f"C:\\Users\\{SECRET} Müller\\x.gguf is gone",
        f"\\\\server\\{SECRET}\\x",
        f"~/{SECRET}/x",
        f"https://{SECRET}:pass@host.example/x",
        f"https://host.example/x?signature={SECRET}",
        f"Authorization: Bearer {SECRET}{SECRET}",
        f"hf_{SECRET}abcdef",
        f"token={SECRET}",
        f"{SECRET}@mail.example",
        f"/usr/lib/python3/x.py read /srv/{SECRET}/b",
    ],
)
def test_what_is_nobodys_business_is_taken_out(text: str) -> None:
    assert SECRET not in without_names(text)


def test_what_was_taken_out_stays_out_and_what_stayed_stays() -> None:
    text = f'  File "{cli.__file__}", line 7, in main\n/media/x y\nhost 10.1.2.3'
    once = without_names(text)
    assert without_names(once) == once


def test_this_user_and_computer_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: SECRET.lower())
    monkeypatch.setattr(platform, "node", lambda: "quarry.example")
    assert without_names(f"{SECRET} on quarry.example, quarry") == "<removed> on <removed>, <removed>"


def test_where_an_error_was_stays_readable() -> None:
    here = str(Path(cli.__file__))
    assert "line 7, in main" in without_names(f'  File "{here}", line 7, in main')
    assert "engine" in without_names(f'  File "{here}", line 7, in main')
    for words in (
        "61.0 tokens/s at 8 GB/s",
        "torch 2.13.0+cpu",
        "CUDA 13.0, driver 580.65.06",
        "http://127.0.0.1:8000",
    ):
        assert without_names(words) == words


@given(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=60))
def test_messages_of_errors_and_of_others_are_never_shown(prompt: str) -> None:
    said = f"{SECRET} {prompt}"
    lines = [
        f"2026-11-23 02:57:18,791 29821 INFO transformers.generation: prompt was {said}",
        f"2026-11-23 02:57:18,791 WARNING torch: {said}",
        f"ValueError: {said}",
        f"some.module.OddError: {said}",
        said,
        f"    raise ValueError({said!r})",
        f'  File "/usr/lib/x.py", line 3, in f {said}',
    ]
    assert SECRET not in "\n".join(of_log(lines))


@pytest.mark.usefixtures("without_kernels")
def test_the_report_has_what_helps_and_nothing_else(
    tmp_path: Path, switchyard_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir().mkdir(parents=True)
    (log_dir() / "window.log").write_text(
        "2026-11-23 02:57:18,791 INFO switchyard.window: raised\n"
        f"2026-11-23 02:57:18,791 ERROR switchyard.x: cannot read /media/{SECRET}/x\n{SECRET}\n"
    )
    (log_dir() / "engine-stderr.log").write_text(
        f'Fatal Python error: Aborted\nThread 0x1:\n  File "/a/{SECRET}", line 3\n'
    )
    (log_dir() / "crash-2026-1.txt").write_text(f"Switchyard, unhandled error\nPython 3\nValueError: {SECRET}\n")
    file = tmp_path / "new" / "report.txt"
    cli.main(["doctor", "--report", str(file)])
    said = file.read_text(encoding="utf-8")
    assert SECRET not in said
    assert SECRET not in capsys.readouterr().out
    for words in (
        "raised",
        "Fatal Python error",
        "unhandled error",
        "ValueError",
        "processor",
        "torch 2.",
        "End of engine",
    ):
        assert words in said, words


@pytest.mark.usefixtures("without_kernels")
def test_a_report_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["doctor", "--report", str(tmp_path / "file" / "report.txt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
