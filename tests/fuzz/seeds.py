"""Small sound inputs, from which fuzzers start."""

import json
import struct
from typing import Any

from engine.families.gguf import Gguf, Key, Made
from engine.families.gguf.table import GGUF
from tests.fuzz.gguf_draft import GgufDraft, Tensor, Value
from tests.unit.checkpoint_files import header_of

_ROWS, _EXPERTS = 4, 2
CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": _ROWS,
    "intermediate_size": _ROWS,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": 1,
    "vocab_size": _ROWS,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
_COMMON = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": _ROWS,
    "feed_forward_length": _ROWS,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_feed_forward_length": _ROWS,
    "expert_shared_feed_forward_length": _ROWS,
    "expert_used_count": 1,
}
_EXPERTS_TOO = {"expert_count": 2, "expert_used_count": 1}
_STATES = {
    "ssm.inner_size": 4,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 2,
    "ssm.state_size": 2,
    "ssm.conv_kernel": 2,
    "full_attention_interval": 4,
}
_LATENT = {"attention.key_length": 4, "attention.kv_lora_rank": 2, "attention.q_lora_rank": 2, "expert_gating_func": 2}
_OWN = {
    "dbrx": {"attention.clamp_kqv": 8.0, **_EXPERTS_TOO},
    "deepseek2": {
        **_LATENT,
        "attention.value_length": 2,
        "attention.key_length_mla": 4,
        "attention.value_length_mla": 2,
    },
    "gemma4": {"attention.sliding_window_pattern": [1], "attention.head_count_kv": [2], "rope.freq_base": 1e6},
    "granitehybrid": {**_STATES, "attention.head_count_kv": [0]},
    "qwen35moe": {**_STATES, "rope.dimension_sections": [1, 1, 0, 0]},
    "qwen3next": _STATES,
}
"""Keys that only some architectures have."""
_TEXT, _LIST, _WHOLE, _REAL, _FLAG, _SIGNED = 8, 9, 4, 6, 7, 5
VALUES: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <s> there"},
        {"role": "assistant", "content": "Hello", "tool_calls": []},
        {"role": "user", "content": "Bye"},
    ],
    "bos_token": "<s>",
    "eos_token": "</s>",
    "tools": None,
    "add_generation_prompt": True,
}


def _value(value: Any) -> Value:
    if isinstance(value, bool):
        return Value(_FLAG, int(value))
    if isinstance(value, str):
        return Value(_TEXT, value)
    if isinstance(value, list):
        kind = _value(value[0]).kind if value else _WHOLE
        return Value(_LIST, (_SIGNED if kind == _WHOLE else kind, value))
    return Value(_REAL if isinstance(value, float) else _WHOLE, value)


def ggufs() -> list[bytes]:
    """A model of each kind that is read, of one layer."""
    found = {}
    for architecture, families in GGUF.items():
        for family in families:
            found[family.model_type] = _model(architecture, family, is_dense="expert" not in str(family.config))
    scaled, factored = GgufDraft.read(found["llama"]), GgufDraft.read(found["llama"])
    scaled.metadata |= {
        "llama.rope.scaling.type": _value("yarn"),
        "llama.rope.scaling.factor": _value(4.0),
        "general.sampling.temp": _value(0.5),
    }
    factored.tensors.append(Tensor("rope_freqs.weight", [1]))
    return [*found.values(), scaled.written(), factored.written()]


