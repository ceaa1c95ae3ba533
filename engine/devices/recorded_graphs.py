"""CUDA graphs emulated on the CPU: records torch operators with their tensors, and replays them.

Results go to the same memory as in the capture, as on a card, so code that forgets that numbers and addresses are baked
into a graph fails here too. Reading a number back during a capture is an error, as on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.devices.graphs import CaptureError, Graph

_READS_BACK = frozenset(
    {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive"}
)
"""Operators that would make the host wait for a result or its shape."""
_READS_BACK_IN_PYTHON = frozenset({"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__"})

_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class RecordedGraph:
    """See `engine.devices.graphs.Graph`."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    def replay(self) -> None:
        """See `Graph.replay`."""
        for operator, args, kwargs, outs in self._steps:
            for old, new in zip(outs, _tensors(operator(*args, **kwargs)), strict=True):
                # Views of the memory need no replay.
                if _address(new) != _address(old):
                    old.copy_(new)


class RecordedCapture:
    """See `engine.devices.graphs.Capture`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._graphs: list[RecordedGraph] = []
        self._recorder: _Recorder | None = None
        self._guard: _Guard | None = None

    def begin(self) -> None:
        """See `Capture.begin`."""
        self._recorder, self._guard = _Recorder(), _Guard()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._guard.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Graph:
        """See `Capture.end`.  The work has already run while it was recorded."""
        recorder = self._recorder
        assert recorder is not None
        self.abandon()
        graph = RecordedGraph(recorder.steps)
        self._graphs.append(graph)
        self.nbytes += recorder.nbytes
        return graph

    def abandon(self) -> None:
        """See `Capture.abandon`."""
        recorder, guard = self._recorder, self._guard
        self._recorder = self._guard = None
        if recorder is not None and guard is not None:
            guard.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """See `Capture.close`."""
        self.abandon()
        for graph in self._graphs:
            graph._steps.clear()
        self._graphs, self.nbytes = [], 0


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and records them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.nbytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_BACK:
            raise CaptureError(f"{func.overloadpacket.__name__} reads a number back")
        result = func(*args, **kwargs)
        outs = _tensors(result)
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for out in outs:
            address = _address(out)
            if address not in given and address not in self._known:
                self._known.add(address)
                self.nbytes += out.untyped_storage().nbytes()
        self.steps.append((func, args, kwargs, outs))
        return result


class _Guard(TorchFunctionMode):
    """Catches calls that never reach the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS_BACK_IN_PYTHON:
            raise CaptureError(f"Tensor.{func.__name__} reads a number back")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
