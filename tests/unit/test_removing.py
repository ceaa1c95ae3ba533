"""What uninstalling removes outside the program's folder."""

import itertools
from pathlib import Path

import pytest

from engine.common import paths
from engine.common.installed import parts_dir
from engine.parts import remove


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    for folder in (paths.config_dir(), paths.cache_dir(), paths.log_dir(), parts_dir()):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    data = paths.data_dir()
    for name in (*remove.MADE_AGAIN, *remove.MODELS, *remove.CHATS):
        if "." in name:
            (data / name).write_text("x")
        else:
            (data / name).mkdir()
            (data / name / "file").write_text("x")
    (data / "not ours.txt").write_text("x")
    return tmp_path


@pytest.mark.parametrize(("models", "chats"), list(itertools.product((False, True), repeat=2)))
def test_models_and_chats_go_only_if_asked(home: Path, models: bool, chats: bool) -> None:
    words = ["--models" if models else "--keep-models", "--chats" if chats else "--keep-chats"]
    assert remove.main(words) == 0
    data = paths.data_dir()
    assert not any((data / name).exists() for name in remove.MADE_AGAIN)
    assert not paths.cache_dir().exists()
    assert not paths.log_dir().exists()
    assert not parts_dir().exists()
    assert all((data / name).exists() is not models for name in remove.MODELS)
    assert all((data / name).exists() is not chats for name in remove.CHATS)
    assert paths.config_dir().exists() is not chats
    assert data.exists() is not (models and chats)


def test_a_folder_that_the_user_chose_is_not_removed_with_what_is_not_ours(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = tmp_path_factory.mktemp("chosen")
    (chosen / "models").mkdir()
    (chosen / "letters.txt").write_text("x")
    paths.chosen_data_dir_file().write_text(str(chosen))
    assert remove.main(["--models", "--chats"]) == 0
    assert [path.name for path in chosen.iterdir()] == ["letters.txt"]


def test_without_an_answer_both_stay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remove.main([]) == 0
    assert "Your models and chats and settings stay in" in capsys.readouterr().out
    assert (paths.data_dir() / "models" / "file").exists()


def test_folders_within_each_other_keep_what_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on Windows, where settings and chats lie in one folder, and cache and logs in it.
    one = home / "one"
    for name in ("data_dir", "standard_data_dir", "config_dir"):
        monkeypatch.setattr(remove, name, lambda: one)
    monkeypatch.setattr(remove, "cache_dir", lambda: one / "Cache")
    monkeypatch.setattr(remove, "log_dir", lambda: one / "Logs")
    monkeypatch.setattr(remove, "models_dir", lambda: one / "models")
    for name in ("Cache", "Logs", "models", "jobs"):
        (one / name).mkdir(parents=True)
    (one / "settings.json").write_text("x")
    assert remove.main(["--models", "--keep-chats"]) == 0
    assert {path.name for path in one.iterdir()} == {"jobs", "settings.json"}
    assert remove.main(["--models", "--chats"]) == 0
    assert not one.exists()


def test_what_cannot_be_removed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert remove.main(["--keep-models", "--chats"]) == 1
    assert "chats.sqlite3 (Permission denied)" in capsys.readouterr().err
