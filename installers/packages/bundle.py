"""The folder of an installed program, for one platform: all that the window needs, and nothing to be fetched first.

    ROOT/
      bundle.json       what this is, and where in it things lie
      switchyard        the launcher (on Windows switchyard.exe and Switchyard.exe)
      start.py          what the launcher runs
      python/           a whole Python
      bin/uv            installs the engine's part
      window/           window, engine without PyTorch, and the libraries of both
      wheels/           our own wheels, which the engine's part needs too
      engine-lock.json  what else that part consists of: addresses, sizes and hashes
      licences/, sbom.json

The engine's part is fetched by the window when it is first started, into the user's data folder.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.kernels.native.build import library_name
from packages import dlls, machos
from packages.kernels import Platform
from packages.project import CHECKOUT, FILES, PackagingError, Project, name_of, read_project, run
from packages.pythons import lay_out_python
from packages.sbom import write_sbom

FORMAT = 1
ENGINE_LOCK = CHECKOUT / "installers" / "engine-lock.json"
LOCKED = CHECKOUT / "installers" / "locked-runtime.txt"
_UV_PLATFORMS = {
    "linux-x86_64": "x86_64-manylinux_2_34",
    "linux-aarch64": "aarch64-manylinux_2_39",
    "windows-x86_64": "x86_64-pc-windows-msvc",
    "macos-arm64": "aarch64-apple-darwin",
}
_OLDEST_MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
"""Of the environment: uv would look for wheels for an older one, of which some libraries have none."""
_QT_MODULES = frozenset({"QtCore", "QtDBus", "QtGui", "QtNetwork", "QtPrintSupport", "QtSvg", "QtWidgets"})
_QT_PLUGINS = frozenset(
    {
        *("platforms", "platformthemes", "platforminputcontexts", "imageformats", "iconengines", "styles", "tls"),
        "printsupport",
        *("xcbglintegrations", "wayland-shell-integration", "wayland-decoration-client"),
        *("wayland-graphics-integration-client",),
    }
)
_QT_NEEDLESS_PLUGINS = (
    "*eglfs*",
    "*linuxfb*",
    "*minimalegl*",
    "*vkkhr*",
    "*vnc*",
    "*virtualkeyboard*",
    "*qpdf*",
    "*direct2d*",
)
_QT_FOLDERS = (
    "qml",
    "metatypes",
    "libexec",
    "typesystems",
    "include",
    "glue",
    "doc",
    "scripts",
    "resources",
    "modules",
)


_ARROW_MODULES = (
    "_flight",
    "_s3fs",
    "_gcsfs",
    "_azurefs",
    "_hdfs",
    "_substrait",
    "_orc",
    "_cuda",
    "_dataset_orc",
    "_pyarrow_cpp_tests",
)
"""Of other services and formats than our batch files'."""


