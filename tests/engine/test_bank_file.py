"""The bank file's format: what is written is read, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.errors import ErrorCode
from engine.experts import bank_header
from engine.experts.bank_file import BankFile, DamagedRecordError
from engine.experts.bank_header import PREAMBLE, BankHeader, UnusableBankError, digest, parse_header, parse_preamble
from engine.experts.bank_writer import BankWriter
from engine.experts.checksums import CHECKSUMS
from engine.experts.record import RECORD_ALIGNMENT, RecordLayout
from tests.engine.made_up_bank import LARGE, SMALL, flip, header_of, write_bank

HEADER = header_of([(6, SMALL), (4, LARGE), (6, SMALL)])


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    write_bank(tmp_path / "a.bank", HEADER)
    return tmp_path / "a.bank"


def refusal(path: Path, wanted: BankHeader | None = HEADER) -> str:
    with pytest.raises(UnusableBankError) as caught:
        BankFile(path, wanted).close()
    assert str(path) in caught.value.message
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
    return caught.value.reason


@pytest.mark.parametrize("checksum", sorted(CHECKSUMS))
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(direct: bool, checksum: str, tmp_path: Path) -> None:
    header = header_of([(6, SMALL), (4, LARGE)], checksum)
    records = write_bank(tmp_path / "a.bank", header, direct=direct)
    with BankFile(tmp_path / "a.bank", direct=direct) as bank:
        assert bank.header == header
        for layer, made in enumerate(records):
            for expert in range(len(made)):
                there = torch.empty_like(made[expert])
                bank.read(layer, expert, there)
                assert torch.equal(there, made[expert])


def test_records_and_table_lie_at_pages_one_after_the_other() -> None:
    assert HEADER.table_offset % RECORD_ALIGNMENT == 0
    assert HEADER.table_offset + 8 * (7 + 5 + 7) <= HEADER.layer_offsets[0]
    assert all(offset % RECORD_ALIGNMENT == 0 for offset in HEADER.layer_offsets)
    assert HEADER.record_offset(0, 5) + SMALL.nbytes == HEADER.record_offset(1, 0)
    assert HEADER.record_offset(2, 5) + SMALL.nbytes == HEADER.nbytes
    assert HEADER.records_nbytes == 12 * SMALL.nbytes + 4 * LARGE.nbytes


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BankFile(tmp_path / "none.bank")


@pytest.mark.parametrize("left", [0, 10, PREAMBLE.size, 200, 5000, HEADER.nbytes - 1])
def test_cut_short(left: int, bank: Path) -> None:
    bank.write_bytes(bank.read_bytes()[:left])
    assert "cut short" in refusal(bank) or f"{left} bytes instead of" in refusal(bank)


def test_longer_than_it_says(bank: Path) -> None:
    bank.write_bytes(bank.read_bytes() + b"x")
    assert "instead of" in refusal(bank)


def test_another_kind_of_file(bank: Path) -> None:
    flip(bank, 0)
    assert "not a prepared model" in refusal(bank)


def test_another_version_of_the_format(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_header, "FORMAT_VERSION", 2)
    assert "version 1" in refusal(bank)


@given(at=st.integers(0, HEADER.layer_offsets[0] - 1), bit=st.integers(0, 7))
def test_any_bit_before_the_records(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Flipped, it is noticed when the file is opened, unless it is padding that nobody reads."""
    path = tmp_path_factory.mktemp("flipped") / "a.bank"
    write_bank(path, HEADER)
    flip(path, at, bit)
    used = PREAMBLE.size + PREAMBLE.unpack_from(HEADER.encoded)[2]
    padding = (
        PREAMBLE.size - 8 <= at < PREAMBLE.size
        or used <= at < HEADER.table_offset
        or at >= HEADER.table_rows[-1] + 8 * 7
    )
    if padding:
        BankFile(path, HEADER).close()
    else:
        refusal(path)


