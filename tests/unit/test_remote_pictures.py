"""Pictures for other servers: sent as they are, refused in a sentence, and what reads none is found out."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.batch_files.prepared_job import prepare
from engine.common.chat import ChatMessage, Picture, parts_with
from engine.common.config import HERE, BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.pictures import MOST_PICTURE_BYTES, MOST_PICTURES, media_of, pictures_in_files
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import endpoint_at
from engine.remote.failures import RemoteError, Trouble
from tests.bad_endpoint import MODEL, Asked, BadEndpoint
from tests.made_pictures import coloured, file_of

FILES = {
    f"a.{kind.lower()}": (file_of(coloured(), kind), f"image/{kind.lower()}") for kind in ("PNG", "JPEG", "WEBP", "GIF")
}
PNG = FILES["a.png"][0]


def urls(asked: Asked) -> list[str]:
    content = asked.body["messages"][-1]["content"]
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_sent_as_it_is(
    server: BadEndpoint, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, media = FILES[name]
    file = tmp_path / name
    file.write_bytes(data)
    command = ["chat", "--model", f"endpoint:{server.url}", "--prompt", "What is it?", "--picture", str(file)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.strip() == "Hello"
    (asked,) = server.posted
    assert urls(asked) == [f"data:{media};base64,{base64.b64encode(data).decode()}"]
    assert asked.body["messages"][-1]["content"][-1] == {"type": "text", "text": "What is it?"}


def test_what_cannot_be_sent_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, large = tmp_path / "a.txt", tmp_path / "large.png"
    text.write_text("no picture")
    large.write_bytes(PNG + bytes(MOST_PICTURE_BYTES))
    for paths in ([tmp_path / "gone.png"], [text], [large], [tmp_path], [text] * (MOST_PICTURES + 1)):
        with pytest.raises(EngineError) as failed:
            pictures_in_files(paths)
        assert failed.value.message.endswith(".")
    for model, options in (("starter", ["--prompt", "Hello"]), ("endpoint:http://127.0.0.1:1", [])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin.isatty", lambda: True, raising=False)
            assert cli.main(["chat", "--model", model, "--picture", str(text), *options]) == 2
        said = capsys.readouterr().err
        assert ("--picture needs" if not options else "no picture that is read") in said
    assert media_of(b"") == ""


REFUSALS = [
    (400, "some/model is not a multimodal model"),
    (400, "At most 0 image(s) may be provided in one request."),
    (500, "image input is not supported - hint: you may need to provide the mmproj"),
    (400, "messages.0.content: Input should be a valid string"),
    (400, "The message has a picture; this program answers texts only."),
]


@pytest.mark.parametrize(("status", "words"), REFUSALS)
def test_a_model_that_reads_none_is_told_apart(server: BadEndpoint, status: int, words: str) -> None:
    server.answer = lambda asked: asked.error(status, words)
    pictured = ChatMessage("user", "?", parts=parts_with("?", (Picture("image/png", "AAAA"),)))
    with Client(endpoint_at(server.url, "Rack", model=MODEL)) as client:
        with pytest.raises(RemoteError) as failed:
            client.ask(RemoteRequest((pictured,)))
        assert (failed.value.kind, failed.value.code) == (Trouble.REFUSED, ErrorCode.PICTURES_NOT_READ)
        assert "reads no pictures with some/model" in failed.value.message
        with pytest.raises(RemoteError) as failed:
            client.ask(RemoteRequest((ChatMessage("user", "?"),)))
        assert failed.value.code is not ErrorCode.PICTURES_NOT_READ


@pytest.mark.parametrize(
    "words", ["The image is too large: 9000 pixels.", "Failed to decode image.", "No tokens left."]
)
def test_one_picture_that_is_wrong_says_nothing_of_the_model(server: BadEndpoint, words: str) -> None:
    server.answer = lambda asked: asked.error(400, words)
    pictured = ChatMessage("user", "?", parts=parts_with("?", (Picture("image/png", "AAAA"),)))
    with Client(endpoint_at(server.url, "Rack", model=MODEL)) as client, pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest((pictured,)))
    assert failed.value.code is ErrorCode.INVALID_REQUEST
    assert words.rstrip(".") in failed.value.message


def test_a_test_of_a_server_finds_out(server: BadEndpoint) -> None:
    def blind(asked: Asked) -> None:
        if isinstance(asked.body["messages"][-1]["content"], list):
            asked.error(400, "No images here.")
        else:
            asked.stream("Hel", "lo")

    with Client(endpoint_at(server.url, "Rack", model=MODEL)) as client:
        assert about(client).found.blind == ()
        server.answer = blind
        assert about(client).found.blind == (MODEL,)
        assert client.models().blind == (MODEL,)
        server.answer = lambda asked: asked.stream("Hel", "lo")
        assert about(client).found.blind == ()  # it was started again with another model


@pytest.mark.parametrize(
    ("said", "blind"),
    [
        ({"data": [{"id": "m", "architecture": {"input_modalities": ["text"]}}]}, ("m",)),
        ({"data": [{"id": "m", "architecture": {"input_modalities": ["text", "image"]}}]}, ()),
        ({"data": [{"id": "m", "capabilities": {"vision": False}}]}, ("m",)),
        ({"data": [{"id": "m"}], "models": [{"name": "m", "capabilities": ["completion"]}]}, ("m",)),
        ({"data": [{"id": "m"}], "models": [{"name": "m", "capabilities": ["completion", "multimodal"]}]}, ()),
        ({"data": [{"id": "m"}], "models": "none"}, ()),
        ({"data": [{"id": "m"}]}, ()),
    ],
)
def test_lists_of_models_that_say_so(said: dict[str, Any], blind: tuple[str, ...]) -> None:
    with BadEndpoint(listed=said) as server, Client(endpoint_at(server.url, "Rack")) as client:
        assert client.models().blind == blind


def test_rows_in_openai_s_format_go_to_other_servers_with_all_that_is_in_them(tmp_path: Path) -> None:
    content = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        {"type": "text", "text": "this?"},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row) + "\n", encoding="utf-8")
    job = BatchJob(str(source), str(tmp_path / "out.jsonl"), endpoints=("Rack",))
    prepared = prepare(job)
    (asked,) = map(prepared.prompts, prepared.source.rows())
    assert json.loads(asked.messages[0].parts) == content
    assert asked.messages[0].content == "What is this?"
    with BadEndpoint() as server, Client(endpoint_at(server.url, "Rack", model=MODEL)) as client:
        client.ask(RemoteRequest(asked.messages, SamplingParams()))
        assert server.posted[0].body["messages"][0]["content"] == content
    both = prepare(BatchJob(str(source), str(tmp_path / "out.jsonl"), endpoints=(HERE, "Rack")))
    (asked,) = map(both.prompts, both.source.rows())
    assert asked.is_for_servers
    for places in ((), (HERE,)):
        prepared = prepare(BatchJob(str(source), str(tmp_path / "out.jsonl"), endpoints=places))
        (refused,) = map(prepared.prompts, prepared.source.rows())
        assert "picture" in refused.problem
