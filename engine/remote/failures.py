"""What goes wrong with an endpoint: one kind each, so that who asks knows whether to ask again, and one sentence.

No sentence holds a key, not even where a server repeats it.
"""

from __future__ import annotations

import email.utils
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.remote.endpoint import Endpoint, called

_LONGEST_SAID = 240
_MOST_WAIT_S = 24 * 3600.0
_MODEL_WORDS = r"not a valid model|invalid model|unknown model|model \S+ (was )?not found|model \S* ?does not exist"
_PICTURE_WORDS = r"image|picture|multi-?modal|vision|mmproj|content.{0,40}(string|text)"
_THIS_PICTURE = (
    r"too (large|big|many|small)|invalid (image|picture|base)|decod|corrupt|download|fetch|at most [1-9]|dimens"
)
_LOADING = 529
"""Besides 503, what some servers say while they are overloaded."""
_MOST_ANSWER = re.compile(r"max_model_len=(\d+)|supports at most (\d+) completion tokens")
_CONTEXT = re.compile(r"context length (?:is|of) (\d+)")
_PROMPT = re.compile(r"(\d+) (?:tokens )?(?:in|from) the (?:input )?messages|has (\d+) input tokens")
_SPARE = 16
"""Tokens of a context that a server may keep to itself."""


class Trouble(StrEnum):
    UNREACHABLE = "unreachable"  # refused, lost, too slow, or an answer that broke off: ask again
    BUSY = "busy"  # it wants fewer requests, or is not ready yet: ask again later
    SERVER = "server"  # it failed inside: ask again
    REFUSED = "refused"  # this request alone cannot be answered there
    KEY = "key"  # it does not accept the key, or the account: the endpoint's failure
    CERTIFICATE = "certificate"  # it cannot prove who it is: the endpoint's failure
    WRONG_MODEL = "wrong-model"  # it has no such model: the endpoint's failure
    ADDRESS = "address"  # there is no such server at this address: the endpoint's failure


_CODES = {
    Trouble.BUSY: ErrorCode.BUSY,
    Trouble.REFUSED: ErrorCode.INVALID_REQUEST,
    Trouble.WRONG_MODEL: ErrorCode.MODEL_NOT_FOUND,
}


class RemoteError(EngineError):
    """A failure of an endpoint, or of one request to it.

    Attributes:
        kind: see `Trouble`.
        retry_after_s: for `BUSY`: how long it asks to be left alone; None if it does not say.
        status: of HTTP; 0 without an answer.
        said: the server's own words, if they say more than the status.
    """

    def __init__(
        self,
        kind: Trouble,
        message: str,
        *,
        retry_after_s: float | None = None,
        status: int = 0,
        code: ErrorCode | None = None,
        said: str = "",
    ) -> None:
        super().__init__(code or _CODES.get(kind, ErrorCode.ENDPOINT_FAILED), message)
        self.kind, self.retry_after_s, self.status, self.said = kind, retry_after_s, status, said


def refusal(
    endpoint: Endpoint, status: int, headers: Mapping[str, str], body: bytes, *, model: str, key: str
) -> RemoteError:
    """The error for an answer that is none.

    Args:
        status: of 300 and above.
        headers: with names in small letters.
        body: its beginning.
    """
    who = called(endpoint)
    said, code = _said(body, key)
    quote = f": {said}" if said else f" (status {status})."
    if status < 400:
        there = plain_line(urlsplit(headers.get("location", "")).netloc)[:80] or "another address"
        message = f"{who} sends on to {there}, which is not followed: enter that address if it is the right one."
        return RemoteError(Trouble.ADDRESS, message, status=status)
    if status == 407:
        return RemoteError(Trouble.UNREACHABLE, f"The proxy before {who} wants a password{quote}", status=status)
    if status in (401, 403):
        what = "does not accept the key: it may have expired" if key else "wants a key"
        return RemoteError(Trouble.KEY, f"{who} {what}. Enter one in Settings, under Other servers.", status=status)
    if status == 402 or (status == 429 and code == "insufficient_quota"):
        return RemoteError(Trouble.KEY, f"The account at {who} cannot pay for answers{quote}", status=status)
    if status in (429, 503, _LOADING):
        what = "is busy or not ready" if status != 429 else "wants fewer requests"
        wait = retry_after(headers)
        when = f"in {wait:.0f} seconds" if wait is not None else "later"
        return RemoteError(Trouble.BUSY, f"{who} {what}: try again {when}.", retry_after_s=wait, status=status)
    if status == 408:
        return unreachable(endpoint, "it waited too long for the request", status=status)
    if status >= 500 and status != 501:
        return RemoteError(Trouble.SERVER, f"{who} failed while it answered{quote}", status=status, said=said)
    if _is_about_the_model(status, said, code, model):
        what = f"has no model {model[:80]!r}" if model else "wants the name of a model"
        return RemoteError(Trouble.WRONG_MODEL, f"{who} {what}: choose another of its models.", status=status)
    if status in (404, 405, 501) and not code and not said:
        return no_such_server(endpoint, f"it has nothing at {urlsplit(endpoint.url).path}", status=status)
    is_long = code == "context_length_exceeded" or re.search("context (length|size|window)", said, re.IGNORECASE)
    return RemoteError(
        Trouble.REFUSED,
        f"{who} cannot answer this{quote}",
        status=status,
        code=ErrorCode.PROMPT_TOO_LONG if is_long else None,
        said=said,
    )


