"""A hub on this machine: the API of Hugging Face's and ModelScope's over real HTTP, with faults to order.

    with HubServer() as hub:
        hub.add("org/model", {"config.json": b"...", "model.gguf": Path(...)})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.order(Fault("drop", path="model.gguf", after_bytes=1000, times=2))

Large files (those in `lfs`) are redirected to a second host, as the real hub does; what was asked for and sent is in
`hub.requests`.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

_CHUNK = 64 * 1024
_TICK_S = 0.05
"""A slow line sends what it may in so long, not a chunk at once: that would be a small part whole."""
_SEND_BUFFER = 128 * 1024
"""Small, so that what counts as sent has nearly arrived."""
LFS_BYTES = 100_000
"""Files from this size, or with weights' endings, lie on the second host."""


@dataclass
class Fault:
    """What goes wrong, and when.

    kind:
        "drop"          the line breaks after `after_bytes` of the body
        "stall"         nothing more comes after `after_bytes`; the line stays open until the server closes or `value` s
        "short"         Content-Length says `value` bytes too few, and no more are sent
        "long"          `value` bytes more than said follow
        "endless"       a body without length that never ends
        "wrong_bytes"   the byte at `after_bytes` of the body is flipped
        "status"        the answer is the status `value`, with `headers`
        "etag"          another ETag
        "commit"        another X-Repo-Commit
        "linked"        another X-Linked-Etag
        "ignore_range"  200 and the whole file where a range was asked for
        "wrong_range"   206, but Content-Range begins `value` bytes later
        "no_range"      206 without Content-Range
        "gzip"          Content-Encoding: gzip
        "page"          200 and a page for people, as from a network that wants a login
        "refuse"        the line is closed without an answer
        "slow"          wait `value` seconds before the answer

    Attributes:
        path: of the file (or the API's path), a pattern as in a shell.
        host: "hub", "second" or "any".
        times: how often; -1: always.
        chance: of meeting a request that fits, drawn from `HubServer.random`.
        skip: this many fitting requests go through first.
        method: "GET", "HEAD" or "any".
    """

    kind: str
    path: str = "*"
    host: str = "any"
    times: int = 1
    after_bytes: int = 0
    value: Any = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    chance: float = 1.0
    skip: int = 0
    method: str = "GET"
    met: int = field(default=0, init=False)


@dataclass
class Asked:
    """One request: `path` is the file's where one was meant, else the URL's; `sent` counts bytes of the body."""

    host: str
    method: str
    path: str
    range: str
    authorization: str
    if_range: str
    at: float
    status: int = 0
    start: int = 0
    sent: int = 0
    fault: str = ""


@dataclass
class Repo:
    """A repository that is served; change its attributes at any time.

    Attributes:
        token: only requests with it may read; `gated`: without it the answer is that of a gated repository.
        lfs: which files lie on the second host; None: by size and ending.
        hub: "huggingface" or "modelscope".
        with_sha256: whether the listing tells checksums.
        xet: file path -> xet hash.
    """

    id: str
    files: dict[str, bytes | Path]
    commit: str
    hub: str = "huggingface"
    licence: str = "apache-2.0"
    gated: str | bool = False
    token: str = ""
    downloads: int = 1000
    likes: int = 10
    updated: str = "2026-10-01T12:00:00.000Z"
    tags: tuple[str, ...] = ()
    pipeline: str = "text-generation"
    parameters: int | None = None
    card: dict[str, Any] = field(default_factory=dict)
    lfs: tuple[str, ...] | None = None
    with_sha256: bool = True
    renamed_to: str = ""
    xet: dict[str, str] = field(default_factory=dict)
    _digests: dict[str, tuple[str, str]] = field(default_factory=dict)

    def size(self, path: str) -> int:
        content = self.files[path]
        return content.stat().st_size if isinstance(content, Path) else len(content)

    def digests(self, path: str) -> tuple[str, str]:
        """(sha256, git's name) of a file's content; put one into `_digests` to lie."""
        if path not in self._digests:
            whole, blob = hashlib.sha256(), hashlib.sha1(f"blob {self.size(path)}\0".encode())
            with self.open(path) as file:
                while chunk := file.read(2**20):
                    whole.update(chunk)
                    blob.update(chunk)
            self._digests[path] = whole.hexdigest(), blob.hexdigest()
        return self._digests[path]

    def open(self, path: str) -> BinaryIO:
        import io

        content = self.files[path]
        return content.open("rb") if isinstance(content, Path) else io.BytesIO(content)

    def is_lfs(self, path: str) -> bool:
        if self.lfs is not None:
            return path in self.lfs
        return self.size(path) >= LFS_BYTES or path.endswith((".gguf", ".safetensors", ".bin"))


