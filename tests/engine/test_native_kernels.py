"""The native kernels against the torch reference: random shapes, routings and values, every instruction set; which are
believed, old processors, and what kernels take while nothing is generated."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import cli
from engine.bench.opened import opened
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig, SamplingParams
from engine.experts.dispatch import StandardExperts
from engine.experts.record import ExpertBank
from engine.formats.tiles import RecordLayout, dequantise
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native import build, library
from engine.kernels.native.build import Compiler
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts, can_compute
from engine.kernels.native.library import _ABI, _SELF_TEST, Isa, NativeKernels, load_kernels, missing_note, proven
from engine.kernels.native.linear import QuantisedLinear, speed_up_linears
from engine.kernels.reference import reference_experts
from engine.kernels.torch_experts import TorchExperts
from tests.engine.conversions import quantise_linears
from tests.engine.native_isas import isas, kernels_of
from tests.engine.native_programs import FOLDER, HEADERS, run_program
from tests.engine.single_streams import Alone

_ISAS = isas()


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=3) as held_back:
        yield held_back


class SiluExperts(StandardExperts):
    """The library's default gate, by the name that the kernels recognise it by."""


def _default_apply_gate(self: SiluExperts, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


SiluExperts._apply_gate = _default_apply_gate


def _layer(experts: int, hidden: int, inner: int) -> tuple[SiluExperts, LayerRecords, dict[str, torch.Tensor]]:
    module = SiluExperts(experts, hidden, inner, torch.nn.SiLU())
    weights = {name: (torch.randn(p.shape) * p.shape[-1] ** -0.5).bfloat16() for name, p in module.named_parameters()}
    shapes = {name: (tuple(w.shape[1:]), torch.bfloat16) for name, w in weights.items()}
    layer = ExpertBank(torch.device("cpu")).add_layer("experts", experts, RecordLayout.of(shapes, transposed=False))
    for name, weight in weights.items():
        layer.stacked[name].copy_(weight)
    return module, layer, weights


@settings(max_examples=13)
@given(
    experts=st.integers(1, 9),
    hidden=st.integers(1, 200),
    inner=st.integers(1, 100),
    tokens=st.integers(1, MAX_TOKENS),
    seed=st.integers(0, 2**31),
)
def test_experts_equal_the_reference(
    kernels: NativeKernels, experts: int, hidden: int, inner: int, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module, layer, weights = _layer(experts, hidden, inner)
    math = ExpertMath.of(module)
    assert can_compute(layer, math)
    compute = NativeExperts(layer, math, kernels, many_tokens=TorchExperts(layer, math))
    width = int(torch.randint(1, experts + 1, ()))
    # Ids one above the experts belong to nobody, as the interface allows.
    index = torch.stack([torch.randperm(experts + 1)[:width] for _ in range(tokens)])
    share = torch.rand(tokens, width)
    x = torch.randn(tokens, hidden).bfloat16()
    got = compute(x, index, share)
    wanted = reference_experts(module, weights, x, index, share)
    torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_more_tokens_equal_the_reference(kernels: NativeKernels) -> None:
    module, layer, weights = _layer(4, 64, 32)
    compute = NativeExperts(layer, ExpertMath.of(module), kernels, TorchExperts(layer, ExpertMath.of(module)))
    x = torch.randn(MAX_TOKENS + 3, 64).bfloat16()
    index = torch.randint(0, 4, (MAX_TOKENS + 3, 2))
    share = torch.rand(MAX_TOKENS + 3, 2)
    wanted = reference_experts(module, weights, x, index, share)
    torch.testing.assert_close(compute(x, index, share).float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-40])
def test_infinities_and_denormals_stay_where_the_reference_has_them(kernels: NativeKernels, value: float) -> None:
    torch.manual_seed(1)
    module, layer, weights = _layer(2, 64, 32)
    compute = NativeExperts(layer, ExpertMath.of(module), kernels, TorchExperts(layer, ExpertMath.of(module)))
    x = torch.randn(1, 64).bfloat16()
    x[0, 5] = value
    index, share = torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.5]])
    wanted = reference_experts(module, weights, x, index, share).float()
    torch.testing.assert_close(compute(x, index, share).float(), wanted, atol=2e-2, rtol=2e-2, equal_nan=True)


