"""Bounded requests to a hub: every answer has a limit of bytes and of time, and every failure is one sentence.

Proxies and certificates are the system's: the client is the hub library's, which asks the environment and the system's
settings for the one, and the system's store for the other. The token goes to the hub's own host alone; the client drops
it when an answer leads elsewhere.

Tokens of hubs, each for one host: in the system's keyring where there is one, else for this run alone.

A token is for the host it was saved for. It goes into no log, no file of Switchyard's and no other host's requests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from engine.checkpoint.headers import MAX_HEADER
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.files import private_folder, write_private
from engine.common.http import HEADERS
from engine.common.paths import config_dir
from engine.common.plain_text import plain_line
from engine.common.settings import ask_keyring, forget_in_keyring, tell_keyring
from engine.common.untrusted import DEEPEST, parse_json, read_record

_VARIABLE = "SWITCHYARD_HUB_TOKENS"
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
_MOST_BYTES = 2**16
_HUGGINGFACE, _MODELSCOPE = "huggingface.co", ("modelscope.cn", "www.modelscope.cn")

_this_run: dict[str, str] = {}
_of_keyring: dict[str, str] = {}
"""What the keyring said; an empty string where it had nothing: asking again could open a dialog of the system's."""
_refused: set[tuple[str, str]] = set()
"""Hosts and tokens that these did not accept."""
_asking = threading.Lock()


def read_token(host: str) -> str:
    """The token for a host such as `huggingface.co`, or an empty string.

    What was saved here comes first, then what the hub's own programs would use. The keyring is asked once per host, so
    this may wait for it, and for people who unlock it.
    """
    host = host.lower()
    for found in (_this_run.get, _inherited().get, _in_keyring, _of_other_programs):
        token = found(host)
        if token and (host, token) not in _refused:
            return token
    return ""


def set_aside(host: str, token: str) -> None:
    """Does without a token for the rest of this run: the host does not accept it, and gives without it."""
    _refused.add((host.lower(), token))


def save_token(host: str, token: str) -> bool:
    """Keeps a token for a host; returns whether it stays after this run.

    Raises:
        EngineError: `INVALID_REQUEST` (this cannot be a token).
    """
    host, token = host.lower(), token.strip()
    if not _TOKEN.fullmatch(token):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, "This is not a token: copy it again from the hub's settings page, in one piece."
        )
    _this_run[host] = token
    tell_keyring(host, token)
    _refused.discard((host, token))
    with _asking:
        _of_keyring.pop(host, None)
    stays = _in_keyring(host) == token  # a backend may accept and keep nothing
    if stays:
        _note_hosts({*_noted_hosts(), host})
    return stays


def forget_token(host: str) -> None:
    host = host.lower()
    _this_run.pop(host, None)
    forget_in_keyring(host)
    with _asking:
        _of_keyring.pop(host, None)
    if host in (noted := _noted_hosts()):
        _note_hosts({*noted} - {host})


def hosts_with_tokens() -> tuple[str, ...]:
    """The hosts that `save_token` keeps a token for, sorted.  The keyring is not asked: it may be locked."""
    return tuple(sorted({*_noted_hosts(), *_this_run}))


def _hosts_file() -> Path:
    return config_dir() / "token-hosts.json"


def _noted_hosts() -> frozenset[str]:
    hosts = read_record(_hosts_file(), _MOST_BYTES).get("hosts")
    named = hosts if isinstance(hosts, list) else []
    return frozenset(host for host in named if isinstance(host, str) and plain_line(host) == host)


def _note_hosts(hosts: set[str]) -> None:
    """Which hosts have one in the keyring, which cannot list them; never the tokens themselves."""
    with contextlib.suppress(OSError):  # then it can still be removed with `models forget-token`
        private_folder(config_dir())
        write_private(_hosts_file(), json.dumps({"hosts": sorted(hosts)}) + "\n")


def for_child() -> dict[str, str]:
    """Environment variables that hand this run's tokens to a process started by this one."""
    tokens = {**_inherited(), **_this_run}
    return {_VARIABLE: json.dumps(tokens)} if tokens else {}


def _inherited() -> dict[str, str]:
    with contextlib.suppress(ValueError, AttributeError):
        return {str(host): str(token) for host, token in json.loads(os.environ.get(_VARIABLE) or "{}").items()}
    return {}


