"""GGUF files of true size that take no room: header, tokenizer, and holes where the numbers are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.checkpoint.gguf.file import Strings, read_gguf
from engine.formats.ggml import GGML
from tests.engine.test_gguf_architectures import unpacked
from tests.engine.tiny_families import model_class
from tests.tiny_gguf import _type

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Of each tensor its shape, as numpy has it, and its type."""


def write_with_holes(file: Path, architecture: str, keys: Callable[[GGUFWriter], None], shapes: Shapes) -> Path:
    """A file whose numbers are zeros that no disk holds, but for the last of them."""
    writer = GGUFWriter(file, architecture)
    keys(writer)
    total = 0
    for name, (shape, kind) in shapes.items():
        nbytes = int(np.prod(shape)) // GGML[kind].elements * GGML[kind].nbytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, _type(kind))
        total += GGUFWriter.ggml_pad(nbytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("r+b") as opened:
        opened.seek(0, 2)
        begin = GGUFWriter.ggml_pad(opened.tell(), writer.data_alignment)
        opened.truncate(begin + total)
        opened.seek(begin + total - 4096)  # a file that ends with nothing looks like an unfinished download
        opened.write(bytes(range(1, 65)) * 64)
    return file


def qwen4exp(folder: Path) -> Path:
    """125 billion numbers, 51 of them in a table of n-grams, in four bits."""
    tiny, _ = unpacked("qwen4exp", folder)
    read = read_gguf(tiny)
    hidden, streams, layers, vocabulary, width, experts, ngram = 2048, 4, 40, 248_320, 512, 512, 2560
    config = CONFIG_MAPPING["qwen4_exp_text"](
        ple_layer_ids=[1],
        eos_token_id=2,
        ple_embed_dim=ngram,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=1,
    )
    with torch.device("meta"):
        table = model_class(config)(config).model.layers[0].ple.ple_embedding
    recurrent = [bool((layer + 1) % 4) for layer in range(layers)]
    own: dict[str, Any] = {
        "block_count": layers,
        "context_length": 32_768,
        "embedding_length": hidden,
        "feed_forward_length": width,
        "attention.head_count": 16,
        "attention.head_count_kv": 2,
        "rope.dimension_sections": [11, 11, 10, 0],
        "expert_count": experts,
        "expert_used_count": 10,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 32,
        "ssm.inner_size": 4096,
        "attention.recurrent_layers": recurrent,
        "full_attention_interval": 4,
        "rope.dimension_count": 64,
        "hyper_connection.count": streams,
        "hyper_connection.low_rank": 320,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.compress_ratios": [0 if each else 4 for each in recurrent],
        "ple.heads_per_ngram": 8,
        "embedding_length_per_layer_input": ngram // 16,
        "ple.head_offsets": np.array(table.head_offsets, np.uint64),
        "ple.head_vocab_sizes": np.array(table.head_vocab_sizes, np.uint64),
    }
    tokens = list(read.metadata["tokenizer.ggml.tokens"])
    more = vocabulary - len(tokens)
    types = [*read.metadata["tokenizer.ggml.token_type"].tolist(), *([1] * more)]
    tokenizer = {"tokens": [*tokens, *(f"<{at}>" for at in range(more))], "token_type": types}

    def keys(writer: GGUFWriter) -> None:
        changes = {f"qwen4exp.{key}": value for key, value in own.items()}
        changes |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
        for key, value in {**read.metadata, **changes}.items():
            if key == "general.architecture":
                continue
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            plain = list(plain) if isinstance(plain, Strings) else plain
            is_wide = isinstance(plain, list) and any(type(each) is int and each >= 2**31 for each in plain)
            kind = GGUFValueType.UINT32 if type(plain) is int else GGUFValueType.get_type(plain)
            writer.add_key_value(key, plain, kind, GGUFValueType.INT64 if is_wide else None)

    wide, rank = streams * hidden, 320
    mixer = {
        "inject": ((streams, wide), "F32"),
        "norm": ((wide,), "F32"),
        "down": ((rank, wide), "Q8_0"),
        "up": ((wide, rank), "Q8_0"),
    }
    delta: dict[str, tuple[tuple[int, ...], str]] = {
        "ssm_a": ((32,), "F32"),
        "ssm_conv1d.weight": ((8192, 4), "F32"),
        "ssm_dt.bias": ((32,), "F32"),
        "ssm_alpha.weight": ((32, hidden), "F32"),
        "ssm_beta.weight": ((32, hidden), "F32"),
        "attn_qkv.weight": ((8192, hidden), "Q4_K"),
        "attn_gate.weight": ((4096, hidden), "Q4_K"),
        "ssm_norm.weight": ((128,), "F32"),
        "ssm_out.weight": ((hidden, 4096), "Q4_K"),
    }
    indexed: dict[str, tuple[tuple[int, ...], str]] = {
        "indexer.q_proj.weight": ((2048, hidden), "Q4_K"),
        "indexer.k_proj.weight": ((128, hidden), "Q4_K"),
        "indexer.k_norm.weight": ((128,), "F32"),
        "indexer.q_norm.weight": ((128,), "F32"),
        "attn_k_norm.weight": ((256,), "F32"),
        "attn_k.weight": ((512, hidden), "Q4_K"),
        "attn_output.weight": ((hidden, 4096), "Q4_K"),
        "attn_q_norm.weight": ((256,), "F32"),
        "attn_q.weight": ((8192, hidden), "Q4_K"),
        "attn_v.weight": ((512, hidden), "Q6_K"),
    }
    every: dict[str, tuple[tuple[int, ...], str]] = {
        **{f"hc_{part}_{kind}.weight": shape for part in ("attn", "ffn") for kind, shape in mixer.items()},
        "ffn_down_exps.weight": ((experts, hidden, width), "Q4_K"),
        "ffn_gate_exps.weight": ((experts, width, hidden), "Q4_K"),
        "ffn_up_exps.weight": ((experts, width, hidden), "Q4_K"),
        "ffn_gate_inp.weight": ((experts, hidden), "F32"),
        "ffn_down_shexp.weight": ((hidden, width), "Q4_K"),
        "ffn_gate_shexp.weight": ((width, hidden), "Q4_K"),
        "ffn_up_shexp.weight": ((width, hidden), "Q4_K"),
        "ffn_gate_inp_shexp.weight": ((1, hidden), "F32"),
    }
    of_layers = {
        f"blk.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in {**every, **(delta if recurrent[layer] else indexed)}.items()
    }
    shapes = {
        "token_embd.weight": ((vocabulary, hidden), "Q4_K"),
        **{f"output_hc_{kind}.weight": shape for kind, shape in mixer.items() if kind != "inject"},
        "blk.0.ple_conv1d.weight": ((wide, 4), "F32"),
        "blk.0.ple_key.weight": ((wide, ngram), "Q4_K"),
        **{f"blk.0.ple_norm_{part}.weight": ((wide,), "F32") for part in ("conv", "key", "query")},
        "blk.0.ple_value.weight": ((hidden, ngram), "Q4_K"),
        **of_layers,
        "per_layer_token_embd.weight": ((table.ngram_embedding.num_embeddings, ngram // 16), "Q4_0"),
        "output.weight": ((vocabulary, hidden), "Q6_K"),
    }
    return write_with_holes(folder / "Qwen4-Exp-Q4_K_M.gguf", "qwen4exp", keys, shapes)


def qwen3_235b(folder: Path) -> Path:
    """235 billion numbers in two bits, as llama.cpp divides the types."""
    hidden, layers, experts, width, heads, vocabulary = 4096, 94, 128, 1536, 64, 151_936

    def keys(writer: GGUFWriter) -> None:
        whole = {
            "block_count": layers,
            "context_length": 40_960,
            "embedding_length": hidden,
            "feed_forward_length": 12_288,
            "attention.head_count": heads,
            "attention.head_count_kv": 4,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_count": experts,
            "expert_used_count": 8,
            "expert_feed_forward_length": width,
        }
        for key, value in whole.items():
            writer.add_uint32(f"qwen3moe.{key}", value)
        writer.add_float32("qwen3moe.rope.freq_base", 1e6)
        writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([f"<{at}>" for at in range(vocabulary)])
        writer.add_token_merges([])

    every: dict[str, tuple[tuple[int, ...], str]] = {
        "attn_norm.weight": ((hidden,), "F32"),
        "ffn_norm.weight": ((hidden,), "F32"),
        "attn_q.weight": ((heads * 128, hidden), "IQ2_XXS"),
        "attn_k.weight": ((512, hidden), "IQ2_XXS"),
        "attn_v.weight": ((512, hidden), "Q4_K"),
        "attn_output.weight": ((hidden, heads * 128), "IQ3_XXS"),
        "attn_q_norm.weight": ((128,), "F32"),
        "attn_k_norm.weight": ((128,), "F32"),
        "ffn_gate_inp.weight": ((experts, hidden), "F32"),
        "ffn_gate_exps.weight": ((experts, width, hidden), "IQ2_XXS"),
        "ffn_up_exps.weight": ((experts, width, hidden), "IQ2_XXS"),
        "ffn_down_exps.weight": ((experts, hidden, width), "IQ2_XXS"),
    }
    finer = {"ffn_down_exps.weight": ((experts, hidden, width), "Q2_K")}
    shapes = {
        "token_embd.weight": ((vocabulary, hidden), "Q2_K"),
        "output_norm.weight": ((hidden,), "F32"),
        **{
            f"blk.{layer}.{name}": shape
            for layer in range(layers)
            for name, shape in {**every, **(finer if layer < layers // 8 else {})}.items()
        },
        "output.weight": ((vocabulary, hidden), "Q5_K"),
    }
    return write_with_holes(folder / "Qwen3-235B-A22B-IQ2_XXS.gguf", "qwen3moe", keys, shapes)
