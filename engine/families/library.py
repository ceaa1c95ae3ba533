"""transformers' release that is pinned, and what our code recognises in it without its promise.

Only names: nothing here imports the library.  What loading takes from it stands in `engine.runtime.load.library_*`.  A
test holds all of this to the library that is installed, and the release to pyproject.toml.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

RELEASE = "5.24"
EXPERTS_INTERFACE = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
"""Attributes of modules whose experts any registered function may compute."""
CHOSEN_EXPERTS = "_experts_implementation"
"""Where a configuration holds the name of that function."""
ROUTER_CORRECTION = "e_score_correction_bias"
"""What routers, or blocks with one, call what is added to the scores for the choice of experts only."""
BLOCK_INDEX = "MiniMaxM3VLSparseCacheLayer"
"""The class of cache layers with keys that blocks of tokens are chosen by."""
COMPRESSING = ("DeepseekV4HCACache", "DeepseekV4CSACache")
"""The classes of those with a sliding window, and sums of what lies before it."""
_GATE, _USUAL_GATE = "_apply_gate", "_default_apply_gate"
_RENAMES = "transformers.utils.deprecation"
"""The module with the wrapper that takes an argument by its former name, too."""


def gate_of(module: Any) -> Any:
    """The function of an experts module that applies gates, bound to no module; `None` if there is none."""
    return getattr(type(module), _GATE, None)


def gates_as_usual(module: Any) -> bool:
    """Whether it is the library's own: `act_fn(gate) * up`, a half of the first matrix each."""
    return getattr(gate_of(module), "__name__", "") == _USUAL_GATE


def code_of(module: Any) -> FunctionType | None:
    """The library's `forward` of a module's class beneath what renames arguments; `None` if it is wrapped more."""
    forward = type(module).forward
    if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == _RENAMES:
        forward = forward.__wrapped__  # type: ignore[attr-defined]  # functools.wraps
    return forward if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None
