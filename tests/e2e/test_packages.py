"""Real packages for Linux, in two versions: made, installed, used, upgraded and removed.

Half an hour on two cores, and the package index. `SWITCHYARD_PACKAGES` names a folder that keeps the packages for the
next run, which then tries those.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.broken import mounted
from tests.e2e.real_packages import CHECKOUT, NEWER, OF_PACKAGES, UNTESTED, Made, run

sys.path.insert(0, str(CHECKOUT / "installers"))

import try_package

pytestmark = OF_PACKAGES
TRY = CHECKOUT / "installers" / "try_package.py"
LOGIN = ("env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
"""Before a command in another system, which has none of our folders."""


@contextmanager
def least_debian(folder: Path, release: str, *options: str) -> Iterator[Path]:
    """The least system that apt runs on."""
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("needs debootstrap, and its rights")
    root = folder / "root"
    # What is mounted in it ends with the command, so the folder can be removed.
    run("unshare", "--mount", "debootstrap", "--variant=minbase", *options, release, root)
    yield root
    mounted = Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert str(root) not in mounted
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian 12 which trusts whom this machine trusts."""
    with least_debian(tmp_path_factory.mktemp("debian"), "bookworm", "--include=ca-certificates,xz-utils") as root:
        for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
            shutil.copy2(certificate, root / "usr" / "local" / "share" / "ca-certificates")
        run("chroot", root, *LOGIN, "update-ca-certificates")
        yield root


def test_packages_install_answer_upgrade_and_leave_nothing(made: Made, debian: Path) -> None:
    said = run(sys.executable, TRY, made.older, "--newer", made.newer, "--root", debian)
    assert said.count(f"installed, used, upgraded to {NEWER} and removed") == 2
    if list(made.older.glob("*-engine-*.zip")):
        assert said.count("the starter answered") == 4


def test_two_versions_stand_side_by_side(made: Made, debian: Path) -> None:
    (package,), (archive,) = made.older.glob("*_amd64.deb"), made.newer.glob("*.run")
    folder = debian / "tmp" / "side by side"
    folder.mkdir(mode=0o755)
    for each in (package, archive):
        shutil.copyfile(each, folder / each.name)
    with try_package.administrator(debian) as admin:
        admin.step("install", ["apt-get", "install", "-y", "-qq", admin.seen(folder / package.name)])
        with try_package.somebody(admin, folder / "home") as user:
            user.step("install", ["sh", user.seen(folder / archive.name)])
            older, newer = Path("/usr/bin/switchyard"), user.seen(folder / "home" / ".local" / "bin" / "switchyard")
            try_package.use([older], user, made.version)
            try_package.use([newer], user, NEWER)
            with try_package.display() as shown:
                environment = {**user.variables, **shown}
                window = subprocess.Popen([*user.prefix, older], env=environment, cwd="/")
                run("timeout", "60", "xdotool", "search", "--sync", "--onlyvisible", "--name", "Switchyard", **shown)
                user.step("the other one", [newer], **shown)  # brings the window forward, and ends
                assert window.poll() is None
                window.terminate()
                window.wait(30)
            user.step("remove", [user.seen(folder / "home" / ".local" / "bin" / "switchyard-uninstall")])
            try_package.use([older], user, made.version)
        admin.step("remove", ["apt-get", "purge", "-y", "-qq", "--autoremove", "switchyard"])
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Upgrade:
    """A Debian with the older .deb, on a disk of its own, and the newer one beside it."""

    admin: try_package.User
    user: try_package.User
    older: str
    disk: Path
    package: Path

    def fails(self) -> str:
        """What is said when the newer one cannot be installed; the older one works then."""
        with pytest.raises(try_package.StepError) as failed:
            self.admin.step("upgrade", ["dpkg", "-i", self.package])
        self.works(self.older)
        return str(failed.value)

    def works(self, version: str) -> None:
        try_package.use([Path("/usr/bin/switchyard")], self.user, version)


