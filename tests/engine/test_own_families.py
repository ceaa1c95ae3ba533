"""Families that the library lacks must compute what their makers' papers and code say, written out plainly here."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, relu, silu
from transformers.models.minimax.modeling_minimax import MiniMaxForCausalLM as LibraryMiniMax

from engine.checkpoint.config_file import read_config
from engine.checkpoint.profile import read_profile
from engine.common.errors import EngineError, ErrorCode
from engine.families import TABLE, family_of
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import PROMPT, greedy, logits
from tests.engine.tiny_configs import OWN
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
Gate = Callable[[torch.Tensor], torch.Tensor]


class Plain:
    """One of the models, as plain as can be: every token is computed from all before it."""

    def __init__(self, folder: Path) -> None:
        self.config: Config = json.loads((folder / "config.json").read_text())
        self.weights: Weights = load_file(folder / "model.safetensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self["model.embed_tokens"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = LAYERS[self.config["model_type"]](self, layer, f"model.layers.{layer}", hidden)
        return linear(self.norm("model.norm", hidden), self["lm_head"])

    def norm(self, name: str, hidden: torch.Tensor, groups: int = 0) -> torch.Tensor:
        groups = groups or self.config.get("layernorm_num_groups", 1)
        parts = hidden.reshape(*hidden.shape[:-1], groups, -1)
        parts = parts / (parts.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return parts.reshape(hidden.shape) * self[name]

    def attention(
        self,
        name: str,
        hidden: torch.Tensor,
        *,
        window: int = 0,
        rotates: bool = True,
        values: torch.Tensor | None = None,
        rotated: int = 0,
    ) -> torch.Tensor:
        heads, of_keys = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width, tokens = self.config["head_dim"], len(hidden)
        q, k = (linear(hidden, self[f"{name}.{part}_proj"]) for part in "qk")
        if f"{name}.q_norm.weight" in self.weights:
            norms = {part: self[f"{name}.{part}_norm"].view(-1, width) for part in "qk"}
            q, k = (
                (
                    each / (each.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * norms[part]
                ).flatten(1)
                for part, each in (("q", q.view(tokens, heads, width)), ("k", k.view(tokens, of_keys, width)))
            )
        v = values if values is not None else linear(hidden, self[f"{name}.v_proj"])
        theta = self.config["rope_parameters"]["rope_theta"]
        out = torch.zeros(tokens, heads, width)
        for head in range(heads):
            place = slice(head * width, (head + 1) * width)
            shared = head * of_keys // heads
            theirs = slice(shared * width, (shared + 1) * width)
            queries, keys = (
                self._rotated(each, theta, rotated or width) if rotates else each
                for each in (q[:, place], k[:, theirs])
            )
            scores = queries @ keys.T / math.sqrt(width)
            for row in range(tokens):
                first = max(0, row + 1 - window) if window else 0
                shares = scores[row, first : row + 1].softmax(-1)
                out[row, head] = shares @ v[first : row + 1, theirs]
        return out.flatten(1)

    @staticmethod
    def _rotated(rows: torch.Tensor, theta: float, width: int) -> torch.Tensor:
        half = width // 2
        angles = torch.arange(len(rows))[:, None] * theta ** (-torch.arange(half) / half)
        turned = torch.complex(rows[:, :half], rows[:, half:width]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag, rows[:, width:]), -1)

    def mlp(self, name: str, hidden: torch.Tensor, names: str = "", gate: Gate = silu) -> torch.Tensor:
        g, u, d = names.split() or ("gate_proj", "up_proj", "down_proj")
        up = gate(linear(hidden, self[f"{name}.{g}"])) * linear(hidden, self[f"{name}.{u}"])
        return linear(up, self[f"{name}.{d}"])


def chosen(scores: torch.Tensor, count: int, bias: torch.Tensor | None = None) -> list[int]:
    return (scores if bias is None else scores + bias).topk(count).indices.tolist()


def deepseek(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    config = model.config
    attended = model.attention(f"{name}.self_attn", model.norm(f"{name}.input_layernorm", hidden))
    hidden = hidden + linear(attended, model[f"{name}.self_attn.o_proj"])
    rows = model.norm(f"{name}.post_attention_layernorm", hidden)
    if layer < config["first_k_dense_replace"]:
        return hidden + model.mlp(f"{name}.mlp", rows)
    out = model.mlp(f"{name}.mlp.shared_experts", rows)
    scores = linear(rows, model[f"{name}.mlp.gate"]).softmax(-1)
    for at, row in enumerate(rows):
        for expert in chosen(scores[at], config["num_experts_per_tok"]):
            out[at] += scores[at, expert] * model.mlp(f"{name}.mlp.experts.{expert}", row)
    return hidden + out


def grove_moe(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    del layer
    attended = model.attention(f"{name}.self_attn", model.norm(f"{name}.input_layernorm", hidden))
    hidden = hidden + linear(attended, model[f"{name}.self_attn.o_proj"])
    rows = model.norm(f"{name}.post_attention_layernorm", hidden)
    scores, out = linear(rows, model[f"{name}.mlp.gate"]).softmax(-1), torch.zeros_like(rows)
    for at, row in enumerate(rows):
        experts = chosen(scores[at], model.config["num_experts_per_tok"])
        for expert in experts:
            share = scores[at, expert] / scores[at, experts].sum()
            out[at] += share * model.mlp(f"{name}.mlp.experts.{expert}", row)
            out[at] += 0.05 * share * model.mlp(f"{name}.mlp.chunk_experts.{expert // 2}", row)
    return hidden + out


def smallthinker(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    config = model.config
    window = config["sliding_window_size"] if config["sliding_window_layout"][layer] else 0
    logits = linear(hidden, model[f"{name}.block_sparse_moe.primary_router"])
    attended = model.attention(
        f"{name}.self_attn",
        model.norm(f"{name}.input_layernorm", hidden),
        window=window,
        rotates=bool(config["rope_layout"][layer]),
    )
    hidden = hidden + linear(attended, model[f"{name}.self_attn.o_proj"])
    rows = model.norm(f"{name}.post_attention_layernorm", hidden)
    out = torch.zeros_like(rows)
    for at, row in enumerate(rows):
        experts = chosen(logits[at], config["moe_num_active_primary_experts"])
        of_softmax = config["moe_primary_router_apply_softmax"]
        shares = logits[at, experts].softmax(-1) if of_softmax else logits[at, experts].sigmoid()
        for expert, share in zip(experts, shares / shares.sum(), strict=True):
            out[at] += share * model.mlp(f"{name}.block_sparse_moe.experts.{expert}", row, "gate up down", relu)
    return hidden + out


def arctic(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    config, names = model.config, "w1 w3 w2"
    attended = model.attention(f"{name}.self_attn", model.norm(f"{name}.input_layernorm", hidden))
    after = hidden + linear(attended, model[f"{name}.self_attn.o_proj"])
    if (layer + 1) % config["moe_layer_frequency"]:
        rows = model.norm(f"{name}.post_attention_layernorm", after)
        return after + model.mlp(f"{name}.block_sparse_moe.mlp", rows, names)
    rows = model.norm(f"{name}.post_attention_layernorm", hidden if config["parallel_attn_mlp_res"] else after)
    if config["parallel_attn_mlp_res"]:
        after = after + model.mlp(f"{name}.residual_mlp", model.norm(f"{name}.residual_layernorm", after), names)
    scores, out = linear(rows, model[f"{name}.block_sparse_moe.gate"]).softmax(-1), torch.zeros_like(rows)
    for at, row in enumerate(rows):
        experts = chosen(scores[at], config["num_experts_per_tok"])
        for expert in experts:
            share = scores[at, expert] / scores[at, experts].sum()
            out[at] += share * model.mlp(f"{name}.block_sparse_moe.experts.{expert}", row, names)
    return after + out


def minimax(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    config, attention = model.config, f"{name}.self_attn"
    heads, width = config["num_attention_heads"], config["head_dim"]
    hidden = model.norm(f"{name}.input_layernorm", hidden)
    kind = "linear_attn" if config["layer_types"][layer] == "linear_attention" else "full_attn"
    if kind == "full_attn":
        attended = model.attention(attention, hidden, rotated=config["rotary_dim"])
        attended = linear(attended, model[f"{attention}.o_proj"])
    else:
        each = silu(linear(hidden, model[f"{attention}.qkv_proj"])).view(-1, heads, 3, width)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        slopes = slopes * (1 - layer / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5)
        held, rows = torch.zeros(heads, width, width), []
        for queries, keys, values in (token.unbind(1) for token in each):
            held = held * torch.exp(-slopes)[:, None, None] + keys[:, :, None] * values[:, None, :]
            rows.append((queries[:, None, :] @ held).flatten())
        attended = torch.stack(rows)
        attended = attended / (attended.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model[f"{attention}.norm"]
        gates = linear(hidden, model[f"{attention}.output_gate"]).sigmoid()
        attended = linear(attended * gates, model[f"{attention}.out_proj"])
    hidden = hidden * config[f"{kind}_alpha_factor"] + attended * config[f"{kind}_beta_factor"]
    hidden = model.norm(f"{name}.post_attention_layernorm", hidden)
    scores, out = linear(hidden, model[f"{name}.block_sparse_moe.gate"]).softmax(-1), torch.zeros_like(hidden)
    for at, row in enumerate(hidden):
        experts = chosen(scores[at], config["num_experts_per_tok"])
        for expert in experts:
            share = scores[at, expert] / scores[at, experts].sum()
            out[at] += share * model.mlp(f"{name}.block_sparse_moe.experts.{expert}", row, "w1 w3 w2")
    return hidden * config["mlp_alpha_factor"] + out * config["mlp_beta_factor"]


def k2_horizon(model: Plain, layer: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
    config, attention = model.config, f"{name}.self_attn"
    rows = model.norm(f"{name}.input_layernorm", hidden)
    sparse = layer not in config["mlp_only_layers"] and config["num_experts"] > 0

    def scored(router: str, row: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        logits = linear(row, model[router])
        scores = logits.sigmoid() if config["router_score_func"] == "sigmoid" else logits.softmax(-1)
        count = config["num_experts_per_tok" if "mlp" in router else "mova_num_experts_per_tok"]
        experts = chosen(scores, count, model.weights.get(f"{router}.bias"))
        return scores[experts] / scores[experts].sum() * config["router_scaling_factor"], experts

    values = None
    if sparse and config["mova_num_experts"]:
        mixed = []
        for row in rows:
            shares, experts = scored(f"{attention}.v_router", row)
            parts = [silu(linear(row, model[f"{attention}.v_experts.{expert}"])) for expert in experts]
            mixed.append(sum(share * part for share, part in zip(shares, parts, strict=True)))
        values = torch.stack(mixed)  # type: ignore[arg-type]
    attended = model.attention(attention, rows, values=values)
    if config["attention_gate_func"]:
        attended = attended * torch.log2(1 + 2 ** linear(rows, model[f"{attention}.gate_proj"]))
    hidden = hidden + linear(attended, model[f"{attention}.o_proj"])
    rows = model.norm(f"{name}.post_attention_layernorm", hidden)
    if not sparse:
        return hidden + model.mlp(f"{name}.mlp", rows)
    out = model.mlp(f"{name}.mlp.shared_experts", rows) if config["num_shared_experts"] else torch.zeros_like(rows)
    for at, row in enumerate(rows):
        for share, expert in zip(*scored(f"{name}.mlp.gate", row), strict=True):
            out[at] += share * model.mlp(f"{name}.mlp.experts.{expert}", row)
    return hidden + out


LAYERS = {each.__name__: each for each in (arctic, deepseek, grove_moe, k2_horizon, minimax, smallthinker)}
PARTS = {"glm5_next_text": "glm5_next", "step3p5": "step3p7"}
"""Of models that also see, of which the library has only the whole."""
CASES: list[tuple[str, Config]] = [
    *((family, {}) for family in LAYERS),
    ("minimax", {"rotary_dim": 8, "block_size": 64}),
    ("arctic", {"moe_layer_frequency": 2}),
    ("arctic", {"parallel_attn_mlp_res": False}),
    (
        "smallthinker",
        {"moe_primary_router_apply_softmax": True, "sliding_window_layout": [0, 0], "rope_layout": [1, 1]},
    ),
    ("k2_horizon", {"mova_num_experts": 0, "mova_num_experts_per_tok": 0, "attention_gate_func": None}),
    ("k2_horizon", {"num_experts": 0, "mova_num_experts": 0, "moe_gate_bias": False, "query_key_norm": False}),
    ("k2_horizon", {"router_score_func": "softmax", "num_shared_experts": 0, "moe_gate_bias": False}),
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_logits_and_greedy_tokens_are_those_of_plain_mathematics(family: str, options: Config, tmp_path: Path) -> None:
    model = Plain(tiny_checkpoint(family, tmp_path, **options))
    profile = read_profile(tmp_path)
    experts = [each for name, each in model.weights.items() if re.search(r"(mlp|moe)\.\w*experts\.\d", name)]
    assert profile.expert_parameters == sum(each.numel() for each in experts)
    with opened_model(tmp_path, "fp32") as ours, torch.no_grad():
        assert profile.parameters == ours.info.parameters
        torch.testing.assert_close(logits(ours.model)[0], model.logits(PROMPT[0]), rtol=0, atol=1e-5)
        answer = greedy(ours.model)[0]
        wanted = model.logits(answer)
    best, said = wanted[PROMPT.shape[1] - 1 : -1], answer[PROMPT.shape[1] :]
    assert (best.gather(-1, said[:, None])[:, 0] > best.max(-1).values - 1e-5).all()


def test_every_family_that_the_library_lacks_is_among_these() -> None:
    own = {name for name, family in TABLE.items() if family.own and not family.refused}
    assert own == LAYERS.keys() | PARTS.keys()
    assert own == OWN.keys() | {"step3p5"}


@pytest.mark.parametrize(("part", "whole"), PARTS.items())
def test_a_part_alone_computes_what_it_does_in_the_whole(part: str, whole: str, tmp_path: Path) -> None:
    tiny_checkpoint(whole, tmp_path / "whole")
    tiny_checkpoint(part, tmp_path / "part")
    every = load_file(tmp_path / "whole/model.safetensors")
    own = {re.sub(r"\.language_model", "", name): each for name, each in every.items()}
    kept = {name: own[name] for name in load_file(tmp_path / "part/model.safetensors")}
    save_file(kept, tmp_path / "part/model.safetensors", {"format": "pt"})
    with opened_model(tmp_path / "whole", "fp32") as theirs, torch.no_grad():
        wanted = logits(theirs.model)
    with opened_model(tmp_path / "part", "fp32") as ours, torch.no_grad():
        assert ours.bank is not None
        torch.testing.assert_close(logits(ours.model), wanted, rtol=0, atol=1e-6)


def test_minimax_is_the_librarys_but_for_what_is_rotated(tmp_path: Path) -> None:
    folder = tiny_checkpoint("minimax", tmp_path, rotary_dim=8)
    library = LibraryMiniMax.from_pretrained(folder, dtype=torch.float32).eval()
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        torch.testing.assert_close(logits(ours.model), logits(library), rtol=0, atol=1e-5)


def test_minimax_as_its_makers_publish_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint("minimax", tmp_path)
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        wanted = logits(ours.model)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    names = {
        "full_attn": "layernorm_full_attention",
        "linear_attn": "layernorm_linear_attention",
        "mlp": "layernorm_mlp",
    }
    for librarys, makers in names.items():
        for which in ("alpha", "beta"):
            config[f"{makers}_{which}"] = config.pop(f"{librarys}_{which}_factor")
    config["attn_type_list"] = [int(each == "full_attention") for each in config.pop("layer_types")]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config |= {"model_type": "minimax_m1", "architectures": ["MiniMaxM1ForCausalLM"], "shared_moe_mode": "sigmoid"}
    file.write_text(json.dumps(config))
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        torch.testing.assert_close(logits(ours.model), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek", {"scoring_func": "sigmoid"}),
        ("grove_moe", {"num_experts_per_group": 3}),
        ("smallthinker", {"rope_layout": [1]}),
        ("smallthinker", {"moe_enable_secondary_experts": True}),
        ("smallthinker", {"moe_layer_layout": [0, 1]}),
        ("minimax", {"postnorm": False}),
        ("minimax", {"shared_intermediate_size": 16}),
        ("k2_horizon", {"rope_head_dim": 4}),
        ("k2_horizon", {"attention_gate_func": "tanh"}),
    ],
)
def test_what_nobody_has_published_is_one_error(family: str, options: Config, tmp_path: Path) -> None:
    file = tiny_checkpoint(family, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    with refused(ErrorCode.CHECKPOINT_DAMAGED), opened_model(tmp_path, "fp32"):
        pass


@pytest.mark.parametrize("kind", ["llada", "lladamoe"])
def test_diffusion_models_are_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(EngineError, match=f"'{kind}' model, which .* many tokens of a text at a time"):
        read_config(tmp_path)
    assert family_of(kind).refused
