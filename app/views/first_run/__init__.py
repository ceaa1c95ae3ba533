"""The page for a PC without a model."""

from app.views.first_run.page import FirstRunPage

__all__ = ["FirstRunPage"]
