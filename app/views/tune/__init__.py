"""The Tune page."""

from app.views.tune.page import TunePage

__all__ = ["TunePage"]
