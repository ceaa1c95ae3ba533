"""Families whose experts do not go through transformers' experts interface, taught to.

An adapter changes the *meta* model (no weights yet) so that its experts look like everyone else's; indexing, bank,
dispatch and verification are then the common code.  What "like everyone else's" means:

- each experts module is a `torch.nn.Module` whose expert weights are direct parameters with the experts in the first
  dimension, and which names them in the attribute `expert_parts: tuple[str, ...]`.  Modules decorated with the
  library's `use_experts_implementation` need no such attribute: they are found by themselves;
- if its experts are the usual MLP, it has the attributes of the library's interface (`num_experts`, `has_gate`,
  `has_bias`, `is_transposed`, `has_post_expert_norm`, `act_fn` or `_apply_gate`), its parts are `gate_up_proj`
  [E, 2I, H] (or `up_proj` [E, I, H]) and `down_proj` [E, H, I] with optional `*_bias`, and its forward ends in
  `engine.experts.dispatch.experts_forward(self, hidden[T, H], top_k_index[T, k], top_k_weights[T, k]) -> [T, H]`.
  Ids at or above `num_experts` contribute nothing.  `engine.experts.dispatch.StandardExperts` is such a module,
  ready to be put in place of the library's;
- otherwise (experts of one matrix, say) its forward takes `bank_layer(self)` from `engine.experts.dispatch` and
  computes with `layer.part(name, expert)`, a view of shape parameter.shape[1:] (two-dimensional parts are stored as
  [out, in] if `is_transposed` is true on the module, that is, transposed from the parameter).

A family's row in `engine.families` names its adapter: a module of this package, and a class in it.

After loading, those parameters are `None` and a `LayerRecords` is bound to each module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from engine.families import family_of


class Adapter:
    """How one family is made to fit."""

    def model_class(self, config: Any) -> type | None:  # noqa: ARG002 - others look at it
        """The model class to build, or `None` for the one that the library's auto classes choose."""
        return None

    def prepare(self, model: Any) -> None:
        """Changes the freshly built meta model in place, under the right default dtype and the meta device."""

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - others look at it
        """The weight conversions to use: the library's (`WeightRenaming`, `WeightConverter`), changed or added to.

        Renamings are all applied, in order; then the first converter that matches.  One with a true attribute
        `experts_below_one_another` has the experts' matrices one below the other in a tall one, [E * rows, ...]: it is
        given them as [E, rows, ...], as if the checkpoint had them so.
        """
        return library


def adapter_for(model_type: str) -> Adapter | None:
    """The adapter of a family, or `None` if it needs none."""
    module, _, name = family_of(model_type).adapter.partition(".")
    return cast(Adapter, getattr(import_module(f"{__name__}.{module}"), name)()) if module else None
