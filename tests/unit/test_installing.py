"""The script that installs for a user without rights, with a small program in the place of the real one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = Path(__file__).resolve().parents[2] / "installers" / "packages" / "files"
PYTHON = '#!/bin/sh\necho "$*" >>"$HOME/python-ran"\n'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a package for Linux")


class Machine:
    """A user's home, and archives that were unpacked for it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "Jürgens Haus & Hof"
        self.home.mkdir()
        self.folder = folder
        self.tools = folder / "tools"
        self.tools.mkdir()

    def archive(self, version: str, machine: str = os.uname().machine, glibc: str = "2.17") -> Path:
        tree = self.folder / f"archive {version}"
        program = tree / "program"
        (program / "python" / "bin").mkdir(parents=True)
        (program / "desktop").mkdir()
        (program / "python" / "bin" / "python3").write_text(PYTHON)
        (program / "version").write_text(version)
        for number in range(40):
            (program / f"file {number}").write_bytes(bytes(20_000))
        for name, as_name in (("switchyard.sh", "switchyard"), ("uninstall.sh", "uninstall")):
            shutil.copy(FILES / name, program / as_name)
        for name in ("switchyard.desktop", "switchyard-mime.xml"):
            shutil.copy(FILES / name, program / "desktop" / name)
        (program / "desktop" / "switchyard.svg").write_text("<svg/>")
        for path in (program / "python" / "bin" / "python3", program / "switchyard", program / "uninstall"):
            path.chmod(0o755)
        (program / "start.py").write_text("")
        shutil.copy(FILES / "install.sh", tree / "install.sh")
        for script in (tree / "install.sh", program / "switchyard"):
            text = script.read_text()
            for mark, value in (("VERSION", version), ("MACHINE", machine), ("GLIBC", glibc)):
                text = text.replace(f"@{mark}@", value)
            script.write_text(text)
        return tree

    def command(self, *words: str | Path) -> subprocess.Popen[str]:
        environment = {"HOME": str(self.home), "PATH": f"{self.tools}:/usr/bin:/bin"}
        return subprocess.Popen(
            ["sh", *map(str, words)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        started = self.command(*words)
        said, errors = started.communicate(timeout=60)
        return started.returncode, said, errors

    def tool(self, name: str, says: str) -> None:
        (self.tools / name).write_text(f"#!/bin/sh\n{says}\n")
        (self.tools / name).chmod(0o755)

    @property
    def program(self) -> Path:
        return self.home / ".local" / "share" / "switchyard-program"

    @property
    def current(self) -> str:
        return (self.program / "current" / "version").read_text()

    def files(self) -> set[Path]:
        return {path.relative_to(self.home) for path in self.home.rglob("*") if not path.is_dir() or path.is_symlink()}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_install_upgrade_and_remove(machine: Machine) -> None:
    for version in ("1.0", "1.1", "1.2"):
        code, said, errors = machine.run(machine.archive(version) / "install.sh")
        assert (code, errors) == (0, "")
        assert version in said
        assert machine.current == version
    # The one before is kept, to go back to.
    assert {path.name for path in machine.program.iterdir()} == {"current", "1.1", "1.2"}
    assert machine.run(machine.home / ".local" / "bin" / "switchyard", "models", "list")[0] == 0
    assert (machine.home / "python-ran").read_text().endswith("start.py models list\n")
    entry = (machine.home / ".local" / "share" / "applications" / "switchyard.desktop").read_text()
    assert f'Exec="{machine.program}/current/switchyard" %F\n' in entry
    code, said, errors = machine.run(machine.home / ".local" / "bin" / "switchyard-uninstall", "--keep-models")
    assert (code, errors) == (0, "")
    assert (machine.home / "python-ran").read_text().endswith("uninstall.py --keep-models\n")
    assert machine.files() == {Path("python-ran")}


def test_the_same_version_again_repairs_it(machine: Machine) -> None:
    archive = machine.archive("1.0")
    machine.run(archive / "install.sh")
    (machine.program / "1.0" / "version").write_text("damaged")
    assert machine.run(archive / "install.sh")[0] == 0
    assert machine.current == "1.0"
    assert {path.name for path in machine.program.iterdir()} == {"current", "1.0-2"}


@pytest.mark.parametrize(
    ("tool", "says", "sentence"),
    [
        ("uname", "echo i686", "this is i686"),
        ("getconf", '[ "$1" = LONG_BIT ] && echo 32 || echo glibc 2.36', "of 32 bits"),
        ("getconf", "echo glibc 2.12", "this system has 2.12"),
        ("getconf", "exit 1", "another C library"),
        ("df", "echo Head; echo disk 100 90 10 90% /", "free some space"),
    ],
)
def test_a_system_that_does_not_fit_is_told_in_a_sentence(
    machine: Machine, tool: str, says: str, sentence: str
) -> None:
    machine.tool(tool, says)
    code, said, errors = machine.run(machine.archive("1.0") / "install.sh")
    assert (code, said) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1
    assert machine.files() == set()


def test_an_upgrade_that_fails_leaves_the_old_version(machine: Machine) -> None:
    machine.run(machine.archive("1.0") / "install.sh")
    before = machine.files()
    machine.tool("cp", 'echo "cp: No space left on device" >&2; /bin/cp "$@"; exit 1')
    code, _, errors = machine.run(machine.archive("1.1") / "install.sh")
    assert code == 2
    assert "is the disk full?" in errors
    assert machine.files() == before
    assert machine.current == "1.0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_to_is_told(machine: Machine) -> None:
    machine.home.chmod(0o500)
    code, _, errors = machine.run(machine.archive("1.0") / "install.sh")
    machine.home.chmod(0o700)
    assert code == 2
    assert "cannot be written to" in errors


def test_a_kill_at_any_moment_leaves_a_version_that_works_and_the_next_run_repairs(machine: Machine) -> None:
    old, new = machine.archive("1.0"), machine.archive("1.1")
    started = time.monotonic()
    assert machine.run(old / "install.sh")[0] == 0
    whole_s = time.monotonic() - started
    rounds = random.Random(os.getpid())
    for _ in range(12):
        for archive in (new, old):
            begun = machine.command(archive / "install.sh")
            time.sleep(rounds.random() * whole_s)
            os.killpg(begun.pid, signal.SIGKILL)
            begun.communicate()
            assert machine.current in ("1.0", "1.1")
            assert len(list((machine.program / "current").iterdir())) == 46
    assert machine.run(new / "install.sh")[0] == 0
    assert machine.current == "1.1"
    assert not list(machine.program.glob("*.partial"))


def test_the_launcher_needs_nothing_of_the_path(machine: Machine) -> None:
    """No Python, and nothing else: a link to it is enough, too."""
    program = machine.archive("1.0") / "program"
    link = machine.folder / "a link"
    link.symlink_to(program / "switchyard")
    for command in (program / "switchyard", link):
        done = subprocess.run([command, "doctor"], env={"HOME": str(machine.home), "PATH": ""}, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert (machine.home / "python-ran").read_text() == f"-I -X utf8 {program}/start.py doctor\n"
        (machine.home / "python-ran").unlink()


@pytest.mark.parametrize(
    ("made_for", "glibc", "lost", "sentence"),
    [
        ("vax", "2.17", "", "for 64-bit vax systems"),
        (os.uname().machine, "2.999", "", "needs glibc 2.999 or newer, and this system has"),
        (os.uname().machine, "2.17", "start.py", "install it again"),
        (os.uname().machine, "2.17", "python/bin/python3", "install it again"),
    ],
)
def test_a_program_that_cannot_run_here_says_why(
    machine: Machine, made_for: str, glibc: str, lost: str, sentence: str
) -> None:
    program = machine.archive("1.0", made_for, glibc) / "program"
    if lost:
        (program / lost).unlink()
    code, said, errors = machine.run(program / "switchyard")
    assert (code, said) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1


def test_from_a_desktop_it_is_said_in_a_dialog(machine: Machine) -> None:
    program = machine.archive("1.0", "vax") / "program"
    machine.tool("zenity", 'echo "$*" >"$HOME/dialog"')
    environment = {"HOME": str(machine.home), "PATH": f"{machine.tools}:/usr/bin:/bin", "DISPLAY": ":7"}
    done = subprocess.run([program / "switchyard"], env=environment, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == 2
    assert "--text This Switchyard is for 64-bit vax systems" in (machine.home / "dialog").read_text()


@pytest.mark.parametrize(
    ("kind", "system", "sentence"),
    [("arm64", "14.0", ""), ("arm64", "26.1", ""), ("arm64", "13.7", "this Mac has 13.7"), ("x86_64", "15.1", "M1")],
)
def test_the_launcher_for_macs(machine: Machine, kind: str, system: str, sentence: str) -> None:
    contents = machine.folder / "Switch yard.app" / "Contents"
    for path, text in (("Resources/python/bin/python3", PYTHON), ("Resources/start.py", ""), ("MacOS/Switchyard", "")):
        (contents / path).parent.mkdir(parents=True, exist_ok=True)
        (contents / path).write_text(text)
        (contents / path).chmod(0o755)
    shutil.copyfile(FILES / "switchyard-macos.sh", contents / "MacOS" / "Switchyard")
    machine.tool("uname", f"echo {kind}")
    machine.tool("sw_vers", f"echo {system}")
    machine.tool("osascript", 'for last; do :; done; echo "$last" >"$HOME/dialog"')
    code, _, errors = machine.run(contents / "MacOS" / "Switchyard", "models")
    if not sentence:
        assert (code, errors) == (0, "")
        assert (machine.home / "python-ran").read_text().endswith("Resources/start.py models\n")
    else:
        assert code == 2
        assert sentence in errors
        assert (machine.home / "dialog").read_text() == errors


def test_a_deb_is_not_upgraded_while_the_program_runs(tmp_path: Path) -> None:
    program = tmp_path / "opt" / "switchyard" / "python" / "bin" / "python3"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/sleep", program)
    running = subprocess.Popen([program, "600"])
    try:
        for action, code in (("upgrade", 1), ("install", 0)):
            done = subprocess.run(["sh", FILES / "deb-preinst", action], capture_output=True, text=True, check=False)
            assert done.returncode == code
            assert ("Switchyard is running: close it" in done.stderr) is (action == "upgrade")
    finally:
        running.kill()
        running.wait()
