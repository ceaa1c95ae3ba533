"""Installations to break: a package that has fetched nothing yet, and one that has an update before it.

Both are started as people start them, by `start`, which says the sentence that the window would show, or nothing if all
went well; `works` is the version that answers.  The engine is a few small wheels from a server on this machine.
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.checkpoint import mirror
from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.common import installed
from engine.common.errors import EngineError
from engine.hardware.torch_builds import CPU, Choice
from engine.parts import install as installing
from engine.parts import updates
from engine.parts.install import install, proven_partial
from engine.parts.updates import begin_engine, begin_update, install_update, look_for_update
from engine.parts.wheels import EngineChoice, EngineSource, begin_download, choose_engine, fetched_folder
from tests.bundles import PLATFORM, make_bundle, make_lock, make_own_wheels, make_wheel
from tests.hub_server import HubServer

UV = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
OLD, NEW = "0.2.0", "0.3.0"
KEY = Ed25519PrivateKey.generate()
WINDOW_TEST = (
    f"import os, json; print(json.dumps({{'problem': os.environ.get('WINDOW_PROBLEM', ''), 'version': '{NEW}'}}))\n"
)


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def chosen(source: EngineSource | None = None) -> EngineChoice:
    return choose_engine(lambda: Choice(CPU), source)


def in_this_process(
    command: Sequence[str], variables: dict[str, str], _within_s: float, folder: Path
) -> tuple[int, str]:
    """What uv and the tests of new parts do, for those who have no time to start them."""
    if "--target" in command:
        target = Path(command[command.index("--target") + 1])
        for word in command:
            wheel = folder / unquote(urlsplit(word.partition(" @ ")[2] or word).path)
            if wheel.suffix == ".whl":
                with zipfile.ZipFile(wheel) as packed:
                    try:
                        packed.extractall(target)
                    except OSError as error:
                        return 2, f"error: {error.strerror}"
        return 0, ""
    problem = variables.get("WINDOW_PROBLEM" if command[-1] == updates.SELF_TEST else "SELF_TEST_PROBLEM", "")
    return bool(problem), json.dumps({"problem": problem, "torch": "1.0"})


class Fresh:
    """A package of version 0.2.0, just installed.

    Args:
        is_quick: see `in_this_process`.

    Attributes:
        on_way: called with each report of a download; on_step: with each step of an installation.
    """

    wanted = OLD

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, hub: HubServer, *, is_quick: bool = False
    ) -> None:
        self.folder, self.monkeypatch, self.hub, self.is_quick = folder, monkeypatch, hub, is_quick
        if is_quick:
            monkeypatch.setattr(installing, "_run", in_this_process)
        self.home = folder / "Jürgens Rechner"
        self.home.mkdir()
        monkeypatch.setenv("SWITCHYARD_HOME", str(self.home))
        self.wheels = [
            make_wheel(
                folder / "made", "torch", "1.0", {"torch/__init__.py": "VERSION = '1.0'\n", "torch/lib.so": BIG}
            ),
            make_wheel(folder / "made", "numpy", "2.0", {"numpy/__init__.py": ""}),
        ]
        repo = hub.add("wheels/all", {path.name: path for path in self.wheels})
        self.address = f"{hub.endpoint}/wheels/all/resolve/{repo.commit}"
        self.root = make_bundle(folder / "Switchyard ü", OLD, uv=str(UV))
        make_own_wheels(self.root, OLD)
        make_lock(self.root, self.wheels, self.address)
        monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(self.root))
        self.on_way: Callable[[Download], object] = lambda _: None
        self.on_step: Callable[[str], object] = lambda _: None

    @property
    def parts(self) -> Path:
        return installed.parts_dir()

    @property
    def engine(self) -> Path:
        return self.parts / f"engine-{OLD}-cpu"

    def start(self) -> str:
        """What the window does on its first page, and the sentence that it shows in the end."""
        installed._read_bundle.cache_clear()  # a new process
        try:
            return self.do()
        except EngineError as error:
            return error.message

    def do(self) -> str:
        if installed.needs_engine():
            choice = chosen()
            is_here = choice.reused is not None or fetched_folder(choice.name) or proven_partial(choice.name)
            if not is_here and (problem := self.fetch(begin_download(choice))):
                return problem
            install(choice, on_step=self.on_step)
        return ""

    def fetch(self, download: Download) -> str:
        """People who read that something is wrong pause it, and look."""
        said: list[str] = []

        def look(now: Download) -> None:
            self.on_way(now)
            if now.problem:
                said.append(now.problem)
                queue.pause(now.key)

        queue.resume(download.key)
        ended = queue.run(download.key, on_progress=look)
        if ended.state is DownloadState.DONE:
            return ""
        return ended.problem or said[-1]

    def works(self) -> str:
        """The version that the next start has; empty if nothing answers."""
        installed._read_bundle.cache_clear()
        version = installed.next_version()
        engine = installed.current_engine(version)
        if engine is None:
            return ""
        packed = installed.bundle()
        assert packed is not None
        if self.is_quick:
            files = ("torch/lib.so", "torch/__init__.py", "engine/self_test.py")
            return (
                version if version == engine.version and all((engine.folder / each).exists() for each in files) else ""
            )
        command, variables = installed.packed_module(packed, engine.folder, "engine.self_test")
        said = subprocess.run(command, env=os.environ | variables, capture_output=True, check=False).stdout
        answers = (engine.folder / "torch" / "lib.so").exists() and said and json.loads(said)["torch"] == "1.0"
        return version if answers and version == engine.version else ""

    def killed_at(self, step: str, *arguments: str) -> None:
        """Kills an installation in this step, and its children with it."""
        module = "engine.parts.updates" if arguments else "engine.parts.install"
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | {"SWITCHYARD_TORCH": "cpu"},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        with process:
            for line in process.stdout:
                if json.loads(line).get("step") == step:
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


class Updating(Fresh):
    """Version 0.2.0 works here, and 0.3.0 is published."""

    wanted = NEW

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, hub: HubServer, *, is_quick: bool = False
    ) -> None:
        super().__init__(folder, monkeypatch, hub, is_quick=is_quick)
        monkeypatch.setattr(updates, "updates_settings", lambda: {"address": "", "keys": [public(KEY)]})
        assert super().do() == ""
        self.publish()

    def do(self) -> str:
        if installed.next_version() == NEW:
            return ""
        found = look_for_update()
        if found is None:
            return "This is the newest version."
        is_here = fetched_folder(found.name) or proven_partial(found.name) or installed.part(found.name)
        if not is_here and (problem := self.fetch(begin_update(found))):
            return problem
        if install_update(found.version, self.on_step, chosen) is not None:
            if problem := self.fetch(begin_engine(found.version)):
                return problem
            install_update(found.version, self.on_step, chosen)
        return ""

    @property
    def window(self) -> Path:
        return self.parts / f"window-{NEW}"

    def publish(
        self, key: Ed25519PrivateKey = KEY, signs: bytes | None = None, spoil: Sequence[str] = (), **said: Any
    ) -> None:
        """Publishes a list of 0.3.0; signed by this key, or with another list's signature."""
        made = self.folder / "window"
        shutil.rmtree(made, ignore_errors=True)
        make_own_wheels(made / "switchyard-update", NEW)
        make_lock(made / "switchyard-update", self.wheels, self.address)
        (made / "app").mkdir()
        (made / "app" / "__init__.py").write_text("")
        (made / "app" / "self_test.py").write_text(WINDOW_TEST)
        file = self.folder / f"window-{NEW}.zip"
        with zipfile.ZipFile(file, "w") as packed:
            for path in sorted(made.rglob("*")):
                packed.write(path, path.relative_to(made).as_posix())
            for name in spoil:
                packed.writestr(name, "x")
        repo = self.hub.add("makers/windows", {file.name: file})
        data = file.read_bytes()
        about = {
            "platform": PLATFORM, "python": installed.this_python(), "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "url": f"{self.hub.endpoint}/makers/windows/resolve/{repo.commit}/{file.name}",
        }  # fmt: skip
        listed = {"format": 1, "version": NEW, "published": "2026-12-01", "notes": "", "windows": [about]} | said
        text = json.dumps(listed).encode()
        signature = base64.b64encode(key.sign(text if signs is None else signs))
        names = self.hub.add("makers/list", {"latest.json": text, "latest.json.sig": signature})
        mirror.use("updates", f"{self.hub.endpoint}/makers/list/resolve/{names.commit}")


