"""The engine's part from a real server to its folder, by real uv: what is used is whole, whatever happens meanwhile."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import DownloadState
from engine.checkpoint.mirror import PACKAGES_VARIABLE
from engine.cli import main
from engine.common import installed
from engine.common.errors import EngineError, ErrorCode
from engine.hardware.torch_builds import CPU, CUDA_126, Choice
from engine.parts import install as installing
from engine.parts.install import install
from engine.parts.wheels import EngineChoice, begin_download, choose_engine, downloads_folder
from tests.bundles import PLATFORM, make_bundle, make_lock, make_own_wheels, make_wheel
from tests.hub_server import Fault, HubServer
from tests.quick_downloads import make_quick

UV = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed")
PART = 16 * 1024
BIG = random.Random(5).randbytes(6 * PART)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch, PART)
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "made"
    return [
        make_wheel(folder, "torch", "1.0", {"torch/__init__.py": "VERSION = '1.0'\n", "torch/big.bin": BIG}),
        make_wheel(folder, "numpy", "2.0", {"numpy/__init__.py": ""}),
        make_wheel(folder, "engineio", "3.0", {"engineio/__init__.py": ""}),
    ]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: HubServer, wheels: list[Path]) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home with ümlauts"))
    repo = hub.add("wheels/all", {path.name: path for path in wheels})
    root = made_bundle(tmp_path / "prog ram ü", "0.2.0", wheels, f"{hub.endpoint}/wheels/all/resolve/{repo.commit}")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    return root


def made_bundle(root: Path, version: str, wheels: list[Path], address: str) -> Path:
    make_bundle(root, version, uv=str(UV))
    make_own_wheels(root, version)
    make_lock(root, wheels, address)
    return root


def chosen() -> EngineChoice:
    return choose_engine(lambda: Choice(CPU))


def fetched(choice: EngineChoice) -> queue.Download:
    return queue.run(begin_download(choice).key)


def test_the_whole_way(root: Path, wheels: list[Path]) -> None:
    choice = chosen()
    assert (choice.name, choice.download_bytes) == ("engine-0.2.0-cpu", sum(path.stat().st_size for path in wheels))
    assert fetched(choice).state is DownloadState.DONE
    steps: list[str] = []
    assert install(choice, on_step=steps.append) == choice.name
    assert steps == [installing.CHECKING, installing.UNPACKING, installing.TESTING, installing.FINISHING]
    engine = installed.current_engine()
    assert engine.whole.proven["torch"] == "1.0"
    assert {entry.name for entry in installed.parts_dir().iterdir()} == {
        "engine-0.2.0-cpu", "downloads", "lock", installed.CURRENT
    }  # fmt: skip
    assert not list(downloads_folder().iterdir())
    assert not (engine.folder / "app").exists()  # the window is no part of it
    command, variables = installed.engine_module("engine.self_test")
    said = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True).stdout
    assert json.loads(said)["torch"] == "1.0"
    steps.clear()
    install(choice, on_step=steps.append)  # once more: nothing to do
    assert steps == [installing.FINISHING]


def test_a_newer_package_takes_the_same_wheels_over_without_fetching(
    root: Path, wheels: list[Path], hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen()
    fetched(first)
    install(first)
    newer = made_bundle(root.with_name("newer"), "0.3.0", wheels, "https://nowhere.invalid")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(newer))
    assert installed.needs_engine()
    choice = chosen()
    assert choice.reused is not None
    asked = len(hub.requests)
    install(choice)
    assert len(hub.requests) == asked
    engine = installed.current_engine()
    assert engine.version == "0.3.0"
    assert "0.3.0" in (engine.folder / "engine" / "__init__.py").read_text()
    old = installed.parts_dir() / "engine-0.2.0-cpu"
    assert "0.2.0" in (old / "engine" / "__init__.py").read_text()
    assert (old / "torch" / "big.bin").samefile(engine.folder / "torch" / "big.bin")
    assert (engine.folder / "engineio").is_dir()


def test_what_is_no_longer_there_is_told_in_a_sentence(root: Path, hub: HubServer) -> None:
    hub.order(Fault("status", path="*numpy*", times=-1, value=404))
    ended = fetched(chosen())
    assert (ended.state, ended.error_code) == (DownloadState.FAILED, ErrorCode.DOWNLOAD_FAILED)
    assert "another mirror" in ended.problem


def test_packages_come_from_the_mirror(root: Path, wheels: list[Path], hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    make_lock(root, wheels, "https://files.pythonhosted.org/packages/ab/cd")
    served = {f"packages/ab/cd/{path.name}": path for path in wheels}
    repo = hub.add("mirror/pypi", served)
    monkeypatch.setenv(PACKAGES_VARIABLE, f"{hub.endpoint}/mirror/pypi/resolve/{repo.commit}")
    assert fetched(chosen()).state is DownloadState.DONE


def test_a_proxy_that_wants_a_login_is_told(root: Path, wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    make_lock(root, wheels, "https://files.pythonhosted.org/packages/ab/cd")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        ending = threading.Event()

        def refuse() -> None:
            proxy.settimeout(0.05)
            while not ending.is_set():
                try:
                    line, _ = proxy.accept()
                except TimeoutError:
                    continue
                with line:
                    line.recv(65536)
                    line.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        said: list[str] = []

        def listen(now: queue.Download) -> None:
            if now.problem:
                said.append(now.problem)
                queue.pause(now.key)

        try:
            queue.run(begin_download(chosen()).key, on_progress=listen)
        finally:
            ending.set()
            thread.join()
    assert "name and a password" in said[0]


def test_files_from_elsewhere(root: Path, wheels: list[Path], tmp_path: Path) -> None:
    """For a computer without a network: a folder, or a zip file; what is wrong with it is said."""
    choice = chosen()
    folder, packed = wheels[0].parent, tmp_path / "offline.zip"
    for text, words in ((b"", "no zip"), (b"PK\x05\x06" + bytes(18), "is not in")):
        packed.write_bytes(text)
        with pytest.raises(EngineError, match=words):
            install(choice, packed)
    with zipfile.ZipFile(packed, "w") as archive:
        for path in wheels:
            archive.write(path, f"switchyard-offline/{path.name}")
        archive.writestr("../outside.txt", "?")
    install(choice, packed)
    assert not installed.needs_engine()
    assert not list(tmp_path.rglob("outside.txt"))
    shutil.rmtree(installed.parts_dir())
    install(choice, folder)
    assert not installed.needs_engine()
    assert wheels[0].exists()  # what was given stays


def test_an_engine_that_does_not_work_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen()
    fetched(choice)
    monkeypatch.setenv("SELF_TEST_PROBLEM", "PyTorch: Illegal instruction.")
    with pytest.raises(EngineError, match=r"does not work on this computer \(PyTorch: Illegal instruction\)"):
        install(choice)
    assert installed.needs_engine()
    monkeypatch.delenv("SELF_TEST_PROBLEM")
    install(choice)  # what was fetched is still there
    assert not installed.needs_engine()


def test_a_build_that_the_list_lacks_is_replaced_and_told(root: Path) -> None:
    choice = choose_engine(lambda: Choice(CUDA_126, "For GTX 1080."))
    assert choice.build == "cpu"
    assert "CUDA 12.6" in choice.why


@pytest.mark.parametrize("text", ["[]", '{"format": 1, "wheels": {"x.whl": {}}, "lists": []}'])
def test_a_damaged_list_is_told_in_a_sentence(root: Path, text: str) -> None:
    (root / "engine-lock.json").write_text(text)
    with pytest.raises(EngineError, match="install Switchyard again"):
        chosen()


def test_a_list_for_other_systems_only_is_told(root: Path) -> None:
    lock = root / "engine-lock.json"
    lock.write_text(lock.read_text().replace(PLATFORM, "plan9-mips"))
    with pytest.raises(EngineError, match="no engine for"):
        chosen()


@pytest.mark.skipif(sys.platform == "win32", reason="kills as only POSIX knows them")
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delays_s=st.tuples(st.floats(0.05, 1.2), st.floats(0.05, 1.2)))
def test_killed_at_any_moment_a_repeat_puts_it_right(root: Path, delays_s: tuple[float, ...]) -> None:
    kill_and_repeat(delays_s)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32", reason="kills as only POSIX knows them")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delays_s=st.lists(st.floats(0.0, 1.5), min_size=1, max_size=3))
def test_killed_at_many_moments_a_repeat_puts_it_right(root: Path, delays_s: list[float]) -> None:
    kill_and_repeat(delays_s)


def kill_and_repeat(delays_s: Sequence[float]) -> None:
    shutil.rmtree(installed.parts_dir(), ignore_errors=True)
    fetched(chosen())
    command = [sys.executable, "-m", "engine.parts.install"]
    variables = os.environ | {"SWITCHYARD_TORCH": "cpu"}
    groups = []
    for delay_s in delays_s:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
        groups.append(process.pid)
        time.sleep(delay_s)
        process.kill()  # uv, if it runs, does not know of it
        process.wait()
        engine = installed.current_engine()
        assert engine is None or (engine.folder / "torch" / "big.bin").read_bytes() == BIG
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    assert done.returncode == 0, done.stdout
    engine = installed.current_engine()
    assert (engine.folder / "torch" / "big.bin").read_bytes() == BIG
    assert not [entry for entry in installed.parts_dir().iterdir() if entry.name.endswith(installed.PARTIAL)]


def test_a_changed_mirror_keeps_what_was_fetched(root: Path) -> None:
    """The same wheels are the same download, wherever they come from."""
    choice = chosen()
    elsewhere = replace(
        choice, wheels=tuple(replace(each, url=f"https://elsewhere.invalid/{each.file}") for each in choice.wheels)
    )
    assert begin_download(choice).key == begin_download(elsewhere).key


def test_the_command_gets_it_without_the_window(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"engine": "engine-0.2.0-cpu", "build": "cpu"}
    assert installed.current_engine() is not None
    assert main(["engine"]) == 0  # is there already
    assert "is ready" in capsys.readouterr().out


def test_the_command_takes_a_file_and_refuses_one_that_is_not_there(
    root: Path, tmp_path: Path, wheels: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", str(tmp_path / "not there.zip")]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert not installed.parts_dir().exists()
    with zipfile.ZipFile(tmp_path / "offline.zip", "w") as packed:
        for wheel in wheels:
            packed.write(wheel, wheel.name)
    assert main(["engine", str(tmp_path / "offline.zip")]) == 0
    assert installed.current_engine() is not None


def test_the_command_says_where_there_is_nothing_to_get(
    monkeypatch: pytest.MonkeyPatch, switchyard_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(installed.BUNDLE_VARIABLE, raising=False)
    assert main(["engine"]) == 2
    assert "runs from a checkout" in capsys.readouterr().err
