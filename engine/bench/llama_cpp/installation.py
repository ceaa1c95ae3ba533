"""Locations of the built binding and of the Python that runs it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from engine.common.paths import cache_dir

VERSION = "0.3.36"
"""Of llama-cpp-python; must match the optional extra `peers` of pyproject.toml."""
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
HOW_TO_BUILD = "python -m engine.bench.llama_cpp build"


def home() -> Path:
    """The folder of the build: sources, objects and its virtual environment."""
    return cache_dir() / f"llama-cpp-python-{VERSION}"


def receipt() -> Path:
    """Written last by a build: the instructions it was built for."""
    return home() / "built.json"


def venv_python() -> Path:
    """The interpreter of the build's virtual environment."""
    return home() / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def avx2_tree() -> Path:
    """The build for AVX2 alone, whose libraries stand in for those of the virtual environment."""
    return home() / "build-avx2"


def held_back() -> bool:
    """Whether the environment limits our kernels to AVX2: then llama.cpp must be limited too."""
    return os.environ.get("SWITCHYARD_ISA", "").lower() == "avx2"


def how_to_build() -> str:
    """The command for the required build."""
    return f"{HOW_TO_BUILD} --avx2" if held_back() else HOW_TO_BUILD


def peer_environment() -> dict[str, str]:
    """The environment of the peer's process: it locates the binding's libraries."""
    return {**os.environ, "LLAMA_CPP_LIB_PATH": str(avx2_tree() / "bin")} if held_back() else dict(os.environ)


def peer_python() -> Path | None:
    """The Python that can import the binding: that of our build, or this one if the extra is installed.

    If limited to AVX2, only our build's, and only if it includes AVX2.
    """
    if held_back() and not (avx2_tree() / "built").is_file():
        return None
    if receipt().is_file() and venv_python().is_file():
        return venv_python()
    return Path(sys.executable) if importlib.util.find_spec("llama_cpp") else None
