"""What is installed, which parts are in use, and which command starts the engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.common import installed
from engine.common.errors import EngineError
from tests.bundles import make_bundle, make_part


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home with ümlauts"))
    monkeypatch.delenv(installed.BUNDLE_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    root = make_bundle(tmp_path / "program")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    return root


def test_a_checkout_uses_its_own_python() -> None:
    assert installed.bundle() is None
    assert not installed.needs_engine()
    command, _ = installed.engine_module("engine.worker")
    assert command[0] == sys.executable
    assert installed.command_line()[0][-1] == "engine.cli"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"format": 2}', "\x00"])
def test_a_damaged_bundle_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None):
    broken = tmp_path / "broken"
    broken.mkdir()
    if text is not None:
        (broken / "bundle.json").write_text(text)
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(broken))
    with pytest.raises(EngineError, match="install Switchyard again"):
        installed.bundle()


def test_without_a_part_the_engine_is_told_to_be_missing(root: Path) -> None:
    assert installed.needs_engine()
    with pytest.raises(EngineError, match="not on this computer yet"):
        installed.engine_module("engine.worker")
    command, variables = installed.command_line()  # `doctor` and `models` work without it
    assert variables["PYTHONPATH"] == str(root / "window")
    assert command[-1] == "engine.cli"


def test_a_whole_part_is_used_and_half_ones_never(root: Path) -> None:
    (installed.parts_dir() / "engine-0.2.0-cpu").mkdir(parents=True)  # not proven
    partial = make_part("engine-0.2.0-cu130")
    partial.rename(partial.with_name("engine-0.2.0-cu130.partial"))  # killed before it got its name
    make_part("engine-0.2.0-xpu", name="engine-0.2.0-cu126")  # of another folder
    make_part("engine-0.2.0-cu126", python="3.1")
    make_part("engine-0.2.0-rocm7.2", platform="windows-x86_64")
    make_part("engine-0.3.0-cpu")  # of another version than the window
    assert installed.needs_engine()
    good = make_part("engine-0.2.0-cu118")
    assert not installed.needs_engine()
    command, variables = installed.engine_module("engine.worker")
    assert variables["PYTHONPATH"] == str(good)
    assert variables[installed.BUNDLE_VARIABLE] == str(root)
    done = subprocess.run([*command[:-2], "-c", "import sys; print(sys.path[0])"], env=variables, capture_output=True)
    assert done.stdout.decode().strip() == str(good)


def test_what_is_in_use_is_switched_and_switched_back(root: Path) -> None:
    for name in ("engine-0.2.0-cpu", "engine-0.3.0-cpu", "window-0.3.0"):
        make_part(name)
    installed.use_parts(engine="engine-0.2.0-cpu")
    assert installed.previous_parts() is None
    installed.use_parts(engine="engine-0.3.0-cpu", window="window-0.3.0")
    engine = installed.current_engine()
    assert (installed.version(), engine and engine.name) == ("0.2.0", "engine-0.2.0-cpu")  # until the next start
    engine = installed.current_engine(installed.next_version())
    assert (installed.next_version(), engine and engine.name) == ("0.3.0", "engine-0.3.0-cpu")
    assert installed.window_folder() == installed.parts_dir() / "window-0.3.0"
    back = installed.previous_parts()
    assert back == {"engine": "engine-0.2.0-cpu", "window": ""}
    installed.use_parts(**back)
    engine = installed.current_engine()
    assert (installed.next_version(), engine and engine.name) == ("0.2.0", "engine-0.2.0-cpu")
    assert installed.window_folder() == root / "window"
    assert installed.previous_parts() == {"engine": "engine-0.3.0-cpu", "window": "window-0.3.0"}


def test_a_half_part_cannot_be_put_into_use(root: Path) -> None:
    (installed.parts_dir() / "engine-0.2.0-cpu").mkdir(parents=True)
    make_part("window-0.3.0")
    for names in ({"engine": "engine-0.2.0-cpu"}, {"engine": "../elsewhere"}, {"engine": "window-0.3.0"}):
        with pytest.raises(EngineError, match="not complete"):
            installed.use_parts(**names)
    assert installed.read_current() == installed.Current()


def test_a_package_installed_over_an_update_is_the_newer_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_part("window-0.3.0")
    installed.use_parts(window="window-0.3.0")
    assert installed.next_version() == "0.3.0"
    newer = make_bundle(root.with_name("newer"), "0.4.0")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(newer))
    assert installed.next_version() == "0.4.0"
    assert installed.window_folder() == newer / "window"


@pytest.mark.parametrize("text", ["", "[]", '{"engine": 3}', '{"engine": "../../x"}', "\x00", '{"previous": []}'])
def test_a_damaged_list_of_what_is_in_use_does_no_harm(root: Path, text: str) -> None:
    good = make_part("engine-0.2.0-cpu")
    (installed.parts_dir() / installed.CURRENT).write_text(text)
    engine = installed.current_engine()
    assert engine.folder == good
    assert installed.window_folder() == root / "window"
    (good / installed.WHOLE).write_text(json.dumps([text]))
    assert installed.needs_engine()


def test_versions_sort_as_people_expect() -> None:
    versions = ["0.10.0", "0.2.0", "0.2.0rc1", "0.2", "1.0", "0.2.0.1"]
    assert sorted(versions, key=installed.version_order) == ["0.2", "0.2.0rc1", "0.2.0", "0.2.0.1", "0.10.0", "1.0"]


def started(root: Path, *arguments: str) -> str:
    """What comes out of the launcher: it calls `before_start`, and then the command line of the packages it is in."""
    launcher = "import sys; from engine.common.installed import before_start as go; go(sys.argv[1:]); print('here')"
    done = subprocess.run([sys.executable, "-c", launcher, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def packages(folder: Path) -> None:
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "__init__.py").write_text("")
    (folder / "engine" / "cli.py").write_text("import sys; print(__file__, *sys.argv[1:])")


def test_the_launcher_goes_on_where_it_belongs(root: Path) -> None:
    """A verb runs where PyTorch is, the window from the newest window; both are told what they were asked."""
    (root / "window").rmdir()
    (root / "window").symlink_to(Path(installed.__file__).parents[2], target_is_directory=True)
    assert started(root) == "here"
    assert started(root, "doctor") == "here"  # there is no engine yet
    engine = make_part("engine-0.2.0-cpu")
    packages(engine)
    assert started(root) == "here"
    assert started(root, "chat", "--prompt", "a b") == f"{engine / 'engine' / 'cli.py'} chat --prompt a b"
    window = make_part("window-0.3.0")
    packages(window)
    installed.use_parts(window="window-0.3.0")
    assert started(root, "--version") == f"{window / 'engine' / 'cli.py'} --version"


def test_a_verb_that_needs_the_engine_says_that_it_is_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "engine.verbs.chat", None)

    def missing(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("engine.cli.importlib.import_module", missing)
    assert main(["chat"]) == 2
    assert "get it on the first page of the window" in capsys.readouterr().err


def test_files_open_the_window_and_are_no_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.csv").touch()
    (tmp_path / "models").mkdir()  # a folder that has a command's name
    assert installed.files_to_open(["my rows.csv"]) == [str(tmp_path / "my rows.csv")]
    assert installed.files_to_open([str(tmp_path / "models"), "my rows.csv"]) == [
        str(tmp_path / "models"),
        str(tmp_path / "my rows.csv"),
    ]
    for words in ([], ["models"], ["models", "list"], ["--version"], ["my rows.csv", "--json"], ["absent.csv"]):
        assert installed.files_to_open(words) == []
