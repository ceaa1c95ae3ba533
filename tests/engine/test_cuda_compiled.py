"""The sources in CUDA C compile for every card, and what came out is kept on disk until something changes."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from benchmarks.card_kernels import Usage, nvidia_kernels, usage_in
from engine.common.paths import cache_dir
from engine.kernels.cuda import compiled as nvrtc
from engine.kernels.cuda.compiled import (
    CompileError,
    Kernel,
    Machine,
    Nvrtc,
    architecture_for,
    compile_kernel,
    find_nvrtc,
    libraries,
    machine_code,
)
from engine.kernels.cuda.products import product_kernel

INT4 = product_kernel("Int4", 1)
AMPERE = (8, 6)
NEWER = (75, 80, 86, 89, 90, 120)
OLDER = (61, 70)


class CountingNvrtc(Nvrtc):
    """Makes something else each time, and knows two architectures."""

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        self.version = version
        self.made = 0

    def architectures(self) -> list[int]:
        return [80, 86, 90]

    def compile(self, source: str, name: str, headers: object, options: object) -> Machine:
        self.made += 1
        return Machine(f"{name} {options} {self.made}".encode(), "")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))


def kept() -> list[Path]:
    return sorted((cache_dir() / "cuda").glob("*"))


def test_a_kernel_is_compiled_once_and_again_when_something_changes() -> None:
    compiler = CountingNvrtc()
    code = machine_code(INT4, AMPERE, "13000", compiler)
    assert machine_code(INT4, AMPERE, "13000", compiler) == code
    assert (compiler.made, len(kept())) == (1, 1)
    assert machine_code(INT4, AMPERE, "13010", compiler) != code  # another driver
    assert machine_code(product_kernel("Int4", 2), AMPERE, "13010", compiler) != code
    assert machine_code(INT4, (8, 0), "13010", compiler) != code
    assert compiler.made == 4
    newer = CountingNvrtc((13, 1))
    machine_code(INT4, AMPERE, "13010", newer)
    assert newer.made == 1
    assert len(kept()) == 3  # what nobody asks for any more is removed


def test_what_is_half_written_or_foreign_is_made_again() -> None:
    compiler = CountingNvrtc()
    code = machine_code(INT4, AMPERE, "13000", compiler)
    (path,) = kept()
    whole = path.read_bytes()
    for spoilt in (b"", whole[:40], whole[:-1], whole[:-1] + b"?", b"\x7fELF", whole + b"more"):
        path.write_bytes(spoilt)
        made = compiler.made
        assert machine_code(INT4, AMPERE, "13000", compiler) != code
        assert compiler.made == made + 1
    path.unlink()
    path.mkdir()
    assert machine_code(INT4, AMPERE, "13000", compiler)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs folders that refuse to be written")
def test_a_folder_that_cannot_be_written_costs_time_only() -> None:
    folder = cache_dir() / "cuda"
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert machine_code(INT4, AMPERE, "13000", CountingNvrtc())


def test_the_architecture_is_of_the_cards_generation() -> None:
    compiler = CountingNvrtc()
    assert architecture_for((8, 9), compiler) == 86
    assert architecture_for((9, 0), compiler) == 90
    for capability in ((6, 1), (12, 0)):
        with pytest.raises(CompileError, match=r"^NVRTC 13\.0 makes no code for cards of compute capability \d+\.\d$"):
            architecture_for(capability, compiler)


def test_without_the_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "libraries", lambda: iter(()))
    find_nvrtc.cache_clear()
    with pytest.raises(CompileError, match="NVRTC was not found"):
        find_nvrtc()
    wrong = tmp_path / "libnvrtc.so.13"
    wrong.write_bytes(b"no library")
    monkeypatch.setattr(nvrtc, "libraries", lambda: iter((wrong,)))
    with pytest.raises(CompileError, match="could not be loaded"):
        find_nvrtc()
    find_nvrtc.cache_clear()


def test_of_several_compilers_one_is_taken_that_knows_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(CountingNvrtc):
        def architectures(self) -> list[int]:
            return [61, 70, 86]

    made = {"new": CountingNvrtc((13, 0)), "old": Old((12, 9))}
    monkeypatch.setattr(nvrtc, "libraries", lambda: iter(made))
    monkeypatch.setattr(nvrtc, "Nvrtc", lambda path: made[path])
    find_nvrtc.cache_clear()
    assert find_nvrtc() is find_nvrtc((8, 6)) is made["new"]
    assert find_nvrtc((6, 1)) is made["old"]
    with pytest.raises(CompileError, match=r"makes no code for cards of compute capability 12\.0"):
        find_nvrtc((12, 0))
    find_nvrtc.cache_clear()


def _installed() -> Nvrtc:
    try:
        return find_nvrtc()
    except CompileError as error:
        pytest.skip(str(error))


def test_the_compiler_takes_a_kernel_and_refuses_nonsense() -> None:
    compiler = _installed()
    made = compile_kernel(INT4, architecture_for(AMPERE, compiler), compiler)
    assert made.code.startswith(b"\x7fELF")
    assert usage_in(made.log).spilled_bytes == 0
    with pytest.raises(CompileError, match=r"^NVRTC [\d.]+ does not compile nonsense\.cu: .*error"):
        compiler.compile("nonsense", "nonsense.cu", {}, ["-arch=sm_86"])


@pytest.fixture(scope="module")
def from_the_index(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Nvrtc]:
    """The compiler of a package, which is downloaded once."""

    @cache
    def download(package: str) -> Nvrtc:
        folder = tmp_path_factory.mktemp("package")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"{package} could not be downloaded: {done.stderr.strip()[-200:]}")
        (found,) = (path for path in folder.glob("nvidia/*/lib/libnvrtc.so.*") if ".alt." not in path.name)
        return Nvrtc(found)

    return download


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="the packages are looked for as they are on Linux")
@pytest.mark.parametrize(
    ("package", "architecture"),
    [
        *(("nvidia-cuda-nvrtc>=13,<14", each) for each in NEWER),
        *(("nvidia-cuda-nvrtc-cu12>=12.9,<13", each) for each in OLDER),
    ],
)
def test_every_kernel_for_every_card_without_spills(
    package: str,
    architecture: int,
    from_the_index: Callable[[str], Nvrtc],
    record_property: Callable[[str, object], None],
) -> None:
    compiler = from_the_index(package)

    def taken(kernel: Kernel) -> Usage:
        return usage_in(compile_kernel(kernel, architecture, compiler).log)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # as cards prepare them
        usages = dict(zip(kernels := nvidia_kernels(), pool.map(taken, kernels), strict=True))
    for kernel, usage in usages.items():
        record_property(kernel.name, f"{usage.registers} registers, {usage.shared_bytes} bytes shared")
        assert usage.shared_bytes <= 48 * 1024
    assert {kernel.name: usage.spilled_bytes for kernel, usage in usages.items() if usage.spilled_bytes} == {}


def test_what_the_log_says() -> None:
    log = (
        "ptxas info    : Compiling entry function 'product_kernel' for 'sm_86'\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers, 7048 bytes smem, 592 bytes cmem[0]\n"
    )
    assert usage_in(log) == Usage(96, 7048, 12)
    with pytest.raises(ValueError, match="no registers"):
        usage_in("")


def test_where_the_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.5", "libnvrtc.alt.so.12")
    if sys.platform == "win32":
        names = ("nvrtc64_130_0.dll", "nvrtc-builtins64_135.dll", "nvrtc64_130_0.alt.dll")
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [path for path in libraries() if tmp_path in path.parents] == [folder / names[0]]
