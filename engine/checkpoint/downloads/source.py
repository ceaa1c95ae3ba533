"""Where a file's bytes come from: ranges of it over HTTP, and what can be wrong with an answer.

The hub answers itself, or names a second host. Every answer is checked before a byte of it counts: the pinned commit
and checksum, the range that was asked for, its length, no compression. The hub's token goes to the hub's own address
and nowhere else, so redirects are followed here and not by the library.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2

from engine.checkpoint.downloads.records import Plan, PlannedFile
from engine.checkpoint.hub import RepoFile, file_url, place_of
from engine.checkpoint.hub.http import HubReason, read_token, refusal, set_aside
from engine.checkpoint.mirror import mirrored_package
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import passed_over
from engine.common.http import HEADERS, system_trust


@contextlib.contextmanager
def open_xet(found: Any, size: int, start: int, end: int, headers: dict[str, str]) -> Iterator[Stream]:
    """The bytes from `start` to `end` (not included).

    Args:
        found: hash and address for a token, as the hub's library reads them from an answer.
        size: of the whole file.
        headers: what the hub itself may see, its token included.

    Raises:
        LineBroken: it did not work this time.
        EngineError: `DOWNLOAD_FAILED` (the library for it is missing).
    """
    try:
        from hf_xet import XetFileInfo
        from huggingface_hub.utils._xet import get_xet_session, refresh_xet_connection_info, xet_headers_without_auth
    except ImportError:
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED, "This file needs the library hf_xet, which is missing: run the set-up again."
        ) from None
    with _again():
        connection = refresh_xet_connection_info(file_data=found, headers=headers)
        session: Any = get_xet_session()  # type: ignore[no-untyped-call]
        group = session.new_download_stream_group(
            endpoint=connection.endpoint,
            token=connection.access_token,
            token_expiry_unix_secs=connection.expiration_unix_epoch,
            token_refresh_url=found.refresh_route,
            token_refresh_headers=headers,
            custom_headers=xet_headers_without_auth(headers),
        )

    def abort() -> None:
        # Not the stream's own `cancel`, which fails while another thread waits for bytes; nor the group's end as a
        # context, which raises after this.
        with passed_over("A line could not be given up"):
            group.abort()

    try:
        with _again():
            stream = group.download_stream(XetFileInfo(found.file_hash, size), start=start, end=end)
        yield Stream(_chunks(stream), abort)
    finally:
        abort()


def _chunks(stream: Any) -> Iterator[bytes]:
    with _again():
        chunks = iter(stream)
    while True:
        with _again():
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


@contextlib.contextmanager
def _again() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its errors are its own, and all mean: try again
        raise LineBroken("The hub's chunk store does not answer: trying again.") from error


CONNECT_S = 15.0
STALL_S = 30.0
"""Without a byte for so long, a line is given up."""
_MOST_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_STALE = 3
_LONGEST_ASKED_S = 3600.0
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_ERRORS = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError)


class Trouble(Exception):  # noqa: N818 - not an error: it is tried again
    """What kept a range from arriving; trying again may help.

    Attributes:
        message: what people are told if it lasts.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NetworkAway(Trouble):
    """Nobody can be reached."""


class NeedsPeople(NetworkAway):
    """Waiting does not help: something about this computer or its network has to be put right first."""


class LineBroken(Trouble):
    """An answer ended early, or nothing more came."""


