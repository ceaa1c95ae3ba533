"""Preparing: the bank file holds what the bank in RAM would, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.library import bank_path
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.bank_file import BankFile
from engine.experts.bank_header import UnusableBankError
from engine.experts.bank_writer import BankWriter, part_path
from engine.experts.disk_tier import DiskTier
from engine.runtime.load import prepare_bank as preparing_module
from engine.runtime.load.prepare_bank import BankSource, PreparedBank, rebuild_layer, rebuild_record
from tests.engine.prepare_bank_parts import assert_holds, in_ram, prepare
from tests.engine.test_checkpoint_layouts import _set_quantization, _to_fp8
from tests.engine.tiny_families import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=5)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3", "nemotron_h", "jetmoe", "dbrx"])
def test_the_bank_holds_what_ram_would(family: str, precision: str, tmp_path: Path) -> None:
    source = BankSource.open(tiny_checkpoint(family, tmp_path / family), precision)
    path = tmp_path / "banks" / "tiny.bank"
    told: list[tuple[int, int]] = []
    done = prepare(source, path, on_progress=lambda *figures: told.append(figures))
    assert done == PreparedBank(path, made=True)
    total = source.header().records_nbytes
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert [file.name for file in path.parent.iterdir()] == ["tiny.bank"]
    assert path.stat().st_size == source.header().nbytes
    assert_holds(path, source)
    assert prepare(source, path) == PreparedBank(path, made=False)


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
    source = BankSource.open(folder)
    prepare(source, tmp_path / "fp8.bank")
    assert_holds(tmp_path / "fp8.bank", source)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no experts") as caught:
        BankSource.open(tiny_checkpoint("llama", tmp_path / "llama"))
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_one_piece_of_memory_is_enough(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing_module, "_ONE_BUFFER_BELOW", 2**60)
    source = BankSource.open(mixtral)
    prepare(source, tmp_path / "one.bank")
    assert_holds(tmp_path / "one.bank", source)


def test_banks_of_different_models_and_precisions_do_not_meet(tmp_path: Path) -> None:
    paths = {
        bank_path(tmp_path / folder / "model", precision) for folder in ("a", "b") for precision in ("bf16", "fp32")
    }
    assert len(paths) == 4


_CHILD = """
import os, signal, sys
from pathlib import Path
from engine.experts import bank_writer, direct_file
from engine.runtime.load.prepare_bank import BankSource
from engine.runtime.load.prepare_bank import prepare_bank
left = int(sys.argv[3])
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
bank_writer.os.ftruncate = counted(os.ftruncate)
bank_writer.os.replace = counted(os.replace)
source = BankSource.open(Path(sys.argv[1]))
done = prepare_bank(source, Path(sys.argv[2]), on_progress=lambda *_: None, cancelled=lambda: False)
print(done.resumed_bytes)
"""


def run_and_kill(model: Path, bank: Path, at_call: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CHILD, str(model), str(bank), str(at_call)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "at_call", [2, 10, 19, *(pytest.param(call, marks=pytest.mark.exhaustive) for call in (5, 18))]
)
def test_killed_anywhere_it_goes_on_and_ends_in_the_same_file(at_call: int, mixtral: Path, tmp_path: Path) -> None:
    """Calls: 2 to begin, 3 for each of 5 layers, a sync and the rename."""
    source = BankSource.open(mixtral)
    prepare(source, tmp_path / "whole.bank")
    killed = tmp_path / "killed.bank"
    assert run_and_kill(mixtral, killed, at_call).returncode == -signal.SIGKILL
    assert not killed.exists()
    done = prepare(source, killed)
    layers = max(at_call - 4, 0) // 3
    assert done.resumed_bytes in [source.header().layers[0].nbytes * count for count in (layers, layers + 1)]
    assert killed.read_bytes() == (tmp_path / "whole.bank").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir() if "bank" in file.name) == ["killed.bank", "whole.bank"]


def stop_after(source: BankSource, path: Path, layers: int) -> None:
    """Leaves a file under construction with so many finished layers."""
    header, records = source.header(), in_ram(source)
    with BankWriter(path, header) as writer:
        for layer, made in zip(range(layers), records.layers.values(), strict=False):
            writer.write_layer(layer, made.records, lambda count: None)


@pytest.mark.parametrize("finished", range(6))
def test_what_was_finished_is_kept(finished: int, mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    stop_after(source, path, finished)
    assert part_path(path).exists() == (finished > 0)
    told: list[int] = []
    done = prepare(source, path, on_progress=lambda count, total: told.append(count))
    assert done.resumed_bytes == finished * source.header().layers[0].nbytes
    assert all(count >= done.resumed_bytes for count in told)
    assert_holds(path, source)


@pytest.mark.parametrize("damage", ["record", "seal", "cut", "header"])
def test_what_is_left_is_not_believed_blindly(damage: str, mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    header = source.header()
    stop_after(source, path, 3)
    part = part_path(path)
    content = bytearray(part.read_bytes())
    at = {
        "record": header.record_offset(1, header.layers[1].num_experts - 1) + 5,
        "seal": header.table_rows[1] + 2,
        "header": 60,
        "cut": 0,
    }[damage]
    content[at] ^= 0 if damage == "cut" else 4
    part.write_bytes(content[:-1] if damage == "cut" else content)
    done = prepare(source, path)
    assert done.resumed_bytes == (0 if damage in ("cut", "header") else 2 * header.layers[0].nbytes)
    assert_holds(path, source)


def test_cancelled_it_keeps_finished_layers_and_nothing_else(mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        seen = done

    with pytest.raises(RequestCancelled):
        prepare(source, path, on_progress=progress, cancelled=lambda: seen >= source.header().layers[0].nbytes)
    assert not path.exists()
    assert not path.with_name("tiny.bank.lock").exists()
    assert prepare(source, path).resumed_bytes > 0
    assert_holds(path, source)


def test_cancelled_at_once_it_leaves_nothing(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestCancelled):
        prepare(BankSource.open(mixtral), tmp_path / "banks" / "tiny.bank", cancelled=lambda: True)
    assert list((tmp_path / "banks").iterdir()) == []


def change_time(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


def change_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    os.utime(model / "model.safetensors", ns=(2, 2))


def change_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))


@pytest.mark.parametrize("change", [change_time, change_weights, change_config])
def test_another_source_makes_another_bank(change: Callable[[Path], None], mixtral: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.bank"
    prepare(BankSource.open(mixtral), path)
    change(mixtral)
    source = BankSource.open(mixtral)
    done = prepare(source, path)
    assert done.made
    assert done.reason is not None
    assert "changed" in done.reason
    assert_holds(path, source)


def test_another_precision_makes_another_bank(mixtral: Path, tmp_path: Path) -> None:
    prepare(BankSource.open(mixtral, "fp32"), tmp_path / "tiny.bank")
    source = BankSource.open(mixtral, "bf16")
    reason = prepare(source, tmp_path / "tiny.bank").reason
    assert reason is not None
    assert all(precision in reason for precision in ("fp32", "bf16"))
    assert_holds(tmp_path / "tiny.bank", source)


def test_a_model_that_changes_meanwhile_is_not_prepared(mixtral: Path, tmp_path: Path) -> None:
    source = BankSource.open(mixtral)
    with pytest.raises(EngineError, match="changed while"):
        prepare(source, tmp_path / "tiny.bank", on_progress=lambda done, total: change_time(mixtral))
    assert not (tmp_path / "tiny.bank").exists()


def test_a_damaged_record_is_made_again(mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    prepare(source, path)
    whole, header = path.read_bytes(), source.header()
    content = bytearray(whole)
    for layer, expert in ((1, 2), (1, 3), (3, 0)):
        content[header.record_offset(layer, expert) + 100] ^= 1
    path.write_bytes(content)
    rebuild_record(source, path, 3, 0)
    assert rebuild_layer(source, path, 1) == 2
    assert rebuild_layer(source, path, 1) == 0
    assert path.read_bytes() == whole


def test_reading_repairs_by_itself(mixtral: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    prepare(source, path)
    whole, header = path.read_bytes(), source.header()
    content = bytearray(whole)
    content[header.record_offset(2, 1)] ^= 128
    path.write_bytes(content)
    record = torch.empty(header.layers[2].layout.nbytes, dtype=torch.uint8)
    with DiskTier(path, header, repair=lambda layer, expert: rebuild_record(source, path, layer, expert)) as disk:
        disk.read(2, 1, record).result(60)
        assert disk.records_repaired == 1
    assert path.read_bytes() == whole
    assert "Expert 1" in caplog.text


def test_a_record_cannot_be_made_again_from_another_model(mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    prepare(source, path)
    change_weights(mixtral)
    with pytest.raises(UnusableBankError, match="has changed"):
        rebuild_record(BankSource.open(mixtral), path, 0, 0)


def test_two_at_once_make_it_once(mixtral: Path, tmp_path: Path) -> None:
    source, path, results = BankSource.open(mixtral), tmp_path / "tiny.bank", []
    threads = [threading.Thread(target=lambda: results.append(prepare(source, path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done.made for done in results) == [False, False, True]
    assert_holds(path, source)
    assert not path.with_name("tiny.bank.lock").exists()


def test_without_direct_access(mixtral: Path, tmp_path: Path) -> None:
    source = BankSource.open(mixtral)
    prepare(source, tmp_path / "direct.bank")
    prepare(source, tmp_path / "buffered.bank", direct=False)
    assert (tmp_path / "direct.bank").read_bytes() == (tmp_path / "buffered.bank").read_bytes()
    with BankFile(tmp_path / "direct.bank", direct=False) as bank:
        assert not bank.file.is_direct
