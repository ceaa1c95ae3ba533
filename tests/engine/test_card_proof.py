"""A card counts only once it has computed something right, whatever its driver does."""

import json
import subprocess
from typing import Any

import pytest
import torch

from engine.devices import card_proof
from engine.devices.card_proof import CardProof, prove_cards


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_there_is_nothing_to_prove() -> None:
    assert prove_cards() == []


def test_a_driver_that_ends_the_process_or_hangs_is_not_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (subprocess.CalledProcessError(-11, "python"), subprocess.TimeoutExpired("python", 1), OSError()):

        def fails(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(subprocess, "run", fails)
        assert prove_cards() is None


class _Said:
    def __init__(self, stdout: bytes) -> None:
        self.stdout = stdout


@pytest.mark.parametrize(
    ("said", "proofs"),
    [
        (b'warning: old driver\n[["RTX", ""], ["GTX", "too old"]]\n', [CardProof("RTX"), CardProof("GTX", "too old")]),
        (b"[]\n", []),
        (b"", None),
        (b"not json\n", None),
        (b"[1]\n", None),
    ],
)
def test_what_the_process_says(monkeypatch: pytest.MonkeyPatch, said: bytes, proofs: list[CardProof] | None) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: _Said(said))
    assert prove_cards() == proofs


def test_each_card_computes_and_what_it_says_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The "cards" are the CPU; the last of them fails as cards do for which torch has no kernels.
    cpu = torch.device("cpu")

    def device(_: str, index: int) -> torch.device:
        if index == 2:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore\n")
        return cpu

    monkeypatch.setattr(torch, "device", device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    assert card_proof.main() == 0
    assert json.loads(capsys.readouterr().out) == [
        ["card 0", ""],
        ["card 1", ""],
        ["card 2", "this torch has kernels for sm_75, sm_90 only"],
    ]
