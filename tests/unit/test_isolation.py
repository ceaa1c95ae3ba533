"""The checks that every test stands under do catch what they are for."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.common import paths
from tests import leaks


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)


def leave_thread() -> Callable[[], None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten", daemon=True)
    thread.start()

    def clean() -> None:
        done.set()
        thread.join()

    return clean


def leave_process() -> Callable[[], None]:
    command = [sys.executable, "-c", "print(flush=True); input()  # forgotten"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()  # until it has begun, it has no name of its own

    def clean() -> None:
        process.communicate()

    return clean


def leave_file() -> Callable[[], None]:
    handle, path = tempfile.mkstemp(prefix="forgotten")
    os.close(handle)
    return Path(path).unlink


@pytest.mark.parametrize("leave", [leave_thread, leave_process, leave_file])
def test_what_a_test_leaves_behind_is_seen(leave: Callable[[], Callable[[], None]]) -> None:
    before = leaks.snapshot()
    assert leaks.leaks_since(before) == []
    clean = leave()
    found = leaks.leaks_since(before)
    clean()
    assert len(found) == 1
    assert "forgotten" in found[0]
    assert leaks.leaks_since(before) == []


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "huggingface.co"])
def test_no_other_machine_is_reached(host: str) -> None:
    with pytest.raises(RuntimeError, match="no network but loopback"):
        socket.create_connection((host, 443), timeout=0.1)


def test_loopback_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        server.accept()[0].close()
        assert client.getpeername() == server.getsockname()


def test_every_test_has_a_home_of_its_own(switchyard_home: Path) -> None:
    for folder in (paths.config_dir(), paths.data_dir(), paths.models_dir(), paths.cache_dir(), paths.log_dir()):
        assert folder.is_relative_to(switchyard_home)
