"""Updates: signed, whole and proven before they are used, and what was in use before stays."""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint import mirror
from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import DownloadState
from engine.common import installed
from engine.common.errors import EngineError
from engine.hardware.torch_builds import CPU, Choice
from engine.parts import updates
from engine.parts.install import install
from engine.parts.updates import Update, begin_update, go_back, install_update, is_signed, look_for_update
from engine.parts.wheels import EngineChoice, EngineSource, begin_download, choose_engine
from tests.bundles import PLATFORM, make_bundle, make_lock, make_own_wheels, make_wheel
from tests.hub_server import HubServer

UV = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
KEY = Ed25519PrivateKey.generate()
OTHER = Ed25519PrivateKey.generate()
WINDOW_TEST = (
    "import os, json; print(json.dumps({'problem': os.environ.get('WINDOW_PROBLEM', ''), 'version': '0.3.0'}))\n"
)


def public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


class Server:
    """The makers' server: a list of versions, its signature, and windows."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self._hub, self._folder = hub, folder
        self.files: dict[str, Any] = {}
        self.address = ""

    def publish(self, key: Ed25519PrivateKey = KEY, signs: bytes | None = None, **said: Any) -> None:
        """Publishes a list that says so; signed by this key."""
        text = json.dumps(
            {"format": 1, "version": "0.3.0", "published": "2026-12-01", "notes": "", "windows": []} | said
        )
        signature = base64.b64encode(key.sign(signs if signs is not None else text.encode()))
        files = {**self.files, "latest.json": text.encode(), "latest.json.sig": signature}
        repo = self._hub.add("makers/updates", files)
        self.address = f"{self._hub.endpoint}/makers/updates/resolve/{repo.commit}"
        mirror.use("updates", self.address)

    def publish_window(self, wheels: Sequence[Path], lock_address: str, **others: Any) -> None:
        """Publishes version 0.3.0 with this engine."""
        made = self._folder / "window"
        shutil.rmtree(made, ignore_errors=True)
        make_own_wheels(made / "switchyard-update", "0.3.0")
        make_lock(made / "switchyard-update", wheels, lock_address)
        (made / "app").mkdir()
        (made / "app" / "__init__.py").write_text("")
        (made / "app" / "self_test.py").write_text(WINDOW_TEST)
        file = self._folder / "window-0.3.0.zip"
        with zipfile.ZipFile(file, "w") as packed:
            for path in sorted(made.rglob("*")):
                packed.write(path, path.relative_to(made).as_posix())
        data = file.read_bytes()
        self.files = {file.name: file}
        about = {"platform": PLATFORM, "python": installed.this_python(), "bytes": len(data)}
        about |= {"sha256": hashlib.sha256(data).hexdigest(), "url": "https://files.pythonhosted.org/x/" + file.name}
        self.publish(windows=[about | others])
        about["url"] = f"{self.address}/{file.name}"
        self.publish(windows=[about | others])


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    return [make_wheel(tmp_path / "made", "torch", "1.0", {"torch/__init__.py": "VERSION = '1.0'\n"})]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: HubServer, wheels: list[Path]) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "sync", lambda: None)
    root = make_bundle(tmp_path / "program", uv=str(UV))
    make_own_wheels(root, "0.2.0")
    repo = hub.add("wheels/all", {path.name: path for path in wheels})
    make_lock(root, wheels, f"{hub.endpoint}/wheels/all/resolve/{repo.commit}")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    monkeypatch.setattr(updates, "updates_settings", lambda: {"address": "", "keys": [public(OTHER), public(KEY)]})
    return root


@pytest.fixture
def server(hub: HubServer, tmp_path: Path, root: Path) -> Server:
    return Server(hub, tmp_path)


def choose(source: EngineSource | None = None) -> EngineChoice:
    return choose_engine(lambda: Choice(CPU), source)


def window(**others: Any) -> dict[str, Any]:
    said = {"platform": PLATFORM, "python": installed.this_python(), "url": "https://x.example/a.zip"}
    return said | {"sha256": "0" * 64, "bytes": 5} | others


# --- the signed list ----------------------------------------------------------------------------------


def test_a_newer_version_for_this_system_is_found(server: Server) -> None:
    server.publish(notes="Faster.", windows=[window(python="3.1"), window(), window(platform="other")])
    found = look_for_update()
    assert found == Update("0.3.0", "2026-12-01", "Faster.", "https://x.example/a.zip", "0" * 64, 5)


@pytest.mark.parametrize(
    "said",
    [
        {"version": "0.2.0", "windows": [window()]},
        {"version": "0.1.9", "windows": [window()]},
        {"windows": []},
        {"windows": [window(platform="plan9")]},
        {"format": 2},
    ],
)
def test_nothing_newer_for_this_system_is_no_update(server: Server, said: dict[str, Any]) -> None:
    server.publish(**said)
    assert look_for_update() is None


@pytest.mark.parametrize(
    "said", [{"version": "../../x"}, {"windows": [{}]}, {"windows": 3}, {"windows": [window(sha256="1")]}]
)
def test_a_signed_list_that_makes_no_sense_is_told(server: Server, said: dict[str, Any]) -> None:
    server.publish(**{"windows": [window()], **said})
    with pytest.raises(EngineError, match="makes no sense"):
        look_for_update()


@given(st.binary(max_size=100), st.binary(max_size=100), st.integers(0, 511))
def test_only_the_very_signature_of_the_very_content_counts(content: bytes, noise: bytes, bit: int) -> None:
    signature = bytearray(KEY.sign(content))
    assert is_signed(content, base64.b64encode(signature), [public(KEY)])
    assert not is_signed(content, base64.b64encode(signature), [public(OTHER)])
    assert not is_signed(content, noise, [public(KEY)])
    assert not is_signed(content + b"x", base64.b64encode(signature), [public(KEY)])
    signature[bit // 8] ^= 1 << bit % 8
    assert not is_signed(content, base64.b64encode(signature), [public(KEY), "no key", ""])


def test_without_a_key_or_an_address_nothing_is_asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not updates.can_update()
    mirror.use("updates", "https://updates.example")
    assert updates.can_update()
    monkeypatch.setattr(updates, "updates_settings", lambda: {"address": "https://x.example", "keys": []})
    assert not updates.can_update()


# --- installing ---------------------------------------------------------------------------------------

needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed")


@pytest.fixture
def update(server: Server, hub: HubServer, wheels: list[Path]) -> Update:
    """Version 0.2.0 with its engine runs here, and 0.3.0 is published."""
    first = choose()
    queue.run(begin_download(first).key)
    install(first)
    server.publish_window(wheels, "https://nowhere.invalid")
    found = look_for_update()
    assert found is not None
    return found


def state() -> tuple[str, str]:
    """Versions of the window and of the engine that the next start has."""
    engine = installed.current_engine(installed.next_version())
    return installed.next_version(), engine.version if engine is not None else ""


@needs_uv
def test_an_update_and_the_way_back(update: Update) -> None:
    assert queue.run(begin_update(update).key).state is DownloadState.DONE
    steps: list[str] = []
    assert install_update("0.3.0", steps.append, choose) is None
    assert steps[-1] == "finishing"
    assert state() == ("0.3.0", "0.3.0")
    assert installed.version() == "0.2.0"  # what runs goes on as it is
    engine = installed.current_engine()
    assert engine.version == "0.2.0"
    assert not list((installed.parts_dir() / "downloads").iterdir())
    assert go_back() == "0.2.0"
    assert state() == ("0.2.0", "0.2.0")
    assert go_back() == "0.3.0"
    assert state() == ("0.3.0", "0.3.0")


@needs_uv
def test_an_engine_with_other_wheels_is_fetched_first(update: Update, server: Server, hub: HubServer, tmp_path: Path):
    newer = [make_wheel(tmp_path / "newer", "torch", "2.0", {"torch/__init__.py": "VERSION = '2.0'\n"})]
    repo = hub.add("wheels/newer", {path.name: path for path in newer})
    server.publish_window(newer, f"{hub.endpoint}/wheels/newer/resolve/{repo.commit}")
    found = look_for_update()
    assert found is not None
    queue.run(begin_update(found).key)
    wanted = install_update("0.3.0", choose=choose)
    assert wanted is not None
    assert state() == ("0.2.0", "0.2.0")
    queue.run(begin_download(wanted).key)
    assert install_update("0.3.0", choose=choose) is None
    assert state() == ("0.3.0", "0.3.0")
    engine = installed.current_engine("0.3.0")
    assert engine.whole.proven["torch"] == "2.0"


@needs_uv
def test_one_that_does_not_work_changes_nothing(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.run(begin_update(update).key)
    monkeypatch.setenv("WINDOW_PROBLEM", "no such library")
    with pytest.raises(EngineError, match="no such library"):
        install_update("0.3.0", choose=choose)
    assert state() == ("0.2.0", "0.2.0")
    monkeypatch.delenv("WINDOW_PROBLEM")
    install_update("0.3.0", choose=choose)
    assert state() == ("0.3.0", "0.3.0")


@needs_uv
def test_a_window_that_is_not_the_listed_one_is_not_used(update: Update) -> None:
    ended = queue.run(begin_update(replace(update, sha256="f" * 64)).key)
    assert ended.state is DownloadState.FAILED
    with pytest.raises(EngineError, match="not been fetched"):
        install_update("0.3.0", choose=choose)
    assert state() == ("0.2.0", "0.2.0")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def leads_out(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr("../outside", "x")


def declares_itself_whole(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr("whole.json", "{}")


@needs_uv
@pytest.mark.parametrize("spoil", [damage, leads_out, declares_itself_whole])
def test_a_spoilt_file_is_found_out(update: Update, spoil: Callable[[Path], None], tmp_path: Path) -> None:
    queue.run(begin_update(update).key)
    spoil(installed.parts_dir() / "downloads" / update.name / update.file)
    with pytest.raises(EngineError, match="nothing has changed"):
        install_update("0.3.0", choose=choose)
    assert state() == ("0.2.0", "0.2.0")
    assert not list(tmp_path.rglob("outside"))


def test_nothing_to_go_back_to_is_told(root: Path) -> None:
    with pytest.raises(EngineError, match="no earlier version"):
        go_back()


@needs_uv
@pytest.mark.skipif(sys.platform == "win32", reason="kills as only POSIX knows them")
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delay_s=st.floats(0.1, 2.0))
def test_killed_at_any_moment_the_old_or_the_new_version_is_whole(update: Update, delay_s: float) -> None:
    if state()[0] == "0.3.0":  # of the example before
        shutil.rmtree(installed.parts_dir())
        first = choose()
        queue.run(begin_download(first).key)
        install(first)
    queue.run(begin_update(update).key)
    command = [sys.executable, "-m", "engine.parts.updates", "0.3.0"]
    variables = os.environ | {"SWITCHYARD_TORCH": "cpu"}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    time.sleep(delay_s)
    process.kill()
    process.wait()
    assert state() in (("0.2.0", "0.2.0"), ("0.3.0", "0.3.0"))
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert state() == ("0.3.0", "0.3.0"), done.stdout
