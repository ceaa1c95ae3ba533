"""Families with an adapter or an encoder: what transformers says of the same files, without experts in the module."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.experts.dispatch import BANK_LAYER
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import NO_END, library_tokens, opened_model
from tests.engine.single_streams import Alone
from tests.engine.test_family_parity import (
    NEW_TOKENS,
    PROMPT,
    assert_buffers_equal,
    assert_is_out_of_the_module,
    first_difference,
    greedy,
    logits,
)
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config
from tests.refusals import refused

ROUTERS = {
    "dbrx": "router.layer",
    "llama4": "feed_forward.router",
    "llama4_text": "feed_forward.router",
    "jetmoe": "router.layer",
    "longcat_flash": "mlp.router",
    "step3p5": "mlp.gate",
    "step3p7": "mlp.gate",
}
"""How the names of the modules end whose (first) result says which experts a token goes to."""

PUBLISHED = {
    "dbrx": "transformer.blocks.1.ffn.experts.mlp.w1",
    "llama4": "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
    "llama4_text": "model.layers.1.feed_forward.experts.gate_up_proj",
    "jetmoe": "model.layers.1.self_attention.experts.input_linear.weight",
    "longcat_flash": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "step3p5": "model.layers.1.moe.gate_proj.weight",
    "step3p7": "model.layers.1.moe.gate_proj.weight",
    "switch_transformers": "encoder.block.1.layer.1.mlp.experts.expert_11.wi.weight",
    "nllb-moe": "model.decoder.layers.1.ffn.experts.expert_11.fc2.bias",
}
"""A name that the checkpoints of the family have on the hub; more than ten experts test their order."""

EXPERTS = {
    "dbrx": (8, 3),
    "llama4": (8, 2),
    "llama4_text": (8, 1),
    "jetmoe": (8, 2),
    "longcat_flash": (8, 4),
    "step3p5": (8, 2),
    "step3p7": (8, 2),
}
"""How many there are, and how many are chosen."""
ENCODERS = {"switch_transformers": (12, 1), "nllb-moe": (12, 2)}
"""The same, of models with an encoder."""
ANSWER = torch.tensor([[2, 17, 230, 5, 91, 64, 128, 7]])

_ZERO_EXPERT = r"experts\.(8|9|10|11)\."


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


def test_longcat_as_published(tmp_path: Path) -> None:
    """The library saves rows for zero experts; the checkpoints on the hub have none, and parts that nothing uses."""
    tiny_checkpoint("longcat_flash", tmp_path)
    file = tmp_path / "model.safetensors"
    with opened_model(tmp_path, "fp32") as ours:
        expected = logits(ours.model)
    tensors = {name: tensor for name, tensor in load_file(file).items() if not re.search(_ZERO_EXPERT, name)}
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, file, {"format": "pt"})
    with opened_model(tmp_path, "fp32") as ours:
        assert torch.equal(logits(ours.model), expected)


def test_step_in_fp8(tmp_path: Path) -> None:
    """Stacked experts in blocks of fp8, against the same numbers unpacked."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        tiny_checkpoint("step3p7", folder)
    plain_tensors, packed_tensors = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not re.search(r"\.moe\.\w+_proj\.weight", name):
            plain_tensors[name] = packed_tensors[name] = tensor
            continue
        blocks = tensor.unflatten(2, (-1, 8)).unflatten(1, (-1, 8))
        scale = blocks.abs().amax(dim=(2, 4)) / 448
        quantised = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
        packed_tensors[name], packed_tensors[f"{name}_scale_inv"] = quantised.reshape(tensor.shape), scale
        plain_tensors[name] = (quantised.float() * scale[:, :, None, :, None]).reshape(tensor.shape)
    assert len(packed_tensors) == len(plain_tensors) + 9
    save_file(plain_tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(packed_tensors, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [8, 8],
        "activation_scheme": "dynamic",
    }
    (packed / "config.json").write_text(json.dumps(config))
    with opened_model(packed, "fp32") as ours, opened_model(plain, "fp32") as same:
        torch.testing.assert_close(logits(ours.model), logits(same.model), rtol=0, atol=1e-5)


@dataclass(frozen=True)
class Ours:
    family: str
    folder: Path
    model: LoadedModel


@pytest.fixture(scope="module", params=[*ROUTERS, *ENCODERS])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ours]:
    """Every family here, loaded by us in fp32."""
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    with opened_model(folder, "fp32") as model, torch.no_grad():
        yield Ours(request.param, folder, model)