class HubServer:
    """Both hosts, started by `with` or `start`.

    Attributes:
        endpoint: what `HF_ENDPOINT` must be; `modelscope`: the same for that hub.
        second_host: where large files are.
        latency_s: before every answer; per_connection_bytes_per_s, bytes_per_s: limits of a line and of all together.
        page: entries a page of a listing.
        requests: everything asked, oldest first.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        per_connection_bytes_per_s: float = 0.0,
        bytes_per_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        import random

        self.random = random.Random(seed)
        self.latency_s, self.per_connection_bytes_per_s = latency_s, per_connection_bytes_per_s
        self.bytes_per_s = bytes_per_s
        self.page = 1000
        self.has_third_host = False  # the second one only says where the third is
        self.links_last_s = 0.0  # 0: a signed address stays good
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[Asked] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._free_at = 0.0
        self._servers: list[_Server] = []
        self._threads: list[threading.Thread] = []
        self._connections: set[socket.socket] = set()

    # Starting and stopping

    def start(self, port: int = 0) -> "HubServer":
        self.closing.clear()
        for name, bound in (("hub", port), ("second", 0)):
            server = _Server(self, name, bound)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name=f"hub-{name}")
            thread.start()
            self._servers.append(server)
            self._threads.append(thread)
        self.port, second = (server.server_address[1] for server in self._servers)
        self.endpoint = self.modelscope = f"http://127.0.0.1:{self.port}"
        self.second_host = f"http://localhost:{second}"
        return self

    def close(self) -> None:
        """Ends everything, stalled answers too."""
        self.closing.set()
        for server in self._servers:
            server.shutdown()
        self.cut()
        for server in self._servers:
            server.server_close()
        for thread in self._threads:
            thread.join()
        self._servers, self._threads = [], []

    def cut(self) -> None:
        """Breaks all lines, as a change of network does; new ones are welcome."""
        with self.lock:
            open_now = list(self._connections)
        for connection in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "HubServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What it serves, what goes wrong, and what was asked

    def add(self, repo_id: str, files: Mapping[str, bytes | Path], **about: Any) -> Repo:
        """Serves a repository; `about` are attributes of `Repo`."""
        commit = about.pop("commit", hashlib.sha1(repo_id.encode()).hexdigest())
        self.repos[repo_id] = repo = Repo(repo_id, dict(files), commit, **about)
        return repo

    def order(self, *faults: Fault) -> None:
        """Orders faults; the first one that fits a request and is not used up happens."""
        with self.lock:
            self.faults += faults

    def asked(self, path: str = "*", host: str = "any", method: str = "GET") -> list[Asked]:
        """The requests for files that match."""
        with self.lock:
            seen = list(self.requests)
        return [
            each
            for each in seen
            if fnmatch.fnmatchcase(each.path, path) and host in ("any", each.host) and method in ("any", each.method)
        ]

    def sent_bytes(self, path: str = "*") -> int:
        """Bytes of files' bodies sent in all, those twice that were sent twice."""
        return sum(each.sent for each in self.asked(path) if each.status in (200, 206))

    def candidate(self, repo_id: str, label: str = "Q4_K_M", paths: Iterable[str] | None = None) -> Any:
        """The `Candidate` that fetches these files, without asking anybody."""
        from engine.checkpoint.hub import Candidate, RepoFile, Repository

        repo = self.repos[repo_id]
        files = tuple(
            RepoFile(path, repo.size(path), repo.digests(path)[0] if repo.with_sha256 and repo.is_lfs(path) else "")
            for path in sorted(repo.files)
        )
        endpoint = self.modelscope if repo.hub == "modelscope" else self.endpoint
        repository = Repository(
            repo.hub, repo.id, repo.commit, files, repo.licence, "", bool(repo.gated), repo.downloads, endpoint
        )
        wanted = set(repo.files if paths is None else paths)
        return Candidate(repository, label, tuple(file for file in files if file.path in wanted), "good")

    # For the handlers

    def fault_for(self, host: str, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or fault.host not in ("any", host) or fault.method not in ("any", method):
                    continue
                if not fnmatch.fnmatchcase(path, fault.path):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.chance < 1 and self.random.random() >= fault.chance:
                    continue
                fault.times -= 1
                fault.met += 1
                return fault
        return None

    def hold_back(self, count: int) -> None:
        """Waits until the common line has carried `count` bytes."""
        if self.bytes_per_s:
            with self.lock:
                self._free_at = max(self._free_at, time.monotonic() - 0.02) + count / self.bytes_per_s
                free_at = self._free_at
            self.closing.wait(max(0.0, free_at - time.monotonic()))


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, hub: HubServer, name: str, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.hub, self.name = hub, name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Lines that break are what this server is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    asked: Asked

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()
        with self.hub.lock:
            self.hub._connections.add(self.request)

    def finish(self) -> None:
        with self.hub.lock:
            self.hub._connections.discard(self.request)
        with contextlib.suppress(OSError):
            super().finish()

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_GET

    # Requests

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        url = urlsplit(self.path)
        path, query = unquote(url.path), {name: values[-1] for name, values in parse_qs(url.query).items()}
        repo, file = self._file(path, query)
        self.asked = Asked(
            self.server.name,
            self.command,
            file if repo is not None else path,
            self.headers.get("Range", ""),
            self.headers.get("Authorization", ""),
            self.headers.get("If-Range", ""),
            time.monotonic(),
        )
        with self.hub.lock:
            self.hub.requests.append(self.asked)
        if self.hub.latency_s:
            self.hub.closing.wait(self.hub.latency_s)
        fault = self.hub.fault_for(self.server.name, self.command, self.asked.path)
        self.asked.fault = fault.kind if fault else ""
        if fault is not None and fault.kind == "refuse":
            self.close_connection = True
            return
        if fault is not None and fault.kind == "slow":
            self.hub.closing.wait(fault.value)
        if fault is not None and fault.kind == "status":
            self._send(fault.value, b"", fault.headers)
        elif repo is None:
            self._api(path, query, body)
        elif self.server.name == "second":
            self._second(repo, file, query, fault)
        else:
            self._resolve(repo, file, fault)

    def _file(self, path: str, query: dict[str, str]) -> tuple[Repo | None, str]:
        """The repository and the file that a request for content means."""
        if self.server.name == "second":
            _, owner, name, file = [*path.split("/", 3), "", "", ""][:4]
            return self.hub.repos.get(f"{owner}/{name}"), file
        scope = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", path)
        if scope:
            return self.hub.repos.get(scope[1]), query.get("FilePath", "")
        found = re.fullmatch(r"(?:/models)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        return (self.hub.repos.get(found[1]), found[3]) if found else (None, "")

    def _resolve(self, repo: Repo, file: str, fault: Fault | None) -> None:
        if self._is_refused(repo):
            return
        if file not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        sha256, blob = repo.digests(file)
        commit = "f" * 40 if fault is not None and fault.kind == "commit" else repo.commit
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"} if repo.hub == "huggingface" else {}
        if not repo.is_lfs(file) or repo.hub == "modelscope":
            etag = sha256 if repo.hub == "modelscope" else blob
            self._content(repo, file, f'"{etag}"', headers, fault)
            return
        linked = "e" * 64 if fault is not None and fault.kind == "linked" else sha256
        headers |= {"X-Linked-Etag": f'"{linked}"', "X-Linked-Size": str(repo.size(file)), "ETag": f'"{linked}"'}
        if file in repo.xet:
            headers["X-Xet-Hash"] = repo.xet[file]
            headers["Link"] = f'<{self.hub.endpoint}/api/models/{repo.id}/xet-read-token/{repo.commit}>; rel="xet-auth"'
        headers["Location"] = f"{self.hub.second_host}/{repo.id}/{quote(file)}?signed={time.monotonic()}"
        self._send(302, b"", headers)

    def _second(self, repo: Repo, file: str, query: dict[str, str], fault: Fault | None) -> None:
        lasts = self.hub.links_last_s
        host, _, port = self.headers.get("Host", "").partition(":")
        if file not in repo.files:
            self._send(404, b"")
        elif self.hub.has_third_host and host == "localhost":
            self._send(302, b"", {"Location": f"http://127.0.0.1:{port}{self.path}"})
        elif lasts and time.monotonic() - float(query.get("signed", 0)) > lasts:
            self._send(403, b"<Error>expired</Error>")
        else:
            self._content(repo, file, f'"second-{repo.digests(file)[0][:32]}"', {"Accept-Ranges": "bytes"}, fault)

    def _is_refused(self, repo: Repo) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo.token and given != repo.token:
            if repo.gated:
                self._send(403 if given else 401, b"", {"X-Error-Code": "GatedRepo"})
            else:
                self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return True
        return False

    # A file's bytes

    def _content(self, repo: Repo, file: str, etag: str, headers: Mapping[str, str], fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else ""
        if kind == "page":
            self._send(200, b"<html>Log in to the network of this hotel.</html>", {"Content-Type": "text/html"})
            return
        size = repo.size(file)
        if kind == "etag":
            etag = f'"another-{etag[1:20]}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last, status = 0, size - 1, 200
        fits = self.headers.get("If-Range", etag) == etag
        if asked and kind != "ignore_range" and fits:
            first, last, status = int(asked[1]), min(int(asked[2] or size - 1), size - 1), 206
            if first >= size:
                self._send(416, b"", {"Content-Range": f"bytes */{size}"})
                return
        count = last - first + 1
        answer = {"ETag": etag, "Content-Type": "application/octet-stream", **headers}
        shifted = fault.value if fault is not None and kind == "wrong_range" else 0
        if status == 206 and kind != "no_range":
            answer["Content-Range"] = f"bytes {first + shifted}-{last + shifted}/{size}"
        if kind == "gzip":
            answer["Content-Encoding"] = "gzip"
        said = count - int(fault.value) if fault is not None and kind == "short" else count
        if kind == "endless":
            self.close_connection = True
            answer["Connection"] = "close"
        else:
            answer["Content-Length"] = str(max(0, said))
        self.asked.status, self.asked.start = status, first
        self.send_response(status)
        for name, value in answer.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with repo.open(file) as content:
            content.seek(first)
            self._body(content, said, fault)

    def _body(self, content: BinaryIO, count: int, fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else ""
        stop = fault.after_bytes if fault is not None and kind in ("drop", "stall") else -1
        sent = 0
        begun = time.monotonic()
        try:
            while sent < count:
                slow = self.hub.per_connection_bytes_per_s
                size = min(int(slow * _TICK_S) + 1 if slow else _CHUNK, count - sent)
                if stop >= 0:
                    size = min(size, stop - sent)
                if size <= 0:
                    break
                chunk = content.read(size)
                if kind == "wrong_bytes" and fault is not None and sent <= fault.after_bytes < sent + len(chunk):
                    place = fault.after_bytes - sent
                    chunk = chunk[:place] + bytes([chunk[place] ^ 0x5A]) + chunk[place + 1 :]
                self.hub.hold_back(len(chunk))
                # Counted first: who has the last bytes may ask for the count before this thread goes on.
                self.asked.sent = sent + len(chunk)
                try:
                    self.wfile.write(chunk)
                except OSError:
                    self.asked.sent = sent
                    raise
                sent += len(chunk)
                if self.hub.per_connection_bytes_per_s:
                    due = begun + sent / self.hub.per_connection_bytes_per_s
                    self.hub.closing.wait(max(0.0, due - time.monotonic()))
            if kind == "stall" and fault is not None:
                self.hub.closing.wait(fault.value or None)
            if kind in ("drop", "stall", "short"):
                self.close_connection = True
            if kind == "long" and fault is not None:
                self.close_connection = True
                self.wfile.write(os.urandom(int(fault.value)))
            while kind == "endless" and not self.hub.closing.is_set():
                self.wfile.write(bytes(_CHUNK))
        except OSError:  # who asked has gone
            self.close_connection = True

    # The APIs

    def _api(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path.startswith("/api/v1/"):
            self._modelscope(path, query, body)
            return
        if path == "/openapi/v1/models":
            words = query.get("search", "").casefold().split()
            scope = [repo for repo in self.hub.repos.values() if repo.hub == "modelscope"]
            found_there = [repo for repo in scope if all(word in repo.id.casefold() for word in words)]
            models = [self._scope_listed(repo) for repo in found_there[: int(query.get("page_size", 10))]]
            self._json({"success": True, "data": {"models": models, "total_count": len(found_there)}})
            return
        if path == "/api/models":
            self._search(query)
            return
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|xet-read-token)/([^/]+)(?:/(.*))?)?", path)
        repo = self.hub.repos.get(found[1]) if found else None
        if found is None or repo is None or repo.hub != "huggingface":
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo.renamed_to:
            self._send(307, b"", {"Location": path.replace(repo.id, repo.renamed_to, 1)})
        elif repo.token and not repo.gated and self._is_refused(repo):
            pass
        elif found[3] and found[3] not in ("main", repo.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif found[2] == "tree":
            self._tree(repo, query)
        elif found[2] == "xet-read-token":
            expires = str(int(time.time()) + 3600)
            xet = {
                "X-Xet-Cas-Url": self.hub.second_host,
                "X-Xet-Access-Token": "xet",
                "X-Xet-Token-Expiration": expires,
            }
            said = {"casUrl": self.hub.second_host, "accessToken": "xet", "exp": int(expires)}
            self._send(200, json.dumps(said).encode(), xet)  # the hub's library reads the headers, xet's the body
        else:
            self._json(self._about(repo, with_blobs=query.get("blobs", "").lower() in ("true", "1")))

    def _about(self, repo: Repo, *, with_blobs: bool = False) -> dict[str, Any]:
        siblings = []
        for file in sorted(repo.files):
            entry: dict[str, Any] = {"rfilename": file}
            if with_blobs:
                entry |= {"size": repo.size(file), "blobId": repo.digests(file)[1]}
                if repo.is_lfs(file) and repo.with_sha256:
                    entry["lfs"] = {"sha256": repo.digests(file)[0], "size": repo.size(file), "pointerSize": 134}
            siblings.append(entry)
        about: dict[str, Any] = {
            "_id": repo.commit[:24],
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.id.partition("/")[0],
            "sha": repo.commit,
            "private": False,
            "gated": repo.gated,
            "downloads": repo.downloads,
            "likes": repo.likes,
            "lastModified": repo.updated,
            "createdAt": repo.updated,
            "pipeline_tag": repo.pipeline,
            "tags": [*repo.tags, f"license:{repo.licence}"],
            "cardData": {"license": repo.licence, **repo.card},
            "siblings": siblings,
        }
        if repo.parameters is not None:
            about["safetensors"] = {"parameters": {"BF16": repo.parameters}, "total": repo.parameters}
        return about

    def _tree(self, repo: Repo, query: dict[str, str]) -> None:
        entries: list[dict[str, Any]] = []
        for file in sorted(repo.files):
            sha256, blob = repo.digests(file)
            entry: dict[str, Any] = {"type": "file", "oid": blob, "size": repo.size(file), "path": file}
            if repo.is_lfs(file) and repo.with_sha256:
                entry["lfs"] = {"oid": sha256, "size": repo.size(file), "pointerSize": 134}
            if file in repo.xet:
                entry["xetHash"] = repo.xet[file]
            entries.append(entry)
        start, page = int(query.get("cursor", 0)), min(int(query.get("limit", self.hub.page)), self.hub.page)
        headers = {}
        if start + page < len(entries):
            following = "&".join(f"{n}={quote(v)}" for n, v in {**query, "cursor": str(start + page)}.items())
            address = f"{self.hub.endpoint}{urlsplit(self.path).path}?{following}"
            headers["Link"] = f'<{address}>; rel="next"'
        self._json(entries[start : start + page], headers)

    def _search(self, query: dict[str, str]) -> None:
        words = query.get("search", "").casefold().split()
        found = [
            repo for repo in self.hub.repos.values()
            if repo.hub == "huggingface" and all(word in repo.id.casefold() for word in words)
        ]  # fmt: skip
        found.sort(key=lambda repo: -repo.downloads)
        self._json([self._about(repo) for repo in found[: int(query.get("limit", 20))]])

    def _modelscope(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path in ("/api/v1/models", "/api/v1/models/", "/api/v1/dolphin/models"):
            asked = json.loads(body or b"{}")
            words = str(asked.get("Name") or query.get("Name") or query.get("search") or "").casefold().split()
            found = [
                self._scope_about(repo) for repo in self.hub.repos.values()
                if repo.hub == "modelscope" and all(word in repo.id.casefold() for word in words)
            ]  # fmt: skip
            models = {"Models": found, "TotalCount": len(found)}
            self._scope({"Model": models, **models})
            return
        found_path = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+?)(/repo/files|/revisions|/repo)?", path)
        repo = self.hub.repos.get(found_path[1]) if found_path else None
        if found_path is None or repo is None or repo.hub != "modelscope":
            self._json({"Code": 10010205001, "Message": "not found", "Success": False}, status=404)
        elif repo.token and self._is_refused(repo):
            pass
        elif found_path[2] == "/repo/files":
            files = [
                {
                    "Path": file,
                    "Name": file.rpartition("/")[2],
                    "Type": "blob",
                    "Size": repo.size(file),
                    "Sha256": repo.digests(file)[0] if repo.with_sha256 else "",
                    "Revision": repo.commit,
                    "CommitId": repo.commit,
                    "IsLFS": repo.is_lfs(file),
                }
                for file in sorted(repo.files)
            ]
            self._scope({"Files": files, "IsVisual": 0, "LatestCommitter": {"Id": repo.commit}})
        elif found_path[2] == "/revisions":
            self._scope({"RevisionMap": {"Branches": [{"Revision": "master"}], "Tags": []}})
        else:
            self._scope(self._scope_about(repo))

    def _scope_about(self, repo: Repo) -> dict[str, Any]:
        owner, _, name = repo.id.partition("/")
        return {
            "Path": owner,
            "Name": name,
            "License": repo.licence,
            "Downloads": repo.downloads,
            "Stars": repo.likes,
            "LastUpdatedTime": 1790000000,
            "Revision": "master",
            "Tags": list(repo.tags),
        }

    def _scope_listed(self, repo: Repo) -> dict[str, Any]:
        return {
            "id": repo.id,
            "license": repo.licence,
            "downloads": repo.downloads,
            "likes": repo.likes,
            "last_modified": repo.updated,
            "tags": list(repo.tags),
        }

    def _scope(self, data: dict[str, Any]) -> None:
        self._json({"Code": 200, "Data": data, "Message": "success", "Success": True})

    def _json(self, value: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.asked.status = status
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True