def _model(architecture: str, family: Gguf, *, is_dense: bool) -> bytes:
    keys: dict[str, Any] = dict(_COMMON if not is_dense else list(_COMMON.items())[:7])
    if not is_dense:
        keys["expert_count"] = _EXPERTS
    for key in family.config.values():
        if isinstance(key, str):
            keys.setdefault(key, 1)
        elif isinstance(key, Key) and not isinstance(key.default, int | float | str | bool | None | list):
            keys.setdefault(key.name, 1)
    keys |= {family.eps: 1e-5, family.head_dim: 2, **_OWN.get(architecture, {}), **family.fixed}
    metadata = {"general.architecture": _value(architecture)}
    metadata |= {f"{architecture}.{key}": _value(value) for key, value in keys.items()}
    names: dict[str, None] = {}
    for ways in family.tensors.values():
        way = ways[0] if isinstance(ways, tuple) else ways
        names |= dict.fromkeys(way.sources if isinstance(way, Made) else (way,))
    tensors = []
    for name in names:
        if name.endswith(".bias"):
            continue
        if name == "rope_freqs.weight":
            continue
        shape = [_ROWS] if "norm" in name else [_ROWS, _ROWS, _EXPERTS] if "exps" in name else [_ROWS, _ROWS]
        shape = [_ROWS, _EXPERTS] if name.endswith("ffn_gate_inp.weight") else shape
        tensors.append(Tensor(name.replace("{n}", "0"), shape, kind=1))
    if architecture == "gemma4":
        tensors.append(Tensor("rope_freqs.weight", [1]))
    return GgufDraft(metadata, tensors).written()


def gguf_tokenizers() -> list[bytes]:
    """A vocabulary of each kind."""
    letters = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a", "é", "[INST]"]
    types = [2, 3, 3, 1, 1, 1, 1, 1, 1, 4]
    scores = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    more = {
        "gpt2": {"pre": "gpt-2", "merges": ["a b"]},
        "gemma4": {"merges": ["a b", "▁ a"]},
        "llama": {"scores": scores, "add_space_prefix": True},
        "t5": {
            "scores": scores,
            "remove_extra_whitespaces": True,
            "precompiled_charsmap": [4, 0, 0, 0, 0, 0, 0, 0, 97, 0],
        },
        "bert": {"cls_token_id": 1, "seperator_token_id": 2, "normalizer.lowercase": True},
    }
    found = []
    for kind, own in more.items():
        keys = {
            "tokens": letters,
            "token_type": types,
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **own,
        }
        metadata = {"general.architecture": _value("llama"), "general.name": _value("Phi-3")}
        metadata |= {f"tokenizer.ggml.{key}": _value(value) for key, value in {"model": kind, **keys}.items()}
        metadata["tokenizer.chat_template"] = _value("{{ bos_token }}")
        metadata["tokenizer.chat_template.tool_use"] = _value("x")
        found.append(GgufDraft(metadata).written())
    return found


def safetensors() -> list[bytes]:
    """A model of one layer; the same with types of fewer bits."""
    layer = "model.layers.0.block_sparse_moe.experts"
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"{layer}.{e}.w{w}.weight" for e in (0, 1) for w in (1, 2, 3)),
    ]
    whole = header_of({name: ("BF16", [_ROWS, _ROWS]) for name in names} | {"model.norm.weight": ("F32", [_ROWS])})
    packed = header_of({"a.weight": ("F8_E4M3", [8, 8]), "a.weight_scale_inv": ("F32", [1, 1]), "b": ("U8", [])})
    return [_written({"__metadata__": {"format": "pt"}, **whole}), _written(packed)]


def _written(header: dict[str, Any]) -> bytes:
    raw = json.dumps(header).encode()
    size = max((value["data_offsets"][1] for value in header.values() if "data_offsets" in value), default=0)
    return struct.pack("<Q", len(raw)) + raw + bytes(size)