@settings(max_examples=10)
@given(rows=st.integers(1, 900), columns=st.integers(1, 700), bias=st.booleans(), seed=st.integers(0, 2**31))
def test_linear_equals_torch(kernels: NativeKernels, rows: int, columns: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16))
    assert speed_up_linears(model, kernels) == (rows * columns >= 64 * 1024)
    for tokens in (1, 2):
        x = torch.randn(1, tokens, columns).bfloat16()
        with torch.no_grad():
            wanted = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
            got = model(x)
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@given(numbers=st.integers(0, 2**17), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_memory_is_read_once_and_whole(kernels: NativeKernels, numbers: int, seed: int) -> None:
    memory = np.random.default_rng(seed).integers(0, 2**64, numbers, dtype=np.uint64)
    assert kernels.read_memory(kernels.pool, memory.ctypes.data, memory.nbytes) == int(memory.sum(dtype=np.uint64))


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
@settings(max_examples=3)
@given(
    rows=st.integers(100, 700),
    columns=st.integers(700, 900),
    bias=st.booleans(),
    tokens=st.sampled_from([1, 2, 8, 9, 49]),
    seed=st.integers(0, 2**31),
)
def test_quantised_linear_is_near_what_its_weights_mean(
    kernels: NativeKernels, precision: str, rows: int, columns: int, bias: bool, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16))
    model.requires_grad_(False)
    assert quantise_linears(model, precision, kernels) == 1
    fast_path = model[0].forward
    assert isinstance(fast_path, QuantisedLinear)
    x = torch.randn(1, tokens, columns).bfloat16()
    offset = model[0].bias.float() if bias else None
    wanted = torch.nn.functional.linear(x.float(), dequantise(fast_path.matrix, torch.float32), offset)
    torch.testing.assert_close(model(x).float(), wanted, atol=2e-2, rtol=2e-2)
    assert model[0].weight.numel() == 0
    assert sum(buffer.nbytes for buffer in model.buffers()) == fast_path.matrix.nbytes


def test_routers_and_small_layers_are_not_quantised(kernels: NativeKernels) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16)
            self.small = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            self.up_proj = torch.nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16)

    block = Block()
    assert quantise_linears(block, "int8", kernels) == 1
    assert [layer.weight.numel() > 0 for layer in (block.gate, block.small, block.up_proj)] == [True, True, False]


def test_a_closed_pool_leaves_no_thread() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted in /proc")
    before = {*os.listdir(tasks)}
    kernels = load_kernels(threads=4)
    assert len({*os.listdir(tasks)} - before) == 3
    kernels.close()
    assert {*os.listdir(tasks)} <= before


def test_the_environment_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    assert load_kernels(threads=2) is None


_PRETENDED = """
extern "C" int switchyard_abi() { return %(abi)d; }
extern "C" unsigned switchyard_advertised_isas() { return %(advertised)d; }
extern "C" int switchyard_self_test(int isa) {
    if (isa == %(traps)d) __builtin_trap();
    return isa == %(errs)d ? 6 : 0;
}
"""

Make = Callable[..., Path]


