"""What can be said of a family of models beyond what its config.json and the library say: data, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

READS_PICTURES = "reads text out of pictures, and Switchyard gives models text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNumbers:
    """What a configuration does not say of the cache.

    Attributes:
        attentions: attention blocks of each layer.
        keys_are_values: one head, whose keys are its values too.
        window_heads: how many times as many key-value heads as others a layer with a window has.
    """

    attentions: int = 1
    keys_are_values: bool = False
    window_heads: int = 1


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Experts with a gate of their own, `_apply_gate`, that clamps gate and up.

    Attributes:
        pairing: where gate and up lie in the first matrix: one half each, or rows by turns.
        limit: attribute of the experts module: gate is clamped to at most this, up to +-this.
        alpha: attribute with the steepness of (up + 1) * gate * sigmoid(alpha * gate); empty for silu(gate) * up.
    """

    pairing: Literal["halves", "alternating"]
    limit: str
    alpha: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a sparse block chooses experts.  Strings name attributes of the library's router; empty ones are not there.

    Attributes:
        scoring: what logits go through.
        bias: of the logits.
        correction: what is added to scores for the choice alone.
        groups: how many groups of experts there are, and how many of them are chosen first.
        groups_if: attribute and value that says that `groups` count; `None`: they always do.
        bf16_logits: whether the logits are rounded before the choice.
        normalise: whether the chosen experts' shares are made to sum to 1, or the attribute that says so.
        bf16_shares: whether shares are rounded.
        scale: what the shares are multiplied by.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: str = ""
    correction: str = ""
    groups: tuple[str, str] | None = None
    groups_if: tuple[str, str] | None = None
    bf16_logits: bool = True
    normalise: bool | str = False
    bf16_shares: bool = False
    scale: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """The library's classes whose mathematics the native kernels compute, a layer's single token in two calls.

    Attributes:
        model: an embedding, the layers, a norm and a head, one after the other, and one kind of angles for all layers.
        layer: two norms, attention and an MLP, each added to its input.
        attention: of each layer; grouped-query attention, unless `is_latent` (multi-head latent attention, DeepSeek-AI
            2024, "DeepSeek-V2", section 2.1).
        block: the sparse block that stands for the MLP; empty for dense families.
        router: of that block.
        angles: how the model gives them to its layers: cosines and sines, each twice, for either half of a head; each
            once; or complex numbers that turn pairs of neighbours.
        norms_all_heads: whether queries' and keys' norms are of all heads together (OLMoE, Muennighoff et al. 2024,
            section 2).
        norms_round_once: whether a norm multiplies by its weight before it rounds, not after.
    """

    model: str
    layer: str
    attention: str
    block: str = ""
    router: Router = Router()
    is_latent: bool = False
    angles: Literal["twice", "once", "complex"] = "twice"
    norms_all_heads: bool = False
    norms_round_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family; the defaults are what holds for those that need nothing.

    Attributes:
        refused: why its models are not run, after "it"; empty if they are.
        adapter: module of `engine.runtime.adapters`, for experts that do not go through the library's interface.
        experts_per_token: where the configuration does not say.
        kv: what its configuration does not say of the cache.
        packs_rows: whether the layers take the tokens of many rows as one sequence: they compute each token by itself
            but for attention, which goes through the library's attention interface with nothing hidden in a mask but
            what a window says.  Others keep a state besides (Mamba, delta rules, convolutions), choose tokens by an
            index, attend in chunks, or pass things on from layer to layer.  A test holds each to the library's answers.
        continues: whether a forward over several tokens is exact on top of an earlier state; if not, a prompt is read
            in one piece.
        rotates_again: whether the library computes the whole context again once an answer crosses LongRoPE's boundary.
        exact_tokens: configuration -> the longest context within which an answer does not depend on which of its
            tokens are computed together, for a reason of this family alone; `None` if there is no such limit.
        gate: of its experts, if that is their own.
        fast_path: for single tokens, if the native kernels know one.
    """

    refused: str = ""
    adapter: str = ""
    experts_per_token: int = 0
    kv: KvNumbers = KvNumbers()
    packs_rows: bool = False
    continues: bool = True
    rotates_again: bool = False
    exact_tokens: Callable[[Mapping[str, Any]], int | None] | None = None
    gate: ClampedGate | None = None
    fast_path: FastPath | None = None
