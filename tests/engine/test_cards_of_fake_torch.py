"""What cards have in common, whoever made them, with a fake in the place of `torch.cuda` and `torch.xpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.devices import opening
from engine.devices.card import CardKind, open_card
from engine.devices.host_memory import HostMemory
from engine.devices.opening import CARD_KINDS, automatic, card_count, open_devices
from engine.hardware.gpu_info import CARD_NAMES
from engine.tuning.measuring import device_spec
from tests.engine.loaded_tiny import open_model
from tests.engine.on_devices import PROMPT, answer, chatting, reference
from tests.fake_cards import FakeCards
from tests.refusals import refused


def kind(cards: FakeCards) -> CardKind:
    return CardKind("cpu", cards, lambda _place: HostMemory(), lambda _index: "fake")


def test_a_card_that_is_not_there_or_does_not_respond() -> None:
    for cards, index, said in (
        (FakeCards(names=[]), 0, "no graphics card that torch can use"),
        (FakeCards(), 1, "no graphics card number 1"),
        (FakeCards(broken="fell off the bus\nat line 3"), 0, r"does not respond \(fell off the bus\)"),
    ):
        with refused(ErrorCode.DEVICE_UNAVAILABLE, match=said):
            open_card(kind(cards), index)


def test_kinds_are_called_as_everywhere_else() -> None:
    assert tuple(CARD_KINDS) == CARD_NAMES


@pytest.mark.parametrize(("nvidia", "intel", "expected"), [(2, 1, ("cuda", 2)), (0, 3, ("xpu", 3)), (0, 0, ("cpu", 1))])
def test_the_first_kind_of_card_that_is_there(
    monkeypatch: pytest.MonkeyPatch, nvidia: int, intel: int, expected: tuple[str, int]
) -> None:
    for name, count in (("cuda", nvidia), ("xpu", intel)):
        monkeypatch.setitem(CARD_KINDS, name, kind(FakeCards(names=["card"] * count)))
    assert automatic() == expected[0]
    assert card_count("auto") == expected[1]
    assert card_count("cuda:0") == 1
    assert card_count("xpu") == max(1, intel)
    spec = "cpu" if expected[0] == "cpu" else f"{expected[0]}:0"
    assert device_spec(EngineConfig("", device="auto")) == spec
    assert device_spec(EngineConfig("", device="xpu")) == "xpu:0"


def test_intels_cards_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARD_KINDS, "xpu", kind(FakeCards(names=["Arc A770", "Arc B580"])))
    devices = open_devices("xpu")
    assert len(devices) == 2
    for device in (*devices, *open_devices("xpu:1")):
        device.close()


def test_what_is_measured_is_kept_for_this_card_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", FakeCards(names=["Arc B580"], total=2**34).get_device_properties
    )
    assert opening.identity_of(0) == "Arc B580 16384 MiB driver 1.6 XPU"


@pytest.mark.parametrize("config", [{}, {"cache_slots": 5}, {"cache_slots": 5, "misses": "fetch"}])
def test_answers_on_a_card_are_those_of_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    expected = reference("qwen3_moe", tmp_path)
    monkeypatch.setitem(opening.CARD_KINDS, "xpu", kind(FakeCards()))
    options = {"device": "xpu", "precision": "fp32", "threads": 1, **config}
    model = open_model(expected.folder, **options)
    try:
        with chatting(model) as session:
            assert list(answer(session, PROMPT).token_ids) == expected.first
            assert list(answer(session, expected.second_prompt).token_ids) == expected.second
    finally:
        model.close()
        reference.cache_clear()