def _in_keyring(host: str) -> str:
    with _asking:  # many connections begin at once
        if host not in _of_keyring:
            _of_keyring[host] = ask_keyring(host)
        return _of_keyring[host]


def _of_other_programs(host: str) -> str:
    """What `hf auth login` stored for the hub itself; for a mirror only what stands beside it in the environment."""
    if host in _MODELSCOPE:
        return os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
    if host == _HUGGINGFACE:
        from huggingface_hub import get_token

        return get_token() or ""
    mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname or ""
    return os.environ.get("HF_TOKEN", "").strip() if host == mirror else ""


ANSWER_S = 120.0
"""Time limit for one file's header, or one answer of the API."""
MAX_ANSWER_BYTES = 16 * 2**20
_TIMEOUT_S = 15.0
_LOOK_S = 0.05
_MOST_AHEAD = 4 * 2**20
_AT_ONCE = 8
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

_Result = TypeVar("_Result")


class HubReason(StrEnum):
    OFFLINE = "offline"  # no connection, or the hub's server is in trouble
    NEEDS_LICENCE = "needs-licence"  # to be accepted on the hub's page, signed in
    WRONG_TOKEN = "wrong-token"
    REFUSED = "refused"  # neither for want of a licence nor of a token, as far as the answer says
    NOT_FOUND = "not-found"  # or private: a hub does not tell the difference
    TOO_MANY = "too-many"  # requests
    BROKEN = "broken"  # an answer that makes no sense
    CANCELLED = "cancelled"


class HubError(EngineError):
    """A failure of a hub.

    Attributes:
        link: the page where something can be done about it; may be empty.
        status: of HTTP; 0 without an answer.
    """

    def __init__(self, reason: HubReason, message: str, link: str = "", status: int = 0) -> None:
        code = ErrorCode.MODEL_NOT_FOUND if reason is HubReason.NOT_FOUND else ErrorCode.DOWNLOAD_FAILED
        super().__init__(code, message)
        self.reason, self.link, self.status = reason, link, status


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, and what they are about.

    Attributes:
        hub: its name for people; endpoint: its address.
        subject: what is asked for: `ORG/NAME`, or words.
        link: the page of it.
    """

    hub: str
    endpoint: str
    subject: str
    link: str
    gated: bool = False

    def headers(self, url: str) -> dict[str, str]:
        """What goes with a request; the token only to the endpoint itself."""
        found = dict(HEADERS)
        if urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]:
            token = self.token()
            if token:
                found["Authorization"] = f"Bearer {token}"
        return found

    def token(self) -> str:
        return read_token(urlsplit(self.endpoint).hostname or "")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came: `size` is that of the whole file if the server gave it, `headers` have names in small letters."""

    content: bytes
    size: int | None
    headers: Mapping[str, str]

    def json(self, place: Place) -> Any:
        """The JSON document.

        Raises:
            HubError: `BROKEN`.
        """
        try:
            return parse_json(self.content, deepest=DEEPEST)
        except ValueError as error:
            raise broken(place, f"its answer is not JSON: {error}") from None


def fetch(place: Place, url: str, most_bytes: int, *, begin: int = 0, end: int | None = None) -> Answer:
    """The answer to a GET, or the bytes [begin, end) of a file.

    Raises:
        HubError: as `HubReason` says; `BROKEN` too for an answer that has more bytes than `most_bytes`, or others than
            asked for.
    """
    headers = place.headers(url)
    token = headers.get("Authorization", "").removeprefix("Bearer ")
    try:
        return _fetch(place, url, headers, most_bytes, begin, end)
    except HubError as error:
        if not token or error.reason is not HubReason.WRONG_TOKEN:
            raise
        # An expired token bars what is open to everybody, too.
        del headers["Authorization"]
        try:
            answer = _fetch(place, url, headers, most_bytes, begin, end)
        except HubError:
            raise error from None
    set_aside(urlsplit(url).hostname or "", token)
    return answer


