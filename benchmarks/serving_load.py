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
from typing import Any
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode

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
    """What a server has done under one load."""

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
    """Each client asks its next question when the one before is answered.

    Raises:
        EngineError: the server did not answer one.
    """
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
    """Questions arrive as a Poisson process of this rate, whether or not those before are answered.

    Raises:
        EngineError: as `closed_loop`.
    """
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
