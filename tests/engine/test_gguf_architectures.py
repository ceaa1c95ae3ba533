"""Each architecture's tiny GGUF file, read by us, must give what llama.cpp computes with it (see `gguf_files`)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.gguf_files import CASES, DATA
from tests.engine.test_family_parity import loaded

TOLERANCE = 1e-4
TABLED = {"gemma3": 1e-3, "gemma4": 6e-2}
"""llama.cpp looks GELU up in a table of 16-bit numbers."""


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    file, wanted = unpacked(name, tmp_path)
    prompt, answer = wanted["prompt"], wanted["tokens"]
    with loaded(file, "fp32") as ours, torch.no_grad():
        found = ours.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
    tolerance = TABLED.get(name, TOLERANCE)
    for place, row in wanted["rows"].items():
        theirs = torch.tensor(row)
        assert (found[int(place)] - theirs).abs().max() < tolerance * theirs.abs().max()
    said = found[len(prompt) - 1 : -1].argmax(-1).tolist()
    near = 4 * tolerance * float(found.abs().max())
    clear = [at for at, margin in enumerate(wanted["margins"]) if margin > near]
    assert len(clear) > len(answer) // 2
    assert [said[at] for at in clear] == [answer[at] for at in clear]


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file, and what is known of it."""
    file = folder / f"{name}.gguf"
    file.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return file, json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
