"""Nemotron 3.5 Transcribe."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(refused="writes down speech, and Switchyard gives models text only")
