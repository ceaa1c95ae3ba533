"""The layer behind a model's last that guesses the token after the next, where its checkpoint has one.

It is made of the model's own classes, so its attention and its experts are computed like those of any other layer.
What it says decides nothing: a guess is tried by the model itself (see `engine.runtime.decode.speculation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.experts.dispatch import DRAFT_HEAD
from engine.families import family_of
from engine.families.family import DraftHead as DraftHeadNames

_FIRST_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""Values of a configuration with which layer 0 attends to everything and has experts."""


class DraftHead(torch.nn.Module):
    """One more decoder layer, and what joins it to the model.

    Args:
        decoder: whose last hidden states it goes on from, and whose classes it uses.
        config: of the decoder.
    """

    def __init__(self, decoder: Any, config: Any) -> None:
        super().__init__()
        own = deepcopy(config)
        for name, value in _FIRST_LAYER.items():
            if hasattr(own, name):
                setattr(own, name, value)

        def norm() -> Any:
            return type(decoder.norm)(own.hidden_size, eps=own.rms_norm_eps)

        self.config = own
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * own.hidden_size, own.hidden_size, bias=False)
        self.block = type(decoder.layers[-1])(own, 0)
        self.norm = norm()
        self.heard: list[torch.Tensor] | None = None
        """The decoder's last hidden states [1, q, H] since it was set to an empty list; `None`: nobody listens."""
        decoder.norm.register_forward_hook(self._hear)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Any, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """What the model's head turns into logits of the token after the next [1, q, H].

        Args:
            embedded: the next tokens [1, q, H].
            hidden: the decoder's hidden states at the tokens before them [1, q, H].
            angles, positions: of the next tokens.
            cache: of this layer; it may hold other tokens before these.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        tokens, held = joined.shape[1], cache.get_seq_length()
        mask = None
        if tokens > 1:
            mask = torch.ones(tokens, held + tokens, dtype=torch.bool, device=joined.device).tril(held)[None, None]
        out = self.block(joined, attention_mask=mask, position_ids=positions, cache=cache, position_embeddings=angles)
        normed: torch.Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return normed

    def all_heard(self) -> torch.Tensor | None:
        """What was heard, in one piece; nobody listens any more."""
        pieces, self.heard = self.heard, None
        return torch.cat(pieces, dim=1) if pieces else None

    def _hear(self, _module: Any, _args: Any, output: torch.Tensor) -> None:
        if self.heard is not None:
            self.heard.append(output)


def draft_head_of(model: Any) -> DraftHead | None:
    """The one that a model has."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found = getattr(decoder, DRAFT_HEAD, None)
    return found if isinstance(found, DraftHead) else None


def add_draft_head(
    model: Any, tensors: Mapping[str, TensorEntry], made: Callable[[Callable[[], DraftHead]], DraftHead]
) -> dict[str, TensorEntry]:
    """Gives a skeleton the draft head that its checkpoint has, if any.

    Args:
        tensors: the checkpoint's, by name.
        made: calls what builds modules, the way the skeleton was built.

    Returns:
        The tensors under the names that they have in the model.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    config = model.config.get_text_config(decoder=True)
    names = family_of(config.model_type).draft_head
    if names is None or decoder is None or not hasattr(decoder, "norm"):
        return dict(tensors)
    found = _renamed(names, names.prefix.format(layers=config.num_hidden_layers), tensors)
    if not found:
        return dict(tensors)
    head = made(lambda: DraftHead(decoder, config))
    experts = tuple(f"{name}." for name, module in head.named_modules() if hasattr(module, "has_gate"))
    if {name for name in head.state_dict() if not name.startswith(experts)} - set(found.values()):
        return dict(tensors)  # not all of it is there, or it is another kind
    decoder.add_module(DRAFT_HEAD, head)
    inside = next(name for name, module in model.named_modules() if module is head)
    return {f"{inside}.{found[key]}" if key in found else key: entry for key, entry in tensors.items()}


def _renamed(names: DraftHeadNames, prefix: str, tensors: Iterable[str]) -> dict[str, str]:
    """The checkpoint's names of a head's tensors -> those in `DraftHead`."""
    own = {names.embedding_norm: "enorm", names.hidden_norm: "hnorm", names.projection: "eh_proj", names.norm: "norm"}
    found = {}
    for key in tensors:
        if not key.startswith(prefix):
            continue
        rest = key.removeprefix(prefix)
        module, _, kind = rest.rpartition(".")
        if module in own:
            found[key] = f"{own[module]}.{kind}"
        elif module not in names.shared and rest.startswith(names.layer):
            found[key] = f"block.{rest.removeprefix(names.layer)}"
    return found
