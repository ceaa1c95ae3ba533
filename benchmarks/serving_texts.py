"""What the clients of the serving bench ask: everyday questions with the lengths of the answers, or those of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import parse_json

DEFAULT_TOKENS = 48
_FIELDS = ("prompt", "text", "question", "instruction", "turns")


@dataclass(frozen=True, slots=True)
class Asked:
    """A text, and how many tokens its answer has."""

    text: str
    tokens: int = DEFAULT_TOKENS


_MAIL = (
    "Dear team, the delivery that was promised for Monday arrived on Thursday afternoon. Two of the six boxes were "
    "open, and the list inside named parts that we had not ordered, while the pump housings that we had ordered were "
    "missing. The driver could not say anything about it and asked us to sign. We signed with a remark. Since then I "
    "have called the number on the delivery note four times and was told each time that somebody would call back. "
    "Nobody has. Our customer's line stands still, which costs him several thousand a day, and he has begun to ask "
    "what we intend to do about it. I need to know three things: where the housings are, when they will be here, and "
    "who pays for the express delivery that is now unavoidable. "
)
_CODE = (
    "def load(path):\n    rows = []\n    with open(path) as file:\n        for line in file:\n            parts = "
    "line.split(',')\n            if len(parts) < 3:\n                continue\n            rows.append((parts[0], "
    "float(parts[1]), parts[2].strip()))\n    return rows\n\ndef total(rows, kind):\n    found = 0\n    for name, "
    "amount, what in rows:\n        if what == kind:\n            found = found + amount\n    return found\n"
)
QUESTIONS = (
    Asked("What is the capital of France?", 24),
    Asked("Explain in two sentences why the sky is blue.", 56),
    Asked("Write a polite answer to this complaint:\n\n" + _MAIL, 96),
    Asked("Name three things that one should check before buying a used bicycle.", 64),
    Asked("Translate into German: The meeting has been moved to Friday at ten, in the small room.", 32),
    Asked("What does this program do, and what goes wrong if a line has a comma too many?\n\n" + _CODE, 96),
    Asked("How many minutes are there in a leap year? Show how you work it out.", 72),
    Asked("Summarise this letter in one sentence:\n\n" + _MAIL, 40),
    Asked("Give me a recipe for a soup of lentils, for two people.", 96),
    Asked("Is 91 a prime number?", 32),
    Asked("Write a short poem about a lighthouse in winter.", 80),
    Asked("Rewrite this function so that it reads its file only once:\n\n" + _CODE, 96),
    Asked("What is the difference between a lease and a loan?", 64),
    Asked("List the questions that this letter asks, one on each line:\n\n" + _MAIL, 48),
    Asked("Suggest a name for a small bakery near a railway station.", 24),
    Asked("Why do some metals rust and others not?", 72),
)


def read_questions(path: Path) -> tuple[Asked, ...]:
    """The questions of a file: a JSON object on each line with a `prompt`, and perhaps `tokens`.

    The text may be called text, question or instruction as well, or be the first of `turns`.

    Raises:
        EngineError: `INVALID_REQUEST`: it cannot be read, or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [_question(parse_json(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or "it has a line without a question"
        raise EngineError(ErrorCode.INVALID_REQUEST, f"The questions in {path} cannot be read: {reason}.") from None
    if not found:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"There are no questions in {path}: write one on each line, as JSON."
        )
    return tuple(found)


def _question(entry: Any) -> Asked:
    if isinstance(entry, str):
        return Asked(entry)
    text = next((entry[name] for name in _FIELDS if name in entry), None) if isinstance(entry, dict) else None
    text = text[0] if isinstance(text, list) and text else text
    if not isinstance(text, str):
        raise KeyError(json.dumps(entry)[:40])
    tokens = entry.get("tokens", DEFAULT_TOKENS)
    return Asked(text, tokens if isinstance(tokens, int) and tokens > 0 else DEFAULT_TOKENS)
