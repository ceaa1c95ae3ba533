"""Tiny checkpoints with a random draft head under the names that real ones have, and the library's own such layer."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.engine.tiny_families import output_embeddings, tiny_checkpoint

LAYERED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
BESIDE = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
_BESIDE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def checkpoint_with_head(family: str, folder: Path, *, fused: bool = False) -> tuple[Path, Any, Any]:
    """(the checkpoint, the library's model, the library's head); `fused`: the head's experts are stacked."""
    kept: list[Any] = []

    def keep(model: Any) -> None:
        with torch.no_grad():
            output_embeddings(model).weight.mul_(40)
        kept.append(model)

    path = tiny_checkpoint(family, folder, prepare=keep)
    model = kept[0]
    head = _library_head(model)
    count = model.config.get_text_config().num_hidden_layers
    tensors = load_file(path / "model.safetensors")
    for name, tensor in head.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        rest = name.removeprefix("layers.0.")
        block = rest.removeprefix("mtp_block.") if rest.startswith("mtp_block.") else None
        module, _, kind = rest.rpartition(".")
        if family in BESIDE:
            stored = f"mtp.layers.0.{block}" if block is not None else f"mtp.{_BESIDE[module]}.{kind}"
        else:
            own = f"{'shared_head.norm' if module == 'post_norm' else module}.{kind}"
            stored = f"model.layers.{count}.{block if block is not None else own}"
        tensors.update({stored: tensor} if fused else _by_expert(stored, tensor))
    if family in LAYERED:
        tensors[f"model.layers.{count}.embed_tokens.weight"] = model.get_input_embeddings().weight
        tensors[f"model.layers.{count}.shared_head.head.weight"] = output_embeddings(model).weight
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path, model, head


def _library_head(model: Any) -> Any:
    config = model.config.get_text_config(decoder=True)
    config.num_mtp_layers = 1
    for name, value in (("mtp_layer_types", ["full_attention"]), ("mtp_mlp_layer_types", ["sparse"])):
        if hasattr(config, name.removeprefix("mtp_")):
            setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        head = MtpModel(model, 1).eval()
        with torch.no_grad():
            for name, parameter in head.layers.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.15))
    return head


def _by_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stacked experts as checkpoints of before have them: a matrix for each."""
    module, _, part = name.rpartition(".")
    if part not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        return {name: tensor}
    made = {}
    for expert, matrix in enumerate(tensor):
        if part == "down_proj":
            made[f"{module}.{expert}.down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            made[f"{module}.{expert}.gate_proj.weight"] = gate
            made[f"{module}.{expert}.up_proj.weight"] = up
    return made


def library_guesses(model: Any, head: Any, ids: list[int]) -> torch.Tensor:
    """Logits [n - 1, V] of the library's head after each token of `ids` but the first."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        cache = MtpCache(config=head.config)
        positions = torch.arange(1, len(ids))[None]
        out = head.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens[:, 1:])
        logits: torch.Tensor = head._project_to_logits(out)[0]
    return logits


def without_head(path: Path) -> None:
    """Takes one of the head's tensors away."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "eh_proj" in name or name.startswith("mtp.fc"))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def config_of(path: Path) -> dict[str, Any]:
    """Its config.json."""
    values: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
    return values


transformers.utils.logging.disable_progress_bar()