def _fetch(place: Place, url: str, headers: Mapping[str, str], most_bytes: int, begin: int, end: int | None) -> Answer:
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if end is not None:
        headers = {**headers, "Range": f"bytes={begin}-{end - 1}"}
    try:
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
            told = {name.lower(): value for name, value in response.headers.items()}
            if response.status_code >= 400:  # skip an error's body: it may be endless
                raise refusal(place, response.status_code, told)
            skipped, size = _first_byte(place, response.status_code, told, begin, end)
            wanted = None if end is None else end - skipped
            got = bytearray()
            for chunk in response.iter_raw():
                got += chunk
                if wanted is not None and len(got) >= wanted:  # some servers ignore ranges
                    break
                if len(got) > most_bytes:
                    name = urlsplit(url).path.rpartition("/")[2]
                    raise broken(place, f"{name} is larger than {most_bytes // 2**20} MiB")
    except EngineError:
        raise
    except Exception as error:
        # Errors of the HTTP library, which the hub's package has replaced before.
        if not isinstance(error, OSError | ValueError) and type(error).__module__.partition(".")[0] not in _HTTP:
            raise
        raise unreachable(place, error) from None
    return Answer(bytes(got[begin - skipped : wanted]), size, told)


_HTTP = ("httpx2", "httpx", "httpcore2", "httpcore", "requests", "huggingface_hub")


def _first_byte(
    place: Place, status: int, headers: Mapping[str, str], begin: int, end: int | None
) -> tuple[int, int | None]:
    """(position of the first byte that comes, size of the file) of an answer."""
    length = headers.get("content-length", "")
    if end is None:
        return 0, None
    if status == 206:
        told = _RANGE.fullmatch(headers.get("content-range", ""))
        if told is None or int(told[1]) != begin or int(told[2]) >= end:
            raise broken(place, "it sent other bytes than it was asked for")
        return begin, int(told[3])
    if end > MAX_HEADER:
        raise broken(place, "it cannot send a part of a file")
    return 0, int(length) if length.isdecimal() and len(length) < 20 else None


def api(place: Place, url: str, cancelled: CancelCheck) -> tuple[Any, Mapping[str, str]]:
    """(the JSON document at `url`, the answer's headers)."""
    answer = in_time(place, [lambda: fetch(place, url, MAX_ANSWER_BYTES)], cancelled)[0]
    return answer.json(place), answer.headers


class RemoteFile(io.RawIOBase):
    """A file on a hub, of which only what is read is fetched, by ranges, and that only up to a limit.

    Attributes:
        size: as the hub listed it.
        pieces: what is here of it: position and bytes.

    Raises, when read:
        HubError: see `fetch`; `BROKEN` if the file has another size than the hub listed.
    """

    def __init__(self, place: Place, url: str, size: int, ahead: int = 0) -> None:
        """`ahead`: bytes to fetch at least, as a request takes as long as some hundred thousand; twice as many the next
        time."""
        super().__init__()
        self._place, self._url, self._ahead = place, url, ahead
        self.size = size
        self.pieces: list[tuple[int, bytes]] = []
        self._at, self._left = 0, 2 * MAX_HEADER

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self.size - self._at))
        if not wanted:
            return 0
        held = self._held()
        if held is None:
            self.ahead(wanted)
            held = self._held()
        assert held is not None
        piece = held[:wanted]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _held(self) -> bytes | None:
        for begin, piece in self.pieces:
            if begin <= self._at < begin + len(piece):
                return piece[self._at - begin :] if self._at > begin else piece
        return None

    def ahead(self, nbytes: int = 0) -> None:
        """Fetches what comes next, so much of it or more."""
        end = min(self.size, self._at + max(nbytes, self._ahead))
        self._ahead = min(2 * self._ahead, _MOST_AHEAD)
        self.pieces.append((self._at, self.fetched(self._at, end)))

    def fetched(self, begin: int, end: int) -> bytes:
        self._left -= end - begin
        if self._left < 0:
            raise broken(self._place, f"the header of {self._name} has no end")
        answer = fetch(self._place, self._url, end, begin=begin, end=end)
        if answer.size is not None and answer.size != self.size:
            raise broken(self._place, f"{self._name} has {answer.size:,} bytes, but {self.size:,} are listed")
        if len(answer.content) != end - begin:
            raise broken(self._place, f"{self._name} ended after {begin + len(answer.content):,} bytes")
        return answer.content

    @property
    def _name(self) -> str:
        return urlsplit(self._url).path.rpartition("/")[2]


