"""Profiles of cards that come with the program, and what an emulated device stands for."""

import re

import pytest

from engine.common.errors import ErrorCode
from engine.hardware.machine import machine_names, read_machine
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
    assert found.gpu is not None
    assert found.link is not None
    assert (found.gpu.name, found.gpu.count, found.gpu.memory_bytes) == (f"emulated:{name}", 2, profile.vram_bytes)
    assert found.gpu.flops == machine.cpu.flops / profile.compute_slowdown
    assert (found.link.h2d, found.link.d2h) == (profile.link_h2d_gbps * 1e9, profile.link_d2h_gbps * 1e9)
    less = with_emulated(machine, f"emulated:{name}#0", 1000).gpu
    assert less is not None
    assert less.memory_bytes == 1000
