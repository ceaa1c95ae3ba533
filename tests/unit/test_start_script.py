"""The parts of installers/start.py that decide something; that the whole of it works is seen in a fresh clone."""

import ast
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.hardware import torch_builds

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLERS = CHECKOUT / "installers"

sys.path.insert(0, str(INSTALLERS))
try:
    import start
    import steps_console
    import steps_environment
    import steps_machine
finally:
    sys.path.remove(str(INSTALLERS))


def everything_reachable(index: str) -> bool:
    return True


def nothing_reachable(index: str) -> bool:
    return False


# --- the command line -----------------------------------------------------------------------------


def test_the_script_parses_on_the_python_that_it_refuses() -> None:
    ast.parse((INSTALLERS / "start.py").read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "version_info", (3, 8, 18, "final", 0))
    assert start.main([]) == 2
    said = capsys.readouterr().err
    assert all(version in said for version in ("3.11", "3.8.18"))
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("system", "said", "words"),
    [
        ("Linux", {"libc_ver": ("glibc", "2.34")}, ""),
        ("Linux", {"libc_ver": ("glibc", "2.100")}, ""),
        ("Linux", {"libc_ver": ("glibc", "2.28")}, "this system has 2.28"),
        ("Linux", {"libc_ver": ("", "")}, "another C library"),
        ("Darwin", {"machine": "arm64", "mac_ver": ("26.1", ("", "", ""), "arm64")}, ""),
        ("Darwin", {"machine": "arm64", "mac_ver": ("13.7.1", ("", "", ""), "arm64")}, "this Mac has 13.7.1"),
        ("Darwin", {"machine": "x86_64"}, "Apple processor"),
        ("Windows", {"version": "10.0.19045"}, ""),
        ("Windows", {"version": "6.3.9600"}, "Windows 10"),
    ],
)
def test_a_system_that_does_not_fit_is_told_in_a_sentence(
    system: str,
    said: dict[str, object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    for name, value in said.items():
        monkeypatch.setattr(f"platform.{name}", lambda value=value: value)
    assert bool(start.why_unsuitable()) is bool(words)
    if words:
        assert start.main([]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1


def test_a_python_of_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert "64-bit Python" in start.why_unsuitable()


def test_an_unknown_word_is_refused_and_help_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["tset"]) == 2
    assert "'tset'" in capsys.readouterr().err
    assert start.main(["--help"]) == 0
    assert "installers/start.py test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({"DISPLAY": ""}, False),
        ({"QT_QPA_PLATFORM": "vnc"}, True),
    ],
)
def test_display_on_linux(variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert steps_machine.has_display() is expected


# --- which PyTorch --------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Linux", "Windows"])
def test_without_a_graphics_card_the_cpu_build_is_tried_first(system: str) -> None:
    with_index = steps_environment.torch_sources(system, torch_builds.CPU, reachable=everything_reachable)
    assert with_index == [
        ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"],
        ["torch==2.13.0"],
    ]
    without = steps_environment.torch_sources(system, torch_builds.CPU, reachable=nothing_reachable)
    assert without == [["torch==2.13.0+cpu"], ["torch==2.13.0"]]


def test_with_a_graphics_card_the_cuda_build_is_tried_first() -> None:
    linux = steps_environment.torch_sources("Linux", torch_builds.CUDA_130, reachable=nothing_reachable)
    assert linux == [["torch===2.13.0"], ["torch==2.13.0"]]
    windows = steps_environment.torch_sources("Windows", torch_builds.CUDA_130, reachable=everything_reachable)
    assert windows[0] == ["torch==2.13.0+cu130", "--extra-index-url", "https://download.pytorch.org/whl/cu130"]


def test_what_a_card_says_is_shown_and_kept_only_if_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = steps_environment.Environment(tmp_path)
    environment.folder.mkdir()
    said = ["RTX 4090: no kernel for it\n", "RTX 4090: works\n"]
    monkeypatch.setattr(steps_environment, "run_logged", lambda *_: (0, said.pop(0)))
    for expected in ("on the CPU", "RTX 4090: works", ""):
        environment.prove_torch(torch_builds.CUDA_130)
        assert expected in capsys.readouterr().out
    assert not said


# --- what failed, and what to do ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('...')'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "could not reach its package index",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "PyTorch for Python 3.15.0"),
        ("error: subprocess-exited-with-error", "PyTorch"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "hash"),
    ],
)
def test_pip_failures_are_told_apart(output: str, expected: str) -> None:
    sentence = steps_environment.explain_pip_failure(output, "PyTorch", "3.15.0")
    assert expected in sentence
    assert "run the same command again" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ('PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n', True),
        ("ID=ubuntu\nID_LIKE=debian\n", True),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', True),
        ('ID="fedora"\n', False),
        ("", False),
    ],
)
def test_debian_is_known_by_its_release_file(release: str, expected: bool) -> None:
    assert steps_machine.is_debian(release) is expected


