"""The Batch page."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient
from app.theme import ThemeController
from app.views.batch.page import BatchPage

__all__ = ["BatchPage", "make_batch_page"]


def make_batch_page(client: EngineClient, theme: ThemeController, window: QWidget) -> BatchPage:
    """The page and the queue of its jobs."""
    return BatchPage(client, BatchJobs(client, window), theme, window)
