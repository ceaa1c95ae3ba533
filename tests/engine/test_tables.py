"""Embeddings whose rows stay on disk: the same answers bit by bit, each row read once, and every fault with a name."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.headers import TensorEntry
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.direct_file import DirectFile
from engine.formats.ggml import GGML
from engine.kernels.native.library import usable_isas
from engine.runtime.load import model as loading
from engine.runtime.load import tables as tables_of
from engine.runtime.load.plan import Plan
from engine.runtime.load.tables import RowTable, StoredTable, TableReads
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import library_tokens, open_model, random_prompt
from tests.engine.test_gguf_architectures import rewritten, unpacked
from tests.engine.tiny_families import model_class, tiny_checkpoint
from tests.refusals import refused

KIB = 2**10
PROMPT = [token % 90 + 3 for token in random_prompt(40)]
IN_GGUF = ("gemma3n", "gemma4-e", "qwen4exp")
NGRAMS = {
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 301,
    "split_ngram_parts": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}


def gemma(folder: Path) -> Path:
    return tiny_checkpoint("gemma4_text", folder, dtype=torch.bfloat16)


def of_few_bits(name: str, folder: Path) -> Path:
    """A GGUF file that llama.cpp reads as well, of blocks where rows are long enough for them."""
    folder.mkdir()
    file, _ = unpacked(name, folder)
    return rewritten(file, kind="Q8_0") if name != "qwen4exp" else file


def ngrams(folder: Path, **more: Any) -> Path:
    return tiny_checkpoint("qwen4_exp_text", folder, dtype=torch.bfloat16, **NGRAMS | more)


@pytest.fixture(autouse=True)
def small_tables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_of, "LARGE_TABLE_BYTES", 2 * KIB)
    monkeypatch.setattr(tables_of, "KEPT_ROWS_BYTES", KIB)


def load(path: Path, ram: int | None = None, device: str = "cpu", vram: int | None = None, **more: Any) -> LoadedModel:
    budgets = {"device": device, "ram_bytes": ram, "vram_bytes": vram}
    return open_model(path, context_tokens=128, **{"precision": "auto", **budgets, **more})


def from_disk(path: Path, planned: list[Plan], **options: Any) -> LoadedModel:
    """With a little less RAM than takes all: the tables are the first to leave it."""
    load(path, **options).close()
    loaded = load(path, planned[-1].placement.ram.held - KIB, **options)
    assert loaded.tables is not None
    assert planned[-1].tables
    assert not planned[-1].on_disk
    return loaded


def answers(loaded: LoadedModel) -> tuple[torch.Tensor, list[int]]:
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([PROMPT, PROMPT[::-1]])).logits
    return logits, library_tokens(loaded.model, PROMPT, 24)


@pytest.mark.takes_turns(2)
@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
@pytest.mark.parametrize("precision", ["auto", "fp32"])
@pytest.mark.parametrize("make", [gemma, ngrams, *(partial(of_few_bits, name) for name in IN_GGUF)])
def test_answers_are_those_of_tables_in_memory(
    make: Callable[[Path], Path], precision: str, tmp_path: Path, planned: list[Plan]
) -> None:
    path = make(tmp_path / "model")
    with closing(load(path, precision=precision)) as held:
        assert held.tables is None
        logits, tokens = answers(held)
    with closing(from_disk(path, planned, precision=precision)) as apart:
        assert apart.tables is not None
        found, theirs = answers(apart)
        assert torch.equal(found, logits)
        assert theirs == tokens
        assert apart.tables.rows
        assert "stay on disk" in apart.info.device_note
        placed = planned[-1].placement
        assert apart.info.weights_bytes <= 1.1 * placed.ram.dense + 8 * KIB


@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
def test_rows_of_all_layers_are_asked_for_before_the_first(tmp_path: Path, planned: list[Plan]) -> None:
    """Which the library's own code then finds already there, so that each is read once."""
    with closing(from_disk(ngrams(tmp_path / "model"), planned)) as loaded:
        own = {name: table for name, table in loaded.tables.tables.items() if "ngram" in name}
        (table,) = own.values()
        seen = list[tuple[int, bool]]()
        begin = table._begin

        def told(rows: Any) -> Any:
            seen.append((len(rows), table.numbers))
            return begin(rows)

        table._begin = told  # type: ignore[method-assign]
        tokens = library_tokens(loaded.model, PROMPT, 8)
        assert len(tokens) == 8
        assert len(seen) == 8
        assert all(ahead for _, ahead in seen)


