"""How long work stops: whoever waits for it asks, the work raises."""

from __future__ import annotations


class RequestCancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The request was cancelled before it was done.  Nothing half-done is left behind."""
