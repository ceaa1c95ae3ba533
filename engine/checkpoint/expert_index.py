"""Locates the bytes of every expert: (layer, part) or (layer, expert, part) -> file, key, slice.

The index is built by `engine.runtime.load.library_conversion`, which knows how the library renames keys; it holds no
tensors and imports nothing heavy, so the planner and disk tier can use it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.checkpoint.headers import TensorEntry


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """A checkpoint tensor that is a source of a part of an expert.

    Attributes:
        entry: the tensor.
        pattern: the library's source pattern that matched its name (the name itself if it is only renamed).
        row: the expert's row in the tensor's first dimension, if the tensor holds all experts.
    """

    entry: TensorEntry
    pattern: str
    row: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.entry.nbytes if self.row is None else self.entry.nbytes // self.entry.shape[0]


@dataclass(slots=True)
class PartSources:
    """Sources of one part (`gate_up_proj`, say) of all experts of one layer.

    Attributes:
        target: name of the parameter that the library would make of them.
        by_pattern: the source tensors, in the library's order, by the pattern that matched their names.
        experts: number of experts.
    """

    target: str
    experts: int
    by_pattern: dict[str, list[TensorEntry]] = field(default_factory=dict)

    @property
    def is_per_expert(self) -> bool:
        """Whether the checkpoint has one tensor per expert, in order."""
        return all(len(entries) == self.experts for entries in self.by_pattern.values()) and not self.is_fused

    @property
    def is_fused(self) -> bool:
        """Whether every source tensor holds all experts, one per row of its first dimension."""
        return all(
            len(entries) == 1 and len(entries[0].shape) > 1 and entries[0].shape[0] == self.experts
            for entries in self.by_pattern.values()
        )

    def of_expert(self, expert: int) -> list[ExpertSource]:
        """The sources of one expert; only if `is_per_expert` or `is_fused`."""
        fused = self.is_fused
        return [
            ExpertSource(entries[0 if fused else expert], pattern, expert if fused else None)
            for pattern, entries in self.by_pattern.items()
        ]

    def entries(self) -> Iterator[TensorEntry]:
        """Every source tensor."""
        for entries in self.by_pattern.values():
            yield from entries

    @property
    def nbytes(self) -> int:
        """Bytes to read for all experts."""
        return sum(entry.nbytes for entry in self.entries())


@dataclass(slots=True)
class ExpertIndex:
    """Sources of all experts: module name (`model.layers.0.mlp.experts`) -> part name -> sources."""

    modules: dict[str, dict[str, PartSources]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of expert weights in the checkpoint."""
        return sum(part.nbytes for parts in self.modules.values() for part in parts.values())
