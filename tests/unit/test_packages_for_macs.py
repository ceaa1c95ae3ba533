"""What can be told of the package for macOS without a Mac."""

import plistlib
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

INSTALLERS = Path(__file__).resolve().parents[2] / "installers"
sys.path.insert(0, str(INSTALLERS))
try:
    from packages import machos, macos
    from packages.project import read_project
finally:
    sys.path.remove(str(INSTALLERS))

ARM64, INTEL = 0x0100000C, 0x01000007
LIBRARY, WEAK, OWN_NAME, RPATH = 0x0C, 0x80000018, 0x0D, 0x8000001C


def macho(*commands: tuple[int, str], kind: int = ARM64) -> bytes:
    """A library with these load commands and nothing else."""
    body = b""
    for command, text in commands:
        offset = 12 if command == RPATH else 24
        name = text.encode() + b"\0"
        size = -(-(offset + len(name)) // 8) * 8
        body += (struct.pack("<III", command, size, offset) + bytes(offset - 12) + name).ljust(size, b"\0")
    return struct.pack("<8I", 0xFEEDFACF, kind, 0, 6, len(commands), len(body), 0, 0) + body


def universal(*slices: tuple[int, bytes]) -> bytes:
    """A file for several processors."""
    at, table, body = 4096, b"", b""
    for kind, content in slices:
        table += struct.pack(">5I", kind, 0, at + len(body), len(content), 12)
        body += content.ljust(4096, b"\0")
    return (struct.pack(">2I", 0xCAFEBABE, len(slices)) + table).ljust(4096, b"\0") + body


def write(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_each_way_to_name_a_library(tmp_path: Path) -> None:
    needs = macho(
        (LIBRARY, "/usr/lib/libSystem.B.dylib"),
        (LIBRARY, "/System/Library/Frameworks/AppKit.framework/AppKit"),
        (LIBRARY, "@loader_path/.dylibs/near"),
        (LIBRARY, "@rpath/Qt.framework/Qt"),
        (WEAK, "@rpath/may be missing"),
        (OWN_NAME, "/where/it/was/built"),
        (RPATH, "@loader_path/../lib"),
    )
    write(tmp_path, window__module=universal((INTEL, b"?"), (ARM64, needs)), window___dylibs__near=macho())
    (tmp_path / "window" / "_dylibs").rename(tmp_path / "window" / ".dylibs")
    assert machos.missing_libraries(tmp_path) == {"@rpath/Qt.framework/Qt": {"window/module"}}
    (tmp_path / "lib" / "Qt.framework").mkdir(parents=True)
    (tmp_path / "lib" / "Qt.framework" / "Qt").write_bytes(macho((LIBRARY, "/opt/homebrew/lib/x.dylib")))
    assert machos.missing_libraries(tmp_path) == {"/opt/homebrew/lib/x.dylib": {"lib/Qt.framework/Qt"}}


def test_a_library_may_lie_in_another_wheel(tmp_path: Path) -> None:
    for name, content in (("one", macho((LIBRARY, "@loader_path/../two/lib"))), ("two", macho())):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as packed:
            packed.writestr(f"{name}/lib", content)
    assert machos.missing_for_wheels([tmp_path / "one.whl"]) == {"@loader_path/../two/lib": {"one/lib"}}
    assert machos.missing_for_wheels([tmp_path / "one.whl", tmp_path / "two.whl"]) == {}


@pytest.mark.parametrize(
    "content", [b"", b"\xca\xfe", b"text " * 10, b"\xca\xfe\xba\xbe\0\0\0\x34Java", macho(kind=INTEL), macho()[:20]]
)
def test_what_is_no_file_for_these_macs_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert machos.read_macho(tmp_path / "file") is None


def test_the_application_says_what_finder_reads(tmp_path: Path) -> None:
    write(tmp_path, root__start=b"", root__python__bin__python3=b"")
    project = SimpleNamespace(version="1.2.3")
    app = macos.build_app(SimpleNamespace(root=tmp_path / "root", project=project), tmp_path)  # type: ignore[arg-type]
    said = plistlib.loads((app / "Contents" / "Info.plist").read_bytes())
    assert (said["CFBundleShortVersionString"], said["CFBundlePackageType"]) == ("1.2.3", "APPL")
    launcher = app / "Contents" / "MacOS" / said["CFBundleExecutable"]
    assert launcher.stat().st_mode & 0o111
    oldest = said["LSMinimumSystemVersion"].partition(".")[0]
    assert f'"${{system%%.*}}" -ge {oldest}' in launcher.read_text()
    assert (app / "Contents" / "Resources" / "python" / "bin" / "python3").exists()
    rights = plistlib.loads((INSTALLERS / "packages" / "files" / "entitlements.plist").read_bytes())
    assert all(value is True for value in rights.values())
    assert read_project().version in plistlib.dumps(macos.information(read_project().version)).decode()
