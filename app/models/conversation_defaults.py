"""Sampling presets, and the default title of a conversation."""

from __future__ import annotations

from enum import Enum

from engine.common.config import SamplingParams

MAX_TITLE = 60


class Preset(Enum):
    """Named sampling settings, all with the mild repetition penalty that keeps a small model from looping."""

    PRECISE = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=1024)
    BALANCED = SamplingParams(temperature=0.4, top_p=0.95, repetition_penalty=1.1, max_tokens=1024)
    CREATIVE = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_tokens=1024)


DEFAULT_PRESET = Preset.BALANCED


def preset_of(sampling: SamplingParams | None) -> Preset | None:
    """The preset with these settings; None if they are the user's own."""
    if sampling is None:
        return DEFAULT_PRESET
    return next((preset for preset in Preset if preset.value == sampling), None)


def title_from(text: str) -> str:
    """A short title from a first message: its first line that has words, cut between words."""
    line = next((line for line in text.splitlines() if any(c.isalnum() for c in line)), text)
    words = line.strip().lstrip("#>*-` ").split()
    title = ""
    for word in words:
        if title and len(title) + 1 + len(word) > MAX_TITLE:
            return title.rstrip(",;:–-") + "…"
        title = f"{title} {word}".strip()
    return title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"