def in_time(place: Place, jobs: Sequence[Callable[[], _Result]], cancelled: CancelCheck) -> list[_Result]:
    """The results of the jobs, some of which run at the same time.

    A server can send a byte now and then forever, which a connection's timeout does not notice. So this waits at most
    `ANSWER_S` for one job, and then abandons its thread.

    Raises:
        HubError: it took too long, or was cancelled.
        Exception: what a job raised.
    """
    waiting, begun, results = iter(range(len(jobs))), dict[int, float](), dict[int, _Result]()
    ended: queue.SimpleQueue[tuple[int, _Result | Exception]] = queue.SimpleQueue()
    given_up = threading.Event()

    def work() -> None:
        for number in waiting:
            if given_up.is_set():
                return
            begun[number] = time.monotonic()
            try:
                ended.put((number, jobs[number]()))
            except Exception as error:  # re-raised in the waiting thread
                ended.put((number, error))
                return

    for _ in range(min(_AT_ONCE, len(jobs))):
        threading.Thread(target=work, name="hub", daemon=True).start()
    try:
        while len(results) < len(jobs):
            with contextlib.suppress(queue.Empty):
                number, result = ended.get(timeout=_LOOK_S)
                if isinstance(result, Exception):
                    raise result
                results[number] = result
            if cancelled():
                raise HubError(HubReason.CANCELLED, f"Reading {place.subject} from {place.hub} was cancelled.")
            if any(time.monotonic() - since > ANSWER_S for at, since in list(begun.items()) if at not in results):
                raise unreachable(place, TimeoutError(f"no complete answer within {ANSWER_S:.0f} seconds"))
    finally:
        given_up.set()
    return [results[number] for number in range(len(jobs))]


def refusal(place: Place, status: int, headers: Mapping[str, str]) -> HubError:
    """The error for a status of 400 and above; headers with names in small letters."""
    code, subject, hub = headers.get("x-error-code", ""), place.subject, place.hub
    is_invalid = "invalid" in headers.get("x-error-message", "").lower()
    if code == "GatedRepo" or (place.gated and status in (401, 403) and not is_invalid):
        then = "check that Switchyard's access token is of" if place.token() else "give Switchyard an access token of"
        return HubError(
            HubReason.NEEDS_LICENCE,
            f"{subject} asks you to accept its licence first: sign in at {place.link}, accept it there, and {then} "
            "that account.",
            place.link,
            status,
        )
    if status == 401 and (code != "RepoNotFound" or is_invalid):
        what = (
            f"{hub} does not accept the access token, which may have expired or been withdrawn: give a new one, or "
            "remove it (`switchyard models forget-token`)."
            if place.token()
            else f"{hub} gives {subject} only to those it knows: enter an access token of an account that may read it."
        )
        return HubError(HubReason.WRONG_TOKEN, what, place.link, status)
    if status == 403 and code != "RepoNotFound":
        return HubError(
            HubReason.REFUSED,
            f"{hub} refuses access to {subject}: a proxy or a firewall may be in the way, or the access token may lack "
            "the right to read it.",
            place.link,
            status,
        )
    if status in (401, 403, 404, 410):
        what = "revision" if code == "RevisionNotFound" else "file" if code == "EntryNotFound" else "model"
        return HubError(
            HubReason.NOT_FOUND,
            f"{hub} has no {what} {subject}: check its spelling, including capitals; it may have been renamed or "
            "deleted, or be private.",
            place.link,
            status,
        )
    if status == 429:
        wait = headers.get("retry-after", "")
        when = f"in {wait} seconds" if wait.isdecimal() and len(wait) < 6 else "in a few minutes"
        return HubError(HubReason.TOO_MANY, f"{hub} got too many requests from here: try again {when}.", "", status)
    return HubError(
        HubReason.OFFLINE, f"{hub} could not answer about {subject} (status {status}): try again later.", "", status
    )


def unreachable(place: Place, error: Exception) -> HubError:
    said = plain_line(str(error)).strip()
    why = said[:120] if said else type(error).__name__
    return HubError(
        HubReason.OFFLINE,
        f"Could not read {place.subject} from {place.hub} ({why}): check the network; models on this PC still work.",
    )


def broken(place: Place, what: str) -> HubError:
    return HubError(
        HubReason.BROKEN, f"{place.hub} answered in a broken way about {place.subject} ({what}): try again later."
    )
