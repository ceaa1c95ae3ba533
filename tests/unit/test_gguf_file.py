"""Reading the headers of GGUF files: what is right, and what is refused."""

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter

from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.file import GgufFile, Strings, read_gguf
from engine.common.errors import EngineError, ErrorCode
from engine.formats.ggml import GGML
from tests.refusals import refused
from tests.tiny_gguf import write_gguf

DAMAGED, UNSUPPORTED = ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.MODEL_UNSUPPORTED
TENSORS = {
    "token_embd.weight": np.arange(64 * 32).reshape(64, 32),
    "blk.0.attn_q.weight": np.linspace(-1, 1, 32 * 32).reshape(32, 32),
    "blk.0.ffn_up_exps.weight": np.linspace(-2, 2, 4 * 16 * 32).reshape(4, 16, 32),
}


def _keys(writer: GGUFWriter) -> None:
    writer.add_name("Tiny")
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "ü", ""])
    writer.add_token_types([1, 1, 3, 6])
    writer.add_bool("llama.flag", True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TENSORS, keys=_keys, types={"blk.0.attn_q.weight": "Q8_0"})


def test_metadata_and_tensors(file: Path) -> None:
    found = read_gguf(file)
    header = file.read_bytes()[: min(entry.offset for entry in found.tensors.values())]
    assert found.digest in {hashlib.sha256(header[: len(header) - padding]).hexdigest() for padding in range(32)}
    assert (found.architecture, found.name, found.text("general.name")) == ("llama", "tiny", "Tiny")
    assert found.value("block_count") == 1
    assert found.value("attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert found.value("flag") is True
    tokens = found.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Strings)
    assert list(tokens) == ["a", "b", "ü", ""]
    np.testing.assert_array_equal(found.metadata["tokenizer.ggml.token_type"], [1, 1, 3, 6])
    assert {name: (entry.dtype, entry.shape) for name, entry in found.tensors.items()} == {
        "token_embd.weight": ("F32", (64, 32)),
        "blk.0.attn_q.weight": ("Q8_0", (32, 32)),
        "blk.0.ffn_up_exps.weight": ("F32", (4, 16, 32)),
    }
    for name, entry in found.tensors.items():
        raw = np.fromfile(file, np.uint8, entry.nbytes, offset=entry.offset)
        values = GGML[entry.dtype].dequantise(raw.reshape(*entry.shape[:-1], -1))
        np.testing.assert_allclose(values, TENSORS[name], atol=0.01)


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    assert "tiny" in read_gguf(file).path.name
    write_gguf(file, {"other.weight": np.zeros((2, 2))})
    assert list(read_gguf(file).tensors) == ["other.weight"]


def test_parts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "split.gguf", TENSORS, keys=_keys, split_max_tensors=1)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"split-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    found = read_gguf(gguf_at(parts[1]) or parts[1])
    assert found.parts == tuple(parts)
    assert found.tensors.keys() == TENSORS.keys()
    assert found.name == "split"
    assert gguf_at(tmp_path) == parts[0]
    parts[1].rename(tmp_path / "aside")
    with refused(DAMAGED, parts[1].name):
        read_gguf(parts[0])
    (tmp_path / "aside").rename(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    with refused(DAMAGED, parts[2].name):
        read_gguf(parts[0])
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with refused(DAMAGED, "00003"):
        read_gguf(renamed)


def test_the_file_that_a_folder_means(tmp_path: Path) -> None:
    assert gguf_at(tmp_path) is None
    assert gguf_at(tmp_path / "no folder") is None
    (tmp_path / "config.json").write_text("{}")
    only = write_gguf(tmp_path / "a.gguf", TENSORS)
    assert gguf_at(tmp_path) == only
    write_gguf(tmp_path / "mmproj-a.gguf", TENSORS)
    assert gguf_at(tmp_path) == only
    write_gguf(tmp_path / "b.gguf", TENSORS)
    with refused(UNSUPPORTED, "a.gguf", "b.gguf"):
        gguf_at(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_at(tmp_path) is None


@pytest.mark.parametrize(
    ("architecture", "kind"), [("llama", "adapter"), ("clip", "mmproj"), ("clip", "model"), ("llama", "imatrix")]
)
def test_files_without_a_language_model(tmp_path: Path, architecture: str, kind: str) -> None:
    file = write_gguf(
        tmp_path / "other.gguf", TENSORS, architecture=architecture, keys=lambda writer: writer.add_type(kind)
    )
    with refused(UNSUPPORTED, "other.gguf"):
        read_gguf(file)


def test_other_versions(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    tensors = read_gguf(file).tensors
    file.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    assert read_gguf(file).tensors == tensors
    for version in (0, 1, 4, 2**31):
        file.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        with refused(UNSUPPORTED, str(version)):
            read_gguf(file)
    big = write_gguf(tmp_path / "big.gguf", TENSORS, keys=_keys, endianess=GGUFEndian.BIG)
    with refused(UNSUPPORTED, "big-endian"):
        read_gguf(big)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((15, "Q8_K"), (43, "type 43"), (33, "Q4_0_8_8 (which llama.cpp no longer has)"), (36, "IQ4_NL_4_4")),
        *((144, "IQ4_KS (ik_llama.cpp's own)"), (151, "type 151 (ik_llama.cpp's own)"), (230, "ik_llama.cpp")),
        (77, "type 77"),
    ],
)
def test_a_type_that_is_not_read_is_named(file: Path, number: int, words: str) -> None:
    raw = bytearray(file.read_bytes())
    at = raw.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    assert raw[at] == 8
    raw[at] = number
    file.write_bytes(raw)
    with refused(UNSUPPORTED, "blk.0.attn_q.weight", words):
        read_gguf(file)


def test_cut_short_anywhere(file: Path) -> None:
    content = file.read_bytes()
    end = max(entry.offset + entry.nbytes for entry in read_gguf(file).tensors.values())
    for size in [0, 1, 4, 7, 8, 20, *range(24, len(content), 97), end - 1]:
        file.write_bytes(content[:size])
        with refused(DAMAGED, str(file)):
            read_gguf(file)


def _header(*tensors: tuple[str, tuple[int, ...], int, int], metadata: bytes = b"", entries: int = 0) -> bytes:
    """A header with these tensors: name, shape, type and offset."""
    name = b"general.architecture"
    content = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, 5) + b"llama" + metadata
    for tensor, shape, kind, offset in tensors:
        content += struct.pack("<Q", len(tensor)) + tensor.encode()
        content += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + entries) + content


