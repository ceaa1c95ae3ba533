"""Cancelling long work: the caller sets a flag, the work raises."""

from __future__ import annotations


class RequestCancelled(Exception):  # noqa: N818 - not an error: the user asked for it
    """The request was cancelled before it was done.  Nothing half-done is left behind."""
