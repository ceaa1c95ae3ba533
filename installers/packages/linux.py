"""Packages for Linux: a .deb, a file that installs itself for a user without rights, and an AppImage's folder."""

from __future__ import annotations

import datetime
import gzip
import os
import shutil
import stat
import tempfile
from pathlib import Path

from steps_machine import WINDOW_LIBRARIES

from packages.bundle import Bundle
from packages.project import CHECKOUT, FILES, PackagingError, run
from packages.pythons import DEBIAN_ARCHITECTURES

_INSTALLED_IN = Path("opt/switchyard")


def oldest_glibc(platform: str, *, debian_python: bool) -> str:
    """The oldest C library that a package runs on: Debian 12's own Python decides, or the libraries' wheels."""
    if platform == "linux-aarch64":
        return "2.39"  # Qt's wheels for Arm
    return "2.36" if debian_python else "2.34"


def finish(bundle: Bundle, glibc: str) -> None:
    """Adds what all packages for Linux have: the launcher, and what desktops read.

    Args:
        glibc: the oldest C library that all in it runs with.
    """
    root = bundle.root
    _program(FILES / "switchyard.sh", root / "switchyard")
    _fill_in(root / "switchyard", MACHINE=bundle.platform.machine, GLIBC=glibc)
    _program(FILES / "uninstall.sh", root / "uninstall")
    shutil.copy2(FILES / "uninstall.py", root / "uninstall.py")
    desktop = root / "desktop"
    desktop.mkdir()
    for name in ("switchyard.desktop", "switchyard-mime.xml"):
        shutil.copy2(FILES / name, desktop / name)
    metainfo = (FILES / "switchyard.metainfo.xml").read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    metainfo = metainfo.replace("@VERSION@", bundle.project.version).replace("@DATE@", today)
    (desktop / "io.switchyard.Switchyard.metainfo.xml").write_text(metainfo, encoding="utf-8")
    shutil.copy2(CHECKOUT / "resources" / "icons" / "logo.svg", desktop / "switchyard.svg")


def build_deb(bundle: Bundle, target: Path, glibc: str, level: int) -> Path:
    """`switchyard_VERSION_ARCH.deb`, in `target`.

    Args:
        level: of compression, from 0 to 9.

    Raises:
        PackagingError: dpkg-deb failed.
    """
    architecture = DEBIAN_ARCHITECTURES[bundle.platform.name]
    file = target / f"switchyard_{bundle.project.version}_{architecture}.deb"
    with tempfile.TemporaryDirectory(prefix="switchyard-deb-", dir=target) as name:
        tree = Path(name) / "tree"
        root = tree / _INSTALLED_IN
        root.parent.mkdir(parents=True)
        shutil.copytree(bundle.root, root, symlinks=True)
        (root / "uninstall").unlink()  # apt's work
        command = tree / "usr" / "bin" / "switchyard"
        command.parent.mkdir(parents=True)
        command.symlink_to(f"/{_INSTALLED_IN}/switchyard")
        share = tree / "usr" / "share"
        for source, folder, as_name in (
            ("switchyard.svg", "icons/hicolor/scalable/apps", "switchyard.svg"),
            ("switchyard-mime.xml", "mime/packages", "switchyard.xml"),
            ("io.switchyard.Switchyard.metainfo.xml", "metainfo", "io.switchyard.Switchyard.metainfo.xml"),
        ):
            (share / folder).mkdir(parents=True)
            shutil.copy2(root / "desktop" / source, share / folder / as_name)
        entry = (root / "desktop" / "switchyard.desktop").read_text(encoding="utf-8")
        (share / "applications").mkdir()
        (share / "applications" / "switchyard.desktop").write_text(
            entry.replace("@EXEC@", f"/{_INSTALLED_IN}/switchyard"), encoding="utf-8"
        )
        document = share / "doc" / "switchyard"
        document.mkdir(parents=True)
        shutil.copy2(FILES / "copyright", document / "copyright")
        (document / "changelog.gz").write_bytes(gzip.compress(_changelog(bundle).encode(), mtime=0))
        control = tree / "DEBIAN"
        control.mkdir()
        (control / "control").write_text(_control(bundle, architecture, glibc), encoding="utf-8")
        for script in ("preinst", "postrm"):
            _program(FILES / f"deb-{script}", control / script)
        _readable(tree)
        options = ["--root-owner-group", "-Zxz", f"-z{level}", "--threads-max=2"]
        run(["dpkg-deb", *options, "--build", tree, file], "The .deb could not be built")
    return file


