"""Finds Switchyards on the local network that want to be found: one question by multicast DNS, when somebody asks.

A server answers only if it was told to (`switchyard serve --announce`). What is spoken is DNS-SD (RFC 6763) over mDNS
(RFC 6762), of which this needs a small part: a one-shot question (section 5.1), and answers to who asked.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from engine.common.errors import CancelCheck, never_cancelled
from engine.common.plain_text import plain_line

GROUP: tuple[str, int] = ("224.0.0.251", 5353)
SERVICE = "_switchyard._tcp.local"
LISTEN_S = 1.5
"""How long answers are waited for."""
_LOOK_S = 0.1
_MOST_FOUND, _MOST_BYTES, _MOST_RECORDS, _MOST_JUMPS = 100, 9000, 64, 16
_PTR, _TXT, _SRV, _ANY, _IN, _UNICAST = 12, 16, 33, 255, 1, 0x8000
_TTL_S = 120


@dataclass(frozen=True, slots=True)
class Nearby:
    """A server that answered: what it calls itself, and its address for `endpoint_at`."""

    name: str
    url: str


def look_around(
    cancelled: CancelCheck = never_cancelled, group: tuple[str, int] = GROUP, listen_s: float = LISTEN_S
) -> tuple[Nearby, ...]:
    """Who answers within `listen_s`, in the order of their names; nobody where there is no network.

    Args:
        group: where the question goes.
    """
    found: dict[str, Nearby] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        asking.settimeout(_LOOK_S)
        asking.sendto(_question(), group)
        ends = time.monotonic() + listen_s
        while time.monotonic() < ends and not cancelled() and len(found) < _MOST_FOUND:
            with contextlib.suppress(TimeoutError, ConnectionError):
                packet, sender = asking.recvfrom(_MOST_BYTES)
                if (one := _answer_in(packet, sender[0])) is not None:
                    found[one.url] = one
    return tuple(sorted(found.values(), key=lambda one: (one.name.casefold(), one.url)))


class Announcer:
    """Answers who looks around, from `start` to `stop`.

    Args:
        name: what this server is to be called.
        port: where it listens, with HTTPS if `is_https`.
        group: where it hears questions; an address that is no group is only listened at.

    Raises:
        OSError: there is no network for that.
    """

    def __init__(self, name: str, port: int, *, is_https: bool, group: tuple[str, int] = GROUP) -> None:
        self._name = _label(plain_line(name))
        self._port, self._is_https = port, is_https
        self._stopped = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if group == GROUP:  # the system's own resolver listens there too
                if hasattr(socket, "SO_REUSEPORT"):
                    with contextlib.suppress(OSError):
                        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                self._socket.bind(("", group[1]))
                member = socket.inet_aton(group[0]) + struct.pack("=I", socket.INADDR_ANY)
                self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            else:
                self._socket.bind(group)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(_LOOK_S)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # also a time limit
                packet, sender = self._socket.recvfrom(_MOST_BYTES)
                if (number := _asks(packet)) is not None:
                    # Resolvers ask from the group's own port, and want everybody to hear the answer.
                    self._socket.sendto(self._answer(number), GROUP if sender[1] == GROUP[1] else sender)

    def _answer(self, number: int) -> bytes:
        service, host = _name_of(SERVICE.split(".")), _name_of([_host(), "local"])
        mine = self._name + service
        texts = b"".join(bytes([len(text)]) + text for text in (b"path=/v1", b"https=%d" % self._is_https))
        records = (
            _record(service, _PTR, mine),
            _record(mine, _SRV, struct.pack(">HHH", 0, 0, self._port) + host),
            _record(mine, _TXT, texts),
        )
        return struct.pack(">HHHHHH", number, 0x8400, 0, 1, 0, 2) + b"".join(records)


def _host() -> str:
    return socket.gethostname().partition(".")[0] or "switchyard"


def _label(text: str) -> bytes:
    raw = text.encode("utf-8", "ignore")[:63].decode("utf-8", "ignore").encode() or b"Switchyard"
    return bytes([len(raw)]) + raw


def _name_of(labels: list[str]) -> bytes:
    return b"".join(map(_label, labels)) + b"\0"


def _record(name: bytes, kind: int, data: bytes) -> bytes:
    return name + struct.pack(">HHIH", kind, _IN, _TTL_S, len(data)) + data


def _question() -> bytes:
    head = struct.pack(">HHHHHH", 0, 0, 1, 0, 0, 0)
    return head + _name_of(SERVICE.split(".")) + struct.pack(">HH", _PTR, _IN | _UNICAST)


def _asks(packet: bytes) -> int | None:
    """The number of a question for servers like this one; None if it is something else."""
    try:
        number, flags, questions = struct.unpack_from(">HHH", packet)
        if flags & 0x8000:
            return None
        at = 12
        for _ in range(min(questions, _MOST_RECORDS)):
            labels, at = _labels(packet, at)
            kind, _class = struct.unpack_from(">HH", packet, at)
            at += 4
            if ".".join(labels).lower() == SERVICE and kind in (_PTR, _ANY):
                return int(number)
    except (struct.error, IndexError, ValueError):
        pass
    return None


def _answer_in(packet: bytes, host: str) -> Nearby | None:
    """The server that an answer tells of; its address is the one that the answer came from."""
    port, name, texts = 0, "", {}
    try:
        for labels, kind, data in _records(packet):
            if ".".join(labels[-3:]).lower() != SERVICE:
                continue
            if kind == _SRV and len(labels) > 3:
                (port,) = struct.unpack_from(">H", data, 4)
                name = plain_line(labels[0])[:40]
            elif kind == _TXT:
                texts = dict(_texts(data))
    except (struct.error, IndexError, ValueError):
        return None
    if not port or not name:
        return None
    path = texts.get("path", "/v1")
    path = path if path.startswith("/") and path.isascii() and path.isprintable() and " " not in path else "/v1"
    return Nearby(name, f"{'https' if texts.get('https') == '1' else 'http'}://{host}:{port}{path[:100]}")


def _records(packet: bytes) -> Iterator[tuple[list[str], int, bytes]]:
    _number, flags, questions, *counts = struct.unpack_from(">HHHHHH", packet)
    if not flags & 0x8000:
        return
    at = 12
    for _ in range(min(questions, _MOST_RECORDS)):
        _asked, at = _labels(packet, at)
        at += 4
    for _ in range(min(sum(counts), _MOST_RECORDS)):
        labels, at = _labels(packet, at)
        kind, _class, _ttl, length = struct.unpack_from(">HHIH", packet, at)
        at += 10
        yield labels, kind, packet[at : at + length]
        at += length


def _labels(packet: bytes, at: int) -> tuple[list[str], int]:
    """(the labels of a name, where it ends).  Names may go on elsewhere in the packet, but not for ever."""
    labels: list[str] = []
    end = 0
    for _ in range(_MOST_RECORDS + _MOST_JUMPS):
        length = packet[at]
        if length & 0xC0 == 0xC0:
            end = end or at + 2
            at = (length & 0x3F) << 8 | packet[at + 1]
        elif length:
            labels.append(packet[at + 1 : at + 1 + length].decode("utf-8", "replace"))
            at += 1 + length
        else:
            return labels, end or at + 1
    raise ValueError("the name has no end")


def _texts(data: bytes) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(data):
        text = data[at + 1 : at + 1 + data[at]].decode("utf-8", "replace")
        name, _, value = text.partition("=")
        yield name.lower(), value
        at += 1 + data[at]
