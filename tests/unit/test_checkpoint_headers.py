from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.headers import TensorEntry, read_header
from engine.common.errors import EngineError, ErrorCode
from tests.unit.checkpoint_files import header_of, write_safetensors

TENSORS = {"a": ("BF16", [2, 3]), "b": ("F32", [4]), "empty": ("F32", [0]), "scalar": ("F32", [])}


def damage(file: Path) -> str:
    with pytest.raises(EngineError) as caught:
        read_header(file)
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert file.name in caught.value.message
    return caught.value.message


def entries_or_damage(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file)
    except EngineError:
        damage(file)
        return {}


def test_reads_names_types_shapes_and_places(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, **header_of(TENSORS)})
    entries = read_header(file)
    assert list(entries) == ["a", "b", "empty", "scalar"]
    assert (entries["a"].dtype, entries["a"].shape, entries["a"].nbytes, entries["a"].numel) == ("BF16", (2, 3), 12, 6)
    assert entries["b"].offset == entries["a"].offset + 12
    assert entries["scalar"].offset + 4 == file.stat().st_size


def test_missing_file(tmp_path: Path) -> None:
    assert "missing" in damage(tmp_path / "x.safetensors")


@pytest.mark.parametrize("size", [0, 5])
def test_file_without_even_a_length(tmp_path: Path, size: int) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(size))
    damage(file)


def test_cut_short_in_data_and_in_header(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", header_of(TENSORS))
    whole = file.read_bytes()
    for length in (len(whole) - 1, 30):
        file.write_bytes(whole[:length])
        assert "cut short" in damage(file)


def test_surplus_bytes(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", header_of(TENSORS), data_bytes=100)
    assert f"{file} is 68 bytes" in damage(file)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "NOPE"},
        {"shape": [2, -3]},
        {"shape": [2, 4]},
        {"shape": "23"},
        {"shape": [2, 3.0]},
        {"data_offsets": [0]},
        {"data_offsets": [4, 16]},
        {"data_offsets": [12, 0]},
        {"data_offsets": [True, 12]},
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, wrong: dict[str, object]) -> None:
    header = header_of(TENSORS)
    header["a"] |= wrong
    damage(write_safetensors(tmp_path / "x.safetensors", header, data_bytes=28))


def test_a_name_twice(tmp_path: Path) -> None:
    raw = b'{"a": 1, "a": 2}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    damage(file)


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff\xfe", b"[" * 60_000])
def test_headers_that_are_no_json_object(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    damage(file)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_header_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """Whatever bit flips, reading ends in our error or in tensors that lie within the file."""
    file = write_safetensors(tmp_path_factory.mktemp("flip") / "x.safetensors", header_of(TENSORS))
    raw = bytearray(file.read_bytes())
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    raw[place % header_bytes] ^= 1 << bit
    file.write_bytes(raw)
    entries = entries_or_damage(file)
    assert all(entry.offset + entry.nbytes <= len(raw) for entry in entries.values())


@given(data=st.binary(max_size=200))
def test_random_bytes_never_cause_anything_but_our_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("noise") / "x.safetensors"
    file.write_bytes(data)
    entries_or_damage(file)
