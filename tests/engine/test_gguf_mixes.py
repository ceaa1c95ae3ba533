"""Files that llama.cpp quantised: our numbers are ggml's, and we say what llama.cpp says (see `gguf_mixes`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.gguf.file import read_gguf
from engine.formats import STORED
from engine.formats.ggml import GGML
from tests.engine.gguf_mixes import MIXES, blocks_of, checked_sum, named
from tests.engine.test_family_parity import loaded
from tests.engine.test_gguf_architectures import unpacked

BY_BLOCKS_OF_256 = (
    *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL"),
    *(mix for mix in MIXES if mix.startswith(("IQ1", "IQ2", "IQ3", "TQ"))),
)
"""Mixes whose activations llama.cpp rounds to 8 bits with one scale for 256 of them; in others for 32, all or most."""
NEAR_TIE = 0.1
"""Of logits that reach 4: those of llama.cpp's rounded activations and of exact ones choose differently below 0.07."""


def tolerance(mix: str) -> float:
    """How far logits may be from llama.cpp's, in its largest one; seen were 0.045 and 0.028."""
    return 0.06 if mix in BY_BLOCKS_OF_256 else 0.04


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("mix", MIXES)
def test_every_tensor_is_what_ggml_makes_of_it(mix: str, tmp_path: Path) -> None:
    file, wanted = unpacked(named(mix), tmp_path)
    stored = read_gguf(file).tensors
    assert {name: entry.dtype for name, entry in stored.items()} == wanted["types"]
    assert mix.split("_")[0] in "".join(wanted["types"].values())
    for name, entry in stored.items():
        values = GGML[entry.dtype].dequantise(blocks_of(entry))
        assert checked_sum(values) == pytest.approx(wanted["sums"][name], rel=1e-9, abs=1e-9)


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize(
    ("mix", "precision"),
    [
        *((mix, "auto") for mix in MIXES),
        *(pytest.param(mix, "fp32", marks=pytest.mark.exhaustive) for mix in MIXES),
    ],
)
def test_logits_and_tokens_are_llama_cpps(mix: str, precision: str, tmp_path: Path) -> None:
    file, wanted = unpacked(named(mix), tmp_path)
    prompt, answer = wanted["prompt"], wanted["tokens"]
    with loaded(file, precision) as ours, torch.no_grad():
        assert ours.info.precision == (STORED if precision == "auto" else precision)
        found = ours.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
    for place, row in wanted["rows"].items():
        theirs = torch.tensor(row)
        assert (found[int(place)] - theirs).abs().max() < tolerance(mix) * theirs.abs().max()
    said = found[len(prompt) - 1 : -1].argmax(-1).tolist()
    clear = [at for at, margin in enumerate(wanted["margins"]) if margin > NEAR_TIE]
    assert len(clear) >= len(answer) // 2
    # One token of Q4_1 has two experts that score alike: which of them it takes is a matter of the last bit.  One of
    # IQ2_XS and one of IQ3_S are chosen otherwise where activations are not rounded.
    odd = mix == "Q4_1" or (precision == "fp32" and mix in ("IQ2_XS", "IQ3_S"))
    assert sum(said[at] != answer[at] for at in clear) <= odd