def test_a_chat_goes_on_as_the_library_would(ours: Ours) -> None:
    if ours.family in ENCODERS:
        pytest.skip("reads each request anew")
    reference = model_class(tiny_config(ours.family)).from_pretrained(ours.folder, dtype=torch.float32).eval()
    prompt, session = PROMPT[0].tolist(), Alone(ours.model)
    first = session.generate_from_ids(prompt, SamplingParams(max_tokens=NEW_TOKENS), end_ids=NO_END)
    assert list(first.token_ids) == library_tokens(reference, prompt, NEW_TOKENS)
    prompt += [*first.token_ids, 7, 8, 9]
    second = session.generate_from_ids(prompt, SamplingParams(max_tokens=NEW_TOKENS), end_ids=NO_END)
    assert list(second.token_ids) == library_tokens(reference, prompt, NEW_TOKENS)
    assert second.reused_tokens >= PROMPT.shape[1]


def test_what_is_known_of_the_model(ours: Ours) -> None:
    info = ours.model.info
    assert (info.experts, info.experts_per_token) == {**EXPERTS, **ENCODERS}[ours.family]
    assert info.layers == 4 if ours.family in ENCODERS else info.layers > 0
    if ours.family in ROUTERS:
        assert info.parameters == parameters_in_use(ours.family, ours.folder)


def test_without_its_experts_a_model_says_so(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way of computing experts but ours is left, so nothing is ever computed from weights that are not there."""
    monkeypatch.delattr(ours.model.model.get_submodule(next(iter(ours.model.bank.layers))), BANK_LAYER)
    with refused(ErrorCode.INTERNAL):
        all_logits(ours.model.model)


def test_every_experts_module_takes_part(ours: Ours) -> None:
    assert ours.model.bank is not None
    before = all_logits(ours.model.model)
    for layer in ours.model.bank.layers.values():
        kept = layer.records.clone()
        layer.records.zero_()
        assert (all_logits(ours.model.model) - before).abs().max() > 1e-4, layer.name
        layer.records.copy_(kept)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize(
    ("save", "tied"), [({}, True), ({}, False), ({"max_shard_size": "20KB"}, False)], ids=["tied", "untied", "sharded"]
)
def test_an_encoder_and_a_decoder_are_the_librarys(
    family: str, save: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    tiny_checkpoint(family, tmp_path, save=save, tie_word_embeddings=tied)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == bool(save)
    assert any(PUBLISHED[family] in load_file(file) for file in files)
    library_class = model_class(tiny_config(family))
    with opened_model(tmp_path, "fp32") as ours, torch.no_grad():
        reference = library_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert_is_out_of_the_module(ours, moe=True)
        assert not [name for name, _ in ours.model.named_parameters() if "expert" in name]
        assert ours.info.parameters == sum(parameter.numel() for parameter in reference.parameters())
        torch.testing.assert_close(all_logits(ours.model), all_logits(reference), rtol=0, atol=1e-5)
        session = Alone(ours)
        result = session.generate_from_ids(PROMPT[0].tolist(), SamplingParams(max_tokens=NEW_TOKENS), end_ids=NO_END)
        wanted = reference.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
        )
        assert list(result.token_ids) == wanted[0, 1:].tolist()
        assert session.kv_bytes == 0  # nobody could go on from it
    with opened_model(tmp_path, "bf16") as ours, torch.no_grad():
        reference = library_class.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert_buffers_equal(ours.model, reference)
        torch.testing.assert_close(all_logits(ours.model).float(), all_logits(reference).float(), rtol=0, atol=2e-3)


def all_logits(model: Any) -> torch.Tensor:
    """Of a prompt, or of an answer to it where an encoder reads the prompt."""
    more = {"decoder_input_ids": ANSWER} if model.config.is_encoder_decoder else {}
    result: torch.Tensor = model(input_ids=PROMPT, **more).logits
    return result


def compare_with_library(family: str, folder: Path) -> None:
    """Loads the checkpoint in both ways and compares: fp32 logits and tokens, bf16 logits."""
    library_class = model_class(tiny_config(family))
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        reference = library_class.from_pretrained(folder, dtype=torch.float32).eval()
        assert_no_experts_left(ours)
        torch.testing.assert_close(logits(ours.model), logits(reference), rtol=0, atol=1e-5)
        assert greedy(ours.model).tolist() == greedy(reference).tolist()
    with opened_model(folder, "bf16") as ours, torch.no_grad():
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
        unused = re.compile(rf"{_ZERO_EXPERT}|e_score_correction_bias")
    if family.startswith("step3p"):
        unused = re.compile(r"router_bias|vision_model|vit_large_projector")
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
