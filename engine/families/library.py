"""transformers' release that is pinned, what our code recognises in it without its promise, and how its modules are
taken over.

Nothing here imports the library.  What loading takes from it stands in `engine.runtime.load.library_*`.  A test holds
all of this to the library that is installed, and the release to pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
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
WITH_PICTURES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Classes of models whose text goes through a decoder of another class and a head, as it does without pictures."""
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


def forward_with(module: Any, names: dict[str, Any]) -> MethodType:
    """The `forward` of a module's class for this module: the same code, but for what these names mean in it."""
    code = code_of(module)
    assert code is not None  # what the names mean in it was found
    made = FunctionType(
        code.__code__, {**code.__globals__, **names}, code.__name__, code.__defaults__, code.__closure__
    )
    made.__kwdefaults__ = code.__kwdefaults__
    return MethodType(made, module)


def own_forward(module: Any) -> Any:
    """What computes this module in place of its class; `None` if nothing does."""
    return getattr(module, "__dict__", {}).get("forward")


def take_over(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> int:
    """Has these compute modules in place of their classes from now on; returns how many.

    Raises:
        RuntimeError: something else computes one already, and what is to do so now does not fall back to it, as its
            `in_library`.
    """
    count = 0
    for module, forward in forwards:
        before = own_forward(module)
        if before is not None and getattr(getattr(forward, "__self__", forward), "in_library", None) != before:
            raise RuntimeError(f"{type(module).__name__} is computed by {before!r} already")
        module.forward = forward
        count += 1
    return count


@contextmanager
def replaced(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Has these compute modules within the context, in place of whatever does before and after it."""
    pairs = [(module.__dict__, forward) for module, forward in forwards]
    before = [names.get("forward") for names, _ in pairs]
    try:
        for names, forward in pairs:
            names["forward"] = forward
        yield
    finally:
        for (names, _), own in zip(reversed(pairs), reversed(before), strict=True):
            if own is not None:
                names["forward"] = own
            else:
                names.pop("forward", None)
