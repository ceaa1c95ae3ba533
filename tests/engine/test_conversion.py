"""Converting: the file holds what a conversion in memory would, whatever happens on the way."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.disk import load_prepared
from engine.checkpoint.library import converted_path
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.files import take_lock
from engine.experts.container import ContainerWriter, part_path
from engine.experts.direct_file import DirectFile
from engine.experts.disk_tier import DiskTier
from engine.experts.record import ExpertBank
from engine.kernels.native import linear
from engine.runtime.load import conversion as conversion_module
from engine.runtime.load.checkpoint import read_headers
from engine.runtime.load.conversion import Conversion, Converted, convert
from engine.runtime.load.library_models import quiet_library
from engine.runtime.load.records import RecordMaker
from engine.runtime.load.tensor_reader import TensorReader
from tests.combinations import some
from tests.engine.conversions import conversion_of
from tests.engine.made_up_records import CPU
from tests.engine.test_checkpoint_layouts import _set_quantization, _to_fp8
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 256)
    monkeypatch.setattr(conversion_module, "remove_leftovers", lambda: 0)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=5)


def opened(folder: Path, precision: str = "int4", *, linears: bool = False) -> Conversion:
    with torch.no_grad(), quiet_library():
        return conversion_of(read_headers(folder, precision), precision, linears=linears)


def converted(source: Conversion, path: Path, **options: object) -> Converted:
    given = {"on_progress": _nothing, "cancelled": lambda: False, "path": path, **options}
    return convert(source, **given)  # type: ignore[arg-type]


def _nothing(_done: int, _total: int) -> None:
    pass


def in_memory(source: Conversion) -> ExpertBank:
    bank, plan = ExpertBank(CPU), source.opened.plan
    with torch.no_grad(), quiet_library(), TensorReader(_nothing, lambda: False, 1, dtype=plan.dtype) as reader:
        maker = RecordMaker(source.opened.model, plan, reader)
        for site in source.sites:
            maker.fill(site, bank.add_layer(site.name, site.num_experts, site.layout).records)
    return bank


def disk_over(there: Converted, source: Conversion, **options: Any) -> DiskTier:
    container = there.container
    return DiskTier(source.sites, [container.parts(site.name) for site in source.sites], container, **options)


def assert_holds(path: Path, source: Conversion) -> None:
    """The file has the same bytes as a bank in memory, part by part, and zeros between."""
    expected, loaded = in_memory(source), ExpertBank(CPU)
    there = converted(source, path)
    assert not there.made
    specs = there.container.entries.keys()
    assert list(specs) == [site.name for site in source.sites] + list(source.linears)
    with disk_over(there, source) as disk:
        load_prepared(disk, loaded, _nothing)
    for name, layer in expected.layers.items():
        for part in layer.layout.parts:
            ours = loaded.layers[name].stacked[part.name].contiguous().view(torch.uint8)
            assert torch.equal(ours, layer.stacked[part.name].contiguous().view(torch.uint8)), (name, part.name)
        for begin, end in layer.layout.padding:
            assert not loaded.layers[name].records[:, begin:end].any()


@pytest.mark.parametrize("precision", ["bf16", "fp32", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3", "nemotron_h"])
def test_the_file_holds_what_memory_would(family: str, precision: str, tmp_path: Path) -> None:
    source = opened(tiny_checkpoint(family, tmp_path / family), precision, linears=precision == "int4")
    path = tmp_path / "converted" / "tiny.gguf"
    told: list[tuple[int, int]] = []
    done = converted(source, path, on_progress=lambda *figures: told.append(figures))
    assert done.made
    assert done.resumed_bytes == 0
    total = source.nbytes
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    assert path.stat().st_size == source.contents.size
    assert_holds(path, source)


def test_experts_in_fp8(tmp_path: Path) -> None:
    folder = tiny_checkpoint("deepseek_v3", tmp_path / "packed")
    packed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            packed[name], packed[f"{name}_scale_inv"] = _to_fp8(tensor)
        else:
            packed[name] = tensor
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    _set_quantization(folder, {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"})
    for precision in ("bf16", "int4"):
        source = opened(folder, precision, linears=True)
        converted(source, tmp_path / f"{precision}.gguf")
        assert_holds(tmp_path / f"{precision}.gguf", source)


def test_files_of_different_models_and_precisions_do_not_meet(tmp_path: Path) -> None:
    paths = {
        converted_path(tmp_path / folder / "model", precision)
        for folder in ("a", "b")
        for precision in ("bf16", "fp32")
    }
    assert len(paths) == 4


# --- kills and other ends ---------------------------------------------------------------------------

_CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from engine.experts import container, direct_file
from engine.kernels.native import linear
from engine.runtime.load.checkpoint import read_headers
from engine.runtime.load import conversion
from tests.combinations import some
from tests.engine.conversions import conversion_of
linear.SMALLEST, left = 256, int(sys.argv[3])
def counted(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
# A kill comes between two calls to the system, or in the middle of one: these are all that change the file.
direct_file.DirectFile.write = counted(direct_file.DirectFile.write)
direct_file.DirectFile.sync = counted(direct_file.DirectFile.sync)
container.os.ftruncate = counted(os.ftruncate)
container.os.replace = counted(os.replace)
container._TOGETHER = 1
with torch.no_grad():
    found = read_headers(Path(sys.argv[1]), "int4")
source = conversion_of(found, "int4")
done = conversion.convert(source, lambda *_: None, lambda: False, path=Path(sys.argv[2]))
print(done.resumed_bytes)
"""


