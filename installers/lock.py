#!/usr/bin/env python3
"""Writes the lists of packages that set-up installs, with versions and file hashes.

    python3 installers/lock.py          resolve pyproject.toml again, with the newest versions that it allows
    python3 installers/lock.py add      add what is new in pyproject.toml, and keep the versions of all else
    python3 installers/lock.py engine   leave those lists as they are, and write the engine's anew
    python3 installers/lock.py check    whether the engine's has all that a release needs

`locked-runtime.txt` has Switchyard's dependencies, `locked-tests.txt` those of the tests. Both hold for every supported
system and Python version, and pip installs from them unchanged. uv resolves them, in a temporary environment; set-up
itself needs no uv.

PyTorch is not in them: its build and source depend on the machine.  The dependencies of its CPU build are.

`engine-lock.json` has the wheels that installed packages fetch: see `lock_engine.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lock_engine import LOCKED_ENGINE, engine_requirements, missing_builds, write_engine_lock
from steps_environment import LOCKED_RUNTIME, LOCKED_TESTS, TORCH

CHECKOUT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = "3.11"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_39", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
OLDEST_MACOS = "14.0"
TORCH_NEEDS = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
"""Of the CPU build; the CUDA build brings its own libraries."""
HEADER = """\
# Made by `python3 installers/lock.py` from pyproject.toml: do not edit.
# {what}
"""


def main(arguments: list[str]) -> int:
    """Writes the lists; returns the exit code."""
    if arguments not in ([], ["add"], ["engine"], ["check"]):
        sys.exit("lock.py knows no such arguments: `python3 installers/lock.py [add | engine | check]`.")
    if arguments == ["check"]:
        missing = missing_builds(CHECKOUT / "installers")
        if missing:
            sys.exit(
                f"{LOCKED_ENGINE} lacks {', '.join(missing)}: run `lock.py engine` where download.pytorch.org can be "
                "reached, and release nothing before."
            )
        return 0
    with tempfile.TemporaryDirectory(prefix="switchyard-lock-") as name:
        folder = Path(name)
        uv = _uv(folder)
        project = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
        if arguments == ["add"]:
            for file in (LOCKED_RUNTIME, LOCKED_TESTS):  # uv prefers the versions that its output already has
                (folder / file).write_bytes((CHECKOUT / "installers" / file).read_bytes())
        if arguments != ["engine"]:
            _write_locks(_resolved_packages(uv, folder, project))
        for file in (LOCKED_RUNTIME, LOCKED_TESTS):
            (folder / file).write_bytes((CHECKOUT / "installers" / file).read_bytes())
        engine = engine_requirements(project)
        write_engine_lock(CHECKOUT / "installers", lambda *what: _resolved_engine(uv, folder, engine, *what))
    return 0


def _resolved_packages(uv: str, folder: Path, project: str) -> dict[str, str]:
    (folder / "pyproject.toml").write_text(project + _torch_for_cpus(), encoding="utf-8")
    (folder / "build.in").write_text("\n".join(build_requirements(project)), encoding="utf-8")
    runtime, tests = folder / LOCKED_RUNTIME, folder / LOCKED_TESTS
    compile_ = [
        *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON),
        *("--generate-hashes", "--only-binary", ":all:", "--no-annotate", "--no-header"),
        *("--no-emit-index-url", "--no-emit-find-links", "--no-emit-package", "torch"),
    ]
    _run([*compile_, "pyproject.toml", "build.in", "--output-file", runtime.name], folder)
    _run(
        [*compile_, "--group", "pyproject.toml:test", "--constraint", runtime.name, "--output-file", tests.name],
        folder,
    )
    texts = {
        LOCKED_RUNTIME: _for_real_systems(runtime.read_text(encoding="utf-8")),
        LOCKED_TESTS: _for_real_systems(tests.read_text(encoding="utf-8")),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    for platform in PLATFORMS:
        for python in PYTHONS:
            for file in texts:
                _need_wheels(uv, folder, file, platform, python)
    return texts


def _write_locks(texts: dict[str, str]) -> None:
    whats = {LOCKED_RUNTIME: "What Switchyard needs.", LOCKED_TESTS: "What the tests need besides."}
    for file, text in texts.items():
        (CHECKOUT / "installers" / file).write_text(HEADER.format(what=whats[file]) + text, encoding="utf-8")
        print("{}: {} packages".format(file, len(re.findall(r"^\S+==", text, re.MULTILINE))))


def _resolved_engine(uv: str, folder: Path, engine: list[str], torch: str, target: str, python: str, index: str) -> str:
    """Versions of all that the engine's part needs with a build of PyTorch: those of `locked-runtime.txt`."""
    (folder / "engine.in").write_text("\n".join([*engine, torch]), encoding="utf-8")
    command = [
        *(uv, "pip", "compile", "--quiet", "--python-platform", target, "--python-version", python),
        *("--only-binary", ":all:", "--no-annotate", "--no-header", "--no-emit-index-url"),
        *("--constraint", LOCKED_RUNTIME, "engine.in", "--output-file", "engine.txt"),
        *(("--index", index, "--index-strategy", "unsafe-best-match") if index else ()),
    ]
    (folder / "engine.txt").unlink(missing_ok=True)
    _run(command, folder)
    return (folder / "engine.txt").read_text(encoding="utf-8")


def build_requirements(project: str) -> list[str]:
    """Build requirements of the checkout, for its editable installation."""
    import tomllib

    return [str(each) for each in tomllib.loads(project)["build-system"]["requires"]]


def _uv(folder: Path) -> str:
    import venv

    venv.create(folder / "uv", with_pip=True)
    scripts = folder / "uv" / ("Scripts" if os.name == "nt" else "bin")
    _run([str(scripts / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"], folder)
    return str(scripts / "uv")


def _torch_for_cpus() -> str:
    needs = ", ".join(f'"{each}"' for each in TORCH_NEEDS)
    return f"""
[tool.uv]
override-dependencies = ["torch=={TORCH}"]

[[tool.uv.dependency-metadata]]
name = "torch"
version = "{TORCH}"
requires-dist = [{needs}]
"""


def _for_real_systems(locked: str) -> str:
    """Removes packages for Python in browsers, and the markers that exclude it from all others."""
    entries = re.split(r"^(?=\S)", locked, flags=re.MULTILINE)
    kept = [entry for entry in entries if "sys_platform == 'emscripten'" not in entry]
    return "".join(kept).replace(" ; sys_platform != 'emscripten'", "")


def _need_wheels(uv: str, folder: Path, file: str, platform: str, python: str) -> None:
    """Exits if a package has no wheel for that system: set-up never builds from source."""
    target = ["--target", str(folder / "nothing"), "--python-platform", platform, "--python-version", python]
    check = ["--dry-run", "--quiet", "--require-hashes", "--only-binary", ":all:", "--no-deps", "--requirement", file]
    _run([uv, "pip", "install", *target, *check], folder)


def _run(command: list[str], folder: Path) -> None:
    # Ignore the user's indices: lock what PyPI has.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    variables["MACOSX_DEPLOYMENT_TARGET"] = OLDEST_MACOS
    done = subprocess.run(command, cwd=folder, env=variables, check=False)
    if done.returncode != 0:
        sys.exit("lock.py stopped: {} failed (see above); nothing was changed.".format(" ".join(command[:3])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
