"""The families that need an adapter: what transformers says of the same files, without experts in the module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import EngineError, ErrorCode
from engine.experts.dispatch import BANK_LAYER
from engine.runtime.loaded_model import LoadedModel
from tests.engine.test_family_parity import (
    PROMPT,
    assert_buffers_equal,
    assert_is_out_of_the_module,
    first_difference,
    greedy,
    loaded,
    logits,
)
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

ROUTERS = {
    "dbrx": "router.layer",
    "llama4": "feed_forward.router",
    "llama4_text": "feed_forward.router",
    "jetmoe": "router.layer",
    "longcat_flash": "mlp.router",
    "step3p7": "mlp.gate",
}
"""How the names of the modules end whose (first) result says which experts a token goes to."""

PUBLISHED = {
    "dbrx": "transformer.blocks.1.ffn.experts.mlp.w1",
    "llama4": "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
    "llama4_text": "model.layers.1.feed_forward.experts.gate_up_proj",
    "jetmoe": "model.layers.1.self_attention.experts.input_linear.weight",
    "longcat_flash": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "step3p7": "model.layers.1.moe.gate_proj.weight",
}
"""A name that the checkpoints of the family have on the hub."""

EXPERTS = {
    "dbrx": (8, 3),
    "llama4": (8, 2),
    "llama4_text": (8, 1),
    "jetmoe": (8, 2),
    "longcat_flash": (8, 4),
    "step3p7": (8, 2),
}
"""How many there are, and how many are chosen."""


@pytest.mark.parametrize("family", ROUTERS)
def test_logits_and_greedy_tokens_equal_the_librarys(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    assert PUBLISHED[family] in load_file(tmp_path / "model.safetensors")
    compare_with_library(family, tmp_path)


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash"])
def test_sharded(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path, save={"max_shard_size": "40KB"})
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare_with_library(family, tmp_path)


@pytest.mark.parametrize("family", ROUTERS)
def test_what_is_known_of_the_model(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    with loaded(tmp_path, "fp32") as ours:
        info = ours.info
        assert (info.experts, info.experts_per_token) == EXPERTS[family]
        assert info.layers > 0
        assert info.parameters == parameters_in_use(family, tmp_path)


@pytest.mark.parametrize("family", ROUTERS)
def test_without_its_experts_a_model_says_so(family: str, tmp_path: Path) -> None:
    """No way of computing experts but ours is left, so nothing is ever computed from weights that are not there."""
    tiny_checkpoint(family, tmp_path)
    with loaded(tmp_path, "fp32") as ours, torch.no_grad():
        assert ours.bank is not None
        delattr(ours.model.get_submodule(next(iter(ours.bank.layers))), BANK_LAYER)
        with pytest.raises(EngineError) as raised:
            logits(ours.model)
        assert raised.value.code == ErrorCode.INTERNAL


@pytest.mark.parametrize("family", ROUTERS)
def test_every_experts_module_takes_part(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    with loaded(tmp_path, "fp32") as ours, torch.no_grad():
        assert ours.bank is not None
        before = logits(ours.model)
        for layer in ours.bank.layers.values():
            kept = layer.records.clone()
            layer.records.zero_()
            assert (logits(ours.model) - before).abs().max() > 1e-4, layer.name
            layer.records.copy_(kept)


def compare_with_library(family: str, folder: Path) -> None:
    """Loads the checkpoint in both ways and compares: fp32 logits and tokens, bf16 logits."""
    library_class = model_class(tiny_config(family))
    with loaded(folder, "fp32") as ours, torch.no_grad():
        reference = library_class.from_pretrained(folder, dtype=torch.float32).eval()
        assert_no_experts_left(ours)
        torch.testing.assert_close(logits(ours.model), logits(reference), rtol=0, atol=1e-5)
        assert greedy(ours.model).tolist() == greedy(reference).tolist()
    with loaded(folder, "bf16") as ours, torch.no_grad():
        reference = library_class.from_pretrained(folder, dtype=torch.bfloat16).eval()
        if type(ours.model) is library_class:  # else ours is its text part, with other names
            assert_buffers_equal(ours.model, reference)
        with routed(ours.model, family) as our_routes, routed(reference, family) as their_routes:
            mine, theirs = logits(ours.model), logits(reference)
        # In bf16 a near tie in a router may fall either way; what comes before it must agree all the same.
        assert our_routes
        agreed = first_difference(our_routes, their_routes)
        assert agreed >= PROMPT.shape[1] // 2
        torch.testing.assert_close(mine[:, :agreed].float(), theirs[:, :agreed].float(), rtol=0, atol=2e-3)


def assert_no_experts_left(ours: LoadedModel) -> None:
    """The bank has them, and nothing that the model holds is as large as its experts, or called so."""
    assert_is_out_of_the_module(ours, moe=True)
    experts = re.compile(r"experts?(_\d+|\.\d+)?\.|(gate_up|q|o)_proj$|(in|out)put_linear|\.mlp\.[vw]\d")
    others = re.compile(r"shared_expert|router|self_attn|\.bias$|vision|attn\.")
    left = [name for name, _ in ours.model.named_parameters() if experts.search(name) and not others.search(name)]
    assert left == []


def parameters_in_use(family: str, folder: Path) -> int:
    """Of the checkpoint: what reads text, and no rows that stand for experts without weights."""
    unused = re.compile(r"vision_model|multi_modal_projector") if family == "llama4" else re.compile(r"^$")
    if family == "longcat_flash":
        unused = re.compile(r"experts\.(8|9|10|11)\.|e_score_correction_bias")
    if family == "step3p7":
        unused = re.compile(r"router_bias")
    return sum(
        tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items() if not unused.search(name)
    )


@contextmanager
def routed(model: Any, family: str) -> Iterator[list[torch.Tensor]]:
    """Collects, sorted, the experts with the highest router logits for each token, router by router."""
    routes: list[torch.Tensor] = []

    def record(module: Any, args: Any, output: Any) -> None:
        scores = output if isinstance(output, torch.Tensor) else output[0]
        routes.append(scores.flatten(0, -2).topk(EXPERTS[family][1]).indices.sort(dim=-1).values)

    hooks = [
        module.register_forward_hook(record) for name, module in model.named_modules() if name.endswith(ROUTERS[family])
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()
