"""A model's shape from a hub before anything is downloaded: a local server stands for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from engine.bench.synthetic.shapes import SHAPES, config_of, tensors_of
from engine.checkpoint.find_shape import find_shape
from engine.checkpoint.hub import metadata as hub_of
from engine.checkpoint.hub.metadata import read_hub_model
from engine.common.errors import EngineError, ErrorCode

SHAPE = SHAPES["qwen3-moe-tiny"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as is asked for here."""

    files: ClassVar[dict[str, bytes]] = {}
    served: ClassVar[list[int]] = []
    knows_ranges: ClassVar[bool] = True
    dripped: ClassVar[str] = "nothing"
    dripping: ClassVar[threading.Event] = threading.Event()
    closing: ClassVar[threading.Event] = threading.Event()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_args: object) -> None:
        """Nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/model"):
            listed = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            self._send(200, self.files.get("about", json.dumps(listed).encode()), body=body)
            return
        name = path.rpartition("/")[2]
        if not path.startswith("/org/model/resolve/") or name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if "org/model" not in path else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.files[name]
        asked = self.headers.get("Range", "")
        if self.knows_ranges and asked.startswith("bytes="):
            first, last = asked.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1 if last else None]
        self._send(206 if asked and self.knows_ranges else 200, content, body=body)

    def _send(self, status: int, content: bytes, *, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.served.append(len(content))
            with contextlib.suppress(OSError):  # who asked has had enough
                if self.dripped in self.path:
                    self.dripping.set()
                    self.closing.wait()
                    return
                self.wfile.write(content)


def header_file(number: int) -> bytes:
    """The beginning of the numbered file of the checkpoint: its header, and none of its data."""
    offset, header = 0, {}
    for spec in list(tensors_of(SHAPE))[number]:
        numel = 1
        for size in spec.shape:
            numel *= size
        header[spec.name] = {
            "dtype": "BF16",
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + 2 * numel],
        }
        offset += 2 * numel
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    count = len(list(tensors_of(SHAPE)))
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    weight_map = {spec.name: names[n] for n, specs in enumerate(tensors_of(SHAPE)) for spec in specs}
    Hub.files = {
        "config.json": json.dumps(config_of(SHAPE)).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{name: header_file(number) for number, name in enumerate(names)},
    }
    Hub.served = []
    Hub.dripping.clear()
    Hub.closing.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as all other tests have it
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield Hub
    Hub.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_shape_is_read_from_headers(hub: type[Hub]) -> None:
    shape = find_shape("org/model")
    assert (shape.layers, shape.experts, shape.experts_per_token) == (SHAPE.layers, SHAPE.experts, SHAPE.top_k)
    assert (shape.hidden, shape.expert_width) == (SHAPE.hidden, SHAPE.intermediate)
    assert shape.hub_id == "org/model"
    config, entries = read_hub_model("org/model")
    assert config["model_type"] == SHAPE.family
    assert sum(entry.numel for entry in entries) == shape.total_weights


def test_a_single_file_without_an_index(hub: type[Hub]) -> None:
    del hub.files["model.safetensors.index.json"]
    hub.files["model.safetensors"] = header_file(1)
    _, entries = read_hub_model("org/model")
    assert {str(entry.file) for entry in entries} == {"model.safetensors"}


def test_what_is_not_there_is_said(hub: type[Hub]) -> None:
    with pytest.raises(EngineError, match="org/other") as refused:
        read_hub_model("org/other")
    assert refused.value.code is ErrorCode.MODEL_NOT_FOUND
    hub.files.pop("model.safetensors.index.json")
    with pytest.raises(EngineError) as unsupported:
        read_hub_model("org/model")
    assert unsupported.value.code is ErrorCode.MODEL_UNSUPPORTED


def test_damaged_headers_are_said(hub: type[Hub]) -> None:
    name = next(name for name in hub.files if name.startswith("model-00002"))
    hub.files[name] = hub.files[name][:8] + b"{" * 100
    with pytest.raises(EngineError) as refused:
        read_hub_model("org/model")
    assert refused.value.code in (ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.DOWNLOAD_FAILED)


def test_cancelled(hub: type[Hub]) -> None:
    with pytest.raises(EngineError, match="cancelled"):
        read_hub_model("org/model", cancelled=lambda: True)


def test_without_a_network_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EngineError, match="network") as refused:
        find_shape("org/model")
    assert refused.value.code is ErrorCode.DOWNLOAD_FAILED
    assert "\n" not in refused.value.message


def test_a_known_model_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    assert find_shape("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"
    with pytest.raises(EngineError, match="no model called"):
        find_shape("nonsense")


def test_a_file_without_end_is_not_fetched_whole(hub: type[Hub]) -> None:
    hub.files["config.json"] = b" " * (hub_of.MAX_CONFIG_BYTES + 2**20)
    with pytest.raises(EngineError, match="16 MiB") as refused:
        read_hub_model("org/model")
    assert refused.value.code is ErrorCode.DOWNLOAD_FAILED


def test_a_server_that_knows_no_ranges_sends_no_weights(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "knows_ranges", False)
    for name in [name for name in hub.files if name.endswith(".safetensors")]:
        hub.files[name] += bytes(2**20)
    config, entries = read_hub_model("org/model")
    assert config["model_type"] == SHAPE.family
    assert entries


@pytest.mark.parametrize("dripped", ["/api/models/org/model", "config.json", "model-00002"])
def test_a_server_that_drips_is_given_up(hub: type[Hub], monkeypatch: pytest.MonkeyPatch, dripped: str) -> None:
    monkeypatch.setattr(hub_of, "ANSWER_S", 0.2)
    monkeypatch.setattr(hub, "dripped", dripped)
    with pytest.raises(EngineError, match="org/model") as refused:
        read_hub_model("org/model")
    assert refused.value.code is ErrorCode.DOWNLOAD_FAILED


def test_a_server_that_drips_can_be_stopped(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "dripped", "config.json")
    with pytest.raises(EngineError, match="cancelled"):
        read_hub_model("org/model", cancelled=hub.dripping.is_set)


@pytest.mark.parametrize("listed", [b"[]", b"{", b'{"siblings": [1, {"rfilename": []}]}', b"[" * 100_000])
def test_nonsense_about_a_model_is_one_sentence(hub: type[Hub], listed: bytes) -> None:
    hub.files = {"about": listed}
    with pytest.raises(EngineError) as refused:
        read_hub_model("org/model")
    assert refused.value.code.is_users
