"""The server among strangers who take its connections, its memory, its log and its time: who may ask is answered."""

import contextlib
import json
import logging
import select
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.paths import log_dir
from engine.process.lifetime import Seldom
from engine.protocol import Ask, Failed, Finished, Token
from engine.runtime.schedule.request import Preparation
from engine.serving import server as connections
from engine.serving import server as server_module
from engine.serving.broker import ModelBroker
from engine.serving.server import Address, Server, own_certificate
from engine.serving.service import Service
from engine.untrusted_text.child import _clearly_more
from tests import plain_http
from tests.engine.test_serving import HELLO, HI, TinyEngine
from tests.refusals import until
from tests.scripted_broker import ScriptedBroker, made_up_models

KEY = {"authorization": "Bearer 0123456789"}
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


class Guarded:
    """A server that asks for a key, for the duration of a block, and those who attack it."""

    def __init__(self, *, ends: bool = True, **address: Any) -> None:
        self.broker = ScriptedBroker(ends=ends)
        self._address = Address(port=0, **{"key": "0123456789", **address})
        self._server = Server(Service(self.broker, made_up_models()), self._address)
        self._strangers: list[socket.socket] = []

    def __enter__(self) -> "Guarded":
        self.port = self._server.start()
        scheme = "https" if self._address.certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        for stranger in self._strangers:
            stranger.close()

    def attack(self, number: int, opening: bytes = b"", host: str = "127.0.0.1") -> list[socket.socket]:
        """So many strangers come, who say this and no more."""
        come = list[socket.socket]()
        for _ in range(number):
            stranger = socket.create_connection(("127.0.0.1", self.port), 30, (host, 0))
            self._strangers.append(stranger)
            come.append(stranger)
            with contextlib.suppress(ConnectionError):  # it has had to make room already
                stranger.sendall(opening)
        return come

    def chat(self, **options: Any) -> httpx2.Response:
        body = {"messages": HELLO, "max_tokens": 8}
        return plain_http.post(f"{self.url}/v1/chat/completions", json=body, timeout=30, headers=KEY, **options)