def stored(path: Path, kind: str, counts: list[int], columns: int, seed: int = 0) -> StoredTable:
    """A file of a table in several parts."""
    torch.manual_seed(seed)
    rows = sum(counts)
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        raw = torch.randn(rows, columns).to(dtype).view(torch.uint8)
    else:
        width = columns // GGML[kind].elements * GGML[kind].nbytes
        raw = torch.randint(0, 60, (rows, width), dtype=torch.uint8)
    path.write_bytes(b"header" + raw.numpy().tobytes())
    width, at, parts = raw.shape[1], 6, list[TensorEntry]()
    for count in counts:
        parts.append(TensorEntry(path, "table", kind, (count, columns), at, count * width))
        at += count * width
    return StoredTable(tuple(parts), width, columns, 1)


@pytest.fixture
def reads() -> Iterator[TableReads]:
    with closing(TableReads()) as made:
        yield made


def bound(table: StoredTable, reads: TableReads) -> RowTable:
    rows = sum(part.shape[0] for part in table.parts)
    module = torch.nn.Embedding(rows, table.columns, padding_idx=rows - 1, device="meta", dtype=torch.bfloat16)
    return RowTable(module, table, reads, None, torch.bfloat16, torch.device("cpu"), rounds=True)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K")),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    steps=st.lists(st.lists(st.integers(0, 159), max_size=60), min_size=1, max_size=5),
    ahead=st.booleans(),
    kept=st.sampled_from((0, 256, 4096, 2**20)),
)
def test_each_row_of_a_step_is_read_once_and_no_other(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    counts: list[int],
    steps: list[list[int]],
    ahead: bool,
    kept: int,
) -> None:
    table = stored(tmp_path_factory.mktemp("table") / "file", kind, counts, 256)
    before, tables_of.KEPT_ROWS_BYTES = tables_of.KEPT_ROWS_BYTES, kept
    reads = TableReads()
    try:
        own, rows, raw = bound(table, reads), sum(counts), bytearray(table.parts[0].file.read_bytes()[6:])
        whole = table.unpack(torch.frombuffer(raw, dtype=torch.uint8).view(rows, -1), torch.bfloat16, None)
        for step in steps:
            ids = torch.tensor([each % rows for each in step], dtype=torch.long)[None]
            done, nbytes = reads.rows, reads.nbytes
            if ahead:
                own.expect(ids)
            found = own(ids)
            assert torch.equal(found.view(torch.int16), torch.nn.functional.embedding(ids, whole).view(torch.int16))
            assert reads.rows - done <= len(set(ids.flatten().tolist()))
            assert reads.nbytes - nbytes == (reads.rows - done) * table.row_bytes
    finally:
        reads.close()
        tables_of.KEPT_ROWS_BYTES = before


def test_a_number_beyond_the_table_is_refused(tmp_path: Path, reads: TableReads) -> None:
    own = bound(stored(tmp_path / "file", "BF16", [5], 64), reads)
    with pytest.raises(IndexError):
        own(torch.tensor([5]))


def test_numbers_that_only_the_guess_has_harm_nothing(tmp_path: Path, reads: TableReads) -> None:
    own = bound(stored(tmp_path / "file", "BF16", [5], 64), reads)
    own.expect(torch.tensor([4, 9, -100]))
    assert own(torch.tensor([4])).shape == (1, 64)
    assert reads.rows == 1


def test_a_file_that_is_cut_is_an_error_with_its_name(tmp_path: Path, reads: TableReads) -> None:
    table = stored(tmp_path / "file", "BF16", [50], 64)
    own = bound(table, reads)
    os.truncate(tmp_path / "file", 1000)
    own(torch.tensor([0]))
    with refused(ErrorCode.CHECKPOINT_DAMAGED, match=r"file cannot be read \(it is cut short"):
        own(torch.tensor([1, 49]))
    assert own(torch.tensor([1])).shape == (1, 64)  # what is there can still be had