def _key(name: str, kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + content


LIES = {
    "overlap": _header(("a", (32,), 0, 0), ("b", (32,), 0, 64)),
    "unaligned": _header(("a", (32,), 0, 4)),
    "beyond": _header(("a", (32,), 0, 2**40)),
    "twice": _header(("a", (32,), 0, 0), ("a", (32,), 0, 128)),
    "overflow": _header(("a", (2**33, 2**33), 0, 0)),
    "empty": _header(("a", (32, 0), 0, 0)),
    "row": _header(("a", (33,), 12, 0)),
    "dimensions": _header(("a", (1, 1, 1, 1, 1), 0, 0)),
    "no dimensions": _header(("a", (), 0, 0)),
    "alignment": _header(metadata=_key("general.alignment", 4, struct.pack("<I", 0)), entries=1),
    "key twice": _header(metadata=2 * _key("k", 7, b"\1"), entries=2),
    "long text": _header(metadata=_key("k", 8, struct.pack("<Q", 2**60)), entries=1),
    "long name": _header(metadata=struct.pack("<Q", 2**63) + b"x", entries=1),
    "long list": _header(metadata=_key("k", 9, struct.pack("<IQ", 4, 2**62)), entries=1),
    "many texts": _header(metadata=_key("k", 9, struct.pack("<IQ", 8, 2**40)), entries=1),
    "lists of lists": _header(metadata=_key("k", 9, struct.pack("<IQ", 9, 2)), entries=1),
    "value": _header(metadata=_key("k", 77, b""), entries=1),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**50, 0),
    "entries": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**50),
    "no architecture": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    "split": _header(metadata=_key("split.count", 4, struct.pack("<I", 10**6)), entries=1),
    "other": b"PK\3\4" + bytes(100),
    "unwritten": bytes(1000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    file = tmp_path / "lie.gguf"
    file.write_bytes(LIES[lie] + bytes(4096))
    with refused(DAMAGED, "lie.gguf"):
        read_gguf(file)


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with refused(ErrorCode.MODEL_NOT_FOUND):
        read_gguf(tmp_path / "none.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with refused(DAMAGED, "pipe.gguf"):
            read_gguf(tmp_path / "pipe.gguf")


def _read_or_refused(file: Path) -> GgufFile | None:
    try:
        return read_gguf(file)
    except EngineError as error:
        if error.code not in (DAMAGED, UNSUPPORTED) or "\n" in error.message:
            raise
        return None


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_refused_or_harmless(tmp_path: Path, file: Path, seed: int) -> None:
    """Whatever bytes of the header change, it is read or refused, in little memory."""
    content = file.read_bytes()
    header = min(entry.offset for entry in read_gguf(file).tensors.values())
    random = np.random.default_rng(seed)
    damaged = tmp_path / "damaged.gguf"
    tracemalloc.start()
    try:
        for _ in range(150):
            changed = bytearray(content)
            for at in random.integers(0, header, random.integers(1, 9)):
                changed[at] = random.choice([0, 1, 8, 9, 127, 255, int(random.integers(0, 256))])
            damaged.write_bytes(changed)
            found = _read_or_refused(damaged)
            if found is not None:
                size = len(changed)
                assert all(entry.offset + entry.nbytes <= size for entry in found.tensors.values())
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
