"""Sizes, counts and devices as typed on a command line."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import EngineConfig
from engine.verbs.options import add_engine_options, device_name, engine_config, parse_size, positive_int


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5gb", 1_500_000_000),
        (".5GB", 500_000_000),
        ("4096B", 4096),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "8", "8 bananas", "GB", "-8GB", "0GB", "nanGB", "8G B", "8,5GB", "1e9B", "٨GB", "9999999TB", "8GBit"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="8GB"):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_a_clear_refusal(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except argparse.ArgumentTypeError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        positive_int(text)


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:1", "emulated:rtx-3060"])
def test_devices(text: str) -> None:
    assert device_name(text) == text


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "emulated:", "CPU", "cpu\n"])
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="auto, cpu, cuda"):
        device_name(text)


def test_options_become_the_settings_of_a_run() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    line = "--device cpu --vram 1GB --ram 2GiB --threads 3 --precision bf16"
    assert engine_config(parser.parse_args(line.split()), "m") == EngineConfig(
        "m", "cpu", "bf16", vram_bytes=10**9, ram_bytes=2 * 2**30, threads=3
    )
    assert engine_config(parser.parse_args([]), "m") == EngineConfig("m")
