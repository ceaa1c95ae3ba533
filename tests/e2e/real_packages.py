"""Real packages of this checkout, in two versions, and how programs are run as users run them."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
NEWER = "9.0.0"
_OF_TESTS = ("SWITCHYARD_", "XDG_", "PYTHON", "PYTEST_", "HF_", "QT_", "OMP_", "TMPDIR")
UNTESTED = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
"""As users have them: without the folders of the tests, which other users cannot read, and without their settings."""
_TOOLS = ("makeself", "makensis", "patchelf", "dpkg-deb", "Xvfb", "xdotool", "git")
_MISSING = [name for name in _TOOLS if shutil.which(name) is None]
_MISSING += [name for name in ("uv", "ziglang", "pefile") if find_spec(name) is None]
OF_PACKAGES = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(platform.system() != "Linux" or bool(_MISSING), reason=f"needs {', '.join(_MISSING)}"),
]
"""Marks of tests that make packages."""


def run(*command: str | Path, code: int = 0, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**UNTESTED, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    assert done.returncode == code, text[-3000:]
    return text


@dataclass(frozen=True)
class Made:
    """Packages of two versions.

    Attributes:
        older: folder of the checkout's version, with all wheels, and with the engine's part where it can be had.
        newer: folder of the next one.
    """

    older: Path
    newer: Path
    version: str


def packages_in(folder: Path) -> Made:
    """Makes them, unless they are there."""
    older, newer = folder / "older", folder / "newer"
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert found
    if not list(newer.glob("*-Setup.exe")):  # the last one
        make_packages(folder / "tree", folder / "near", older, newer, text.replace(found[0], f'version = "{NEWER}"'))
    return Made(older, newer, found[1])


def make_packages(tree: Path, near: Path, older: Path, newer: Path, newer_project: str) -> None:
    near.mkdir(parents=True)
    for name in run("git", "-C", CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (CHECKOUT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, tree / name)
    release: list[str | Path] = [sys.executable, tree / "installers" / "release.py", "run", "deb", "setup"]
    options: list[str | Path] = ["--debian-python", "--quick", "--near", near, "--out"]
    offline = ["offline"] if offer_processors(tree / "installers" / "engine-lock.json", near) else []
    run(*release, "wheels", *offline, *options, older, PYTHONPATH=str(tree))
    (tree / "pyproject.toml").write_text(newer_project, encoding="utf-8")
    run(*release, *options, newer, PYTHONPATH=str(tree))


def offer_processors(lock: Path, near: Path) -> bool:
    """Fetches PyTorch's build for processors from this machine's indices, and adds it to a list that lacks it.

    Returns:
        Whether it can be had.
    """
    document = json.loads(lock.read_text(encoding="utf-8"))
    here, python = f"linux-{platform.machine()}", f"{sys.version_info.major}.{sys.version_info.minor}"
    lists = {each["build"]: each for each in document["lists"] if (each["platform"], each["python"]) == (here, python)}
    wanted = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", near, f"torch=={document['torch']}+cpu"]
    if subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=False).returncode != 0:
        return False
    if "cpu" in lists:
        return True
    (wheel,) = near.glob("torch-*.whl")
    document["wheels"][wheel.name] = {
        "name": "torch",
        "version": f"{document['torch']}+cpu",
        "url": f"https://download.pytorch.org/whl/cpu/{wheel.name.replace('+', '%2B')}",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "bytes": wheel.stat().st_size,
    }
    cards = ("nvidia_cu", "nvidia_n", "cuda_", "triton-", "torch-")
    files = [file for file in lists["cu130"]["files"] if not file.startswith(cards) or file.startswith("nvidia_ml_py")]
    document["lists"].append({"platform": here, "python": python, "build": "cpu", "files": [*files, wheel.name]})
    lock.write_text(json.dumps(document), encoding="utf-8")
    return True