@dataclass(frozen=True)
class Bundle:
    """A program's folder that was laid out.

    Attributes:
        python: program in it, relative.
    """

    root: Path
    platform: Platform
    project: Project
    python: str

    @property
    def nbytes(self) -> int:
        """What it takes on disk."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())


def lay_out(
    platform: Platform, target: Path, wheels: Path, packaged_as: str, *, uv: Path, debian_python: bool = False
) -> Bundle:
    """Lays a program's folder out in `target`, which must not exist.

    Args:
        wheels: folder of our wheels.
        packaged_as: the kind of package, which decides how it is updated and removed.
        uv: the program, for this machine.
        debian_python: take this machine's Python from Debian's packages.

    Raises:
        PackagingError: something is missing; `target` is removed.
    """
    project = read_project()
    try:
        python = f"python/{lay_out_python(platform, target / 'python', uv, from_debian=debian_python)}"
        version = _python_version(target / python, platform)
        _install_window(platform, target / "window", wheels, project, uv, version)
        _slim(target / "window")
        _install_uv(platform, target / "bin", uv)
        (target / "wheels").mkdir()
        for wheel in our_wheels(platform, wheels):
            shutil.copy2(wheel, target / "wheels")
        if missing := _missing_libraries(platform, target):
            name, users = min(missing.items())
            raise PackagingError(f"{name}, which {min(users)} needs, is not in the package for {platform.name}.")
        if ENGINE_LOCK.exists():
            shutil.copy2(ENGINE_LOCK, target / "engine-lock.json")
        shutil.copy2(FILES / "start.py", target / "start.py")
        shutil.copytree(CHECKOUT / "resources" / "icons", target / "icons")
        bundle = Bundle(target, platform, project, python)
        _compile(bundle)
        _collect_licences(target)
        write_sbom(target, project)
        _describe(bundle, packaged_as)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return bundle


def _missing_libraries(platform: Platform, folder: Path) -> dict[str, set[str]]:
    """Of systems whose files can be read on any."""
    if platform.is_windows:
        return dlls.missing_libraries(folder)
    return machos.missing_libraries(folder) if platform.name.startswith("macos") else {}


def our_wheels(platform: Platform, wheels: Path) -> list[Path]:
    """Switchyard's own wheels for a platform.

    Raises:
        PackagingError: one was not built.
    """
    version = read_project().version
    names = [f"switchyard_{part}-{version}-py3-none-any.whl" for part in ("app", "engine")]
    found = [*(wheels / name for name in names), wheels / _kernels_wheel(platform)]
    missing = [each.name for each in found if not each.exists()]
    if missing:
        raise PackagingError(f"{wheels} has no {missing[0]}: run `release.py wheels` first.")
    return found


def has_kernels(platform: Platform, wheels: Path) -> bool:
    """Whether a folder has the wheel with a platform's kernels, of the very sources of the checkout."""
    library = library_name(platform.machine, platform.suffix)
    try:
        with zipfile.ZipFile(wheels / _kernels_wheel(platform)) as kernels:
            return any(name.endswith(f"/{library}") for name in kernels.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _kernels_wheel(platform: Platform) -> str:
    return f"switchyard_kernels-{read_project().version}-py3-none-{platform.wheel}.whl"


def locked(names: Iterable[str], text: str) -> str:
    """Of a locked list of packages those with these names, with their hashes."""
    wanted = set(names)
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return "".join(entry for entry in entries if name_of(entry) in wanted)


def _python_version(program: Path, platform: Platform) -> str:
    if platform.is_windows:
        (library,) = (each for each in program.parent.glob("python3[0-9]*.dll"))
        return f"3.{library.stem.removeprefix('python3')}"
    said = _run_quietly(program, "import sys; print('{0.major}.{0.minor}'.format(sys.version_info))")
    if said is not None:
        return said.strip()
    # Of another processor: its folder tells.
    (library_folder,) = (program.parents[1] / "lib").glob("python3.*")
    return library_folder.name.removeprefix("python")


def python_of(bundle: Bundle) -> str:
    """Version of a program's Python, such as "3.13"."""
    return _python_version(bundle.root / bundle.python, bundle.platform)


def _run_quietly(python: Path, script: str) -> str | None:
    """What a script prints; None if the Python is another system's."""
    try:
        done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _install_window(platform: Platform, window: Path, wheels: Path, project: Project, uv: Path, version: str) -> None:
    target = ["--python-platform", _UV_PLATFORMS[platform.name], "--python-version", version, "--only-binary", ":all:"]
    quiet = ["--quiet", "--no-config"]
    with tempfile.TemporaryDirectory(prefix="switchyard-window-") as name:
        wanted, exact = Path(name) / "window.in", Path(name) / "window.txt"
        wanted.write_text("\n".join(project.window), encoding="utf-8")
        said = run(
            [uv, "pip", "compile", *quiet, *target, "--no-header", "--no-annotate", "--constraint", LOCKED, wanted],
            "The window's libraries could not be resolved",
            env=_OLDEST_MACOS,
        )
        names = [name_of(line) for line in said.splitlines() if re.match(r"[A-Za-z0-9]", line)]
        exact.write_text(locked(names, LOCKED.read_text(encoding="utf-8")), encoding="utf-8")
        install: list[str | Path] = [
            uv,
            "pip",
            "install",
            *quiet,
            "--target",
            window,
            *target,
            "--no-deps",
            "--link-mode",
            "copy",
        ]
        why = "The window's libraries could not be installed"
        run([*install, "--require-hashes", "--requirement", exact], why, env=_OLDEST_MACOS)
        ours = [each for each in our_wheels(platform, wheels) if "_kernels-" not in each.name]
        run([*install, *ours], why, env=_OLDEST_MACOS)
    shutil.rmtree(window / "bin", ignore_errors=True)  # commands with this machine's paths


def _install_uv(platform: Platform, folder: Path, uv: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="switchyard-uv-") as name:
        target = ["--python-platform", _UV_PLATFORMS[platform.name], "--only-binary", ":all:", "--no-deps"]
        same = run([uv, "--version"], "uv does not start").split()[1]
        run(
            [uv, "pip", "install", "--quiet", "--no-config", "--target", name, *target, f"uv=={same}"],
            "uv could not be fetched",
            env=_OLDEST_MACOS,
        )
        program = next(each for each in Path(name).rglob("uv.exe" if platform.is_windows else "uv") if each.is_file())
        folder.mkdir()
        shutil.copy2(program, folder / program.name)


def _slim(window: Path) -> None:
    """Removes what our window does not use of its biggest libraries."""
    _slim_qt(window / "PySide6")
    for tests in [each for each in (window / "numpy").rglob("tests") if each.is_dir()]:
        shutil.rmtree(tests)
    arrow = window / "pyarrow"
    for needless in ("tests", "include", "src"):
        shutil.rmtree(arrow / needless, ignore_errors=True)
    for module in _ARROW_MODULES:
        for file in arrow.glob(f"{module}.*"):
            file.unlink()
    _remove_unused(arrow, {*arrow.glob("libarrow_*"), *arrow.glob("arrow_*.dll"), *arrow.glob("*.lib")})


def _slim_qt(folder: Path) -> None:
    for module in (*folder.glob("Qt*.pyd"), *folder.glob("Qt*.abi3.so")):
        if module.name.partition(".")[0] not in _QT_MODULES:
            module.unlink()
    for needless_library in (*folder.glob("pyside6qml*"), *folder.glob("libpyside6qml*")):
        needless_library.unlink()
    for root in (each for each in (folder, folder / "Qt") if each.is_dir()):
        for needless in _QT_FOLDERS:
            shutil.rmtree(root / needless, ignore_errors=True)
        for plugin in (root / "plugins").glob("*"):
            if plugin.name not in _QT_PLUGINS:
                shutil.rmtree(plugin)
        for pattern in _QT_NEEDLESS_PLUGINS:
            for plugin in (root / "plugins").glob(f"*/{pattern}"):
                plugin.unlink()
        for translation in (root / "translations").glob("*"):
            if not translation.name.startswith("qtbase_"):
                shutil.rmtree(translation) if translation.is_dir() else translation.unlink()
    for stub in folder.rglob("*.pyi"):
        stub.unlink()
    for tool in folder.iterdir():
        is_program = tool.suffix in (".exe", ".app") or (tool.suffix == "" and tool.is_file())
        if is_program and tool.name != "py.typed":
            shutil.rmtree(tool) if tool.is_dir() else tool.unlink()
    _remove_unused(folder, {*folder.glob("Qt/lib/*"), *folder.glob("Qt6*.dll"), *folder.glob("opengl32sw.dll")})


def _remove_unused(folder: Path, libraries: set[Path]) -> None:
    """Removes those of these libraries that no other file asks for, until all that are left are asked for.

    A file that uses a library holds its name, ended by a zero, whatever the system; one that holds it by chance only
    keeps it. Wheels have no links, so a library may be there once for each of its names, and each copy holds one.
    """

    def group(path: Path) -> str:
        return re.sub(r"\.(so|dylib|framework|dll)\b.*", "", path.name)

    asked_for = {library: library.name.removesuffix(".framework").encode() + b"\0" for library in libraries}
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".qm")]
    asked_by: dict[Path, set[Path]] = {}
    for path in files:
        content = path.read_bytes()
        own = {group(path), *(group(parent) for parent in path.parents)}
        asked_by[path] = {each for each, name in asked_for.items() if group(each) not in own and name in content}
    left = set(libraries)
    while unused := left - set().union(*asked_by.values()):
        for library in unused:
            shutil.rmtree(library) if library.is_dir() else library.unlink()
        asked_by = {path: asked for path, asked in asked_by.items() if path.exists()}
        left -= unused