@pytest.fixture
def upgrade(made: Made, debian: Path) -> Iterator[Upgrade]:
    (package,), (newer,) = made.older.glob("*_amd64.deb"), made.newer.glob("*_amd64.deb")
    folder = debian / "tmp" / "upgrade"
    folder.mkdir(mode=0o755)
    for each in (package, newer):
        shutil.copyfile(each, folder / each.name)
    with (
        mounted("-t", "tmpfs", "-o", "size=2g,mode=755", "tmpfs", debian / "opt"),
        try_package.administrator(debian) as admin,
        try_package.somebody(admin, folder / "home") as user,
    ):
        admin.step("install", ["apt-get", "install", "-y", "-qq", admin.seen(folder / package.name)])
        yield Upgrade(admin, user, made.version, debian / "opt", admin.seen(folder / newer.name))
        admin.step("remove", ["apt-get", "purge", "-y", "-qq", "--autoremove", "switchyard"])
    shutil.rmtree(folder)


def test_a_deb_that_fails_leaves_the_old_version(upgrade: Upgrade) -> None:
    python = [*upgrade.user.prefix, "/opt/switchyard/python/bin/python3", "-c"]
    running = subprocess.Popen([*python, "print('here', flush=True); input()"], stdin=subprocess.PIPE, stdout=-1)
    with running:
        assert running.stdout.readline() == b"here\n"
        assert "Switchyard is running: close it on all desktops, then install again." in upgrade.fails()
        running.kill()
    used = int(run("du", "-sm", upgrade.disk).split()[0])
    run("mount", "-o", f"remount,size={used + 60}m", upgrade.disk)
    assert "No space left on device" in upgrade.fails()
    run("mount", "-o", "remount,size=2g", upgrade.disk)
    upgrade.admin.step("upgrade", ["dpkg", "-i", upgrade.package])
    upgrade.works(NEWER)


def test_a_deb_that_was_killed_is_put_right_by_a_repeat(upgrade: Upgrade) -> None:
    for number in range(6):
        command = [*upgrade.admin.prefix, "dpkg", "-i", str(upgrade.package)]
        installing = subprocess.Popen(command, env=upgrade.admin.variables, start_new_session=True)
        time.sleep(1 + 2 * number)
        os.killpg(installing.pid, signal.SIGKILL)
        installing.wait(30)
    upgrade.admin.step("upgrade", ["dpkg", "-i", upgrade.package])
    upgrade.works(NEWER)


def test_a_run_that_was_killed_leaves_the_old_version(made: Made, tmp_path: Path) -> None:
    (older,), (newer,) = made.older.glob("*.run"), made.newer.glob("*.run")
    home = tmp_path / "Jürgens Rechner"
    home.mkdir()
    user = try_package.User({**UNTESTED, "HOME": str(home), "TMPDIR": str(tmp_path)})
    command = home / ".local" / "bin" / "switchyard"
    user.step("install", ["sh", older])
    for number in range(6):
        installing = subprocess.Popen(["sh", newer], env=user.variables, start_new_session=True)
        time.sleep(1 + 2 * number)
        os.killpg(installing.pid, signal.SIGKILL)
        installing.wait(30)
        assert user.step("--version", [command, "--version"]).strip() in (
            f"switchyard {made.version}",
            f"switchyard {NEWER}",
        )
    user.step("upgrade", ["sh", newer])
    try_package.use([command], user, NEWER)
    program = home / ".local" / "share" / "switchyard-program"
    assert not list(program.glob("*.partial"))
    user.step("remove", [home / ".local" / "bin" / "switchyard-uninstall", "--models", "--chats"])
    assert not program.exists()