def run_and_kill(model: Path, path: Path, at_call: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CHILD, str(model), str(path), str(at_call)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("at_call", some([2, 5, 10, 18, 24, 25], first=3))
def test_killed_anywhere_it_goes_on_and_ends_in_the_same_file(at_call: int, mixtral: Path, tmp_path: Path) -> None:
    """Calls: 3 to begin, 4 for each of 5 layers, a sync and the rename."""
    source = opened(mixtral)
    converted(source, tmp_path / "whole.gguf")
    killed = tmp_path / "killed.gguf"
    done = run_and_kill(mixtral, killed, at_call)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not killed.exists()
    again = converted(source, killed)
    layers = max(at_call - 5, 0) // 4
    assert again.resumed_bytes in [source.contents.tensors[0].nbytes * count for count in (layers, layers + 1)]
    assert killed.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir() if "gguf" in file.name) == ["killed.gguf", "whole.gguf"]


def stop_after(source: Conversion, path: Path, layers: int) -> None:
    """Leaves a file under construction with so many finished layers."""
    records = in_memory(source)
    with ContainerWriter(path, source.contents) as writer:
        for layer, made in zip(range(layers), records.layers.values(), strict=False):
            for begin, end in made.layout.padding:
                made.records[:, begin:end] = 0
            writer.write(layer, made.records, lambda count: None)


@pytest.mark.parametrize("finished", [0, 1, 4, 5])
def test_what_was_finished_is_kept(finished: int, mixtral: Path, tmp_path: Path) -> None:
    source, path = opened(mixtral, "bf16"), tmp_path / "tiny.gguf"
    stop_after(source, path, finished)
    assert part_path(path).exists() == (finished > 0)
    told: list[int] = []
    done = converted(source, path, on_progress=lambda count, total: told.append(count))
    assert done.resumed_bytes == finished * source.contents.tensors[0].nbytes
    assert all(count >= done.resumed_bytes for count in told)
    assert_holds(path, source)


@pytest.mark.parametrize("damage", ["record", "seal", "cut", "header"])
def test_what_is_left_is_not_believed_blindly(damage: str, mixtral: Path, tmp_path: Path) -> None:
    source, path = opened(mixtral, "bf16"), tmp_path / "tiny.gguf"
    contents = source.contents
    stop_after(source, path, 3)
    part = part_path(path)
    content = bytearray(part.read_bytes())
    table = content.index(b"switchyard.digests") + len("switchyard.digests") + 16
    first, second = contents.tensors[:2]
    at = {
        "record": contents.offsets[2] - 5,
        "seal": table + (first.num_experts + 1 + second.num_experts) * 8 + 2,
        "header": 60,
        "cut": 0,
    }[damage]
    content[at] ^= 0 if damage == "cut" else 4
    part.write_bytes(content[:-1] if damage == "cut" else content)
    done = converted(source, path)
    assert done.resumed_bytes == (0 if damage in ("cut", "header") else 2 * first.nbytes)
    assert_holds(path, source)


def test_cancelled_at_once_it_leaves_nothing(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestCancelled):
        converted(opened(mixtral), tmp_path / "converted" / "tiny.gguf", cancelled=lambda: True)
    assert list((tmp_path / "converted").iterdir()) == []


