"""Reasoning apart from answers in files, in the terminal and before answers that are held to a form."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from engine import cli
from tests.engine.thinking_models import OPENED, SWITCHED, thinking_checkpoint, write_for

THOUGHT = "<think>\nIs it <b>? No.\n</think>\n\n"
HARMONY = (
    "<|channel|>analysis<|message|>Is it <b>? No.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("thinking")
    return {
        "switched": thinking_checkpoint("mixtral", place / "switched"),
        "opened": thinking_checkpoint("mixtral", place / "opened", OPENED),
        "harmony": thinking_checkpoint("gpt_oss", place / "harmony"),
    }


def run(verb: str, model: Path, *arguments: str) -> int:
    fixed = ("--device", "cpu", "--precision", "fp32", "--threads", "1", "--temperature", "0.5", "--max-tokens", "180")
    return cli.main([verb, *arguments, "--model", str(model), *fixed])


def rows_of(model: Path, folder: Path, *arguments: str, suffix: str = "jsonl") -> list[dict[str, str]]:
    (folder / "in.csv").write_text("prompt\nred\nblue\n", encoding="utf-8")
    output = folder / f"out.{suffix}"
    assert run("batch", model, str(folder / "in.csv"), "-o", str(output), "--restart", *arguments) == 0
    if suffix == "csv":
        with output.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_reasoning_of_rows_has_a_column_of_its_own(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    write_for(monkeypatch, lambda prompt: f"{THOUGHT}Red." if "red" in prompt else "Blue.")
    red, blue = rows_of(folders["switched"], tmp_path, suffix=suffix)
    assert (red["reasoning"].strip(), red["answer"]) == ("Is it <b>? No.", "Red.")
    assert (blue["reasoning"], blue["answer"]) == ("", "Blue.")
    write_for(monkeypatch, lambda _prompt: "Blue.")
    assert "reasoning" not in rows_of(folders["switched"], tmp_path, suffix=suffix)[0]


def test_openai_rows_have_it_beside_the_content(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_for(monkeypatch, lambda _prompt: f"{THOUGHT}Red.")
    body = {"model": "x", "messages": [{"role": "user", "content": "red"}], "reasoning_effort": "high"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    assert run("batch", folders["switched"], str(tmp_path / "in.jsonl"), "-o", str(output)) == 0
    (choice,) = json.loads(output.read_text(encoding="utf-8"))["response"]["body"]["choices"]
    assert choice["message"]["content"] == "Red."
    assert choice["message"]["reasoning_content"].strip() == "Is it <b>? No."


@pytest.mark.parametrize(
    ("model", "options", "written"),
    [
        # It cannot do without, or was asked to: what it thinks is free, and the answer is one of the choices.
        ("opened", (), THOUGHT.removeprefix("<think>\n")),
        ("harmony", (), HARMONY),
        ("switched", ("--thinking", "on"), THOUGHT),
    ],
)
def test_answers_that_are_held_to_choices_may_come_after_a_thought(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: tuple[str, ...],
    written: str,
) -> None:
    write_for(monkeypatch, lambda prompt: written + ("yes" if "red" in prompt else "perhaps"))
    red, blue = rows_of(folders[model], tmp_path, "--choice", "yes", "--choice", "no", *options)
    assert (red["answer"], red["reasoning"].strip(), red["problem"]) == ("yes", "Is it <b>? No.", "")
    assert blue["answer"] in ("yes", "no")


def test_answers_that_are_held_to_choices_do_without_thoughts_where_they_can(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list[str]()
    write_for(monkeypatch, lambda prompt: prompts.append(prompt) or f"{THOUGHT}yes")  # type: ignore[func-returns-value]
    answers = rows_of(folders["switched"], tmp_path, "--choice", "yes", "--choice", "no")
    assert {answer["answer"] for answer in answers} <= {"yes", "no"}
    assert "reasoning" not in answers[0]
    assert all(prompt.endswith("<think></think>") for prompt in prompts)
    assert SWITCHED  # whose template closes the reasoning


def test_the_terminal_dims_what_is_thought(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_for(monkeypatch, lambda _prompt: f"{THOUGHT}Red.\x1b[31m")
    asked = ("--prompt", "red")
    assert run("chat", folders["switched"], *asked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reasoning"].strip()) == ("Red.\x1b[31m", "Is it <b>? No.")
    assert run("chat", folders["switched"], *asked) == 0
    told = capsys.readouterr()
    assert told.out == "Red.\x1b[31m\n"  # piped: the answer alone
    assert "Is it" not in told.err
    assert "--thinking" not in told.err
    assert run("chat", folders["opened"], *asked, "--thinking", "off") == 0
    assert "--thinking" in capsys.readouterr().err  # its template cannot be told
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("chat", folders["switched"], *asked) == 0
    told = capsys.readouterr()
    assert told.out == "Red.\x1b[31m\n"
    thought = told.err.replace("\x1b[22m\x1b[2m", "")
    assert "\x1b[2mIs it <b>? No.\n\n\n\x1b[22m" in thought
