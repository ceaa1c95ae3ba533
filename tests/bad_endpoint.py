"""A server with OpenAI's interface on this machine that does what a test says, and notes what it was asked.

with BadEndpoint() as server:
    server.answer = lambda asked: asked.stream("Hel", "lo")
"""

import contextlib
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any

MODEL = "some/model"


class Asked:
    """One request, and the ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, released: threading.Event) -> None:
        self._handler, self._released = handler, released
        self.method, self.path = handler.command, handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        length = int(self.headers.get("content-length", 0))
        self.body: dict[str, Any] = json.loads(handler.rfile.read(length)) if length else {}

    @property
    def key(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        """A whole answer; names in `headers` have underscores."""
        self._handler.send_response(status)
        for name, value in {"content_length": str(len(content)), **headers}.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()
        self._handler.wfile.write(content)

    def json(self, document: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(document).encode(), content_type="application/json", **headers)

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        self.json({"error": {"message": message, "code": code}}, status, **headers)

    def begin_stream(self) -> None:
        self._handler.send_response(200)
        self._handler.send_header("content-type", "text/event-stream; charset=utf-8")
        self._handler.send_header("connection", "close")
        self._handler.end_headers()

    def raw(self, content: bytes) -> None:
        self._handler.wfile.write(content)
        self._handler.wfile.flush()

    def chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self.raw(b"data: " + json.dumps({"model": MODEL, "choices": [choice], **more}).encode() + b"\n\n")

    def stream(self, *texts: str, finish: str = "stop", usage: tuple[int, int] | None = (7, 3)) -> None:
        """A whole streamed answer."""
        self.begin_stream()
        for text in texts:
            self.chunk({"content": text})
        self.chunk({}, finish)
        if usage is not None:
            counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
            self.raw(b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n")
        self.raw(b"data: [DONE]\n\n")

    def hang(self) -> None:
        """Says nothing more until the server closes."""
        self._released.wait(60)


def hello(asked: Asked) -> None:
    asked.stream("Hel", "lo")


@dataclass
class BadEndpoint:
    """The server; `certificate` is a PEM file with its certificate and key, for HTTPS.

    Attributes:
        answer: what is done with a POST; `get`: with other GETs than that of the models.
        entries: its list of models, in place of `models` and `owner`; `listed`: the whole answer around it.
        asked: all requests.
    """

    answer: Callable[[Asked], None] = hello
    get: Callable[[Asked], None] = lambda asked: asked.json({"detail": "Not Found"}, 404)
    models: tuple[str, ...] = (MODEL,)
    owner: str = "somebody"
    certificate: Path | None = None
    entries: tuple[dict[str, Any], ...] = ()
    listed: dict[str, Any] | None = None
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> "BadEndpoint":
        server = self
        self._released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                if server.certificate is not None:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(server.certificate)
                    self.request = context.wrap_socket(self.request, server_side=True)
                super().setup()

            def do_GET(self) -> None:
                self._do(server._on_get)

            def do_POST(self) -> None:
                self._do(lambda asked: server.answer(asked))

            def _do(self, answer: Callable[[Asked], None]) -> None:
                asked = Asked(self, server._released)
                server.asked.append(asked)
                with contextlib.suppress(OSError):
                    answer(asked)

            def finish(self) -> None:
                with contextlib.suppress(OSError):
                    super().finish()
                if server.certificate is not None:
                    self.request.close()

            def log_message(self, *_: Any) -> None:
                pass

        class Listening(ThreadingHTTPServer):
            daemon_threads = False
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # clients that leave

        self._server = Listening(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="bad-endpoint")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}/v1"

    @property
    def posted(self) -> list[Asked]:
        return [each for each in self.asked if each.method == "POST"]

    def _on_get(self, asked: Asked) -> None:
        if asked.path != "/v1/models":
            self.get(asked)
            return
        entries = list(self.entries) or [{"id": name, "owned_by": self.owner} for name in self.models]
        asked.json(self.listed or {"object": "list", "data": entries})


def write_certificate(folder: Path, host: str = "127.0.0.1", *, days: int = 2) -> tuple[Path, Path]:
    """(certificate and key, the certificate alone) of a server of this name, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
    try:
        names: list[x509.GeneralName] = [x509.IPAddress(ip_address(host))]
    except ValueError:
        names = [x509.DNSName(host)]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=3))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both, alone = folder / "server.pem", folder / "certificate.pem"
    both.write_bytes(pem + secret)
    alone.write_bytes(pem)
    return both, alone
