"""The decoder layers of a library model, one at a time: what the model passes to them is recorded, then replayed.

The model's own forward runs with its layers replaced by stubs that note their arguments; then the real layers are
called with these, in whatever order and pieces suit; then the forward runs again, its last stub handing over what the
real layers made, so that the library's own final norm and head follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class _Enough(Exception):  # noqa: N818 - no error: the last layer's arguments are known
    pass


@dataclass
class Recording:
    """What the model passed to each of its layers beside hidden states, and the first hidden states [1, T, H]."""

    hidden: torch.Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]


class DecoderLayers:
    """The layers of a causal language model.

    Raises:
        LookupError: they cannot be found.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = _find(model)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Any:
        return self._layers[index]

    def record(self, ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """The arguments of all layers for tokens [1, T] at positions [1, T]."""
        recording = Recording(torch.empty(0), [])

        def stub(index: int) -> Callable[..., Any]:
            def note(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if index == 0:
                    recording.hidden = hidden_states
                recording.calls.append((args, kwargs))
                if index == len(self._layers) - 1:
                    raise _Enough
                return hidden_states

            return note

        try:
            with self._replaced(stub):
                self._forward(ids, positions)
        except _Enough:
            return recording
        raise LookupError("the model does not call its layers one after the other")

    def run(self, index: int, hidden: torch.Tensor, recording: Recording) -> torch.Tensor:
        """What a layer makes of hidden states [1, T, H]."""
        args, kwargs = recording.calls[index]
        out = self._layers[index](hidden, *args, **kwargs)
        result = out[0] if isinstance(out, tuple) else out
        assert isinstance(result, torch.Tensor)
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, R, H] behind the last layer -> [R, V]."""
        rows = hidden.shape[1]
        ids = torch.zeros(1, rows, dtype=torch.long, device=hidden.device)

        def stub(index: int) -> Callable[..., Any]:
            is_last = index == len(self._layers) - 1
            return lambda hidden_states, *args, **kwargs: hidden if is_last else hidden_states  # noqa: ARG005

        with self._replaced(stub):
            out = self._forward(ids, torch.zeros_like(ids))
        logits = out.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self._model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)

    @contextmanager
    def _replaced(self, stub: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        own = [layer.__dict__.get("forward") for layer in self._layers]
        try:
            for index, layer in enumerate(self._layers):
                layer.forward = stub(index)
            yield
        finally:
            for layer, forward in zip(self._layers, own, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward


def _find(model: Any) -> list[Any]:
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and count:
            return list(module)
    raise LookupError("the model's layers were not found")
