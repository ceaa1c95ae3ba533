"""Two runs of a model whose routers may waver: the second chooses the first one's experts, and says how near it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Routes = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each experts module in turn: the experts of each token, [T, k], and their shares."""


@contextmanager
def routes_of(model: Any) -> Iterator[Routes]:
    """Collects what the routers of a model choose."""
    routes: Routes = []

    def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, shares = _arguments(args, kwargs)
        routes.append((index.clone(), shares.clone()))

    with _hooked(model, record):
        yield routes


@contextmanager
def choosing(model: Any, routes: Routes) -> Iterator[list[float]]:
    """Lets tokens go to the experts of these routes, with their shares, where the model's own routers choose others.

    Yields:
        For each such token how near the choice was: the difference of the logits between which the router chose, as a
        share of the difference between its highest and its lowest.
    """
    left, ties, logits = iter(routes), list[float](), list[torch.Tensor]()

    def replace(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, index, shares = _arguments(args, kwargs)
        wanted, their_shares = (each.to(own.dtype) for each, own in zip(next(left), (index, shares), strict=True))
        differs = (index.sort(-1).values != wanted.sort(-1).values).any(-1)
        of_router = logits.pop().reshape(len(index), -1).float().sort(-1, descending=True).values
        gaps = of_router[:, index.shape[1] - 1] - of_router[:, index.shape[1]]
        ties.extend((gaps / (of_router[:, 0] - of_router[:, -1]))[differs].tolist())
        index = torch.where(differs[:, None], wanted, index)
        return (hidden, index, torch.where(differs[:, None], their_shares, shares)), {}

    def note(_module: Any, _args: Any, output: Any) -> None:
        logits.append(output[0] if isinstance(output, tuple) else output)

    routers = [
        getattr(module, "gate", None) or module.router for module in model.modules() if hasattr(module, "experts")
    ]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        with _hooked(model, replace):
            yield ties
    finally:
        for hook in hooks:
            hook.remove()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    names = ("hidden_states", "top_k_index", "top_k_weights")
    return tuple(args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names))  # type: ignore[return-value]


@contextmanager
def _hooked(model: Any, hook: Any) -> Iterator[None]:
    hooks = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
