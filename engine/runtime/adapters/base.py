"""What the adapters have in common."""

from __future__ import annotations

from typing import Any


class Adapter:
    """A `FamilyAdapter` that only has to say how it prepares the model."""

    def model_class(self, config: Any) -> type | None:  # noqa: ARG002 - others look at it
        """The one that the library's auto classes choose."""
        return None

    def prepare(self, model: Any) -> None:
        """Changes the freshly built meta model in place."""
        raise NotImplementedError

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - others look at it
        """The library's, as they are."""
        return library