def test_two_at_once_make_it_once(mixtral: Path, tmp_path: Path) -> None:
    source, path, results = opened(mixtral), tmp_path / "tiny.gguf", list[Converted]()
    threads = [threading.Thread(target=lambda: results.append(converted(source, path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done.made for done in results) == [False, False, True]
    assert_holds(path, source)
    assert not path.with_name("tiny.gguf.lock").exists()


def test_while_another_program_makes_it_one_waits_and_can_be_cancelled(mixtral: Path, tmp_path: Path) -> None:
    path, asked = tmp_path / "tiny.gguf", iter(range(100))
    with ThreadPoolExecutor(1) as other:
        lock = other.submit(take_lock, path.with_name("tiny.gguf.lock"), 0.0).result()
        with pytest.raises(RequestCancelled):
            converted(opened(mixtral), path, cancelled=lambda: next(asked) > 2)
        other.submit(lock.release).result()
    assert not path.exists()


# --- other sources ----------------------------------------------------------------------------------


def change_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    os.utime(model / "model.safetensors", ns=(2, 2))


def test_another_precision_makes_another_file(mixtral: Path, tmp_path: Path) -> None:
    converted(opened(mixtral, "fp32"), tmp_path / "tiny.gguf")
    source = opened(mixtral, "bf16")
    note = converted(source, tmp_path / "tiny.gguf").note
    assert all(precision in note for precision in ("fp32", "bf16"))
    assert_holds(tmp_path / "tiny.gguf", source)


def test_a_model_that_changes_meanwhile_is_not_converted(mixtral: Path, tmp_path: Path) -> None:
    weights = mixtral / "model.safetensors"
    with pytest.raises(EngineError, match="changed while"):
        converted(opened(mixtral), tmp_path / "tiny.gguf", on_progress=lambda *_: os.utime(weights, ns=(1, 1)))
    assert [file.name for file in tmp_path.iterdir()] == ["mixtral"]


@pytest.mark.parametrize("changed", [False, True])
def test_reading_repairs_by_itself(
    mixtral: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: bool
) -> None:
    source, path = opened(mixtral), tmp_path / "tiny.gguf"
    there = converted(source, path)
    whole = path.read_bytes()
    content = bytearray(whole)
    content[source.contents.offsets[2] + source.contents.tensors[2].layout.nbytes] ^= 128
    path.write_bytes(content)
    if changed:
        change_weights(mixtral)
    layers = source.contents.tensors[: len(source.sites)]
    record = torch.empty(layers[2].layout.nbytes, dtype=torch.uint8)
    with disk_over(there, source, repair=lambda layer, expert: source.record(layers[layer].name, expert)) as disk:
        read = disk.read(2, 1, record)
        if changed:
            with pytest.raises(EngineError, match=r"Expert 1 of .* is damaged"):
                read.result(60)
        else:
            read.result(60)
        assert disk.records_repaired == (not changed)
    assert (path.read_bytes() == whole) is not changed
    assert "Expert 1" in caplog.text


# --- no room ----------------------------------------------------------------------------------------


def with_file_limit(nbytes: int, work: Callable[[], None]) -> None:
    """Runs it with files limited to so many bytes: the nearest to a full disk that a test may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_before_anything_is_written(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("engine.experts.container.shutil.disk_usage", lambda folder: usage._replace(free=70_000))
    path = tmp_path / "converted" / "tiny.gguf"
    with refused(ErrorCode.DISK_FULL, match=r"kB .*converted.*70 kB"):
        converted(opened(mixtral), path)
    assert list(path.parent.iterdir()) == []


def test_a_file_that_may_not_grow(mixtral: Path, tmp_path: Path) -> None:
    source, path = opened(mixtral), tmp_path / "converted" / "tiny.gguf"

    def fails() -> None:
        with refused(ErrorCode.DISK_FULL):
            converted(source, path)

    with_file_limit(source.contents.offsets[2] + 5000, fails)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("fits", [0, 2])
def test_a_disk_that_fills_up_meanwhile(
    fits: int, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = opened(mixtral), tmp_path / "tiny.gguf"
    offsets, write = source.contents.offsets, DirectFile.write

    def until_full(self: DirectFile, offset: int, data: memoryview) -> None:
        if offset + len(data) > offsets[fits] + 5000:
            write(self, offset, data[:4096])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", until_full)
        with pytest.raises(EngineError) as caught:
            converted(source, path)
    assert caught.value.code == ErrorCode.DISK_FULL
    assert not path.exists()
    assert part_path(path).exists() == (fits > 0)  # worth keeping only if something of it is finished
    assert converted(source, path).resumed_bytes == fits * source.contents.tensors[0].nbytes
    assert_holds(path, source)


def test_a_folder_that_cannot_be_written(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "converted").write_text("no folder")
    with pytest.raises(EngineError, match="written"):
        converted(opened(mixtral), tmp_path / "converted" / "tiny.gguf")