def still_connected(strangers: list[socket.socket]) -> int:
    """How many have not been cut."""
    poll = select.poll()
    for stranger in strangers:
        poll.register(stranger, select.POLLRDHUP)
    return len(strangers) - len(poll.poll(0))


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process has both ends of all connections."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4096:
        pytest.skip("too few files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="counts who is still connected by Linux's poll")
@pytest.mark.parametrize(
    ("number", "opening"),
    [
        (1500, b""),
        (600, b"GET /v1/models HT"),
        (600, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (600, POST + b"Authorization: Bearer wrong\r\nContent-Length: 9999999\r\n\r\n{"),
        (600, POST + b"Origin: http://evil.example\r\nX-Api-Key: 0123456789\r\nContent-Length: 9\r\n\r\n{"),
    ],
)
def test_strangers_keep_nobody_out(number: int, opening: bytes, many_files: None) -> None:
    with Guarded(ends=False) as server, httpx2.Client() as client:
        asked = {"messages": HELLO, "stream": True}
        request = client.build_request("POST", f"{server.url}/v1/chat/completions", json=asked, headers=KEY)
        stream = client.send(request, stream=True)
        lines = stream.iter_lines()
        assert "data" in next(lines)
        strangers = server.attack(number, opening)
        until(lambda: still_connected(strangers) <= connections.MOST_CONNECTIONS // 2)
        for _ in range(3):
            assert plain_http.get(f"{server.url}/v1/models", headers=KEY, timeout=30).status_code == 200
            server.attack(50, opening)
        server.broker.tickets[0].tell(Token("", " there", 2))  # who was being answered still is
        server.broker.tickets[0].tell(Finished("", "stop", 3, 0, 2))
        assert "there" in "".join(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of their own")
def test_those_of_one_address_make_room_for_each_other_first(many_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 40)
    with Guarded() as server:
        (neighbour,) = server.attack(1, host="127.0.0.2")
        crowd = server.attack(100)
        until(lambda: still_connected(crowd) == 20)
        others = [one for host in range(3, 9) for one in server.attack(8, host=f"127.0.0.{host}")]
        until(lambda: still_connected(crowd) < 8 and still_connected(others) + still_connected(crowd) == 39)
        assert still_connected([neighbour]) == 1
        assert server.chat().status_code == 200


def test_connections_that_agree_on_no_encryption_are_cut(monkeypatch: pytest.MonkeyPatch, many_files: None) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with Guarded(certificate=own_certificate()) as server:
        server.attack(600)
        server.attack(20, b"GET / HTTP/1.1\r\n\r\n")
        assert server.chat(verify=trusting).status_code == 200
        monkeypatch.setattr(connections, "SLOWEST_HANDSHAKE_S", 0.05)
        for late in server.attack(20):
            with contextlib.suppress(ConnectionError):
                assert late.recv(1) == b""
        assert server.chat(verify=trusting).status_code == 200


def test_all_unfinished_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_HELD_BYTES", 2**20)
    head = POST + b"Authorization: Bearer 0123456789\r\nContent-Length: 3000000\r\n\r\n"
    with Guarded() as server:
        strangers = server.attack(3, head + b" " * 700_000)
        refused, _, _ = select.select(strangers, [], [], 30)
        with refused[0].makefile("rb") as received:
            answer = received.read(270).decode()
        assert answer.startswith("HTTP/1.1 503")
        assert "large requests" in answer
        assert server.chat().status_code == 200  # a small one
        for stranger in strangers:
            stranger.close()
        large = {"messages": HELLO, "metadata": {"x": "y" * 900_000}}

        def is_taken() -> bool:
            return plain_http.post(f"{server.url}/v1/chat/completions", json=large, headers=KEY).status_code == 200

        until(is_taken)
        until(is_taken)  # what was held is free again


def test_who_has_no_key_is_refused_before_the_body_is_there() -> None:
    with Guarded() as server:
        (stranger,) = server.attack(1, POST + b"Content-Length: 3000000\r\n\r\n" + b" " * 100)
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")


def test_who_finds_all_places_taken_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 6)
    with Guarded(ends=False) as server:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        head = POST + f"Authorization: Bearer 0123456789\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(5):
            (caller,) = server.attack(1, head + body)
            assert caller.recv(10_000)
        answer = server.chat()
        assert (answer.status_code, "as many clients as it can" in answer.text) == (503, True)
        server.broker.tickets[0].tell(Finished("", "stop", 3, 0, 1))
        until(lambda: plain_http.get(f"{server.url}/v1/models", headers=KEY).status_code == 200)
        for ticket in server.broker.tickets[1:]:  # or the server would give them time as it stops
            ticket.tell(Finished("", "stop", 3, 0, 1))


def test_without_files_for_connections_strangers_go_and_the_log_stays_short(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    program = textwrap.dedent("""
        import os, resource, sys
        from engine.process.lifetime import log_to_file
        from engine.serving.server import Address, Server
        from engine.serving.service import Service
        from tests.scripted_broker import ScriptedBroker, made_up_models
        end_log = log_to_file("server.log", also_stderr=False)
        server = Server(Service(ScriptedBroker(ends=True), made_up_models()), Address(port=0, key="0123456789"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        port = server.start()
        others = []
        while len(others) < 1000:
            try:
                others.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(20):
            os.close(others.pop())
        print(port, flush=True)  # only now, or all strangers may have come and gone before
        sys.stdin.read()
        server.stop()
        end_log()
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    strangers = list[socket.socket]()
    try:
        port = int(child.stdout.readline())
        for _ in range(4):
            strangers += [socket.create_connection(("127.0.0.1", port), 30) for _ in range(30)]
            models = plain_http.get(f"http://127.0.0.1:{port}/v1/models", headers=KEY, timeout=30)
            assert models.status_code == 200
    finally:
        for stranger in strangers:
            stranger.close()
        child.stdin.close()
        child.stdout.close()
        assert child.wait(30) == 0
    lines = (log_dir() / "server.log").read_text().splitlines()
    assert len(lines) == 1
    assert "could not be accepted" in lines[0]


def test_what_is_logged_often_is_written_once_a_minute_with_how_often() -> None:
    now_s, said = [0.0], list[str]()
    seldom = Seldom(lambda: now_s[0])

    def happens(words: str, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("door", level, __file__, 1, "It failed: %s", (words,), None)
        assert seldom.filter(record) is seldom.filter(record)  # for each handler
        if seldom.filter(record):
            said.append(record.getMessage())

    for second in range(130):
        now_s[0] = second
        happens("no files")
        happens("all is well", logging.INFO)
    happens("no memory")
    assert said.count("It failed: all is well") == 130
    failures = [words for words in said if "well" not in words]
    again = "It failed: no files (and 59 times since it was last written)"
    assert failures == ["It failed: no files", again, again, "It failed: no memory"]


@pytest.fixture(scope="module")
def without_key() -> Iterator[Guarded]:
    with Guarded(key="", origins=("http://named.example:81",)) as server:
        yield server


@pytest.mark.parametrize(
    ("origin", "host", "may"),
    [
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}", True),
        ("http://localhost:{port}", "LOCALHOST:{port}", True),
        ("http://[::1]:{port}", "[::1]:{port}", True),
        ("http://localhost", "localhost:80", True),
        ("http://127.0.0.1:{other}", "127.0.0.1:{port}", False),
        ("http://127.0.0.1", "127.0.0.1:{port}", False),
        ("http://localhost:{port}", "127.0.0.1:{port}", False),
        ("https://127.0.0.1:{port}", "127.0.0.1:{port}", False),
        ("https://localhost", "localhost", False),
        ("null", "127.0.0.1:{port}", False),
        ("http://127.0.0.1:x", "127.0.0.1:x", False),
        ("http://a@127.0.0.1:{port}", "a@127.0.0.1:{port}", False),
        ("", "", False),
        ("http://named.example:81", "127.0.0.1:{port}", True),
        ("http://named.example", "127.0.0.1:{port}", False),
    ],
)
def test_only_its_own_pages_and_those_that_were_named_may_ask(
    without_key: Guarded, origin: str, host: str, may: bool
) -> None:
    places = {"port": without_key.port, "other": without_key.port + 1}
    headers = {"origin": origin.format(**places), "host": host.format(**places)}
    answer = plain_http.get(f"{without_key.url}/v1/models", headers=headers)
    assert answer.status_code == (200 if may else 403)
    assert answer.headers.get("access-control-allow-origin") == (headers["origin"] if may else None)


def test_requests_may_name_the_whole_url() -> None:
    with Guarded(key="") as server:
        for target, header, status in (
            ("http://127.0.0.1/v1/models", "127.0.0.1", 200),
            ("http://127.0.0.1:8490/v1/models?x=http://other", "ignored.example", 200),
            ("HTTP://localhost/v1/models", "localhost", 200),
            ("http://evil.example/v1/models", "127.0.0.1", 403),
            ("http://127.0.0.1/", "127.0.0.1", 200),
            ("http://127.0.0.1", "127.0.0.1", 200),
            ("ftp://127.0.0.1/v1/models", "127.0.0.1", 404),
            ("http:///v1/models", "127.0.0.1", 404),
            ("*", "127.0.0.1", 404),
        ):
            ask = f"GET {target} HTTP/1.1\r\nHost: {header}\r\nConnection: close\r\n\r\n".encode()
            (client,) = server.attack(1, ask)
            with client.makefile("rb") as received:
                assert int(received.readline().split()[1]) == status, target


def test_streams_go_on_while_another_prompt_becomes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = TinyEngine(), Preparation.prompt
    broker = ModelBroker(engine, engine.load)
    written, at_work, more = list[int](), threading.Event(), threading.Condition()

    def read(rows: Preparation, messages: Any, *given: Any) -> list[int]:
        if messages[0].content != "Hello":
            at_work.set()
            before = len(written)
            with more:
                assert more.wait_for(lambda: len(written) >= before + 20, 60)
        return prompt(rows, messages, *given)

    def on_stream(event: Any) -> None:
        if isinstance(event, Token):
            with more:
                written.append(event.generated_tokens)
                more.notify_all()
            if len(written) == 2:
                broker.ask(Ask(Path("mixtral"), (HI[0].__class__("user", "word " * 10**6),)), on_long)
                broker.ask(Ask(Path("mixtral"), HI, wants="length"), on_count)

    def on_long(event: Any) -> None:
        long.append(event)

    def on_count(event: Any) -> None:
        counted.append(event)

    long, counted = list[Any](), list[Any]()
    monkeypatch.setattr(Preparation, "prompt", read)
    broker.start()
    ticket = broker.ask(Ask(Path("mixtral"), HI, sampling={"max_tokens": 240}), on_stream)
    try:
        until(lambda: long and counted)
        assert isinstance(long[0], Failed)
        assert "about" in long[0].error.message
        assert "tokens long" in long[0].error.message
        assert isinstance(counted[-1], Finished)
    finally:
        ticket.cancel()
        broker.close()
    assert at_work.is_set()


def test_a_model_that_goes_ends_what_is_becoming_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt, events = TinyEngine(), Preparation.prompt, list[Any]()
    broker = ModelBroker(engine, engine.load)
    at_work = threading.Event()

    def read(rows: Preparation, messages: Any, cancelled: Callable[[], bool], *given: Any) -> list[int]:
        at_work.set()
        until(cancelled)
        return prompt(rows, messages, cancelled, *given)

    monkeypatch.setattr(Preparation, "prompt", read)
    broker.start()
    broker.ask(Ask(Path("mixtral"), HI), events.append)
    assert at_work.wait(30)
    broker.close()
    assert isinstance(events[-1], Failed)


@given(st.text(alphabet="ab ", max_size=3000), st.integers(1, 40))
def test_a_text_is_too_long_only_if_its_tokens_are_too_many(text: str, most: int) -> None:
    read = list[int]()

    def encode(part: str) -> list[int]:
        read.append(len(part))
        return [len(word) for word in part.split()]

    tokens = _clearly_more(encode, text, most)
    assert all(4 * one == two for one, two in pairwise(read))
    assert sum(read[:-1]) <= len(text)
    if tokens is not None:
        assert len(text.split()) > most
        assert tokens > most
    assert _clearly_more(encode, text, None) is None
