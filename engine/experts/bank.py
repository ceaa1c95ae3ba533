"""The bank: the weights of all experts, as records outside the model.  This one keeps all of them in one memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine.devices.host_memory import HostMemory
from engine.experts.record import RecordLayout, allocate_records


@dataclass
class BankLayer:
    """The records of one experts module.

    Attributes:
        name: the module's name in the model.
        records: [E, record bytes], uint8.
        stacked: part name -> view [E, *shape] of the records.
        rows: part name -> one view per expert, made in advance because indexing a tensor takes microseconds.
    """

    name: str
    layout: RecordLayout
    records: torch.Tensor
    stacked: dict[str, torch.Tensor] = field(init=False)
    rows: dict[str, tuple[torch.Tensor, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.stacked = {part.name: self.layout.stacked_view(self.records, part) for part in self.layout.parts}
        self.rows = {name: tensor.unbind(0) for name, tensor in self.stacked.items()}

    @property
    def pieces(self) -> tuple[torch.Tensor]:
        """All records, as one tensor."""
        return (self.records,)

    @property
    def nbytes(self) -> int:
        """Bytes of all records, padding included."""
        return self.records.nbytes

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self.records.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that holds the records and computes the experts."""
        return self.records.device

    @contextmanager
    def filling(self) -> Iterator[torch.Tensor]:
        """Memory in RAM for the records, which are as the caller leaves it from then on."""
        here = self.device.type == "cpu"
        records = self.records if here else allocate_records(self.num_experts, self.layout, torch.device("cpu"))
        yield records
        if not here:
            self.records.copy_(records)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """One part of one expert, [out, in] (or [out] for a bias): a view, not a copy."""
        return self.rows[name][expert]


@dataclass
class LayerInPlace(BankLayer):
    """The same where each part lies by itself, in a mapped file or beside it.

    Attributes:
        parts: part name -> one view per expert; `records` are without bytes, and nothing is stacked.
    """

    parts: dict[str, list[torch.Tensor]] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.stacked = {}
        self.rows = {name: tuple(experts) for name, experts in self.parts.items()}

    @property
    def pieces(self) -> tuple[torch.Tensor]:
        """A part of the first expert, which the others are found from."""
        return (next(iter(self.rows.values()))[0],)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(experts) * experts[0].nbytes for experts in self.rows.values())


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
        self.layers: dict[str, BankLayer] = {}
        self._host_memory = host_memory

    def add_layer(
        self, name: str, num_experts: int, layout: RecordLayout, records: torch.Tensor | None = None
    ) -> BankLayer:
        """Allocates the records of one experts module, which the caller fills.

        Args:
            records: [E, nbytes], page-aligned, that are there or on their way; only if it `takes_memory`.

        Raises:
            MemoryError: the host does not have enough memory.
        """
        if records is None and self._host_memory is None:
            records = allocate_records(num_experts, layout, self._elsewhere.get(name, self.device))
        elif records is None and self._host_memory is not None:
            memory = self._host_memory.allocate(num_experts * layout.nbytes, unit=layout.nbytes)
            records = memory.view(num_experts, layout.nbytes)
        assert records is not None
        layer = self.layers[name] = BankLayer(name, layout, records)
        return layer

    @property
    def takes_memory(self) -> bool:
        """Whether records in plain memory are as good as those that it would allocate."""
        return self._host_memory is None and self.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of all records, padding included."""
        return sum(layer.nbytes for layer in self.layers.values())

    def close(self) -> None:
        """Frees the records.  A model still bound to them raises an error when used."""
        for layer in self.layers.values():
            layer.stacked.clear()
            layer.rows.clear()
            if self._host_memory is not None:
                self._host_memory.release(layer.records)
            layer.records = torch.empty(0, layer.layout.nbytes, dtype=torch.uint8)
        self.layers.clear()