def _compile(bundle: Bundle) -> None:
    """Compiles all modules, so that a folder that users cannot write to starts fast, too."""
    program = bundle.root / bundle.python
    same = f"{sys.version_info[0]}.{sys.version_info[1]}"
    version = _python_version(program, bundle.platform)
    compiler = str(program)
    if _run_quietly(program, "") is None:
        if version != same:
            return  # for another system and of another version: its installer compiles them
        compiler = sys.executable
    # By hash, unchecked: packages and copies do not keep the times of files.
    options = ["-q", "-f", "--invalidation-mode", "unchecked-hash", "-s", str(bundle.root)]
    folders = [bundle.root / "window", bundle.root / "python"]
    subprocess.run([compiler, "-I", "-m", "compileall", *options, *folders], capture_output=True, check=False)


def _collect_licences(root: Path) -> None:
    """One folder with the licences of everything in the package."""
    target = root / "licences"
    target.mkdir()
    shutil.copy2(CHECKOUT / "LICENSE", target / "Switchyard.txt")
    shutil.copy2(CHECKOUT / "resources" / "THIRD_PARTY.md", target)
    for python in (*root.glob("python/LICENSE*"), *root.glob("python/lib/python3.*/LICENSE*")):
        shutil.copy2(python, target / "Python.txt")
    for metadata in (root / "window").glob("*.dist-info"):
        files = [*metadata.glob("LICEN[CS]E*"), *metadata.glob("COPYING*"), *metadata.glob("licenses/**/*")]
        for file in files:
            if file.is_file():
                inside = target / metadata.name.removesuffix(".dist-info")
                inside.mkdir(exist_ok=True)
                shutil.copy2(file, inside / file.name)


def _describe(bundle: Bundle, packaged_as: str) -> None:
    document = {
        "format": FORMAT,
        "version": bundle.project.version,
        "platform": bundle.platform.name,
        "packaged_as": packaged_as,
        "python": bundle.python,
        "uv": "bin/uv.exe" if bundle.platform.is_windows else "bin/uv",
        "window": "window",
        "wheels": "wheels",
        "engine_lock": "engine-lock.json",
    }
    (bundle.root / "bundle.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
