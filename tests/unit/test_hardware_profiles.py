"""Profiles of machines, cards and models that come with the program."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_shape import model_names, read_model
from engine.common.errors import EngineError, ErrorCode
from engine.hardware.machine import card_choices, find_card, machine_names, machines_dir, read_machine
from engine.hardware.profiles import emulated_cards, profile_names, read_profile, timed_profiles, with_emulated
from tests.refusals import refused


def test_the_shipped_profiles_are_sound() -> None:
    assert profile_names() == ["laptop-4gb", "pcie3-x8-8gb", "pcie4-x16-24gb", "slow-link"]
    for profile in (*map(read_profile, profile_names()), *timed_profiles()):
        # `emulated:NAMEx2` means two, so no name may end like that.
        assert not re.search(r"x\d+$", profile.name)
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", profile.name)
        assert profile.description
        assert 2**30 <= profile.vram_bytes <= 2**36
        assert 1 <= profile.link_h2d_gbps <= 64 >= profile.link_d2h_gbps >= 1  # a number outside is in another unit
        assert 0 < profile.link_latency_us < 100


@pytest.mark.parametrize("name", ["card", "../card", "/etc/passwd", "", "slow-link.json", "SLOW-LINK"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with refused(ErrorCode.INVALID_REQUEST, "laptop-4gb, pcie3-x8-8gb, pcie4-x16-24gb, slow-link"):
        read_profile(name)


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
    assert (found.gpu.name, found.gpu.count, found.gpu.memory_bytes) == (f"emulated:{name}", 2, profile.vram_bytes)
    assert found.gpu.flops == machine.cpu.flops / profile.compute_slowdown
    assert (found.link.h2d, found.link.d2h) == (profile.link_h2d_gbps * 1e9, profile.link_d2h_gbps * 1e9)
    less = with_emulated(machine, f"emulated:{name}#0", 1000).gpu
    assert less.memory_bytes == 1000


@pytest.mark.parametrize("name", model_names())
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    model = read_model(name)
    assert model.total_weights + model.left_out_weights == pytest.approx(model.parameters, rel=0.01)
    assert 0 < model.all_expert_weights < model.total_weights
    assert model.kv_bytes_per_token() > 0
    assert model.licence
    assert model.hub_id in model.source


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_is_one_that_could_be(name: str) -> None:
    machine = read_machine(name)
    assert machine.source
    assert machine.link.h2d_pageable <= machine.link.h2d
    if machine.gpu:
        assert machine.link.h2d < machine.gpu.bytes_per_s
        assert machine.cpu.flops < machine.gpu.flops
    rates = [rate for _, rate in sorted(machine.cpu.weights_bytes_per_s.items())]
    assert rates == sorted(rates)


def test_memory_can_be_what_if() -> None:
    machine = read_machine("gcp-2x-t4")
    more = machine.with_memory(vram_bytes=2 * machine.vram_bytes, ram_bytes=10**12)
    assert more.vram_bytes == 2 * machine.vram_bytes
    assert more.cpu.ram_bytes == 10**12
    assert read_machine("desktop-no-gpu-64gb").with_memory(vram_bytes=10**10).vram_bytes == 0


@pytest.mark.parametrize(
    ("typed", "name", "gib"),
    [
        ("4090", "NVIDIA GeForce RTX 4090", 24),
        ("rtx 4070 super", "NVIDIA GeForce RTX 4070 SUPER", 12),
        ("4060ti", "NVIDIA GeForce RTX 4060 Ti", 16),
        ("7900 XTX", "AMD Radeon RX 7900 XTX", 24),
        ("4060 ti 8 gb", "NVIDIA GeForce RTX 4060 Ti", 8),
        ("RTX 3080 20GB", "NVIDIA GeForce RTX 3080", 20),
        ("h200", "NVIDIA H200", 141),
        ("Voodoo 2", "", 0),
        ("  ", "", 0),
    ],
)
def test_a_card_is_found_by_a_few_letters(typed: str, name: str, gib: int) -> None:
    if not name:
        with refused(ErrorCode.INVALID_REQUEST, "No graphics card called"):
            find_card(typed)
        return
    card = find_card(typed).machine.gpu
    assert (card.name, card.memory_bytes / 2**30) == (name, gib)


def test_every_card_is_found_by_its_own_name() -> None:
    for one in card_choices():
        assert find_card(one.name) == one
        assert one.machine.vram_bytes >= 2**30


def changed(folder: Path, name: str, change: Any) -> str:
    content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["gpu"].__setitem__("memory_bytes", -1),
        lambda c: c["gpu"].__setitem__("memory_bytes", 1.5e10 + 0.5),
        lambda c: c["gpu"].pop("tflops"),
        lambda c: c["link"].__setitem__("h2d_gbps", float("nan")),
        lambda c: c["cpu"].__setitem__("cores", True),
        lambda c: c["cpu"].__setitem__("ram_gbps", "fast"),
        lambda c: c["cpu"].__setitem__("weights_gbps_by_threads", {"many": 3}),
        lambda c: c.pop("link"),
        lambda c: c.__setitem__("description", " "),
        lambda c: c.__setitem__("disk_gbps", 0),
    ],
)
def test_nonsense_about_a_machine_is_refused_in_one_sentence(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "odd.json"
    path.write_text(changed(machines_dir(), "gcp-t4", change), encoding="utf-8")
    with refused(ErrorCode.INVALID_REQUEST, "odd.json"):
        read_machine(str(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.__setitem__("experts_per_token", 9),
        lambda c: c.__setitem__("dense_layers", 32),
        lambda c: c.__setitem__("hidden", 0),
        lambda c: c["attention"].pop("heads"),
        lambda c: c.pop("hub_id"),
    ],
)
def test_nonsense_about_a_model_is_refused_in_one_sentence(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "odd.json"
    path.write_text(changed(machines_dir().parent / "models", "mixtral-8x7b", change), encoding="utf-8")
    with refused(ErrorCode.INVALID_REQUEST, "odd.json"):
        read_model(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\x00"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EngineError, match="The profile"):
        read_machine(str(path))


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(EngineError, match="gcp-t4"):
        read_machine("toaster")
    with pytest.raises(EngineError, match="mixtral-8x7b"):
        read_model("toaster")