def test_a_disk_that_fails_is_an_error_with_a_name(
    tmp_path: Path, reads: TableReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = bound(stored(tmp_path / "file", "BF16", [50], 64), reads)

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "read_into", fails)
        own.expect(torch.tensor([4]))
        with pytest.raises(EngineError, match="Input/output error"):
            own(torch.tensor([4]))
    assert own(torch.tensor([4])).shape == (1, 64)


def test_closing_ends_what_is_being_read(tmp_path: Path) -> None:
    reads = TableReads()
    own = bound(stored(tmp_path / "file", "BF16", [50], 64), reads)
    own.expect(torch.arange(50))
    reads.close()
    reads.close()
    assert not any("table-rows" in thread.name for thread in threading.enumerate())


def test_cancelling_a_load_leaves_nothing(tmp_path: Path, planned: list[Plan]) -> None:
    path = gemma(tmp_path / "model")
    loaded = from_disk(path, planned)
    ram = loaded.ram_bytes
    loaded.close()
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    config = EngineConfig(str(path), device="cpu", ram_bytes=ram, threads=1, context_tokens=128)
    with pytest.raises(RequestCancelled):
        loading.load_model(config, on_progress=lambda _done, _total: None, cancelled=cancelled)
    assert not any("table-rows" in thread.name for thread in threading.enumerate())


@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
def test_on_a_card_without_room_for_the_tables(tmp_path: Path, planned: list[Plan]) -> None:
    path = ngrams(tmp_path / "model", ngram_vocab_size_base=4001)
    with closing(load(path, precision="bf16")) as held:
        tokens = library_tokens(held.model, PROMPT, 16)
    for vram in range(160 * KIB, 640 * KIB, 32 * KIB):
        with closing(load(path, device="emulated:slow-link", vram=vram, precision="bf16")) as loaded:
            if planned[-1].tables:
                assert planned[-1].devices
                assert library_tokens(loaded.model, PROMPT, 16) == tokens
                return
    raise AssertionError("the table always was somewhere else")


def with_holes(folder: Path) -> Path:
    """A tiny model with a table of n-grams of true size, 51 billion numbers, that takes no room on the disk."""
    ngrams(folder, ple_embed_dim=2560)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 512}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        made = model_class(AutoConfig.from_pretrained(folder))(AutoConfig.from_pretrained(folder))
    table = made.model.layers[0].ple.ple_embedding
    tensors = load_file(folder / "model.safetensors")
    shard = next(name for name in tensors if "shard_" in name)
    kept = {name: value for name, value in tensors.items() if "shard_" not in name}
    for name, values in (("vocab_sizes", table.head_vocab_sizes), ("offsets", table.head_offsets)):
        (own,) = (each for each in kept if each.endswith(f"ngram_heads_{name}"))
        kept[own] = torch.tensor(values)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    rows, each, header = table.ngram_embedding.num_embeddings, -(-table.ngram_embedding.num_embeddings // 512), {}
    for number in range(512):
        begin, end = (min(at * each, rows) * 320 for at in (number, number + 1))
        name = re.sub(r"shard_\d+", f"shard_{number}", shard)
        header[name] = {"dtype": "BF16", "shape": [(end - begin) // 320, 160], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "table.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(512):  # a part that ends with nothing looks like an unfinished download
            file.seek(8 + len(text) + min((number + 1) * each, rows) * 320 - 4096)
            file.write(bytes(range(1, 65)) * 64)
    index = dict.fromkeys(kept, "model.safetensors") | dict.fromkeys(header, "table.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="a file with holes")
def test_a_table_larger_than_memory_takes_none(tmp_path: Path, planned: list[Plan]) -> None:
    path = with_holes(tmp_path / "model")
    with closing(load(path, 64 * 2**20, precision="bf16")) as loaded:
        (ngram,) = (table for name, table in planned[-1].tables.items() if "ngram" in name)
        assert len(ngram.parts) == 512
        assert ngram.nbytes == pytest.approx(102.4e9, rel=0.001)
        assert loaded.tables is not None
        library_tokens(loaded.model, PROMPT, 4)
        assert loaded.tables.nbytes < 2 * 320 * 16 * (len(PROMPT) + 8)
        assert loaded.info.weights_bytes < 1.1 * planned[-1].placement.ram.dense
    shape = find_shape(str(path))
    assert shape.table_weights == ngram.nbytes // 2
    assert (shape.table_rows, shape.table_columns) == (16, 160)
