"""The `switchyard` command: what it imports, how it ends, what it says when something is wrong."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import log_dir
from engine.verbs import batch, chat, output

CHECKOUT = Path(__file__).resolve().parents[2]
NO_DISPLAY = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "QT_QPA_PLATFORM": ""}


def test_help_and_verbs_that_run_no_model_import_no_torch() -> None:
    script = """
import sys
from engine.cli import main
for arguments in (['--help'], ['--version'], ['chat', '--help'], ['models', '--help'], ['doctor', '--help']):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0
for arguments in (['models', 'list', '--json'], ['doctor', '--json'], ['chat', '--model', 'no such', '--prompt', 'x']):
    main(arguments)
assert not {'torch', 'transformers', 'PySide6'} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert "--min-p" in done.stdout
    assert "--dry-multiplier" in done.stdout


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ([], {}),
        (["--dry-multiplier", "0.8", "--dry-range", "-1"], {"dry_multiplier": 0.8, "dry_range": -1}),
        (["--dry-breaker", r"\n", "--dry-breaker", "###"], {"dry_breakers": ("\n", "###")}),
        (["--dry-breaker", "none"], {"dry_breakers": ()}),
        (["--dry-base", "2", "--dry-allowed-length", "3"], {"dry_base": 2.0, "dry_allowed_length": 3}),
    ],
)
@pytest.mark.parametrize("verb", [["chat"], ["batch", "x.txt"]])
def test_options_become_sampling(verb: list[str], options: list[str], fields: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    chat.add_parser(verbs)
    batch.add_parser(verbs)
    assert chat.given_sampling(parser.parse_args([*verb, *options])) == fields


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "nonsense"),
        (["chat", "--temprature", "1"], "--temprature"),
        (["chat", "--prom", "abbreviated"], "--prom"),
        (["chat", "--vram", "8"], "8GB"),
        (["chat", "--ram", "-8GB"], "--ram"),
        (["chat", "--threads", "0"], "between 1 and 1024"),
        (["chat", "--max-tokens", "-5"], "1 or more"),
        (["chat", "--precision", "fp4"], "fp4"),
        (["chat", "--device", "gpu"], "auto, cpu, cuda"),
        (["chat", "--temperature", "warm"], "warm"),
        (["chat", "--prompt", "x", "--temperature", "-1"], "between 0 and 10"),
        (["chat", "--prompt", "x", "--temperature", "nan"], "between 0 and 10"),
        (["chat", "--prompt", "x", "--top-p", "0"], "--top-p"),
        (["chat", "--prompt", "x", "--top-k", "-1"], "--top-k"),
        (["chat", "--prompt", "x", "--min-p", "1"], "--min-p"),
        (["chat", "--prompt", "x", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["chat", "--prompt", "x", "--dry-multiplier", "-1"], "--dry-multiplier"),
        (["chat", "--prompt", "x", "--dry-multiplier", "nan"], "--dry-multiplier"),
        (["chat", "--prompt", "x", "--dry-base", "0.9"], "--dry-base"),
        (["chat", "--prompt", "x", "--dry-allowed-length", "-1"], "--dry-allowed-length"),
        (["chat", "--prompt", "x", "--dry-allowed-length", "2.5"], "--dry-allowed-length"),
        (["chat", "--prompt", "x", "--dry-range", "-2"], "--dry-range"),
        (["chat", "--prompt", "x", "--dry-breaker", ""], "--dry-breaker"),
        (["batch", "x.txt", "--dry-base", "11"], "--dry-base"),
        (["batch", "x.txt", "--beams", "2"], "--beams"),
        (["chat", "--prompt", "x", "--beams", "0"], "beams"),
        (["chat", "--prompt", "x", "--seed", "-1"], "seed"),
        (["chat", "--prompt", "x", "--seed", str(2**70)], "seed"),
        (["chat", "--prompt", "x", "--stop", ""], "stop"),
        (["chat", "--prompt", "   "], "prompt is empty"),
        (["chat", "--prompt", "x"], "switchyard models pull starter"),
        (["chat", "--prompt", "x", "--model", "no-such-model"], "no-such-model"),
        (["chat", "--prompt", "x", "--model", "/no/such/folder"], "/no/such/folder"),
        (["chat", "--prompt", "x", "--model", ""], "No model was named"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_users_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, as_json: bool
) -> None:
    assert cli.main([*arguments, *(["--json"] if as_json else [])]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("switchyard: ")
    assert words in line
    if as_json:
        error = json.loads(said.out)["error"]
        assert error["message"] in line
        assert ErrorCode(error["code"]).is_users
    else:
        assert said.out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a display")
def test_without_a_display_it_says_so_and_chats() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from engine.cli import main; sys.exit(main())"],
        cwd=CHECKOUT,
        env={**os.environ, **NO_DISPLAY},
        input="hello",
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stderr.splitlines()
    assert "no display" in first
    assert "models pull starter" in second  # the chat has begun, and there is no model in this home
    assert done.returncode == 2


def test_without_a_verb_the_window_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(cli, "has_display", lambda: True)
    monkeypatch.setattr(os, "execv", lambda _path, command: started.append(command) or 0)
    monkeypatch.setattr(subprocess, "call", lambda command: started.append(command) or 0)
    assert cli.main([]) == 0
    (command,) = started
    assert command[0] == sys.executable
    assert command[-2:] == ["-m", "app"]
    assert str(CHECKOUT) in os.environ["PYTHONPATH"]


def test_a_fault_of_ours_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise RuntimeError("SEC" + "RET")

    monkeypatch.setattr("engine.verbs.doctor.run", fail)
    assert cli.main(["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError" in line
    log = (log_dir() / "command.log").read_text()
    assert "in fail" in log
    assert "SECRET" not in line + log


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.verbs.doctor.run", interrupted)
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_interrupts_end_a_command_that_began_with_them_ignored() -> None:
    """As a script's background commands do."""
    script = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import engine.verbs.doctor
engine.verbs.doctor.run = lambda _args: signal.raise_signal(signal.SIGINT) or 0
from engine import cli
raise SystemExit(cli.main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, b"")


@pytest.mark.skipif(os.name == "nt", reason="a pipe of POSIX")
def test_a_reader_that_leaves_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "engine.cli", "models", "list", "--json"]
    with open(write, "wb") as out:
        done = subprocess.run(command, cwd=CHECKOUT, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""


def test_a_terminal_that_cannot_show_it_gets_something_else() -> None:
    script = "from engine.verbs.output import write_text; write_text('caf\\u00e9 \\U0001f600 \\udc80\\n')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "caf? ? ?\n"


def test_an_answer_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.write_text("a\x1b[2Jb\rc\n\td\x07é")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffdc\n\td\ufffdé"


def test_json_documents_take_dataclasses_and_paths_and_nothing_odd(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"path": Path("x"), "text": "é"}, as_json=True, human="")
    assert json.loads(capsys.readouterr().out) == {"path": "x", "text": "é"}
    with pytest.raises(TypeError):
        output.emit({"odd": object()}, as_json=True, human="")


def test_a_message_of_several_lines_is_told_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    output.report_error(EngineError(ErrorCode.INTERNAL, "One\n  sentence."), as_json=False)
    assert capsys.readouterr().err == "switchyard: One sentence.\n"


@pytest.mark.parametrize("failure", [RuntimeError("half a stream"), EngineError(ErrorCode.INTERNAL, "Broken.")])
def test_what_fails_because_of_ctrl_c_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception
) -> None:
    def torn(_arguments: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise failure

    monkeypatch.setattr(cli, "_run", torn)
    assert cli.main(["models"]) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "")