def build_run(bundle: Bundle, target: Path, glibc: str, level: int) -> Path:
    """`switchyard-VERSION-linux-ARCH.run`, in `target`: needs neither rights nor a package manager.

    Args:
        level: of compression, from 0 to 9.

    Raises:
        PackagingError: makeself is missing or failed.
    """
    if shutil.which("makeself") is None:
        raise PackagingError("makeself is missing: run `apt-get install makeself`, then the same command again.")
    machine = bundle.platform.machine
    file = target / f"switchyard-{bundle.project.version}-{bundle.platform.name}.run"
    with tempfile.TemporaryDirectory(prefix="switchyard-run-", dir=target) as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        shutil.copytree(bundle.root, tree / "program", symlinks=True, copy_function=os.link)
        _program(FILES / "install.sh", tree / "install.sh")
        libraries = " ".join(f"{file}:{package}" for file, package in WINDOW_LIBRARIES.items())
        _fill_in(
            tree / "install.sh",
            VERSION=bundle.project.version,
            MACHINE=machine,
            GLIBC=glibc,
            LIBRARIES=libraries,
        )
        options = [
            "--quiet",
            "--xz",
            "--complevel",
            str(level),
            "--threads",
            "2",
            "--sha256",
            "--nomd5",
            "--noprogress",
            "--tar-quietly",
            "--nox11",
        ]
        run(["makeself", *options, tree, file, "Switchyard", "./install.sh"], "The .run file could not be built")
    return file


def build_appimage(bundle: Bundle, target: Path, runtime: Path | None) -> Path:
    """`Switchyard-VERSION-ARCH.AppImage`, in `target`: a runtime, and behind it a file system with the program.

    Without a runtime, the folder `Switchyard.AppDir` that would be in it.

    Args:
        runtime: the type-2 runtime of this architecture, an ELF program of the AppImage project.

    Raises:
        PackagingError: squashfs-tools are missing or failed, or the runtime is none.
    """
    folder = target / "Switchyard.AppDir"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle.root, folder / "usr" / "switchyard", symlinks=True)
    (folder / "AppRun").symlink_to("usr/switchyard/switchyard")
    entry = (bundle.root / "desktop" / "switchyard.desktop").read_text(encoding="utf-8")
    (folder / "switchyard.desktop").write_text(entry.replace("@EXEC@", "switchyard"), encoding="utf-8")
    shutil.copy2(bundle.root / "desktop" / "switchyard.svg", folder / "switchyard.svg")
    (folder / ".DirIcon").symlink_to("switchyard.svg")
    (folder / "usr" / "share" / "metainfo").mkdir(parents=True)
    shutil.copy2(
        bundle.root / "desktop" / "io.switchyard.Switchyard.metainfo.xml", folder / "usr" / "share" / "metainfo"
    )
    if runtime is None:
        return folder
    if runtime.read_bytes()[:4] != b"\x7fELF":
        raise PackagingError(f"{runtime} is no AppImage runtime: get `runtime-{bundle.platform.machine}` (type 2).")
    if shutil.which("mksquashfs") is None:
        raise PackagingError("mksquashfs is missing: run `apt-get install squashfs-tools`, then the same again.")
    file = target / f"Switchyard-{bundle.project.version}-{bundle.platform.machine}.AppImage"
    with tempfile.TemporaryDirectory(prefix="switchyard-appimage-", dir=target) as name:
        packed = Path(name) / "packed"
        options = ["-root-owned", "-noappend", "-no-progress", "-quiet", "-comp", "zstd", "-b", "1M", "-no-xattrs"]
        run(["mksquashfs", folder, packed, *options], "The AppImage's file system could not be built")
        unfinished = Path(name) / file.name
        with unfinished.open("wb") as whole:
            for part in (runtime, packed):
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, whole, 1 << 20)
            whole.seek(8)
            whole.write(b"AI\x02")  # by which systems know an AppImage
        unfinished.chmod(0o755)
        unfinished.replace(file)
    shutil.rmtree(folder)
    return file


def _control(bundle: Bundle, architecture: str, glibc: str) -> str:
    libraries = ", ".join(sorted(set(WINDOW_LIBRARIES.values())))
    return (
        f"Package: switchyard\nVersion: {bundle.project.version}\nArchitecture: {architecture}\n"
        f"Maintainer: The Switchyard developers <developers@switchyard.invalid>\nSection: science\nPriority: optional\n"
        f"Installed-Size: {bundle.nbytes // 1024}\nDepends: libc6 (>= {glibc}), {libraries}\n"
        f"Recommends: ca-certificates\n"
        "Description: chat with language models that are bigger than the graphics card\n"
        " Runs Mixture-of-Experts models on an ordinary PC: a window to chat with them,\n"
        " to push files through them, and to watch what graphics card, processor and\n"
        " disk are doing, and why.\n"
    )


def _changelog(bundle: Bundle) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S +0000")
    return (
        f"switchyard ({bundle.project.version}) unstable; urgency=medium\n\n  * See CHANGELOG.md of this version.\n\n"
        f" -- The Switchyard developers <developers@switchyard.invalid>  {now}\n"
    )


def _program(source: Path, target: Path) -> None:
    shutil.copy2(source, target)
    target.chmod(0o755)


def _fill_in(script: Path, **marks: str) -> None:
    text = script.read_text(encoding="utf-8")
    for mark, value in marks.items():
        text = text.replace(f"@{mark}@", value)
    script.write_text(text, encoding="utf-8")


def _readable(tree: Path) -> None:
    """For everybody, whatever the mask of whoever builds."""
    for path in tree.rglob("*"):
        if not path.is_symlink():
            is_program = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if is_program else 0o644)