class ServerBusy(Trouble):
    """The server asks for patience, or has a fault.

    Attributes:
        wait_s: how long it asks for; 0 if it does not say.
        too_many: whether fewer lines at once are asked for.
    """

    def __init__(self, message: str, wait_s: float = 0.0, *, too_many: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.too_many = wait_s, too_many


class WrongAnswer(Trouble):
    """Not what was asked for; a server that goes on so is given up."""


class RangeRefused(Trouble):
    """The server sends the whole file or nothing."""


class ContentChanged(Trouble):
    """The server has another content now than the one that was begun, as far as its ETag says."""


@dataclass(slots=True)
class Stream:
    """A range on its way.  `abort` may be called by any thread, and ends a wait for bytes."""

    chunks: Iterator[bytes]
    abort: Callable[[], None]


class Client:
    """The lines of one download.  Proxies and certificates are the system's, as the library reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client = self._new()
        self._old: list[httpx2.Client] = []

    def _new(self) -> httpx2.Client:
        timeout = httpx2.Timeout(STALL_S, connect=CONNECT_S)
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=32, keepalive_expiry=30.0)
        return httpx2.Client(verify=system_trust(), timeout=timeout, limits=limits, follow_redirects=False)

    @contextlib.contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None) -> Iterator[httpx2.Response]:
        """An answer, of which only the head has been read.

        Raises:
            Trouble: the network's.
            EngineError: the address is none.
        """
        client = self._client
        try:
            response = client.send(
                client.build_request("GET", url, headers={**HEADERS, **(headers or {})}), stream=True
            )
        except _ERRORS as error:
            raise _trouble(error, url) from None
        try:
            yield response
        finally:
            with contextlib.suppress(*_ERRORS):
                response.close()

    def renew(self) -> None:
        """Takes new lines from now on: a change of network leaves the open ones dead."""
        with self._lock:
            self._old.append(self._client)
            self._client = self._new()

    def close(self) -> None:
        for client in (self._client, *self._old):
            client.close()


def proxy_login() -> str:
    """What to do about a proxy that wants another name and password than it was given."""
    how = "http://NAME:PASSWORD@HOST:PORT"
    if any("@" in address for address in urllib.request.getproxies().values()):
        return f"The proxy refuses this name and password: correct them in its address in the settings ({how})."
    return f"The proxy asks for a name and a password: give its address in the settings as {how}."


def _trouble(error: Exception, url: str) -> Exception:
    host = urlsplit(url).hostname or "the hub"
    if isinstance(error, httpx2.ProxyError) and "407" in str(error):
        return NeedsPeople(proxy_login())
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        if "CERTIFICATE" in str(error).upper():
            return NeedsPeople(
                f"The certificate of {host} is not trusted: check this computer's date and whether the network wants a "
                "login; if a company's proxy reads along, add its certificate to the system's."
            )
        return NetworkAway(f"{host} cannot be reached: waiting for the network.")
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol | httpx2.LocalProtocolError):
        return EngineError(ErrorCode.DOWNLOAD_FAILED, f"{host} gave an invalid address: try again later.")
    if isinstance(error, httpx2.TimeoutException):
        return LineBroken(f"{host} sends nothing: waiting.")
    return LineBroken(f"The connection to {host} broke: trying again.")


class Source:
    """One file of a download, to be read in ranges by several threads.

    Attributes:
        etag: what the server that has the content calls it; kept over runs.
        content: `sha256:...` or `git:...`, what the hub says the content is; empty if it does not.
        xet: what is needed to stream it from the hub's chunk store; None where that does not have it.
        streams_xet: ranges are refused, but xet has it.
    """

    def __init__(self, plan: Plan, file: PlannedFile, client: Client, etag: str = "") -> None:
        self._plan, self._file, self._client = plan, file, client
        in_hub = RepoFile(file.path, file.size, file.sha256)
        self._hub_url = mirrored_package(file.url) if file.url else file_url(plan.repository, in_hub)
        self._origin = _origin(self._hub_url)
        self._sends_token = not file.url
        self._lock = threading.RLock()
        self._url = ""  # after redirects; empty: ask the hub
        self._stale = 0
        self.etag = etag
        self.content = f"sha256:{file.sha256}" if file.sha256 else ""
        self.xet: Any = None
        self.streams_xet = False

    @contextlib.contextmanager
    def open(self, start: int, end: int) -> Iterator[Stream]:
        """The bytes from `start` to `end` (not included), or, cut short, the first of them.

        Raises:
            Trouble: it did not work this time.
            EngineError: it never will without people.
        """
        if self.streams_xet:
            with open_xet(self.xet, self._file.size, start, end, self.token_headers()) as stream:
                yield stream
            return
        with self._answer(start, end) as response:
            count = self._check(response, start, end)
            yield Stream(_at_most(response, count), lambda: _cut(response))

    @contextlib.contextmanager
    def open_whole(self) -> Iterator[Stream]:
        """All bytes, from a server that knows no ranges.  Raises as `open`."""
        with self._answer(0, None) as response:
            if response.status_code != 200:
                raise WrongAnswer(
                    self._words(f"answers with {response.status_code} where the whole file was asked for")
                )
            self._check_encoding(response)
            self._check_etag(response)
            if (length := _number(response.headers.get("Content-Length"))) not in (None, self._file.size):
                raise WrongAnswer(self._words(f"sends {length} bytes instead of {self._file.size}"))
            yield Stream(_at_most(response, self._file.size), lambda: _cut(response))

    def forget_address(self) -> None:
        with self._lock:
            self._url = ""

    def token_headers(self) -> dict[str, str]:
        """The hub's token, for the hub alone."""
        token = read_token(self._origin[1]) if self._sends_token else ""
        return {"Authorization": f"Bearer {token}"} if token else {}

    # The way to the content

    @contextlib.contextmanager
    def _answer(self, start: int, end: int | None) -> Iterator[httpx2.Response]:
        """The answer of whoever has the content.  Where that is, one thread asks the hub for all."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                response = None if self._url else self._ask_hub(stack, start, end)
                url = self._url
            if response is None:
                response = self._ask_others(stack, url, start, end)
            self._stale = 0
            yield response

    def _ask_hub(self, stack: contextlib.ExitStack, start: int, end: int | None) -> httpx2.Response | None:
        """Finds the address of the content.  The answer itself, if the hub has it; None if a second host does."""
        url = self._hub_url
        for _ in range(_MOST_HOPS):
            hop = stack.enter_context(contextlib.ExitStack())
            response = hop.enter_context(self._client.get(url, self._headers(url, start, end)))
            if self._does_without_token(response):
                hop.close()
                continue
            if url == self._hub_url:
                self._check_identity(response)
            if response.status_code not in _REDIRECTS:
                self._check_status(response, url)
                self._url = url
                return response
            following = self._following(url, response.headers.get("Location", ""))
            hop.close()
            if _origin(following) != self._origin:
                self._url = following
                return None
            url = following
        raise WrongAnswer(self._words("leads in circles"))

    def _does_without_token(self, response: httpx2.Response) -> bool:
        """Whether to ask again, without the token: an expired one bars what is open to everybody, too."""
        token = "" if self._file.url else read_token(self._origin[1])
        if response.status_code < 400 and token and not self._sends_token:
            set_aside(self._origin[1], token)
        if response.status_code != 401 or not token or not self._sends_token or self._plan.gated:
            return False
        self._sends_token = False
        return True

    def _ask_others(self, stack: contextlib.ExitStack, first: str, start: int, end: int | None) -> httpx2.Response:
        """The answer of the second host, or of the one that it names; none of them sees the token."""
        url = first
        for _ in range(_MOST_HOPS):
            hop = stack.enter_context(contextlib.ExitStack())
            response = hop.enter_context(self._client.get(url, self._headers(url, start, end)))
            if response.status_code not in _REDIRECTS:
                self._check_status(response, url)
                with self._lock:
                    if self._url == first:
                        self._url = url
                return response
            url = self._following(url, response.headers.get("Location", ""))
            hop.close()
            if _origin(url) == self._origin:
                break
        self.forget_address()
        raise WrongAnswer(self._words("leads in circles"))

    def _following(self, url: str, location: str) -> str:
        try:
            following = urljoin(url, location)
            scheme, host, _ = _origin(following)
        except ValueError:
            raise WrongAnswer(self._words("gave an invalid address")) from None
        if scheme not in ("https", self._origin[0]) or not host:
            raise WrongAnswer(self._words("leads to an address that is not protected; nothing was sent there"))
        return following

    def _headers(self, url: str, start: int, end: int | None) -> dict[str, str]:
        headers: dict[str, str] = {}
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
            if self.etag and not self.etag.startswith("W/") and self.etag.isascii():
                headers["If-Range"] = self.etag
        if _origin(url) == self._origin:
            headers |= self.token_headers()
        return headers

    # Whether an answer is the right one

    def _check_identity(self, response: httpx2.Response) -> None:
        """Compares what the hub says of the file with what was pinned."""
        headers = response.headers
        if response.status_code >= 400:
            return
        commit = headers.get("X-Repo-Commit", "")
        if commit and _GIT.fullmatch(self._plan.commit) and commit != self._plan.commit:
            raise WrongAnswer(self._words("answers with another version of the repository"))
        size = _number(headers.get("X-Linked-Size"))
        linked = headers.get("X-Linked-Etag", "").strip('"').removeprefix('W/"')
        if size is not None and size != self._file.size:
            raise WrongAnswer(self._words(f"has {size} bytes where {self._file.size} were promised"))
        content = self.content
        if self._plan.hub == "huggingface":
            own = headers.get("ETag", "").strip('"')
            if _SHA256.fullmatch(linked):
                content = f"sha256:{linked}"
            elif not linked and commit and _GIT.fullmatch(own):
                content = f"git:{own}"
        if self.content and content != self.content and content.partition(":")[0] == self.content.partition(":")[0]:
            raise WrongAnswer(self._words("has another content than promised"))
        self.content = self.content or content
        if "X-Xet-Hash" in headers:
            self.xet = self._xet_of(response)

    def _xet_of(self, response: httpx2.Response) -> Any:
        from huggingface_hub.utils._xet import parse_xet_file_data_from_response

        found = parse_xet_file_data_from_response(response, endpoint=self._plan.endpoint or None)
        # The token for the store is asked for with the hub's own token, so only of the hub.
        return found if found is not None and _origin(found.refresh_route) == self._origin else None

    def _check_status(self, response: httpx2.Response, url: str) -> None:
        status = response.status_code
        if status < 400:
            return
        wait_s = _retry_after(response.headers.get("Retry-After", ""))
        if status == 407:
            raise NeedsPeople(proxy_login())
        if status == 429 or (status == 503 and wait_s):
            raise ServerBusy(self._words("asks for fewer requests; waiting"), wait_s, too_many=True)
        if status in (408, 425) or status >= 500:
            raise ServerBusy(self._words(f"has a fault of its own ({status}); trying again"), wait_s)
        if status == 412:
            raise ContentChanged(self._words("has another content now"))
        if status == 416:
            self._refused(WrongAnswer(self._words("does not have the whole file")))
        if _origin(url) != self._origin:  # the address was for a while only
            self._refused(WrongAnswer(self._words(f"refuses ({status})")))
        raise self._final(response)

    def _refused(self, trouble: Trouble) -> None:
        self.forget_address()
        self._stale += 1
        if self._stale >= _MOST_STALE and self.xet is not None:
            raise RangeRefused(trouble.message)
        raise trouble

    def _final(self, response: httpx2.Response) -> EngineError:
        if self._file.url:
            return EngineError(
                ErrorCode.DOWNLOAD_FAILED,
                f"{_origin(self._hub_url)[1]} does not give {self._file.path} (status {response.status_code}): try "
                "again later, or use another mirror of packages in the settings.",
            )
        place = place_of(self._plan.hub, self._plan.id, self._plan.endpoint, gated=self._plan.gated)
        headers = {name.lower(): value for name, value in response.headers.items()}
        error = refusal(place, response.status_code, headers)
        if error.reason is not HubReason.NOT_FOUND:
            return error
        what = f"The file {self._file.path}" if headers.get("x-error-code") == "EntryNotFound" else self._plan.id
        return EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{what} is no longer on the hub: it was renamed, deleted or made private; search for it again.",
        )

    def _check(self, response: httpx2.Response, start: int, end: int) -> int:
        self._check_encoding(response)
        self._check_etag(response)
        length = _number(response.headers.get("Content-Length"))
        if response.status_code == 200:
            if length not in (None, self._file.size):
                raise WrongAnswer(self._words(f"sends {length} bytes instead of {self._file.size}"))
            if (start, end) != (0, self._file.size):
                raise RangeRefused(self._words("sends only whole files"))
            return end
        if response.status_code != 206:
            raise WrongAnswer(self._words(f"answers with {response.status_code}"))
        span = re.fullmatch(
            r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", response.headers.get("Content-Range", "").strip()
        )
        if span is None or int(span[1]) != start or not start <= int(span[2]) < end:
            raise WrongAnswer(self._words("sends another part than was asked for"))
        if span[3] not in ("*", str(self._file.size)):
            raise WrongAnswer(self._words(f"has {span[3]} bytes where {self._file.size} were promised"))
        count = int(span[2]) + 1 - start
        if length not in (None, count):
            raise WrongAnswer(self._words(f"sends {length} bytes where {count} were promised"))
        return count

    def _check_encoding(self, response: httpx2.Response) -> None:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise WrongAnswer(self._words("sends packed data, which was not asked for"))

    def _check_etag(self, response: httpx2.Response) -> None:
        etag = response.headers.get("ETag", "")
        with self._lock:
            if self.etag and etag and etag != self.etag:
                self._url = ""
                raise ContentChanged(self._words("has another content now"))
            self.etag = self.etag or etag

    def _words(self, what: str) -> str:
        host = urlsplit(self._url or self._hub_url).hostname
        return f"{host} {what} ({self._file.path.rpartition('/')[2][:80]})."


def _at_most(response: httpx2.Response, count: int) -> Iterator[bytes]:
    """The first `count` bytes of the body, or fewer if it ends before."""
    has_end = _number(response.headers.get("Content-Length")) == count
    try:
        for chunk in response.iter_raw():
            if chunk and count:
                yield chunk[:count]
                count -= min(len(chunk), count)
            if not count and not has_end:  # where it has one, only reading up to it keeps the line for the next range
                return
    except _ERRORS as error:
        raise _trouble(error, str(response.url)) from None


def _cut(response: httpx2.Response) -> None:
    """Ends the line under an answer; a thread that waits for bytes of it wakes up."""
    stream: Any = response.extensions.get("network_stream")
    with passed_over("A line was closed already"):  # or by a library that shows no socket
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\s*[0-9]{1,19}\s*", text) else None


def _retry_after(text: str) -> float:
    """Seconds that a server asks to wait, given as a number or a date; 0 if it does not."""
    if (seconds := _number(text)) is not None:
        return min(float(seconds), _LONGEST_ASKED_S)
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        return min(max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time()), _LONGEST_ASKED_S)
    return 0.0
