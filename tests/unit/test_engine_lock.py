"""The list that installed packages fetch the engine by."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

INSTALLERS = Path(__file__).resolve().parents[2] / "installers"

sys.path.insert(0, str(INSTALLERS))
try:
    import lock_engine
    from steps_environment import LOCKED_RUNTIME, TORCH
finally:
    sys.path.remove(str(INSTALLERS))

LINUX, _, MACOS, WINDOWS = lock_engine.SYSTEMS
SHA = "0" * 64


def test_what_is_committed_is_whole() -> None:
    """Every list has a wheel of each package, with address, checksum and size; versions are those of set-up."""
    found = json.loads((INSTALLERS / lock_engine.LOCKED_ENGINE).read_text(encoding="utf-8"))
    assert (found["format"], found["torch"]) == (lock_engine.FORMAT, TORCH)
    locked = (INSTALLERS / LOCKED_RUNTIME).read_text(encoding="utf-8").lower()
    places = {(each["platform"], each["python"], each["build"]) for each in found["lists"]}
    assert len(places) == len(found["lists"])
    for system in lock_engine.SYSTEMS:
        for python in lock_engine.PYTHONS:
            assert (system.name, python, system.on_pypi) in places
    used = {file for each in found["lists"] for file in each["files"]}
    assert used == set(found["wheels"])
    for file, said in found["wheels"].items():
        wheel = lock_engine.Wheel(**said)
        assert wheel.file == file
        assert wheel.url.startswith(("https://files.pythonhosted.org/", "https://download.pytorch.org/"))
        assert len(wheel.sha256) == 64
        assert wheel.bytes > 0
        assert wheel.name == "torch" or f"\n{wheel.name}==" not in locked or f"{wheel.name}=={wheel.version}" in locked
    for each in found["lists"]:
        names = [found["wheels"][file]["name"] for file in each["files"]]
        assert len(names) == len(set(names))
        assert {"torch", "transformers", "safetensors", "numpy", "psutil"} <= set(names)
        assert not any(name.startswith("pyside") for name in names)


@pytest.mark.parametrize(
    ("file", "system", "python", "fits"),
    [
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl", LINUX, "3.13", True),
        ("torch-2.13.0-cp313-cp313t-manylinux_2_28_x86_64.whl", LINUX, "3.13", False),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", LINUX, "3.13", False),
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_aarch64.whl", LINUX, "3.13", False),
        ("torch-2.13.0-cp313-cp313-macosx_14_0_arm64.whl", MACOS, "3.13", True),
        ("torch-2.13.0-cp313-cp313-macosx_15_0_arm64.whl", MACOS, "3.13", False),
        ("torch-2.13.0-1-cp313-cp313-win_amd64.whl", WINDOWS, "3.13", True),
        ("torch-2.13.0-cp36-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", LINUX, "3.11", True),
        ("torch-2.13.0-cp314-abi3-manylinux2014_x86_64.whl", LINUX, "3.11", False),
        ("torch-2.13.0-py2.py3-none-any.whl", WINDOWS, "3.11", True),
        ("torch-2.12.0-py3-none-any.whl", LINUX, "3.11", False),
        ("torch-2.13.0.tar.gz", LINUX, "3.11", False),
    ],
)
def test_wheels_of_other_systems_and_pythons_are_not_taken(
    file: str, system: lock_engine.System, python: str, fits: bool
) -> None:
    assert (lock_engine.wheel_rank(file, TORCH, system.platforms, python) is not None) is fits


def listed(*files: dict[str, Any]) -> lock_engine.Index:
    index = lock_engine.Index()
    index._pages = {"https://index/thing/": list(files)}
    return index


def file_of(name: str, **others: Any) -> dict[str, Any]:
    said = {"filename": name, "url": f"https://index/{name}", "hashes": {"sha256": SHA}, "size": 7}
    return said | others


def test_the_wheel_made_for_the_system_is_taken() -> None:
    index = listed(
        file_of("thing-1.0-py3-none-any.whl"),
        file_of("thing-1.0-cp36-abi3-manylinux2014_x86_64.whl"),
        file_of("thing-1.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        file_of("thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"),
    )
    found = index.best("thing", "1.0", LINUX, "3.11", ["https://index/"])
    assert found.file == "thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize("hashes", [{}, {"md5": "x"}, {"sha256": ""}, {"sha256": "1234"}])
def test_a_wheel_without_a_checksum_is_refused(hashes: dict[str, str]) -> None:
    index = listed(file_of("thing-1.0-py3-none-any.whl", hashes=hashes))
    with pytest.raises(SystemExit, match="no checksum"):
        index.best("thing", "1.0", LINUX, "3.11", ["https://index/"])


def test_a_build_whose_index_is_away_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"torch-{TORCH}+cpu-py3-none-any.whl"
    url = f"https://index/{file.replace('+', '%2B')}"
    wheel = {"name": "torch", "version": TORCH + "+cpu", "url": url, "sha256": SHA, "bytes": 5}
    old = {"platform": "linux-x86_64", "python": "3.11", "build": "cpu", "files": [file]}
    text = {"format": 1, "torch": TORCH, "wheels": {file: wheel}, "lists": [old]}
    (tmp_path / lock_engine.LOCKED_ENGINE).write_text(json.dumps(text))

    def away(url: str) -> list[dict[str, Any]]:
        raise lock_engine.Unreachable(f"{url} cannot be reached")

    monkeypatch.setattr(lock_engine, "_read_page", away)
    lock_engine.write_engine_lock(tmp_path, lambda *_: f"torch=={TORCH}\n")
    assert json.loads((tmp_path / lock_engine.LOCKED_ENGINE).read_text()) == text


def test_what_a_release_needs_and_is_not_listed_is_named(tmp_path: Path) -> None:
    whole = [
        {"platform": system.name, "python": python, "build": build}
        for system in lock_engine.SYSTEMS
        for python in lock_engine.PYTHONS
        for build in system.builds
    ]
    (tmp_path / lock_engine.LOCKED_ENGINE).write_text(json.dumps({"lists": whole}))
    assert lock_engine.missing_builds(tmp_path) == []
    (tmp_path / lock_engine.LOCKED_ENGINE).write_text(json.dumps({"lists": whole[1:]}))
    assert lock_engine.missing_builds(tmp_path) == ["linux-x86_64 3.11 cpu"]


@pytest.fixture
def indices(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, str, bytes]]]:
    """Package indices on this machine: what they answer, by path."""
    pages: dict[str, tuple[int, str, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = pages.get(self.path, (404, "text/plain", b""))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    there = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(lock_engine, "PYPI", f"{there}/simple/")
    monkeypatch.setattr(lock_engine, "INDEX", f"{there}/whl/")
    monkeypatch.setattr(lock_engine, "PYTHONS", ("3.13",))
    monkeypatch.setattr(lock_engine, "SYSTEMS", (LINUX,))
    yield pages
    server.shutdown()
    server.server_close()
    thread.join()


JSON, HTML = "application/vnd.pypi.simple.v1+json", "text/html"
ON_PYPI = f"torch-{TORCH}-cp313-cp313-manylinux_2_28_x86_64.whl"
FOR_CPUS = f"torch-{TORCH}+cpu-cp313-cp313-manylinux_2_28_x86_64.whl"


def resolve(torch: str, *_: str) -> str:
    return f"{torch}\njinja2==3.1.6 ; python_version >= '3'\n"


def test_builds_come_from_indices_of_both_kinds(indices: dict[str, tuple[int, str, bytes]], tmp_path: Path) -> None:
    """PyTorch's own answers in HTML (PEP 503) without sizes, PyPI in JSON (PEP 691)."""
    jinja = file_of("jinja2-3.1.6-py3-none-any.whl", url="../../files/jinja2-3.1.6-py3-none-any.whl")
    indices["/simple/jinja2/"] = 200, JSON, json.dumps({"files": [jinja]}).encode()
    indices["/simple/torch/"] = 200, JSON, json.dumps({"files": [file_of(ON_PYPI)]}).encode()
    wheel = f"/whl/cpu/{FOR_CPUS.replace('+', '%2B')}"
    links = f'<a href="{wheel}#sha256={SHA}">{FOR_CPUS}</a><br/><a href="/x.whl">x-1-py3-none-any.whl</a>'
    indices["/whl/cpu/torch/"] = 200, HTML, links.encode()
    indices["/whl/cpu/jinja2/"] = 404, HTML, b""
    indices[wheel] = 200, "application/zip", b"seven b"
    for away in ("cu126", "rocm7.2", "xpu"):
        indices[f"/whl/{away}/torch/"] = 503, HTML, b""
    lock_engine.write_engine_lock(tmp_path, resolve)
    found = json.loads((tmp_path / lock_engine.LOCKED_ENGINE).read_text())
    lists = {each["build"]: each["files"] for each in found["lists"]}
    assert lists["cpu"] == ["jinja2-3.1.6-py3-none-any.whl", FOR_CPUS]
    assert lists["cu130"] == ["jinja2-3.1.6-py3-none-any.whl", ON_PYPI]
    assert found["wheels"][FOR_CPUS]["bytes"] == 7
    assert found["wheels"]["jinja2-3.1.6-py3-none-any.whl"]["url"].endswith("/files/jinja2-3.1.6-py3-none-any.whl")
    assert found["wheels"][FOR_CPUS]["url"].endswith(wheel)
    assert "linux-x86_64 3.13 cu126" in lock_engine.missing_builds(tmp_path)  # its index has a fault today


def test_an_index_that_gives_no_checksum_stops_it(indices: dict[str, tuple[int, str, bytes]], tmp_path: Path) -> None:
    indices["/whl/cpu/torch/"] = 200, HTML, f'<a href="/whl/cpu/{FOR_CPUS}">{FOR_CPUS}</a>'.encode()
    with pytest.raises(SystemExit, match="no checksum"):
        lock_engine.write_engine_lock(tmp_path, resolve)
    assert not list(tmp_path.iterdir())
