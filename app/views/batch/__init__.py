"""The Batch page."""

from app.views.batch.page import BatchPage

__all__ = ["BatchPage"]
