"""What the window and its HTTP server's process tell each other."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Literal

from engine.common.message_lines import MessageLines

Outcome = Literal["answered", "refused", "left", "failed"]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that is over.

    Attributes:
        began_s: seconds since 1970.
        program: as it names itself.
        path: which interface, such as `/v1/messages`.
        model: its name; empty if the request was refused before that.
        read_tokens, written_tokens: of the prompt, and of the answers.
        status: of HTTP.
        outcome: `left`, if the client went away before the end.
    """

    began_s: float
    program: str
    path: str
    model: str
    read_tokens: int
    written_tokens: int
    seconds: float
    status: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen; the fields are those of `engine.serving.server.Address`."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Listening:
    """It does, at this port; the engine finds it at `link`."""

    port: int
    link: str
    secret: str


@dataclass(frozen=True, slots=True)
class NotListening:
    """It cannot; `message` is one sentence for the user."""

    message: str


def forget_link(address: str) -> None:
    """Removes what is left of a link whose server has ended."""
    if os.name == "posix" and address:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)


FRONT_LINES = MessageLines((Listen, Listening, NotListening, Served))