def is_about_pictures(error: RemoteError) -> bool:
    """Whether a request with pictures was refused because they are some: llama.cpp's server fails, others refuse it."""
    is_its = error.kind in (Trouble.REFUSED, Trouble.SERVER) and error.code is not ErrorCode.PROMPT_TOO_LONG
    said = error.said.lower()
    return is_its and bool(re.search(_PICTURE_WORDS, said)) and not re.search(_THIS_PICTURE, said)


def pictures_not_read(endpoint: Endpoint, model: str, error: RemoteError) -> RemoteError:
    return RemoteError(
        Trouble.REFUSED,
        f"{called(endpoint)} reads no pictures with {model[:80]}: send the text alone, or choose another model.",
        status=error.status,
        code=ErrorCode.PICTURES_NOT_READ,
        said=error.said,
    )


def room_for_answer(error: RemoteError) -> int | None:
    """The most tokens of an answer that a server has room for, where it refused more of them; else None.

    vLLM, SGLang and OpenAI refuse such requests, which others answer as far as there is room.
    """
    if error.kind is not Trouble.REFUSED:
        return None
    most, context, prompt = (said.search(error.message) for said in (_MOST_ANSWER, _CONTEXT, _PROMPT))
    if most is not None:
        room = int(most[1] or most[2])
    elif context is not None and prompt is not None:
        room = int(context[1]) - int(prompt[1] or prompt[2]) - _SPARE
    else:
        return None
    return room if room > 0 else None


def said_in_stream(endpoint: Endpoint, error: Any, *, model: str, key: str) -> RemoteError:
    """The error that came in the place of more text."""
    status = error.get("code") if isinstance(error, dict) else None
    status = status if type(status) is int and 400 <= status < 600 else 500
    return refusal(endpoint, status, {}, json.dumps({"error": error}).encode(), model=model, key=key)


def unreachable(endpoint: Endpoint, why: str, status: int = 0) -> RemoteError:
    """The error for a request without a whole answer."""
    return RemoteError(
        Trouble.UNREACHABLE,
        f"{called(endpoint)} gave no answer ({why}): check that the server runs, and the network.",
        status=status,
    )


def no_such_server(endpoint: Endpoint, why: str, status: int = 0) -> RemoteError:
    """The error for something else that listens there."""
    return RemoteError(
        Trouble.ADDRESS,
        f"There is no server with OpenAI's interface at {endpoint.url} ({why}): check the address.",
        status=status,
    )


def connection_error(endpoint: Endpoint, error: BaseException) -> RemoteError:
    """The error for a connection that failed, from what the HTTP library raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes and len(causes) < 20:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in causes:
        if isinstance(each, ssl.SSLCertVerificationError):
            why = plain_line(each.verify_message or "it cannot be verified")
            return RemoteError(
                Trouble.CERTIFICATE,
                f"The certificate of {called(endpoint)} is not trusted ({why}): give the file of its certificate if "
                "you know that it is the right server.",
            )
    for each in causes:
        if isinstance(each, ssl.SSLError) and not isinstance(each, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return no_such_server(endpoint, "it does not speak HTTPS")
        if isinstance(each, socket.gaierror):
            return unreachable(endpoint, "no host of this name is known here")
        if isinstance(each, ConnectionRefusedError):
            return unreachable(endpoint, "the connection was refused")
    words = {
        "ConnectTimeout": "it did not accept the connection in time",
        "RemoteProtocolError": "the connection broke off",
        "ReadError": "the connection broke off",
        "WriteError": "the connection broke off",
        "ConnectError": "no connection",
    }
    return unreachable(endpoint, words.get(type(error).__name__, "the connection failed"))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, from a number or a date (RFC 9110, 10.2.3); None if it is neither."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        return min(float(text), _MOST_WAIT_S)
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(0.0, at - time.time()), _MOST_WAIT_S)


def _said(body: bytes, key: str) -> tuple[str, str]:
    """(its words, its code) of an error's body: OpenAI's form, that of vLLM before, or FastAPI's."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        return "", ""
    code: Any = ""
    if isinstance(error, dict) and "error" in error:
        error = error["error"]
    if isinstance(error, dict):
        code, error = error.get("code") or error.get("type"), error.get("message")
    text = plain_line(error) if isinstance(error, str) else ""
    text = text.replace(key, "[key]") if key else text
    text = text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}…"
    return (text if not text or text.endswith((".", "!", "…")) else f"{text}."), str(code)[:60] if code else ""


def _is_about_the_model(status: int, said: str, code: str, model: str) -> bool:
    if code == "model_not_found":
        return True
    text = said.lower()
    if status == 404:
        return bool(said) and ("model" in text or (bool(model) and model.lower() in text))
    return status in (400, 422) and bool(re.search(_MODEL_WORDS, text))
