"""Encoders that make embeddings, which read texts and write none."""

from __future__ import annotations

from engine.families.gguf import Gguf, Key, Tensors, both

_EPSILON = "attention.layer_norm_epsilon"
_ENDS: Tensors = {
    **both("embeddings.word_embeddings", "token_embd"),
    **both("embeddings.position_embeddings", "position_embd"),
    **both("embeddings.token_type_embeddings", "token_types"),
    **both("embeddings.LayerNorm", "token_embd_norm"),
}


def _layer(place: str, names: dict[str, str]) -> Tensors:
    found: Tensors = {}
    for theirs, ours in names.items():
        found |= both(f"{place}.{theirs}", f"blk.{{n}}.{ours}")
    return found


ROWS = (
    Gguf(
        architecture="bert",
        model_type="bert",
        eps=_EPSILON,
        own_rope=True,  # positions are a table
        config={"layer_norm_eps": _EPSILON},
        constants={"hidden_act": "gelu", "architectures": ["BertModel"]},
        fixed={"attention.causal": False},
        tensors=_ENDS
        | _layer(
            "encoder.layer.{n}",
            {
                "attention.self.query": "attn_q",
                "attention.self.key": "attn_k",
                "attention.self.value": "attn_v",
                "attention.output.dense": "attn_output",
                "attention.output.LayerNorm": "attn_output_norm",
                "intermediate.dense": "ffn_up",
                "output.dense": "ffn_down",
                "output.LayerNorm": "layer_output_norm",
            },
        ),
    ),
    Gguf(
        architecture="nomic-bert",
        model_type="nomic_bert",
        eps=_EPSILON,
        config={"layer_norm_eps": _EPSILON, "max_position_embeddings": Key("context_length")},
        constants={"architectures": ["NomicBertModel"]},
        fixed={"attention.causal": False},
        tensors=_ENDS
        | _layer(
            "layers.{n}",
            {
                "self_attn.q_proj": "attn_q",
                "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v",
                "self_attn.o_proj": "attn_output",
                "post_attention_layernorm": "attn_output_norm",
                "mlp.gate_proj": "ffn_gate",
                "mlp.up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
                "post_mlp_layernorm": "layer_output_norm",
            },
        ),
    ),
)
