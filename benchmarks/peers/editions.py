"""The two programs that run GGUF files beside us: what each is built from, and where its build lies."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.common.paths import cache_dir

SERVER = "llama-server"
HOW_TO_BUILD = "python -m benchmarks.peers build"


@dataclass(frozen=True, slots=True)
class Flags:
    """How a peer is run; the values by default are those of its own command line.

    Attributes:
        words: the flags as its command line spells them.
        flash: flash attention.
        repack: llama.cpp: weights in the layout of its kernels; ik_llama.cpp: repacked while loading (`-rtr`).
        fused: ik_llama.cpp: gate and up of the experts in one operation (`-fmoe`).
        latent: ik_llama.cpp: how latent attention is computed (`-mla`).
    """

    words: str
    flash: bool = True
    repack: bool = True
    fused: bool = True
    latent: int = 3


@dataclass(frozen=True, slots=True)
class Edition:
    """One of the two.

    Attributes:
        package, version, sha256, megabytes: the archive on the package index that its sources come from.
        folder: of the sources in that archive.
        binding: the Python package through which it is run; `None`: through `ik_interface.cpp`.
        flags: the ways to run it of which the fastest is reported; those that keep the loaded weights are neighbours.
        latent_flags: further ones for models with latent attention.
        options: of its own build.
    """

    name: str
    package: str
    version: str
    sha256: str
    megabytes: int
    folder: str
    binding: str | None
    flags: tuple[Flags, ...]
    latent_flags: tuple[Flags, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def archive(self) -> str:
        """File name of the archive, without its ending."""
        return f"{self.package.replace('-', '_')}-{self.version}"

    def home(self) -> Path:
        """The folder of the build: sources, objects and its virtual environment."""
        return cache_dir() / f"{self.package}-{self.version}"

    def receipt(self) -> Path:
        """Written last by a build: the instructions it was built for."""
        return self.home() / "built.json"

    def venv_python(self) -> Path:
        """The interpreter of the build's virtual environment."""
        return self.home() / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def avx2_tree(self) -> Path:
        """The build for AVX2 alone, whose libraries stand in for those for this machine."""
        return self.home() / "build-avx2"

    def server(self) -> Path:
        """Its server for other programs, once that is built."""
        return self.home() / "build" / "bin" / (f"{SERVER}.exe" if os.name == "nt" else SERVER)

    def tree(self) -> Path:
        """The build that the benches use now."""
        return self.avx2_tree() if held_back() else self.home() / "build"

    def how_to_build(self) -> str:
        return f"{HOW_TO_BUILD} --only {self.name}{' --avx2' if held_back() else ''}"

    def environment(self) -> dict[str, str]:
        """The environment of the peer's process: it locates the binding's libraries."""
        if not held_back() or self.binding is None:
            return dict(os.environ)
        return {**os.environ, "LLAMA_CPP_LIB_PATH": str(self.avx2_tree() / "bin")}

    def interface(self) -> str:
        """What the peer's process is to load: the binding's name, or the library that stands for one."""
        return self.binding or str(self.tree() / INTERFACE)

    def python(self) -> Path | None:
        """The Python that can run it: that of our build, or this one if the binding is installed here.

        If limited to AVX2, only our build's, and only if it includes AVX2.
        """
        if held_back() and not (self.avx2_tree() / "built").is_file():
            return None
        if self.receipt().is_file() and self.venv_python().is_file():
            return self.venv_python()
        return Path(sys.executable) if self.binding and importlib.util.find_spec(self.binding) else None


INTERFACE = "switchyard_interface.dll" if os.name == "nt" else "libswitchyard_interface.so"
"""In the build's folder: `ik_interface.cpp`."""


def held_back() -> bool:
    """Whether the environment limits our kernels to AVX2: then the peers must be limited too."""
    return os.environ.get("SWITCHYARD_ISA", "").lower() == "avx2"


LLAMA_CPP = Edition(
    "llama.cpp",
    package="llama-cpp-python",
    version="0.3.36",  # must match the optional extra `peers` of pyproject.toml
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    megabytes=77,
    folder="vendor/llama.cpp",
    binding="llama_cpp",
    flags=(
        Flags("-fa on"),
        Flags("-fa off", flash=False),
        Flags("-fa on --no-repack", repack=False),
        Flags("-fa off --no-repack", flash=False, repack=False),
    ),
)
IK_LLAMA_CPP = Edition(
    "ik_llama.cpp",
    package="ik-llama-cpp-python",
    version="0.1.5",
    sha256="33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad",
    megabytes=42,
    folder="vendor/ik_llama.cpp",
    binding=None,
    flags=(
        Flags("-fa on -rtr -fmoe"),
        Flags("-fa off -rtr -fmoe", flash=False),
        Flags("-fa on -rtr -no-fmoe", fused=False),
        Flags("-fa on -fmoe", repack=False),
        Flags("-fa off -fmoe", flash=False, repack=False),
        Flags("-fa on -no-fmoe", repack=False, fused=False),
    ),
    latent_flags=(
        Flags("-fa on -rtr -fmoe -mla 1", latent=1),
        Flags("-fa on -rtr -fmoe -mla 2", latent=2),
        Flags("-fa on -fmoe -mla 1", repack=False, latent=1),
    ),
    options=(("GGML_IQK_FA_ALL_QUANTS", "OFF"),),  # kernels for caches that no bench asks for take most of the time
)
EDITIONS = (LLAMA_CPP, IK_LLAMA_CPP)
