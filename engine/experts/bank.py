"""The experts' weights, outside the model."""

from __future__ import annotations


class ExpertBank:
    """Holds one record per expert."""

    bytes: int = 0

    def close(self) -> None:
        """Frees the records."""
