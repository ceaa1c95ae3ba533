"""Several cards of torch's where there is none: the CPU computes, and no operator may be given tensors of two cards."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CARDS = [torch.device("cuda", index) for index in range(3)]


class MixedCardsError(Exception):
    """An operator was given tensors of two cards."""


class CardsApart(TorchFunctionMode):
    """Within it, tensors say that they are on the cards that they were made for, and stay apart.

    Attributes:
        copies: bytes that went from one card to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[int] = []
        self._card_of: dict[int, tuple[torch.device, Any]] = {}

    def put(self, tensor: torch.Tensor, card: torch.device) -> torch.Tensor:
        """Says that a tensor is on this card."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():  # all that is empty has one address
            return tensor
        self._card_of[storage.data_ptr()] = card, storage  # held, so that no other memory gets its address
        return tensor

    def card_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The card that a tensor was put on."""
        return self._card_of.get(tensor.untyped_storage().data_ptr(), (None, None))[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.card_of(args[0]) or func(*args)
        name = getattr(func, "__name__", "")
        if name == "to":
            return self._moved(args, kwargs)
        there = kwargs.get("device")
        there = torch.device(there) if there is not None else None
        if there is not None and there.type == "cuda":
            kwargs["device"] = "cpu"
            return self._placed(func(*args, **kwargs), there)
        if name == "copy_" and not isinstance(func, torch._ops.OpOverload):
            source, target = self.card_of(args[1]), self.card_of(args[0])
            if source != target:
                self.copies.append(args[1].nbytes)
            return func(*args, **kwargs)
        cards = {card for tensor in tensors if tensor.dim() and (card := self.card_of(tensor)) is not None}
        if len(cards) > 1:
            raise MixedCardsError(f"{name} of tensors on {sorted(map(str, cards))}")
        result = func(*args, **kwargs)
        return self._placed(result, next(iter(cards))) if cards and there is None else result

    def _moved(self, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *given = args
        named = kwargs.pop("device", None)
        there = next((item for item in (*given, named) if isinstance(item, torch.device)), None)
        if there is None or there.type != "cuda":
            return self._placed(torch.Tensor.to(tensor, *given, **kwargs), self.card_of(tensor))
        given = [item for item in given if item is not there]
        here = self.card_of(tensor)
        if here == there:
            return self._placed(torch.Tensor.to(tensor, *given, **kwargs) if given else tensor, there)
        self.copies.append(tensor.nbytes)
        return self._placed(tensor.clone(), there)

    def _placed(self, result: Any, card: torch.device | None) -> Any:
        if card is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and self.card_of(leaf) is None:
                    self.put(leaf, card)
        return result