def test_a_missing_library_is_found_and_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = steps_machine.missing_libraries({"libc.so.6": "libc6", "libnosuch.so.9": "libnosuch9"})
    assert missing == {"libnosuch.so.9": "libnosuch9"}
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(steps_machine, "may_install_packages", lambda: False)
    monkeypatch.setattr(steps_machine, "os_release", lambda: "ID=debian")
    with pytest.raises(steps_console.SetupError, match=r"libnosuch\.so\.9.*libnosuch9"):
        steps_machine.need_libraries(missing, "The window", tmp_path / "log")


def test_a_missing_program_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(steps_machine, "may_install_packages", lambda: False)
    steps_machine.want_programs({"nosuchprogram": "nosuch"}, "these tests", tmp_path / "log")
    assert "without these tests" in capsys.readouterr().out


def test_too_little_disk_is_told_before_anything_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(steps_console.SetupError, match="1000000000 GB"):
        steps_machine.need_disk(tmp_path, 1e9, "PyTorch")


# --- the environment ------------------------------------------------------------------------------


def test_libraries_are_installed_with_their_hashes_and_before_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(_step: object, command: list[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, ""

    monkeypatch.setattr(steps_environment, "run_logged", run)
    monkeypatch.setattr(steps_environment.Environment, "make", lambda _self: None)
    monkeypatch.setattr(steps_environment.Environment, "build_kernels", lambda _self: None)
    monkeypatch.setattr(steps_environment.Environment, "_installed_version", lambda *_: "2.13.0+cpu")
    monkeypatch.setattr(steps_environment, "is_reachable", nothing_reachable)
    monkeypatch.setattr(torch_builds, "chosen", lambda: torch_builds.Choice(torch_builds.CPU))
    (tmp_path / ".venv").mkdir()
    (tmp_path / "installers").mkdir()
    for file in ("installers/locked-runtime.txt", "installers/locked-tests.txt", "pyproject.toml"):
        (tmp_path / file).write_bytes((CHECKOUT / file).read_bytes())
    for _ in range(2):  # the second time nothing is left to do
        steps_environment.prepare(tmp_path).install_test_tools()
    libraries, torch, switchyard, tools = commands
    for command, file in ((libraries, "locked-runtime.txt"), (tools, "locked-tests.txt")):
        assert command[-5:-1] == ["--require-hashes", "--only-binary", ":all:", "--requirement"]
        assert command[-1] == str(tmp_path / "installers" / file)
    assert any(word.startswith("torch==") for word in torch)
    assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(switchyard)


def test_stamps_are_kept_and_a_damaged_file_means_not_done(tmp_path: Path) -> None:
    environment = steps_environment.Environment(tmp_path)
    environment.folder.mkdir()
    assert environment._stamp("torch") is None
    environment._set_stamp("place", "here")
    environment._set_stamp("torch", "2.13.0 cpu")
    assert (environment._stamp("place"), environment._stamp("torch")) == ("here", "2.13.0 cpu")
    (environment.folder / "switchyard-stamps.json").write_text('{"torch": "2.1')
    assert environment._stamp("torch") is None


def kernels_checkout(folder: Path, library: str = "") -> steps_environment.Environment:
    """A checkout with two sources, one of them in a folder as ours are, and perhaps a built library."""
    native = folder / "engine" / "kernels" / "native"
    (native / "src" / "types").mkdir(parents=True)
    (native / "src" / "a.cpp").write_text("int a;", encoding="utf-8")
    (native / "src" / "types" / "b.h").write_text("int b;", encoding="utf-8")
    (native / "built").mkdir()
    if library:
        (native / "built" / library).write_bytes(b"")
    (folder / ".venv").mkdir()
    return steps_environment.Environment(folder)


@pytest.mark.parametrize(
    ("system", "has_compiler", "builds"),
    [("Linux", True, True), ("Linux", False, False), ("Darwin", True, True), ("Windows", False, True)],
)
def test_kernels_are_built_where_a_compiler_may_be(
    system: str, has_compiler: bool, builds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(_step: object, command: list[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, ""

    monkeypatch.setattr(steps_environment.platform, "system", lambda: system)
    monkeypatch.setattr(steps_machine, "has_compiler", lambda: has_compiler)
    monkeypatch.setattr(steps_machine, "want_programs", lambda *_: None)
    monkeypatch.setattr(steps_environment, "run_logged", run)
    kernels_checkout(tmp_path).build_kernels()
    assert [command[1:] for command in commands] == ([["-m", "engine.kernels.native"]] if builds else [])


@pytest.mark.parametrize(("system", "library"), [("Linux", "k.so"), ("Darwin", "k.so"), ("Windows", "k.dll")])
def test_kernels_that_are_built_are_not_built_again(
    system: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[object] = []
    monkeypatch.setattr(steps_environment.platform, "system", lambda: system)
    monkeypatch.setattr(steps_machine, "has_compiler", lambda: True)
    monkeypatch.setattr(steps_environment, "run_logged", lambda _step, *words: (commands.append(words), (0, ""))[1])
    environment = kernels_checkout(tmp_path, library)
    environment.build_kernels()
    environment.build_kernels()
    assert len(commands) == 1
    changed = tmp_path / "engine" / "kernels" / "native" / "src" / "types" / "b.h"
    changed.write_text("int c;", encoding="utf-8")
    environment.build_kernels()
    assert len(commands) == 2


def test_without_a_compiler_on_windows_the_step_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "no C++ compiler was found (install the Build Tools for Visual Studio)"
    monkeypatch.setattr(steps_environment.platform, "system", lambda: "Windows")
    monkeypatch.setattr(steps_environment, "run_logged", lambda *_: (1, f"x\n{said}\n"))
    kernels_checkout(tmp_path).build_kernels()
    assert f"without them: {said}" in capsys.readouterr().out


def test_an_environment_that_does_not_run_counts_as_none(tmp_path: Path) -> None:
    environment = steps_environment.Environment(tmp_path)
    assert environment.python_version() is None
    python = Path(environment.python)
    python.parent.mkdir(parents=True)
    python.write_text("not a program")
    assert environment.python_version() is None


def test_variables_that_lead_a_private_environment_astray_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    variables = steps_console.variables_for_children()
    assert "PYTHONPATH" not in variables
    assert variables["PIP_USER"] == "0"


# --- running things -------------------------------------------------------------------------------


def test_output_goes_to_the_log_and_its_end_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "setup.log"
    command = [sys.executable, "-c", "print('noise\\n' * 30 + 'the reason'); raise SystemExit(3)"]
    with steps_console.Step("Trying") as step:
        code, output = steps_console.run_logged(step, command, log)
    assert code == 3
    shown = steps_console.tail(output, log)
    assert "the reason" in shown
    assert shown.count("noise") == steps_console.TAIL_LINES - 1
    assert str(log) in shown
    assert "the reason" in log.read_text()
    assert "noise" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_interrupting_ends_the_command_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    # The leak check of every test sees to it that the command is gone.
    with pytest.raises(KeyboardInterrupt), steps_console.Step("Waiting") as step:
        steps_console.run_logged(step, command, tmp_path / "setup.log")
    timer.join()


def test_the_script_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, INSTALLERS / "start.py", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "installers/start.py test" in done.stdout
