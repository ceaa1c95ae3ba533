"""The bank: the weights of all experts, as records outside the model.  This one keeps all of them in one memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from engine.devices.host_memory import HostMemory
from engine.experts.record import allocate_records
from engine.formats.layouts import RecordLayout
from engine.kernels.interface import LayerRecords


class ExpertBank:
    """All experts of a model, by the name of their module.

    Args:
        device: holds the records.
        host_memory: allocates the records if a device is going to copy from them; it may pin them.
        elsewhere: modules whose records are on further devices of the same kind.
    """

    def __init__(
        self,
        device: torch.device,
        host_memory: HostMemory | None = None,
        elsewhere: Mapping[str, torch.device] | None = None,
    ) -> None:
        self.device = device
        self._elsewhere = elsewhere or {}
        self.layers: dict[str, LayerRecords] = {}
        self._host_memory = host_memory

    def add_layer(
        self, name: str, num_experts: int, layout: RecordLayout, records: torch.Tensor | None = None
    ) -> LayerRecords:
        """Allocates the records of one experts module, which the caller fills.

        Args:
            records: [E, nbytes], page-aligned, that are there or on their way; only if it `takes_memory`.
        """
        if records is None and self._host_memory is None:
            records = allocate_records(num_experts, layout, self._elsewhere.get(name, self.device))
        elif records is None and self._host_memory is not None:
            memory = self._host_memory.allocate(num_experts * layout.nbytes, unit=layout.nbytes)
            records = memory.view(num_experts, layout.nbytes)
        assert records is not None
        layer = self.layers[name] = LayerRecords(name, layout, records)
        return layer

    @staticmethod
    @contextmanager
    def filling(layer: LayerRecords) -> Iterator[torch.Tensor]:
        """Memory in RAM for the records, which are as the caller leaves it from then on."""
        here = layer.device.type == "cpu"
        records = layer.records
        if not here:
            records = allocate_records(layer.num_experts, layer.layout, torch.device("cpu"))
        yield records
        if not here:
            layer.records.copy_(records)

    @property
    def takes_memory(self) -> bool:
        """Whether records in plain memory are as good as those that it would allocate."""
        return self._host_memory is None and self.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def close(self) -> None:
        """Frees the records.  A model still bound to them raises an error when used."""
        for layer in self.layers.values():
            records = layer.records
            layer.forget()
            if self._host_memory is not None:
                self._host_memory.release(records)
        self.layers.clear()
