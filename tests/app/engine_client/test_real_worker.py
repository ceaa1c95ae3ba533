"""The engine client with the worker that users get: torch, a real (tiny) model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import ChatAnswer, Request
from engine.common import installed
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.protocol import ChatMessage, Finished, ModelLoaded, Token
from engine.remote.endpoint import RemoteModel, endpoint_at
from tests.bad_endpoint import BadEndpoint
from tests.bundles import make_bundle, make_part

CHECKOUT = Path(__file__).resolve().parents[3]
WAIT_MS = 60_000
ENDLESS = SamplingParams(temperature=1.0, seed=1, max_tokens=100_000)


@pytest.fixture
def client(qtbot: QtBot) -> Iterator[EngineClient]:
    client = EngineClient()
    client.start()
    yield client
    client.close_now()
    client.deleteLater()


def config(model: Path | str) -> EngineConfig:
    return EngineConfig(str(model), device="cpu", precision="fp32", threads=1)


def test_another_server_answers_without_a_model_here(client: EngineClient, qtbot: QtBot) -> None:
    states: list[EngineState] = []
    ends: list[object] = []
    texts: list[str] = []
    with BadEndpoint() as server:
        remote = RemoteModel(endpoint_at(server.url, "rack"), chosen=("max_tokens",), key="sk-of-this-run-alone")
        answer = client.generate([ChatMessage("user", "hello")], SamplingParams(max_tokens=3), remote)
        answer.token.connect(lambda token: texts.append(token.text))
        answer.finished.connect(ends.append)
        client.state_changed.connect(states.append)
        qtbot.waitUntil(lambda: bool(ends), timeout=WAIT_MS)
    assert isinstance(ends[0], Finished)
    assert "".join(texts) == "Hello"
    assert client.model is None
    assert EngineState.BUSY not in states
    assert {asked.key for asked in server.posted} == {"sk-of-this-run-alone"}


WITHOUT_ENGINE = """import sys
from importlib.machinery import PathFinder
ENGINE = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "starlette", "jinja2")
class WindowAlone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ENGINE else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = WindowAlone
"""


def test_another_server_answers_before_the_engine_is_there(
    qtbot: QtBot, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    root = make_bundle(tmp_path / "program")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    (root / "window" / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    for name in ("engine", "resources"):
        (root / "window" / name).symlink_to(CHECKOUT / name)
    ends: dict[str, object] = {}

    def follow(request: Request) -> str:
        request.finished.connect(lambda event: ends.setdefault(event.request_id, event))
        return request.id

    client = EngineClient()
    client.start()
    try:
        with BadEndpoint() as server:
            remote = RemoteModel(endpoint_at(server.url, "rack"))
            answer = follow(client.generate([ChatMessage("user", "hello")], SamplingParams(max_tokens=3), remote))
            load = follow(client.load(config(tiny)))
            qtbot.waitUntil(lambda: len(ends) == 2, timeout=WAIT_MS)
        assert isinstance(ends[answer], Finished)
        failure = ends[load]
        assert failure.code is ErrorCode.DEVICE_UNAVAILABLE
        assert "not on this computer yet" in failure.message
        part = make_part("engine-0.2.0-cpu")
        for name in ("engine", "resources"):
            (part / name).symlink_to(CHECKOUT / name)
        load = follow(client.load(config(tiny)))
        qtbot.waitUntil(lambda: load in ends, timeout=WAIT_MS)
        assert isinstance(ends[load], ModelLoaded)
    finally:
        client.close_now()
        client.deleteLater()


def test_load_ask_stop(client: EngineClient, tiny: Path, qtbot: QtBot) -> None:
    ends: dict[str, object] = {}
    tokens: list[Token] = []

    def follow(request: Request) -> str:
        request.finished.connect(lambda event: ends.setdefault(event.request_id, event))
        return request.id

    def ask(sampling: SamplingParams) -> ChatAnswer:
        answer = client.generate([ChatMessage("user", "hello")], sampling)
        answer.token.connect(tokens.append)
        follow(answer)
        return answer

    with qtbot.waitSignal(client.load(config("no-such-model")).finished, timeout=WAIT_MS) as caught:
        pass
    assert caught.args[0].code == ErrorCode.MODEL_NOT_FOUND
    assert client.state == EngineState.READY

    load = follow(client.load(config(tiny)))
    first = ask(SamplingParams(max_tokens=3)).id
    qtbot.waitUntil(lambda: {load, first} <= ends.keys(), timeout=WAIT_MS)
    assert isinstance(ends[load], ModelLoaded)
    assert client.model.family == "mixtral"
    assert isinstance(ends[first], Finished)

    tokens.clear()
    answer = ask(ENDLESS)
    stopped = answer.id
    qtbot.waitUntil(lambda: len(tokens) > 3, timeout=WAIT_MS)
    answer.cancel()
    qtbot.waitUntil(lambda: stopped in ends, timeout=WAIT_MS)
    end = ends[stopped]
    assert end.finish_reason == "cancelled"
