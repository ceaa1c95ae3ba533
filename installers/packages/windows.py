"""The package for Windows: a Setup.exe by NSIS, which any system builds."""

from __future__ import annotations

import shutil
import struct
import tempfile
from pathlib import Path

from packages.bundle import Bundle, python_of
from packages.dlls import missing_for_wheels
from packages.kernels import zig
from packages.offline import fetch_wheel, wheels_of
from packages.project import CHECKOUT, FILES, PackagingError, run

_SIZES = (16, 24, 32, 48, 64, 128, 256)
_OF_DRIVERS = {"cu": ("nvcuda.dll", "nvml.dll"), "xpu": ("ze_loader.dll",)}
"""What builds of PyTorch for cards find where the card works."""


def finish(bundle: Bundle) -> None:
    """Adds the launchers, the icon, and what the engine's part expects of Windows.

    Raises:
        PackagingError: no Zig, or the engine's part would lack something.
    """
    root = bundle.root
    bring_runtime(root)
    check_engine(bundle)
    shutil.copy2(FILES / "uninstall.py", root / "uninstall.py")
    (root / "switchyard.ico").write_bytes(icon(CHECKOUT / "resources" / "icons" / "logo.svg"))
    compiler = zig(bundle.platform)
    with tempfile.TemporaryDirectory(prefix="switchyard-launcher-") as name:
        script, resource = Path(name) / "launcher.rc", Path(name) / "launcher.res"
        script.write_text(_resource_script(bundle), encoding="utf-8")
        shutil.copy2(root / "switchyard.ico", Path(name) / "switchyard.ico")
        why = "The launcher could not be built"
        run([compiler.command, "rc", "/:no-preprocess", script, resource], why, cwd=Path(name))
        target: list[str | Path] = [
            "cc",
            "-target",
            bundle.platform.zig,
            "-O2",
            "-s",
            "-municode",
            FILES / "launcher.c",
            resource,
        ]
        window, console = root / "Switchyard.exe", root / "switchyard-cli.exe"
        run([compiler.command, *target, "-Wl,--subsystem,windows", "-luser32", "-o", window], why)
        run([compiler.command, *target, "-DCONSOLE", "-Wl,--subsystem,console", "-luser32", "-o", console], why)
    for extra in (*root.glob("*.pdb"), *root.glob("*.lib")):
        extra.unlink()


def bring_runtime(root: Path) -> None:
    """Puts Microsoft's C++ runtime beside python.exe, where every library of its process looks.

    PyTorch needs it and does not bring it, and not every Windows has it. Qt's wheels do bring it, for the window alone.
    """
    for library in (root / "window" / "shiboken6").glob("*140*.dll"):
        if library.name.startswith(("msvcp140", "vcruntime140")):
            shutil.copy2(library, root / "python" / library.name)


def check_engine(bundle: Bundle, build: str = "cpu") -> None:
    """Whether every library that the engine's part imports comes with it, our Python, Windows, or the card's driver.

    Args:
        build: of PyTorch.

    Raises:
        PackagingError: one does not, or a wheel could not be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="switchyard-engine-") as name:
        listed = wheels_of(bundle.platform.name, python_of(bundle), build)
        compiled = {file: said for file, said in listed.items() if not file.endswith("-any.whl")}
        wheels = [fetch_wheel(file, said, Path(name)) for file, said in compiled.items()]
        missing = missing_for_wheels(wheels, bundle.root / "python")
    for library, users in sorted(missing.items()):
        if library not in _OF_DRIVERS.get(build.rstrip("0123456789."), ()):
            raise PackagingError(
                f"{library}, which {min(users)} of the engine's part ({build}) needs, is nowhere on Windows."
            )


def build_setup(bundle: Bundle, target: Path, level: int) -> Path:
    """`Switchyard-VERSION-Setup.exe`, in `target`.

    Args:
        level: of compression; 0 for little and soon.

    Raises:
        PackagingError: NSIS is missing or failed.
    """
    if shutil.which("makensis") is None:
        raise PackagingError("makensis is missing: run `apt-get install nsis`, then the same command again.")
    file = target / f"Switchyard-{bundle.project.version}-Setup.exe"
    with tempfile.TemporaryDirectory(prefix="switchyard-setup-", dir=target) as name:
        script = (FILES / "setup.nsi").read_text(encoding="utf-8")
        licence = Path(name) / "LICENSE.txt"
        licence.write_bytes((CHECKOUT / "LICENSE").read_bytes())
        output = Path(name) / "Setup.exe"
        for mark, value in (
            ("VERSION", bundle.project.version),
            ("OUTPUT", output),
            ("ICON", bundle.root / "switchyard.ico"),
            ("LICENCE", licence),
            ("ROOT", bundle.root),
            ("COMPRESSOR", "/SOLID lzma" if level else "zlib"),
            ("REMOVALS", "\n".join(removals(bundle.root))),
        ):
            script = script.replace(f"@{mark}@", str(value))
        source = Path(name) / "setup.nsi"
        source.write_text(script, encoding="utf-8")
        run(["makensis", "-V2", "-INPUTCHARSET", "UTF8", source], "Setup.exe could not be built")
        output.replace(file)
    return file


def removals(root: Path) -> list[str]:
    """NSIS commands that remove what lies in a program's folder, and nothing else."""
    return [
        f'        RMDir /r "$INSTDIR\\{entry.name}"' if entry.is_dir() else f'        Delete "$INSTDIR\\{entry.name}"'
        for entry in sorted(root.iterdir())
    ]


def icon(picture: Path) -> bytes:
    """An .ico file of an SVG, in all sizes that Windows shows."""
    from PySide6.QtCore import QBuffer, QByteArray, QIODevice, Qt
    from PySide6.QtGui import QImage, QImageWriter, QPainter
    from PySide6.QtSvg import QSvgRenderer

    renderer = QSvgRenderer(str(picture))
    if not renderer.isValid():
        raise PackagingError(f"{picture} is no picture.")
    images = []
    for size in _SIZES:
        image = QImage(size, size, QImage.Format.Format_ARGB32)
        image.fill(Qt.GlobalColor.transparent)
        painter = QPainter(image)
        renderer.render(painter)
        painter.end()
        content = QByteArray()
        buffer = QBuffer(content)
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        QImageWriter(buffer, QByteArray(b"png")).write(image)
        images.append(bytes(content.data()))
    # The format: a header, an entry for each picture, and the pictures; sizes are bytes, and 0 is 256.
    at = 6 + 16 * len(images)
    entries = b""
    for size, image_bytes in zip(_SIZES, images, strict=True):
        entries += struct.pack("<BBBBHHII", size % 256, size % 256, 0, 0, 1, 32, len(image_bytes), at)
        at += len(image_bytes)
    return struct.pack("<HHH", 0, 1, len(images)) + entries + b"".join(images)


def _resource_script(bundle: Bundle) -> str:
    version = bundle.project.version
    numbers = ",".join([*version.split(".")[:3], "0"])
    return f"""\
1 ICON "switchyard.ico"
1 VERSIONINFO
FILEVERSION {numbers}
PRODUCTVERSION {numbers}
BEGIN
  BLOCK "StringFileInfo"
  BEGIN
    BLOCK "040904B0"
    BEGIN
      VALUE "FileDescription", "Switchyard"
      VALUE "ProductName", "Switchyard"
      VALUE "FileVersion", "{version}"
      VALUE "ProductVersion", "{version}"
      VALUE "LegalCopyright", "The Switchyard developers, Apache-2.0"
    END
  END
  BLOCK "VarFileInfo"
  BEGIN
    VALUE "Translation", 0x409, 1200
  END
END
"""