def test_a_program_on_a_disk_that_is_read_only_works(made: Made, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    (package,) = made.older.glob("*_amd64.deb")
    disk, home = tmp_path / "disk", tmp_path / "home"
    home.mkdir()
    run("dpkg", "-x", package, disk)
    locked = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; shift; exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-euc", locked, "sh", str(disk))
    user = try_package.User({**UNTESTED, "HOME": str(home)}, prefix)
    with pytest.raises(try_package.StepError, match="Read-only file system"):
        user.step("writing", ["touch", disk / "opt" / "written"])
    try_package.use([disk / "opt" / "switchyard" / "switchyard"], user, made.version)


@pytest.mark.parametrize(
    ("release", "architecture", "sentence"),
    [
        ("bullseye", "amd64", "Switchyard needs glibc 2.36 or newer, and this system has 2.31: "),
        ("bookworm", "i386", "for 64-bit systems, and this one's programs are of 32 bits: "),
    ],
)
def test_a_system_that_does_not_suit_is_told_in_a_sentence(
    made: Made, tmp_path: Path, release: str, architecture: str, sentence: str
) -> None:
    (archive,) = made.older.glob("*.run")
    with least_debian(tmp_path, release, f"--arch={architecture}", "--include=xz-utils") as root:
        shutil.copyfile(archive, root / "tmp" / "it.run")
        said = run("chroot", root, *LOGIN, "/bin/sh", "/tmp/it.run", code=2)
        assert sentence in said.splitlines()[-1]
        assert not list((root / "root").glob(".local/**/*"))


def test_desktops_understand_what_is_installed(made: Made, debian: Path) -> None:
    (package,) = made.older.glob("*_amd64.deb")
    run("dpkg", "-x", package, debian / "shown")
    share = Path("/shown/usr/share")
    with try_package.administrator(debian) as admin:
        tools = ["appstream", "desktop-file-utils", "shared-mime-info"]
        admin.step("lists", ["apt-get", "update", "-qq"])
        admin.step("tools", ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *tools])
        admin.step("entry", ["desktop-file-validate", share / "applications" / "switchyard.desktop"])
        information = share / "metainfo" / "io.switchyard.Switchyard.metainfo.xml"
        admin.step("information", ["appstreamcli", "validate", "--no-net", information])
        admin.step("kinds of files", ["update-mime-database", share / "mime"])
    assert "application/x-gguf:*.gguf" in (debian / "shown/usr/share/mime/globs2").read_text(encoding="utf-8")


def test_the_sums_are_those_of_the_files(made: Made) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=made.older, check=True)


@pytest.mark.parametrize("installer", ["uv", "pipx"])
def test_wheels_give_command_and_window_and_go(made: Made, tmp_path: Path, installer: str) -> None:
    program = shutil.which(installer, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"needs {installer}")
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    near = [made.older, made.older.parent / "near"]
    variables = UNTESTED | {
        "HOME": str(home),
        "UV_TOOL_DIR": str(tools / "uv"),
        "UV_TOOL_BIN_DIR": str(tools / "bin"),
        "UV_FIND_LINKS": ",".join(map(str, near)),
        "UV_PYTHON": sys.executable,
        "PIPX_HOME": str(tools / "pipx"),
        "PIPX_BIN_DIR": str(tools / "bin"),
        "PIPX_MAN_DIR": str(tools / "man"),
        "PIP_FIND_LINKS": " ".join(map(str, near)),
    }
    if list(made.older.parent.glob("near/torch-*.whl")):  # else the newest one, which may be for cards
        constraint = tmp_path / "constraint.txt"
        constraint.write_text("torch==" + next(made.older.parent.glob("near/torch-*.whl")).name.split("-")[1])
        variables |= {"UV_CONSTRAINT": str(constraint), "PIP_CONSTRAINT": str(constraint)}
    user = try_package.User(variables)
    install = [program, "tool", "install"] if installer == "uv" else [program, "install", "--python", sys.executable]
    (wheel,) = made.older.glob("switchyard-*-py3-none-any.whl")  # by its path: the name is another project's on PyPI
    user.step("install", [*install, wheel])
    command = tools / "bin" / "switchyard"
    try_package.use([command], user, made.version)
    try_package.ask(command, None, user)
    user.step("remove", [program, *(["tool"] if installer == "uv" else []), "uninstall", "switchyard"])
    assert not [path for path in tools.rglob("switchyard*") if "logs" not in path.parts]
