"""What the engine says, in the window's language.

The engine speaks English, with what is special to a case put into its sentences. Those that people meet most are known
here by their form: what was put in is found again, and put into the translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from PySide6.QtCore import QT_TRANSLATE_NOOP, QCoreApplication, QLocale

translate = QCoreApplication.translate

_NOTED = (
    # What limits the speed, and what would help.
    QT_TRANSLATE_NOOP("Engine", "The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s."),
    QT_TRANSLATE_NOOP("Engine", "The CPU limits the speed."),
    QT_TRANSLATE_NOOP(
        "Engine", "Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s."
    ),
    QT_TRANSLATE_NOOP("Engine", "The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s."),
    QT_TRANSLATE_NOOP(
        "Engine",
        "CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than "
        "reading them from RAM.",
    ),
    QT_TRANSLATE_NOOP(
        "Engine", "Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token."
    ),
    QT_TRANSLATE_NOOP("Engine", "Layers are read for each token: rows of a file share that, and gain most."),
    QT_TRANSLATE_NOOP(
        "Engine", "No single change of memory, link, disk or precision would make a noticeable difference."
    ),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} would help most: {1} tokens/s, {2} times as fast with the prompt included."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} would help most: {1} tokens/s, about {2} times as fast."),
    QT_TRANSLATE_NOOP("Engine", "{0} GB of RAM"),
    QT_TRANSLATE_NOOP("Engine", "A card with {0} GB"),
    QT_TRANSLATE_NOOP("Engine", "A link to the card that is twice as fast"),
    QT_TRANSLATE_NOOP("Engine", "A disk that is twice as fast"),
    QT_TRANSLATE_NOOP("Engine", "RAM that is twice as fast"),
    QT_TRANSLATE_NOOP("Engine", "All {0} threads"),
    QT_TRANSLATE_NOOP("Engine", "expert weights"),
    QT_TRANSLATE_NOOP("Engine", "as stored ({0}-bit)"),
    QT_TRANSLATE_NOOP("Engine", "as stored ({0}-bit and {1}-bit)"),
    QT_TRANSLATE_NOOP("Engine", "as stored ({0}-bit, {1}-bit and {2}-bit)"),
    QT_TRANSLATE_NOOP("Engine", "Switchyard mixed"),
    QT_TRANSLATE_NOOP("Engine", "Switchyard mixed, static"),
    QT_TRANSLATE_NOOP("Engine", "Switchyard mixed, predicted"),
    QT_TRANSLATE_NOOP("Engine", "Switchyard, misses on the CPU"),
    QT_TRANSLATE_NOOP("Engine", "CPU only"),
    QT_TRANSLATE_NOOP("Engine", "CPU experts"),
    QT_TRANSLATE_NOOP("Engine", "on-demand"),
    QT_TRANSLATE_NOOP("Engine", "whole-layer prefetch"),
    QT_TRANSLATE_NOOP("Engine", "the other weights and the KV cache"),
    QT_TRANSLATE_NOOP("Engine", "the weights and the KV cache"),
    QT_TRANSLATE_NOOP("Engine", "From now on: {0}, {1} tokens/s."),
    QT_TRANSLATE_NOOP("Engine", "Before: {0} tokens/s, so {1} times."),
    QT_TRANSLATE_NOOP("Engine", "Before, it could not run."),
    QT_TRANSLATE_NOOP("Engine", "The settings stay the same: {0} tokens/s, and nothing else is better."),
    # Tools and their servers.
    QT_TRANSLATE_NOOP("Engine", "{0} did not answer within {1} seconds."),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} did not speak MCP within {1} seconds of its start: check its command or address."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} ended in the middle of it."),
    QT_TRANSLATE_NOOP("Engine", "{0} sent more than {1} MB at once, and was stopped."),
    QT_TRANSLATE_NOOP("Engine", "{0} could not be started ({1}): check its command."),
    QT_TRANSLATE_NOOP("Engine", "{0} ended, or does not speak MCP."),
    QT_TRANSLATE_NOOP("Engine", "{0} ended, or does not speak MCP. It wrote: {1}"),
    QT_TRANSLATE_NOOP("Engine", "Give the server a name."),
    QT_TRANSLATE_NOOP("Engine", "{0} needs either a command or an address: enter one of them."),
    QT_TRANSLATE_NOOP("Engine", "This is not JSON ({0}): paste the whole block."),
    QT_TRANSLATE_NOOP("Engine", "The user did not allow this call."),
    QT_TRANSLATE_NOOP("Engine", "There is no tool of this name."),
    QT_TRANSLATE_NOOP("Engine", "The expression divides by zero."),
    QT_TRANSLATE_NOOP("Engine", "No folder is attached to this chat: attach one first."),
    QT_TRANSLATE_NOOP("Engine", "{0} was removed or is off."),
    QT_TRANSLATE_NOOP("Engine", "The process with the tools ended."),
    QT_TRANSLATE_NOOP("Engine", "The process with the tools could not be started."),
    QT_TRANSLATE_NOOP("Engine", "The tools did not respond, and were stopped."),
    QT_TRANSLATE_NOOP("Engine", "The call was stopped."),
    QT_TRANSLATE_NOOP("Engine", "The arguments are no JSON object."),
    QT_TRANSLATE_NOOP("Engine", "{0} was called with the same arguments {1} times: no more calls, answer now."),
    QT_TRANSLATE_NOOP("Engine", "Tools were called {0} times in a row: no more calls, answer now."),
    QT_TRANSLATE_NOOP("Engine", "More than {0} tools were called at once: no more calls, answer now."),
    QT_TRANSLATE_NOOP("Engine", "{0} has no command and no address: enter one of them."),
    QT_TRANSLATE_NOOP("Engine", "The address of {0} does not begin with http:// or https://: correct it."),
    QT_TRANSLATE_NOOP("Engine", "The arguments of {0} are not a list of texts: correct them."),
    QT_TRANSLATE_NOOP("Engine", "The command of {0} has a character that no command can have: correct it."),
    QT_TRANSLATE_NOOP("Engine", "The variables or headers of {0} are not names with texts: correct them."),
    QT_TRANSLATE_NOOP("Engine", "No servers are in it: it needs \"mcpServers\" with a name for each."),
    QT_TRANSLATE_NOOP("Engine", "{0} servers are too many: up to {1} can be added."),
    QT_TRANSLATE_NOOP("Engine", "{0} needs its {1} again, which was kept for one run only: edit the server."),
    QT_TRANSLATE_NOOP("Engine", "{0} needs {1} in the environment, where it is not set: set it."),
    QT_TRANSLATE_NOOP("Engine", "No documents are attached to this chat."),
    QT_TRANSLATE_NOOP("Engine", "There is no tool named {0}."),
    QT_TRANSLATE_NOOP("Engine", "A batch has a prompt and 1 to {0} rows."),
    QT_TRANSLATE_NOOP("Engine", "The rows cannot be written to {0} ({1})."),
    QT_TRANSLATE_NOOP("Engine", "The file {0} cannot be read ({1})."),
    QT_TRANSLATE_NOOP("Engine", "The file {0} is no text."),
    QT_TRANSLATE_NOOP("Engine", "No attached folder has a file {0}."),
    QT_TRANSLATE_NOOP("Engine", "The result has too many digits."),
    QT_TRANSLATE_NOOP("Engine", "The result is no real number."),
    QT_TRANSLATE_NOOP("Engine", "A factorial is of a whole number from 0 to 1000."),
    QT_TRANSLATE_NOOP("Engine", "An expression has 1 to {0} characters."),
    QT_TRANSLATE_NOOP("Engine", "The expression cannot be read ({0})."),
    QT_TRANSLATE_NOOP("Engine", "The expression cannot be computed ({0})."),
    QT_TRANSLATE_NOOP(
        "Engine", "Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed."
    ),
    # Models and files.
    QT_TRANSLATE_NOOP("Engine", "The starter model is not on this machine yet."),
    QT_TRANSLATE_NOOP("Engine", "There is no file {0}: check the path."),
    QT_TRANSLATE_NOOP("Engine", "There is no folder {0}: check the path."),
    QT_TRANSLATE_NOOP("Engine", "There is no model at {0}: check the path."),
    QT_TRANSLATE_NOOP("Engine", "{0} is not a folder: check the path."),
    QT_TRANSLATE_NOOP("Engine", "{0} cannot be read ({1}): check the path."),
    QT_TRANSLATE_NOOP("Engine", "{0} cannot be read ({1}): download or copy the model again."),
    QT_TRANSLATE_NOOP("Engine", "{0} has no {1}, so it is not a complete model: download or copy it again."),
    QT_TRANSLATE_NOOP(
        "Engine",
        "{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's "
        "safetensors version.",
    ),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} is in use: unload it in Switchyard's window, end other programs with it, and try again."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} is being moved or removed: wait until that is done."),
    QT_TRANSLATE_NOOP("Engine", "{0} exists already: choose another name."),
    QT_TRANSLATE_NOOP("Engine", "{0} is already in the library."),
    QT_TRANSLATE_NOOP(
        "Engine", "The model folder {0} is not there: connect its disk, or take the folder off the list."
    ),
    QT_TRANSLATE_NOOP("Engine", "The disk of {0} is full: make room and try again."),
    QT_TRANSLATE_NOOP("Engine", "The disk of {0} is full: make room and let the download go on; nothing is lost."),
    QT_TRANSLATE_NOOP("Engine", "The disk of {0} is full: free some space, and the job continues."),
    QT_TRANSLATE_NOOP("Engine", "Cannot read or write {0} ({1}): check its permissions and the disk."),
    # Memory and devices.
    QT_TRANSLATE_NOOP(
        "Engine", "{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model."
    ),
    QT_TRANSLATE_NOOP(
        "Engine",
        "{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller "
        "model.",
    ),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} ran out of memory: close other programs, or allow the model less memory or a shorter context."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} has no graphics card: choose one first."),
    QT_TRANSLATE_NOOP("Engine", "The graphics card stopped responding, so the model runs on the CPU now."),
    QT_TRANSLATE_NOOP("Engine", "The NVIDIA driver does not respond: restart the computer, or update the driver."),
    QT_TRANSLATE_NOOP("Engine", "No NVIDIA driver was found."),
    QT_TRANSLATE_NOOP("Engine", "The {0} was {1} and is now {2}."),
    # Chats.
    QT_TRANSLATE_NOOP(
        "Engine",
        "The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, "
        "or start a new chat.",
    ),
    QT_TRANSLATE_NOOP("Engine", "No model is loaded: choose one first."),
    QT_TRANSLATE_NOOP(
        "Engine", "There was not enough memory to choose this answer's next token: close other programs and ask again."
    ),
    # The network.
    QT_TRANSLATE_NOOP(
        "Engine", "Could not read {0} from {1} ({2}): check the network; models on this PC still work."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} cannot be reached: waiting for the network."),
    QT_TRANSLATE_NOOP("Engine", "The connection to {0} broke: trying again."),
    QT_TRANSLATE_NOOP("Engine", "{0} sends nothing: waiting."),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} gives {1} only to those it knows: enter an access token of an account that may read it."
    ),
    QT_TRANSLATE_NOOP("Engine", "{0} got too many requests from here: try again {1}."),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} gave no answer ({1}): check that the server runs, and the network."
    ),
    QT_TRANSLATE_NOOP("Engine", "There is no server with OpenAI's interface at {0} ({1}): check the address."),
    QT_TRANSLATE_NOOP("Engine", "{0} is not an address of a server: it must begin with http:// or https://."),
    QT_TRANSLATE_NOOP("Engine", "{0} is not an address: enter one such as http://10.0.0.5:8000/v1."),
    QT_TRANSLATE_NOOP("Engine", "There is an endpoint called {0} already, or nearly so: choose another name."),
    QT_TRANSLATE_NOOP("Engine", "This is not a key: copy it again, in one piece and without spaces."),
    QT_TRANSLATE_NOOP("Engine", "This is not a token: copy it again from the hub's settings page, in one piece."),
    QT_TRANSLATE_NOOP("Engine", "This file holds no certificate in PEM."),
    # Files of rows.
    QT_TRANSLATE_NOOP("Engine", "{0} has no rows: there is nothing to answer."),
    QT_TRANSLATE_NOOP("Engine", "{0} cannot be written ({1}): choose another output."),
    QT_TRANSLATE_NOOP("Engine", "{0} is within the input: choose another output."),
    QT_TRANSLATE_NOOP(
        "Engine", "{0} is protected by a password or is an old .xls: save it as .xlsx without a password."
    ),
    QT_TRANSLATE_NOOP("Engine", "Another run is working on the job of {0}: wait for it or stop it first."),
    # The end of which could be anything.
    QT_TRANSLATE_NOOP("Engine", "{0} was stopped."),
    QT_TRANSLATE_NOOP("Engine", "{0} failed: {1}."),
)  # fmt: skip
FORMS = tuple(map(str, _NOTED))
"""Sentences, and parts of them that are put into others."""
_ALONE = re.compile(r"(\d+)(?:\.(\d+))?(%?)")


def said(words: str) -> str:
    """A text of the engine, as far as it is known sentence by sentence; what is not stays as it is."""
    if not words or translate("Engine", FORMS[0]) == FORMS[0]:
        return words  # English
    return "\n".join(_known(line) or _sentences(line) for line in words.split("\n"))


def _sentences(line: str) -> str:
    return " ".join(_known(part) or part for part in re.split(r"(?<=[.!?]) +(?=[A-Z])", line))


def _known(words: str) -> str | None:
    for form, pattern in _patterns():
        found = pattern.fullmatch(words)
        if found is not None:
            return translate("Engine", form).format(*map(_put_in, found.groups()))
    return None


def _put_in(words: str) -> str:
    number = _ALONE.fullmatch(words)
    if number is not None:
        whole, decimals, percent = number.groups()
        text = QLocale().toString(float(f"{whole}.{decimals or 0}"), "f", len(decimals or ""))
        return translate("Fit", "{0}%").format(text) if percent else text
    return _known(words) or words


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((form, re.compile("".join(_pieces(form)), re.DOTALL)) for form in FORMS)


def _pieces(form: str) -> Iterator[str]:
    anything = "(.*?)" if form.endswith(".") else r"(\d+)"  # what is part of a sentence must not take in the rest
    for piece in re.split(r"(\{\d\})", form):
        yield anything if piece.startswith("{") and piece.endswith("}") else re.escape(piece)
