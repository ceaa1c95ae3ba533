"""What the window and its HTTP server's process tell each other: the first three messages come from the window."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Literal

from engine.common.config import EngineConfig
from engine.common.json_fields import MessageLines

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
class Rules:
    """What the window has, and how models are run that programs ask for by name; said again whenever it changes.

    Attributes:
        window: the model that the window has loaded or is loading, by its path; empty if it has none.
        is_loading: it is not there yet.
        config: of the others; its model is not used.
        idle_s: they are freed once nobody has asked for so long; None keeps them.
        wakes: the window has a model that it put aside, and loads it again when a program asks for it.
        gives_way: its model makes room for one that does not fit beside it.
    """

    window: str
    is_loading: bool
    config: EngineConfig
    idle_s: float | None = None
    wakes: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class FreeOthers:
    """The window needs the memory: the model beside its own is freed, unless it is answering."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The model beside the window's: its name, empty if there is none, and whether it is being loaded."""

    model: str
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class Wants:
    """A program asks for the window's model, which was put aside, or for the room that it takes."""

    what: Literal["model", "room"]


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


FRONT_LINES = MessageLines((Listen, Rules, FreeOthers, Listening, NotListening, Served, Beside, Wants))
