"""Whole models in int8 and int4: in RAM, on disk and on a device, near the same model in bf16."""

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.common.config import SamplingParams
from engine.experts.record import allocate_records
from engine.kernels.native.build import library_path
from engine.runtime.load.checkpoint import read_headers
from engine.runtime.load.tensor_reader import TensorReader
from engine.runtime.loaded_model import LoadedModel
from tests.engine.conversions import conversion_of
from tests.engine.loaded_tiny import open_model
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

_load = partial(open_model, threads=2)

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"]
_KL = {"int8": 2e-4, "int4": 2e-2}
"""Of the next token's distribution, mean over a prompt: tiny random models are nearly indifferent, so it is small."""


def _log_probs(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = loaded.model(input_ids=tokens).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_is_near_the_model(family: str, precision: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path)
    exact = _load(path, "bf16")
    near = _load(path, precision)
    try:
        assert near.info.precision == precision
        assert near.info.parameters == exact.info.parameters
        layouts = [layer.layout for layer in near.bank.layers.values()]
        quantised = [layout for layout in layouts if layout.tiled]
        assert quantised
        assert {tuple(tiled.name for _, tiled in layout.tiled) for layout in quantised} == {(precision, "int8")}
        for tokens in (torch.arange(5, 12)[None], torch.arange(3, 90)[None] % 60 + 3):
            wanted, got = _log_probs(exact, tokens), _log_probs(near, tokens)
            assert got.isfinite().all()
            assert (wanted.exp() * (wanted - got)).sum(-1).mean() < _KL[precision]
        ids = list(range(5, 15))
        answers = [
            Alone(near).generate_from_ids(ids, SamplingParams(max_tokens=8), end_ids=frozenset()).token_ids
            for _ in range(2)
        ]
        assert len(answers[0]) == 8
        assert answers[0] == answers[1]
    finally:
        near.close()
        exact.close()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_is_converted_holds_the_same_bytes(precision: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path)
    with closing(_load(path, precision)) as loaded:
        assert loaded.bank is not None
        with torch.no_grad():
            found = read_headers(path, precision)
        source = conversion_of(found, precision, kernels=loaded.kernels)
        layers = list(loaded.bank.layers.values())
        assert source.contents.precision == precision
        assert [spec.layout for spec in source.contents.tensors] == [layer.layout for layer in layers]
        records = allocate_records(layers[0].num_experts, layers[0].layout, torch.device("cpu"))
        with TensorReader(lambda _done, _total: None, lambda: False, 0) as reader:
            source.make(0, records, reader)
        assert torch.equal(records, layers[0].records)
