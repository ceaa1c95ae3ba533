"""The default title of a conversation."""

from __future__ import annotations

MAX_TITLE = 60


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