@given(
    at=st.integers(0, HEADER.records_nbytes - 1),
    bit=st.integers(0, 7),
    checksum=st.sampled_from(sorted(CHECKSUMS)),
)
def test_any_bit_of_a_record(at: int, bit: int, checksum: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    header = dataclasses.replace(HEADER, checksum=checksum)
    path = tmp_path_factory.mktemp("flipped") / "a.bank"
    write_bank(path, header)
    offset = header.layer_offsets[0] + at
    flip(path, offset, bit)
    found = []
    with BankFile(path, header) as bank:
        for layer, spec in enumerate(header.layers):
            for expert in range(spec.num_experts):
                try:
                    bank.read(layer, expert, torch.empty(spec.layout.nbytes, dtype=torch.uint8))
                except DamagedRecordError as error:
                    found.append((error.layer, error.expert, error.message))
    ((layer, expert, message),) = found
    assert f"Expert {expert} of layers.{layer}.experts" in message
    begin = header.record_offset(layer, expert)
    assert begin <= offset < begin + header.layers[layer].layout.nbytes


def test_records_in_each_others_place(bank: Path) -> None:
    content = bytearray(bank.read_bytes())
    first, second = (slice(HEADER.record_offset(0, e), HEADER.record_offset(0, e) + SMALL.nbytes) for e in (1, 2))
    content[first], content[second] = content[second], content[first]
    bank.write_bytes(content)
    with BankFile(bank) as opened, pytest.raises(DamagedRecordError):
        opened.read(0, 1, torch.empty(SMALL.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "int8", "group_size": 32}, "bf16 rather than int8"),
        ({"layout_version": 99}, "another version"),
        ({"source": {"files": []}}, "has changed"),
        ({"layers": HEADER.layers[:2]}, "layers are not those"),
    ],
)
def test_not_what_is_wanted(change: dict[str, Any], reason: str, bank: Path) -> None:
    assert reason in refusal(bank, dataclasses.replace(HEADER, **change))


def test_which_checksum_it_has_does_not_matter_but_it_must_be_known(tmp_path: Path) -> None:
    write_bank(tmp_path / "a.bank", dataclasses.replace(HEADER, checksum="blake2b_64"))
    BankFile(tmp_path / "a.bank", dataclasses.replace(HEADER, checksum="xxh3_64")).close()
    foreign = dataclasses.replace(HEADER, checksum="of-tomorrow")
    (tmp_path / "b.bank").write_bytes(foreign.encoded.ljust(foreign.nbytes, b"\0"))
    assert "of-tomorrow" in refusal(tmp_path / "b.bank")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("layers"),
        lambda content: content["layers"][0].__setitem__(2, 9),
        lambda content: content["layouts"][0].__setitem__("nbytes", 100),
        lambda content: content["layouts"][0]["parts"][0].__setitem__(4, 10**9),
        lambda content: content["layouts"][0]["parts"][0].__setitem__(4, -64),
        lambda content: content["layouts"][0]["parts"][0].__setitem__(2, "object"),
        lambda content: content["layouts"][0]["parts"][0].__setitem__(1, [-1, 3]),
    ],
)
def test_a_header_that_makes_no_sense(change: Any) -> None:
    """Its digest is right, so somebody made it on purpose: no view may leave the record all the same."""
    length, _ = parse_preamble(Path("a"), HEADER.encoded)
    content = json.loads(HEADER.encoded[PREAMBLE.size : PREAMBLE.size + length])
    change(content)
    body = json.dumps(content).encode()
    with pytest.raises(UnusableBankError, match="header is damaged"):
        parse_header(Path("a"), body, digest(body))


def test_an_unfinished_bank_is_not_put_in_place(tmp_path: Path) -> None:
    with BankWriter(tmp_path / "a.bank", HEADER) as writer, pytest.raises(ValueError, match="0 of 3"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_layouts_differ_by_any_part() -> None:
    turned = RecordLayout(tuple(dataclasses.replace(part, transposed=True) for part in SMALL.parts), SMALL.nbytes)
    other = dataclasses.replace(HEADER.layers[0], layout=turned)
    changed = dataclasses.replace(HEADER, layers=(other, *HEADER.layers[1:]))
    assert HEADER.difference(changed) is not None
