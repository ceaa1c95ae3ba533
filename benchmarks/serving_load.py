"""Clients of a server for the bench: each asks for a continuation, and times its first token and its end.

They use little of the processor that they share with the server: a socket each, and no more than a look at each line.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import parse_json

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


_LONGEST_LINE = 2**20


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens of a prompt, and how many are to follow."""

    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: seconds from its arrival to the first text and to the end, and how many tokens it has."""

    first_s: float
    whole_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    seconds: float
    answers: tuple[Timed, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated, from the first arrival to the last end."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def first_p95_s(self) -> float:
        """The 95th percentile of the time to the first text, by nearest rank."""
        ordered = sorted(answer.first_s for answer in self.answers)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]


def closed_loop(url: str, questions: Sequence[Question], clients: int) -> Load:
    """Each client asks its next question when the one before is answered."""
    left = list(reversed(questions))

    async def client() -> list[Timed]:
        answers = []
        while left:
            question, begun_s = left.pop(), time.perf_counter()
            answers.append(await _ask(url, question, begun_s))
        return answers

    async def all_of_them() -> list[Timed]:
        found = await asyncio.gather(*(client() for _ in range(clients)))
        return [answer for answers in found for answer in answers]

    return _timed(all_of_them())


def open_loop(url: str, questions: Sequence[Question], per_s: float, seed: int) -> Load:
    """Questions arrive as a Poisson process of this rate, whether or not those before are answered."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in questions:
        arrivals.append(at_s)
        at_s += draw.expovariate(per_s)

    async def arrive(question: Question, after_s: float, begun_s: float) -> Timed:
        await asyncio.sleep(max(0.0, begun_s + after_s - time.perf_counter()))
        return await _ask(url, question, begun_s + after_s)

    async def all_of_them() -> list[Timed]:
        begun_s = time.perf_counter()
        pairs = zip(questions, arrivals, strict=True)
        return await asyncio.gather(*(arrive(question, after_s, begun_s) for question, after_s in pairs))

    return _timed(all_of_them())


def _timed(work: Coroutine[Any, Any, list[Timed]]) -> Load:
    begun_s = time.perf_counter()
    answers = asyncio.run(work)
    return Load(time.perf_counter() - begun_s, tuple(answers))


async def _ask(url: str, question: Question, begun_s: float) -> Timed:
    """One question, which has arrived at `begun_s`."""
    place = urlsplit(url)
    body = json.dumps(
        {
            "prompt": list(question.prompt),
            "max_tokens": question.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=_LONGEST_LINE)
        try:
            writer.write(head.encode() + body)
            return await _read(reader, begun_s)
        finally:
            writer.close()
    except (OSError, ValueError) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The server at {url} did not answer: {error}.") from error


async def _read(reader: asyncio.StreamReader, begun_s: float) -> Timed:
    status = (await reader.readline()).decode("latin-1").strip()
    if " 200" not in status:
        said = (await reader.read()).decode("utf-8", "replace").strip().splitlines()
        raise ValueError(f"{status} {said[-1][:200] if said else ''}".strip())
    first_s = None
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        if first_s is None and _says_something(line):
            first_s = time.perf_counter() - begun_s
        elif b'"completion_tokens"' in line:
            usage = json.loads(line[6:]).get("usage")
            if usage:
                whole_s = time.perf_counter() - begun_s
                return Timed(first_s if first_s is not None else whole_s, whole_s, usage["completion_tokens"])
    raise ValueError("the answer broke off")


def _says_something(line: bytes) -> bool:
    choices = json.loads(line[6:]).get("choices")
    return bool(choices and choices[0].get("text"))