def quantised() -> list[bytes]:
    """A layer in each of the forms that are read, as `config` and `header`."""
    layer = "model.layers.0.self_attn.q_proj"
    numbers = ("F16", [1, 8])
    gptq = {"qweight": ("I32", [1, 8]), "qzeros": ("I32", [1, 1]), "scales": numbers, "g_idx": ("I32", [8])}
    awq = {"qweight": ("I32", [8, 1]), "qzeros": ("I32", [1, 1]), "scales": numbers}
    whole = {"weight_packed": ("I32", [8, 1]), "weight_scale": ("F16", [8, 1]), "weight_shape": ("I64", [2])}
    uneven = {**whole, "weight_zero_point": ("I32", [1, 1]), "weight_g_idx": ("I32", [8])}
    scaled = {"weight": ("I8", [8, 8]), "weight_scale": ("F32", [8, 1]), "weight_zero_point": ("I8", [8, 1])}
    blocks = {"weight": ("F8_E4M3", [8, 8]), "weight_scale": ("F32", [2, 2])}
    small = {"weight": ("U8", [8, 8]), "weight_scale": ("F8_E4M3", [8, 1]), "weight_scale_2": ("F32", [])}
    mlx = {"weight": ("U32", [8, 1]), "scales": ("F16", [8, 1]), "biases": ("F16", [8, 1])}
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": 8, "symmetric": True}
    in_groups = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    lopsided = {**in_groups, "config_groups": {"group_0": {"weights": {**weights, "symmetric": False}}}}
    of_blocks = {"num_bits": 8, "type": "float", "block_structure": [4, 4]}
    forms = [
        ({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True}, gptq),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
        (in_groups, whole),
        (lopsided, uneven),
        (in_groups, scaled),
        ({**in_groups, "config_groups": {"group_0": {"weights": of_blocks}}}, blocks),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, small),
        ({"group_size": 8, "bits": 4}, mlx),
    ]
    found = []
    for stored, parts in forms:
        config = {**CONFIG, "quantization_config": stored}
        header = header_of({f"{layer}.{part}": form for part, form in parts.items()})
        if f"{layer}.weight_shape" in header:
            header[f"{layer}.weight_shape"]["fill"] = (8).to_bytes(8, "little").hex()
        found.append(json.dumps({"config": config, "header": header}).encode())
    return found


def indices() -> list[bytes]:
    """An index of one file."""
    header = safetensors()[0]
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    weight_map = {name: "part.safetensors" for name in names if name != "__metadata__"}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()]


def configs() -> list[bytes]:
    """Configurations of several shapes."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_hidden_layers": 2}
    nested = {"model_type": "qwen3_vl_moe", "text_config": CONFIG, "vision_config": {"depth": 1}}
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 4, "qk_rope_head_dim": 2, "n_routed_experts": 2,
              "moe_intermediate_size": 4, "first_k_dense_replace": 1}  # fmt: skip
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    own = [{}, {"rope_parameters": rope}, {"rope_scaling": rope, **window}, latent, quantised]
    return [json.dumps(each).encode() for each in (*({**CONFIG, **more} for more in own), nested)]


def generation_configs() -> list[bytes]:
    """One of everything."""
    sampled = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    dry = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_range": 100, "dry_breakers": ["\n"]}
    return [json.dumps({**sampled, **dry, "eos_token_id": [1, 2]}).encode()]


def templates() -> list[bytes]:
    """ChatML, turns that must alternate, tools, and a macro."""
    chatml = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{{ message.content | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    strict = (
        "{{- bos_token }}{%- for m in messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('Roles must alternate') }}{%- endif %}{%- if m['role'] == 'user' %}"
        "{{- '[INST] ' ~ m['content'] }}{%- elif m.tool_calls is defined %}{%- generation %}{{- m.content }}"
        "{%- endgeneration %}{%- endif %}{%- endfor %}"
    )
    macro = (
        "{%- macro show(x, deep=0) %}{%- if x is mapping %}{%- for k, v in x | dictsort %}"
        "{{ k }}: {{ show(v, deep + 1) }}{%- endfor %}{%- else %}{{ x | tojson }}{%- endif %}{%- endmacro %}"
        "{%- set ns = namespace(text='') %}{%- for m in messages[1:] %}{%- set ns.text = ns.text + show(m) %}"
        "{%- endfor %}{{ ns.text }}{{ strftime_now('%Y') }}"
    )
    return [text.encode() for text in (chatml, strict, macro)]