@pytest.fixture
def pretended(tmp_path: Path) -> Make:
    """Makes a library that says what a processor's would."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as why:
        pytest.skip(str(why))

    def make(*, abi: int = _ABI, advertised: int = 0b11111, traps: int = -1, errs: int = -1) -> Path:
        values = {"abi": abi, "advertised": advertised, "traps": traps, "errs": errs}
        source, target = tmp_path / "pretended.cpp", tmp_path / "pretended.so"
        source.write_text(_PRETENDED % values, encoding="ascii")
        compiler.run("-shared", "-fPIC", str(source), "-o", str(target))
        return target

    return make


def test_what_is_advertised_and_traps_is_not_used(pretended: Make) -> None:
    assert proven(pretended(traps=Isa.AVX512_VNNI)) == [Isa.PORTABLE, Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512]


def test_what_computes_wrongly_is_not_used(pretended: Make) -> None:
    assert proven(pretended(errs=Isa.AVX_VNNI)) == [Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_VNNI]


def test_a_processor_without_avx2_has_the_portable_kernels(pretended: Make) -> None:
    assert proven(pretended(advertised=1)) == [Isa.PORTABLE]


def test_instruction_sets_of_arm_are_known(pretended: Make) -> None:
    assert proven(pretended(advertised=1 | 1 << 16 | 1 << 17)) == [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT]


def test_a_library_of_another_interface_is_not_used_and_told(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pretended(abi=_ABI - 1)
    monkeypatch.setattr(library, "library_path", lambda: path)
    assert proven(path) == []
    assert load_kernels(threads=2) is None
    assert "self-test" in missing_note()


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"cut short")
    assert proven(broken) == []


def test_a_library_built_from_other_sources_is_ignored_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "switchyard_kernels-0123456789abcdef-x86_64.so"
    monkeypatch.setattr(library, "library_path", lambda: mine)
    monkeypatch.setattr(build, "library_path", lambda: mine)
    assert "install a C++ compiler" in missing_note()
    (tmp_path / "switchyard_kernels-fedcba9876543210-x86_64.so").write_bytes(b"of another version")
    assert load_kernels(threads=2) is None
    assert "another version" in missing_note()


def test_a_new_build_takes_the_place_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "switchyard_kernels-0123456789abcdef-x86_64.so"
    others = [tmp_path / f"switchyard_kernels-fedcba9876543210-x86_64{end}" for end in (".so", ".proven.json")]
    for other in others:
        other.write_text("{}")
    monkeypatch.setattr(build, "library_path", lambda: mine)
    monkeypatch.setattr(build, "_SUFFIX", ".so")
    monkeypatch.setattr(build, "find_compiler", lambda: Compiler("none"))
    monkeypatch.setattr(build, "compile_sources", lambda *_: [])
    monkeypatch.setattr(Compiler, "link", lambda _, __, target: target.write_bytes(b"built"))
    assert build.build() == mine
    assert sorted(tmp_path.iterdir()) == [mine]


def test_a_verdict_holds_until_the_processor_is_another(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pretended()
    assert proven(path)[-1] is Isa.AVX512_VNNI
    tried: list[int] = []
    monkeypatch.setattr(library, "_passes", lambda _, isa: tried.append(isa) or isa <= Isa.AVX2)
    assert proven(path)[-1] is Isa.AVX512_VNNI
    assert not tried
    monkeypatch.setattr(library, "processor", lambda: "moved to an older one")
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert len(tried) == 5


def test_a_damaged_verdict_is_proven_again(pretended: Make) -> None:
    path = pretended(advertised=3)
    for damaged in ("", "[]", '{"machine": 1}', json.dumps({"machine": None, "isas": [99]})):
        path.with_suffix(".proven.json").write_text(damaged)
        assert proven(path) == [Isa.PORTABLE, Isa.AVX2]


def test_a_self_test_without_an_answer_is_tried_again(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = subprocess.run, []

    def sleeps_through_it(*command: object, **options: object) -> object:
        asked.append(command)
        if len(asked) <= 2:
            raise subprocess.TimeoutExpired("python", 20)
        return run(*command, **options)  # type: ignore[call-overload]

    path = pretended(advertised=3)
    monkeypatch.setattr(library.subprocess, "run", sleeps_through_it)
    assert proven(path) == [Isa.AVX2]  # the portable kernels' test was tried twice for nothing
    assert not path.with_suffix(".proven.json").exists()
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert path.with_suffix(".proven.json").exists()


_IDLE_S = 0.4
_MOST_BUSY = 0.3
"""Part of one core.  A thread that spins takes all of one."""


def busy_while_idle() -> float:
    """Cores that all threads of this process use while it sleeps, after a moment in which they may still spin."""
    time.sleep(0.05)
    begun, cpu = time.perf_counter(), time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - cpu) / (time.perf_counter() - begun)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_no_core_is_busy_after_an_answer(precision: str) -> None:
    path = str(make_synthetic("synthetic:qwen3-moe-tiny"))
    config = EngineConfig(model=path, device="cpu", precision=precision, threads=3)  # type: ignore[arg-type]
    with opened(config) as loaded:
        Alone(loaded).generate_from_ids(
            [3, 4, 5, 6],
            SamplingParams(max_tokens=24),
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _count: None,
            cancelled=lambda: False,
            end_ids=frozenset(),
        )
        assert busy_while_idle() < _MOST_BUSY


def test_idle_threads_wait_in_the_kernel() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("states of threads are in /proc")
    before = set(os.listdir(tasks))
    kernels = load_kernels(threads=4)
    assert kernels is not None
    workers = [tasks / name / "stat" for name in os.listdir(tasks) if name not in before]

    def all_asleep() -> bool:
        return all(stat.read_text().rpartition(")")[2].split()[0] == "S" for stat in workers)

    try:
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16))
        quantise_linears(model, "int8", kernels)
        for tokens in (1, 1, 1, 40):
            model(torch.randn(tokens, 1024).bfloat16())
            assert len(workers) == 3
            while not all_asleep():  # the test's own limit ends this if one never sleeps
                time.sleep(0.001)
            for _ in range(40):
                time.sleep(0.002)
                assert all_asleep()
    finally:
        kernels.close()


def test_a_busy_machine_gets_fewer_threads_while_they_are_faster(tmp_path: Path) -> None:
    program = tmp_path / "busy_machine"
    source = str(FOLDER / "busy_machine.cpp")
    build.find_compiler().run("-std=c++17", "-O1", f"-I{HEADERS}", source, "-o", str(program))
    done = run_program(program, timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_is_small() -> None:
    """28 types of blocks, three sets of instructions and one to eight vectors take half of it, their grids 0.1 MiB."""
    assert build.build().stat().st_size < 4 * 2**20


def test_without_a_compiler_the_bench_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "library.so")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["bench", "kernels"]) == 2
    assert "C++ compiler" in capsys.readouterr().err


QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")

_ADVERTISED = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).switchyard_advertised_isas())"


@pytest.mark.skipif(
    QEMU is None or platform.machine() != "x86_64", reason="needs x86-64 and qemu-user to be another processor"
)
@pytest.mark.parametrize(
    "processor",
    [
        "Nehalem",
        pytest.param("SandyBridge", marks=pytest.mark.exhaustive),
        pytest.param("Haswell", marks=pytest.mark.exhaustive),
    ],
)
def test_what_an_old_processor_can_run_is_offered_and_works(processor: str) -> None:
    """Of 2008, without AVX; of 2011, without AVX2; and of 2013, the first with all that the AVX2 kernels use."""
    assert QEMU is not None
    library = str(build.build())
    python = [QEMU, "-cpu", processor, sys.executable, "-I", "-S", "-c"]
    said = subprocess.run([*python, _ADVERTISED, library], capture_output=True, check=True).stdout
    newest = Isa.AVX2 if processor == "Haswell" else Isa.PORTABLE
    assert [isa for isa in Isa if int(said) >> isa & 1] == [isa for isa in Isa if isa <= newest]
    for isa in {Isa.PORTABLE, newest}:
        subprocess.run([*python, _SELF_TEST, library, str(int(isa))], capture_output=True, check=True, timeout=100)
