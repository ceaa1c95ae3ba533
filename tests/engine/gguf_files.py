"""Makes the GGUF files in tests/data/gguf: `python -m tests.engine.gguf_files [NAME ...]`.

For maintainers, after `python -m engine.bench.peers build`.  Tiny random models of transformers are written to GGUF
by llama.cpp's own converter; beside each file lies what llama.cpp computes with it.  Weights are of few values, so that
the files compress, and float32, so that llama.cpp computes without rounding.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.bench.peers.editions import LLAMA_CPP

DATA = Path(__file__).parent.parent / "data" / "gguf"
VOCABULARY = 288
NEW_TOKENS = 64
PROMPT = [1, *(int(token) for token in np.random.RandomState(5).randint(4, VOCABULARY, 23))]


@dataclass(frozen=True)
class Case:
    """A tiny model.

    Attributes:
        config: beside `_BASE`.
        written: what the converter must find in config.json besides: the library drops what published files have.
        judge: who says what is right; where llama.cpp computes something else than the model's makers, the library.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    judge: str = "llama.cpp"


_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
_OWN_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_DELTA = {
    **_EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
_LATENT = {
    **_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_GRANITE = {
    **_OWN_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip

_SCALE = 1.0606601717798212
"""Of rotary embeddings for twice a length of 256 (Phi-3's formula)."""

CASES: dict[str, Case] = {
    "deepseek2": Case("deepseek_v2", {**_LATENT, "rope_parameters": _YARN, "routed_scaling_factor": 1.5}),
    # llama.cpp knows files without a low rank of queries by their number of layers.
    "deepseek2-lite": Case(
        "deepseek_v2",
        {
            **_LATENT, "num_hidden_layers": 26, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
            "q_lora_rank": None, "intermediate_size": 32, "moe_intermediate_size": 8, "kv_lora_rank": 16,
        },
    ),
    "deepseek3": Case(
        "deepseek_v3",
        {**_LATENT, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"scoring_func": "sigmoid"},
    ),
    "glm4-moe-lite": Case(
        "glm4_moe_lite",
        {**_LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True},
        {"scoring_func": "sigmoid"},
    ),
    "dbrx": Case(
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
         "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
         "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 2.0}},
    ),
    "ernie4-5-moe": Case(
        "ernie4_5_moe",
        {"intermediate_size": 128, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
    ),
    "gemma3": Case(
        "gemma3_text",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
         "num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "gemma4": Case(
        "gemma4_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32,
         "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
         "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
         "vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True},
    ),
    # The smallest ones: embeddings for each layer, and layers that share keys and values with earlier ones.
    "gemma4-e": Case(
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
         "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": VOCABULARY,
         "tie_word_embeddings": True},
    ),
    "glm4-moe": Case(
        "glm4_moe",
        {**_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True, "n_group": 1,
         "topk_group": 1, "attention_bias": True, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5,
         "norm_topk_prob": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    # Without YaRN: llama.cpp rounds the two ends of its ramp, the model's makers and the library do not.
    "gpt-oss": Case(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
    "granitemoe": Case("granitemoe", _GRANITE),
    "granitehybrid": Case(
        "granitemoehybrid",
        {**_GRANITE, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 16,
         "position_embedding_type": "nope"},
        {"layer_types": ["mamba", "attention"]},
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [32, 32], "num_shared_expert": [1, 1],
         "intermediate_size": 32, "use_qk_norm": True},
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "use_expert_bias": True,
         "tie_word_embeddings": True},
    ),
    "llama4": Case(
        "llama4_text",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32,
         "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1, 3],
         "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
         "use_qk_norm": True},
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {**_OWN_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                             "partial_rotary_factor": 0.5}},
        {"scoring_func": "sigmoid", "rotary_dim": 8},
    ),
    "phi3": Case(
        "phi3",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.25] * 4,
                "long_factor": [2.0, 4.0] * 4,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # llama.cpp has other norms and weights of experts than the model's makers: see its family.
    "phimoe": Case(
        "phimoe",
        {**_OWN_EXPERTS, "attention_bias": True, "lm_head_bias": True,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25] * 4,
                             "long_factor": [2.0, 4.0] * 4, "short_mscale": _SCALE, "long_mscale": _SCALE,
                             "factor": 2.0, "original_max_position_embeddings": 256}},
        {"architectures": ["PhiMoEForCausalLM"]},
        judge="transformers",
    ),
    "qwen3next": Case(
        "qwen3_next",
        {**_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {**_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                       "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"full_attention_interval": 2},
    ),
    "smollm": Case("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
                             "tie_word_embeddings": True}),
    "smollm3": Case("smollm3", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
                                "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
}  # fmt: skip

_CONVERT = """
import logging, sys
sys.path[:0] = [SOURCE + "/gguf-py", SOURCE]
logging.basicConfig(level=logging.ERROR)
import importlib
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_glm = lambda self: self._set_vocab_gpt2()
import convert_hf_to_gguf
for name in ("phi", "gemma", "hunyuan", "ernie", "granite", "mamba"):
    for kind in vars(importlib.import_module("conversion." + name)).values():
        if isinstance(kind, type) and issubclass(kind, base.TextModel) and kind is not base.TextModel:
            kind.set_vocab = lambda self: self._set_vocab_gpt2()
sys.argv = ["convert", FOLDER, "--outfile", FILE, "--outtype", "f32", "--model-name", "tiny", *OPTIONS]
convert_hf_to_gguf.main()
"""
_REFERENCE = """
import json, numpy as np
from llama_cpp import Llama
model = Llama(FILE, n_ctx=512, n_batch=512, n_threads=1, logits_all=True, type_k=0, type_v=0, n_gpu_layers=0,
              verbose=False)
model.eval(PROMPT)
rows = np.array(model.scores[: len(PROMPT)])
tokens = []
for place in range(len(PROMPT), len(PROMPT) + NEW):
    tokens.append(int(np.argmax(model.scores[place - 1])))
    model.eval(tokens[-1:])
found = np.array(model.scores[len(PROMPT) - 1 : len(PROMPT) - 1 + NEW])
np.savez(FOLDER + "/reference.npz", rows=rows, tokens=tokens, found=found)
"""


def main(names: list[str]) -> None:
    """Makes these files, or all."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            _make(name, CASES[name], Path(folder))


def _make(name: str, case: Case, folder: Path) -> None:
    model = _build(name, case, folder)
    file = folder / "model.gguf"
    _run(sys.executable, _CONVERT, folder, file, ["--no-mtp"] if "linear_conv_kernel_dim" in case.config else [])
    theirs = _theirs(model)
    try:
        peer = _peers(file, folder)
    except subprocess.CalledProcessError:
        if case.judge == "llama.cpp":
            raise
        peer = theirs
    away = float(np.abs(peer["rows"] - theirs["rows"]).max() / np.abs(theirs["rows"]).max())
    same = int((peer["tokens"] == theirs["tokens"]).sum())
    kept = peer if case.judge == "llama.cpp" else theirs
    content = {"judge": case.judge, **_described(kept)}
    (DATA / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    (DATA / f"{name}.gguf.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    size = (DATA / f"{name}.gguf.xz").stat().st_size
    report = f"{name:15} {size:7,} bytes; llama.cpp and transformers: {away:.1e} apart, {same}/{NEW_TOKENS} tokens"
    sys.stdout.write(f"{report}, least margin {min(content['margins']):.4f}\n")
    sys.stdout.flush()


def as_llama_cpp_computes(file: Path, folder: Path) -> dict[str, Any]:
    """The prompt, llama.cpp's greedy tokens after it with their margins, and rows of its logits.

    Args:
        folder: for what it writes meanwhile.
    """
    return _described(_peers(file, folder))


def _peers(file: Path, folder: Path) -> dict[str, Any]:
    _run(str(LLAMA_CPP.python()), _REFERENCE, folder, file, [])
    with np.load(folder / "reference.npz") as read:
        return {key: read[key] for key in ("rows", "tokens", "found")}


def _described(found: dict[str, Any]) -> dict[str, Any]:
    ends = np.sort(found["found"])[:, -2:].astype(float)
    return {
        "prompt": PROMPT,
        "tokens": found["tokens"].tolist(),
        "margins": np.round(ends[:, 1] - ends[:, 0], 5).tolist(),
        "rows": {place: np.round(found["rows"][place].astype(float), 5).tolist() for place in (3, len(PROMPT) - 1)},
    }


def _run(python: str, program: str, folder: Path, file: Path, options: list[str]) -> None:
    source = str(LLAMA_CPP.home() / "source" / "vendor" / "llama.cpp")
    names = {
        "SOURCE": source,
        "FOLDER": str(folder),
        "FILE": str(file),
        "PROMPT": PROMPT,
        "NEW": NEW_TOKENS,
        "OPTIONS": options,
    }
    text = "\n".join(f"{key} = {value!r}" for key, value in names.items()) + program
    done = subprocess.run([python, "-c", text], env=LLAMA_CPP.environment(), capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
    done.check_returncode()


def _build(name: str, case: Case, folder: Path) -> Any:
    """Writes the checkpoint to `folder`; the library's model of it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    shared = {key: _BASE[key] for key in _BASE if case.model_type != "dbrx" or "token" in key or key == "vocab_size"}
    config = CONFIG_MAPPING[case.model_type](**{**shared, **case.config})
    torch.manual_seed(sum(map(ord, name)))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
    levels = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            pick = levels[torch.randint(0, 4, parameter.shape)]
            if parameter.dim() > 1:
                parameter.copy_((pick * (1.6 / parameter.shape[-1] ** 0.5)).half().float())
            elif "A_log" in key:
                parameter.copy_(torch.randint(0, 4, parameter.shape) * 0.25)
            elif "norm" in key and not key.endswith("bias"):
                parameter.copy_(parameter + pick * 0.125)
            else:
                parameter.copy_(pick * 0.25 + (1.0 if "scale" in key or "layer_scalar" in key else 0.0))
        for key, buffer in model.named_buffers():
            if "correction" in key or "expert_bias" in key:
                buffer.copy_(levels[torch.randint(0, 4, buffer.shape)] * 0.1)
            elif "layer_scalar" in key:
                buffer.fill_(0.75)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**written, **case.written}), encoding="utf-8")
    save_tokenizer(folder)
    if case.judge != "llama.cpp" or case.written:
        (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    (folder / "config.json").write_text(json.dumps({**written, **case.written}), encoding="utf-8")
    return model


def _theirs(model: Any) -> dict[str, Any]:
    import torch

    ids, found = list(PROMPT), []
    with torch.no_grad():
        rows = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        for _ in range(NEW_TOKENS):
            found.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
            ids.append(int(found[-1].argmax()))
    return {"rows": rows, "tokens": np.array(ids[len(PROMPT) :]), "found": np.array(found)}


def save_tokenizer(folder: Path) -> None:
    """Bytes, and a few words of two letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    words = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou"
    for word in words.split():
        if len(vocabulary) < VOCABULARY:
            vocabulary[word] = len(vocabulary)
            merges.append((word[0], word[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
