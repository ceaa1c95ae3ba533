"""The library's model types that write text, without asking the library, and what we make of each."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection
from dataclasses import dataclass

from engine.common.paths import resources_dir
from engine.families import PACKAGES, family_of
from engine.families.gguf.table import GGUF

_EXPERTS = "experts"
_CLASSES = {
    "kimi_k25": "deepseek_v3",
    "nemotron_h_omni": "nemotron_h",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "glm4_moe",
    "step3p7": "step3p5",
}
"""Types whose layers that write text are another family's."""

ENCODERS = frozenset(
    (
        "albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "embedding_gemma2", "ernie", "eurobert",
        "gemma3_text", "jina_embeddings_v3", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta",
        "xlm-roberta-xl",
    )
)  # fmt: skip
"""The library's kinds of models that read texts and write none, but for those of pictures and proteins."""


@dataclass(frozen=True, slots=True)
class Known:
    """One of them.

    Attributes:
        model_type: as transformers calls it; of a model that also sees, the whole model's.
        has_experts: whether it is a Mixture of Experts.
        refused: why it does not run, completing "it ..."; empty if it does.
        architectures: of the GGUF files that are read, as llama.cpp calls it.
        is_native: whether native kernels compute whole steps of it on a CPU; else the library's layers are used, and
            the kernels for their experts and matrices.
        shares: what several rows share each reading of: all of a layer ("yes"), all but its mixers ("experts"), or
            nothing ("").
        has_draft_head: whether its own layer for drafting is used, where its checkpoint has one.
    """

    model_type: str
    has_experts: bool
    refused: str
    architectures: tuple[str, ...]
    is_native: bool
    shares: str
    has_draft_head: bool


@functools.cache
def known_types() -> dict[str, bool]:
    lines = (resources_dir() / "model_types.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: line.endswith(f" {_EXPERTS}") for line in lines}


def known_families() -> list[Known]:
    """All of them; the parts of one model that write text count once."""
    parts: dict[str, list[str]] = {}
    for name in known_types():
        parts.setdefault(_whole(name), []).append(name)
    return [_known(whole, names) for whole, names in sorted(parts.items())]


def family_of_layers(model_type: str) -> str:
    """The `model_type` of the family that the layers of a whole model's text part are of."""
    return _CLASSES.get(model_type, model_type)


def _known(whole: str, parts: list[str]) -> Known:
    families = [family_of(name) for part in parts for name in (part, family_of_layers(part))]
    takes_turns = any(family.takes_turns for family in families)
    return Known(
        model_type=whole,
        has_experts=any(known_types()[part] for part in parts),
        refused=next((family.refused for family in families if family.refused), ""),
        architectures=tuple(sorted(one for one, rows in GGUF.items() if {row.model_type for row in rows} & {*parts})),
        is_native=any(family.fast_path is not None for family in families),
        shares="yes" if any(family.packs_rows for family in families) else "" if takes_turns else "experts",
        has_draft_head=any(family.draft_head is not None for family in families),
    )


def _whole(model_type: str) -> str:
    """The model that a part belongs to: `qwen3_5_moe` of `qwen3_5_moe_text`."""
    whole = model_type.removesuffix("_text").removesuffix("_thinker")
    return whole if whole == PACKAGES.get(model_type) or whole in known_types() else model_type


def nearest(name: str, names: Collection[str]) -> str:
    """Says of an unknown name which one is most like it: ` (the nearest that it reads is 'llama')`, or nothing."""
    found = difflib.get_close_matches(name, {*names} - {name}, n=1)
    return f" (the nearest that it reads is {found[0]!r})" if found else ""
