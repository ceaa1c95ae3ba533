"""Profiles of cards: those that come with the program are sound, and an unsound one is told where it is so."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.hardware.machine import machine_names, read_machine
from engine.hardware.profiles import emulated_cards, profile_names, read_profile, with_emulated
from tests.refusals import refused

GOOD: dict[str, Any] = {
    "name": "card",
    "description": "a card",
    "vram_bytes": 2**32,
    "link_h2d_gbps": 12,
    "link_d2h_gbps": 11.5,
    "link_latency_us": 10,
}


def write(folder: Path, content: object, name: str = "card") -> Path:
    path = folder / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        read_profile("card", folder)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    return caught.value.message


def test_the_shipped_profiles_are_sound() -> None:
    assert {"slow-link", "pcie3-x8-8gb", "pcie4-x16-24gb", "laptop-4gb"} <= set(profile_names())
    for name in profile_names():
        assert read_profile(name).name == name
        # `emulated:NAMEx2` means two, so no name may end like that.
        assert not re.search(r"x\d+$", name)
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)


def test_slow_link_is_what_it_says() -> None:
    profile = read_profile("slow-link")
    assert (profile.vram_bytes, profile.link_h2d_gbps, profile.link_d2h_gbps) == (4_000_000_000, 2.0, 2.0)


def test_fields_have_their_types_and_defaults(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    profile = read_profile("card", tmp_path)
    assert isinstance(profile.link_h2d_gbps, float)
    assert profile.compute_slowdown == 1.0
    write(tmp_path, {**GOOD, "compute_slowdown": 2})
    assert read_profile("card", tmp_path).compute_slowdown == 2.0


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "b")
    write(tmp_path, GOOD, "a")
    message = refusal(tmp_path)
    assert "'card'" in message
    assert "a, b" in message
    assert str(tmp_path) in message


def test_no_profiles_at_all(tmp_path: Path) -> None:
    assert "(none)" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../card", "/etc/passwd", "", "card.json", "CARD"])
def test_names_are_no_paths(tmp_path: Path, name: str) -> None:
    write(tmp_path, GOOD)
    (tmp_path / "inner").mkdir()
    with refused(ErrorCode.INVALID_REQUEST):
        read_profile(name, tmp_path / "inner")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vram_bytes", 0),
        ("vram_bytes", -5),
        ("vram_bytes", 4e9),
        ("vram_bytes", "4GB"),
        ("vram_bytes", True),
        ("vram_bytes", None),
        ("vram_bytes", 2**63),
        ("link_h2d_gbps", 0),
        ("link_h2d_gbps", float("nan")),
        ("link_d2h_gbps", float("inf")),
        ("link_d2h_gbps", 16e9),
        ("link_latency_us", -1),
        ("link_latency_us", [10]),
        ("compute_slowdown", 0.5),
        ("name", "other"),
        ("name", ""),
        ("name", 3),
        ("description", "  "),
        ("vram", 2**32),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_file(tmp_path: Path, field: str, value: object) -> None:
    path = write(tmp_path, {**GOOD, field: value})
    message = refusal(tmp_path)
    assert str(path) in message
    assert f"'{field}'" in message


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_field_that_lacks_is_named_with_its_file(tmp_path: Path, field: str) -> None:
    path = write(tmp_path, {key: value for key, value in GOOD.items() if key != field})
    message = refusal(tmp_path)
    assert str(path) in message
    assert f"'{field}'" in message


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 100_000, '"text"', "\x00", '{"vram_bytes": 1' + "0" * 5000 + "}"]
)
def test_what_is_no_profile_at_all(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert str(path) in refusal(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_bytes(b"\xff\xfe{}")
    assert "cannot be read" in refusal(tmp_path)


@given(
    content=st.dictionaries(
        st.sampled_from([*GOOD, "compute_slowdown", "other"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50) | st.lists(st.integers()),
    )
)
def test_whatever_a_file_says_it_is_a_profile_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("profiles")
    write(folder, content)
    with contextlib.suppress(EngineError):
        assert read_profile("card", folder).vram_bytes > 0


@pytest.mark.parametrize(
    ("device", "cards"),
    [
        ("emulated:slow-link", ("slow-link", 1)),
        ("emulated:slow-link#1", ("slow-link", 1)),
        ("emulated:slow-linkx3", ("slow-link", 3)),
        ("emulated:pcie3-x8-8gb", ("pcie3-x8-8gb", 1)),
        ("emulated:pcie3-x8-8gbx2#1", ("pcie3-x8-8gb", 2)),
        ("emulated:nothingx2", ("nothingx2", 1)),
    ],
)
def test_what_an_emulated_device_stands_for(device: str, cards: tuple[str, int]) -> None:
    assert emulated_cards(device) == cards


def test_a_machine_with_emulated_cards_has_their_memory_and_link_and_its_own_speed() -> None:
    machine = read_machine(machine_names()[0])
    name = "pcie3-x8-8gb"
    profile, found = read_profile(name), with_emulated(machine, f"emulated:{name}x2")
    assert found.cpu == machine.cpu
    assert found.gpu is not None
    assert found.link is not None
    assert (found.gpu.name, found.gpu.count, found.gpu.memory_bytes) == (f"emulated:{name}", 2, profile.vram_bytes)
    assert found.gpu.flops == machine.cpu.flops / profile.compute_slowdown
    assert (found.link.h2d, found.link.d2h) == (profile.link_h2d_gbps * 1e9, profile.link_d2h_gbps * 1e9)
    less = with_emulated(machine, f"emulated:{name}#0", 1000).gpu
    assert less is not None
    assert less.memory_bytes == 1000
