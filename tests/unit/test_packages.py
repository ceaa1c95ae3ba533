"""What goes into packages, and the folder that they install."""

import io
import json
import struct
import sys
import tomllib
from pathlib import Path

import pytest

INSTALLERS = Path(__file__).resolve().parents[2] / "installers"
sys.path.insert(0, str(INSTALLERS))

from packages import bundle, dlls, wheels, windows  # noqa: E402
from packages.kernels import PLATFORMS  # noqa: E402
from packages.offline import write_offline_file  # noqa: E402
from packages.project import CHECKOUT, FILES, PackagingError, name_of, read_project  # noqa: E402
from packages.sbom import write_sbom  # noqa: E402


def test_each_dependency_belongs_to_window_or_engine_or_both() -> None:
    project = read_project()
    dependencies = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted({*project.window, *project.engine}) == sorted(dependencies)
    assert not any(name_of(each) in ("torch", "transformers") for each in project.window)
    assert not any(name_of(each).startswith("pyside6") for each in project.engine)


def test_a_name_that_is_no_dependency_is_refused(tmp_path: Path) -> None:
    text = (CHECKOUT / "pyproject.toml").read_text().replace("window-only = [", 'window-only = ["absent", ')
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(PackagingError, match="absent"):
        read_project(tmp_path)


def test_the_four_wheels_describe_themselves() -> None:
    project = read_project()
    described = {
        each.name: tomllib.loads("\n".join(wheels.pyproject(each, project))) for each in wheels.distributions(project)
    }
    assert set(described) == {"switchyard", "switchyard-app", "switchyard-engine"}
    command = described["switchyard"]["project"]
    assert command["scripts"] == {"switchyard": "engine.cli:main"}
    assert {name_of(each) for each in command["dependencies"]} == {
        "switchyard-app",
        "switchyard-engine",
        "switchyard-kernels",
    }
    assert all(each["project"]["version"] == project.version for each in described.values())


def test_of_the_locked_list_whole_entries_are_kept() -> None:
    text = "# Head\na==1 \\\n    --hash=sha256:aa\nb-c==2 ; x \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\nd==3\n"
    assert bundle.locked(["b-c"], text) == "b-c==2 ; x \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    lock = bundle.LOCKED.read_text()
    names = {name_of(line) for line in lock.splitlines() if line[:1].isalnum()}
    assert {name_of(each) for each in read_project().window} <= names