TORCH, BIG = "VERSION = '1.0'\n", bytes(range(256)) * 384


class Proxy:
    """A proxy that lets through to one server whoever has this login, in `with`."""

    def __init__(self, server: str, login: str) -> None:
        wanted = "Basic " + base64.b64encode(login.encode()).decode()
        host = urlsplit(server).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.headers.get("Proxy-Authorization") != wanted:
                    self.send_response(407)
                    self.send_header("Proxy-Authenticate", 'Basic realm="office"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                asked = {name: self.headers[name] for name in ("Range", "If-Range", "Accept") if name in self.headers}
                line = http.client.HTTPConnection(host)
                with contextlib.closing(line):
                    line.request("GET", urlsplit(self.path).path, headers=asked)
                    answer = line.getresponse()
                    body = answer.read()
                self.send_response(answer.status)
                for name in ("Content-Range", "ETag"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def address(self, login: str = "") -> str:
        return f"http://{login and login + '@'}127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _can_mount() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and subprocess.call(["unshare", "-m", "true"]) == 0


CAN_MOUNT = _can_mount()
"""Whether a test may make a small or a read-only disk of its own here."""


@contextlib.contextmanager
def mounted(*arguments: str | Path) -> Iterator[None]:
    """A disk of the test's own; skips the test where that is not allowed."""
    if not CAN_MOUNT or subprocess.call(["mount", *arguments], stderr=subprocess.DEVNULL) != 0:
        pytest.skip("a disk of its own needs Linux and its administrator")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True)
