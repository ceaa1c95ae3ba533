"""The Models page: what is on this PC, what suits it, and what the hub has."""

from app.views.models.page import ModelsPage

__all__ = ["ModelsPage"]