def test_libraries_that_nothing_asks_for_are_removed(tmp_path: Path) -> None:
    files = {
        "QtGui.so": b"..libGui.so.6\0..",
        "Qt/lib/libGui.so.6": b"libGui.so.6\0libCore.so.6\0",
        "Qt/lib/libCore.so.6": b"libCore.so.6\0",
        "Qt/lib/libCore.so": b"libCore.so.6\0",  # a link that a wheel turned into a copy
        "Qt/lib/libQml.so.6": b"libQml.so.6\0libNet.so.6\0libCore.so.6\0",
        "Qt/lib/libNet.so.6": b"libNet.so.6\0libCore.so.6\0",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    bundle._remove_unused(tmp_path, set((tmp_path / "Qt" / "lib").iterdir()))
    assert {path.name for path in (tmp_path / "Qt" / "lib").iterdir()} == {"libGui.so.6", "libCore.so.6"}


def test_the_icon_has_all_sizes() -> None:
    content = windows.icon(CHECKOUT / "resources" / "icons" / "logo.svg")
    _, kind, count = struct.unpack_from("<HHH", content)
    assert (kind, count) == (1, 7)
    for number in range(count):
        width, _, _, _, _, bits, nbytes, at = struct.unpack_from("<BBBBHHII", content, 6 + 16 * number)
        assert bits == 32
        assert content[at : at + 8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack_from(">I", content, at + 16)[0] == (width or 256)
        assert at + nbytes <= len(content)


def test_pytorch_finds_microsofts_runtime_beside_python(tmp_path: Path) -> None:
    (tmp_path / "window" / "shiboken6").mkdir(parents=True)
    (tmp_path / "python").mkdir()
    for name in ("msvcp140.dll", "msvcp140_1.dll", "vcruntime140.dll", "vcamp140.dll", "shiboken6.abi3.dll"):
        (tmp_path / "window" / "shiboken6" / name).write_text(name)
    (tmp_path / "python" / "vcruntime140.dll").write_text("an older one")
    windows.bring_runtime(tmp_path)
    found = {path.name: path.read_text() for path in (tmp_path / "python").iterdir()}
    assert found == {name: name for name in ("msvcp140.dll", "msvcp140_1.dll", "vcruntime140.dll")}


def test_libraries_count_only_where_their_process_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {"torch_cpu.dll": {"msvcp140.dll", "c10.dll", "kernel32.dll"}, "c10.dll": {"api-ms-win-crt-1.dll"}}
    monkeypatch.setattr(dlls, "imports", lambda file: imported.get(file.name, set()))
    engine, python, window = (tmp_path / name for name in ("engine", "python", "window"))
    for file in (engine / "torch" / "lib" / "torch_cpu.dll", engine / "c10.dll", window / "msvcp140.dll"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    python.mkdir()
    assert dlls.missing_libraries(engine, python) == {"msvcp140.dll": {"torch/lib/torch_cpu.dll"}}
    (python / "MSVCP140.dll").touch()
    assert dlls.missing_libraries(engine, python) == {}


@pytest.mark.parametrize(
    ("build", "missing", "named"),
    [
        ("cpu", (), ""),
        ("cpu", ("nvcuda.dll",), "nvcuda.dll"),
        ("cu130", ("nvcuda.dll", "nvml.dll"), ""),
        ("cu130", ("nvcuda.dll", "cudnn64_9.dll"), "cudnn64_9.dll"),
        ("xpu", ("ze_loader.dll",), ""),
    ],
)
def test_an_engine_for_a_card_may_need_its_driver_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, missing: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr(windows, "python_of", lambda bundle: "3.13")
    monkeypatch.setattr(windows, "wheels_of", lambda *of: {})
    users = {library: {"torch/lib/torch_cuda.dll"} for library in missing}
    monkeypatch.setattr(windows, "missing_for_wheels", lambda wheels, python: users)
    laid_out = bundle.Bundle(tmp_path, PLATFORMS["windows-x86_64"], read_project(), "python/python.exe")
    if not named:
        windows.check_engine(laid_out, build)
    else:
        with pytest.raises(PackagingError, match=f"^{named}, .*nowhere on Windows"):
            windows.check_engine(laid_out, build)


def test_kernels_of_other_sources_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    platform, version = PLATFORMS["windows-x86_64"], read_project().version
    assert not bundle.has_kernels(platform, tmp_path)
    for content, has in (("switchyard_kernels/old.dll", False), (f"switchyard_kernels/{NAMED}", True)):
        with zipfile.ZipFile(tmp_path / f"switchyard_kernels-{version}-py3-none-win_amd64.whl", "w") as zipped:
            zipped.writestr(content, b"")
        monkeypatch.setattr(bundle, "library_name", lambda machine, suffix: NAMED)
        assert bundle.has_kernels(platform, tmp_path) is has


NAMED = "kernels-amd64-0123.dll"


def test_uninstalling_on_windows_removes_only_what_was_installed(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "bundle.json").touch()
    assert [line.strip() for line in windows.removals(tmp_path)] == [
        r'Delete "$INSTDIR\bundle.json"',
        r'RMDir /r "$INSTDIR\python"',
    ]


@pytest.mark.parametrize("name", ["setup.nsi", "install.sh", "switchyard.desktop", "switchyard.metainfo.xml"])
def test_templates_have_only_marks_that_are_filled_in(name: str) -> None:
    import re

    known = {
        "VERSION",
        "OUTPUT",
        "ICON",
        "LICENCE",
        "ROOT",
        "REMOVALS",
        "COMPRESSOR",
        "MACHINE",
        "GLIBC",
        "EXEC",
        "DATE",
        "LIBRARIES",
    }
    assert set(re.findall(r"@([A-Z]+)@", (FILES / name).read_text(encoding="utf-8"))) <= known


def test_the_bill_of_materials_names_every_library(tmp_path: Path) -> None:
    for name, version in (("numpy", "2.4.6"), ("PySide6_Essentials", "6.11.3")):
        folder = tmp_path / "window" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\nLicense-Expression: MIT\n\nText.\n")
    (tmp_path / "python" / "lib" / "python3.13").mkdir(parents=True)
    document = json.loads(write_sbom(tmp_path, read_project()).read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert [each.get("purl") for each in document["components"]] == [
        "pkg:pypi/pyside6-essentials@6.11.3",
        "pkg:pypi/numpy@2.4.6",
        None,
        None,
    ]
    assert document["components"][2]["version"] == "3.13"


def test_the_platforms_are_those_of_the_locked_engine() -> None:
    lists = json.loads(bundle.ENGINE_LOCK.read_text())["lists"]
    assert {each["platform"] for each in lists} == set(PLATFORMS)


class TestOfflineFile:
    """The engine's part as one file."""

    @pytest.fixture
    def lock(self, tmp_path: Path) -> Path:
        import hashlib

        near = tmp_path / "near"
        near.mkdir()
        said = {}
        for name in ("a-1-py3-none-any.whl", "b-2-py3-none-any.whl"):
            (near / name).write_bytes(name.encode())
            digest = hashlib.sha256(name.encode()).hexdigest()
            said[name] = {"url": "http://127.0.0.1:9/" + name, "sha256": digest, "bytes": len(name)}
        lists = [{"platform": "linux-x86_64", "python": "3.13", "build": "cpu", "files": list(said)}]
        file = tmp_path / "lock.json"
        file.write_text(json.dumps({"wheels": said, "lists": lists}))
        return file

    def test_it_holds_the_wheels(self, lock: Path, tmp_path: Path) -> None:
        import zipfile

        file = write_offline_file(tmp_path, "linux-x86_64", "3.13", "cpu", [tmp_path / "near"], lock)
        assert zipfile.ZipFile(io.BytesIO(file.read_bytes())).namelist() == [
            "a-1-py3-none-any.whl",
            "b-2-py3-none-any.whl",
        ]

    def test_a_changed_wheel_or_no_connection_leaves_nothing(self, lock: Path, tmp_path: Path) -> None:
        (tmp_path / "near" / "b-2-py3-none-any.whl").write_bytes(b"other")
        with pytest.raises(PackagingError, match="another hash"):
            write_offline_file(tmp_path, "linux-x86_64", "3.13", "cpu", [tmp_path / "near"], lock)
        with pytest.raises(PackagingError, match="could not be fetched"):
            write_offline_file(tmp_path, "linux-x86_64", "3.13", "cpu", [], lock)
        assert not list(tmp_path.glob("*offline*"))
        assert not list(tmp_path.glob("*.zip"))

    def test_what_the_list_does_not_have_is_said(self, lock: Path, tmp_path: Path) -> None:
        with pytest.raises(PackagingError, match="it has cpu"):
            write_offline_file(tmp_path, "linux-x86_64", "3.13", "cu130", [], lock)


def test_an_update_that_was_made_here_is_believed_with_its_key_alone(tmp_path: Path) -> None:
    import zipfile

    from packages.update import new_key, write_list, write_window

    from engine.parts.updates import is_signed

    root = tmp_path / "root"
    for name in ("window/app/main.py", "wheels/switchyard_engine-1.whl", "python/lib/python3.13/os.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "engine-lock.json").write_text("{}")
    laid_out = bundle.Bundle(root, PLATFORMS["linux-x86_64"], read_project(), "python/bin/python3")
    window = write_window(laid_out, tmp_path)
    assert set(zipfile.ZipFile(window).namelist()) == {
        "app/main.py",
        "switchyard-update/wheels/switchyard_engine-1.whl",
        "switchyard-update/engine-lock.json",
    }
    key, other = new_key(tmp_path / "key.pem"), new_key(tmp_path / "other.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    with pytest.raises(PackagingError, match="exists"):
        new_key(tmp_path / "key.pem")
    content = write_list(tmp_path, "https://updates.example/x", tmp_path / "key.pem").read_bytes()
    signature = (tmp_path / "latest.json.sig").read_bytes()
    assert is_signed(content, signature, [other, key])
    assert not is_signed(content, signature, [other])
    (said,) = json.loads(content)["windows"]
    assert said["url"] == f"https://updates.example/x/{window.name}"
    assert (said["platform"], said["python"], said["bytes"]) == ("linux-x86_64", "3.13", window.stat().st_size)


@pytest.mark.parametrize(
    ("address", "key", "sentence"),
    [
        ("http://far.example", "key.pem", "https"),
        ("https://x.example", "no.pem", "is no key"),
        ("", "key.pem", "https"),
    ],
)
def test_a_list_is_not_made_without_a_safe_address_and_a_key(
    tmp_path: Path, address: str, key: str, sentence: str
) -> None:
    from packages.update import new_key, write_list

    new_key(tmp_path / "key.pem")
    version = read_project().version
    about = {"platform": "linux-x86_64", "python": "3.13", "sha256": "0", "bytes": 1}
    (tmp_path / f"switchyard-window-{version}-linux-x86_64-py3.13.about.json").write_text(json.dumps(about))
    with pytest.raises(PackagingError, match=sentence):
        write_list(tmp_path, address, tmp_path / key)
    assert not (tmp_path / "latest.json").exists()
