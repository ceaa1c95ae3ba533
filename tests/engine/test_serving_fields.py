"""Fields that change an answer: each interface gives what they ask for, under each of its names, or refuses it."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.batch_files.openai_requests import NO_LIMIT
from engine.checkpoint.library import describe
from engine.common.pictures import pictures_of
from engine.protocol import Ask
from engine.serving.server import Address, Server
from engine.serving.service import Service
from tests import plain_http
from tests.engine.test_serving import HELLO, TOOL, Running, serving
from tests.engine.test_serving_bad_input import GOOD, PATHS, check_error
from tests.made_pictures import MADE, coloured, endless, file_of, png_of
from tests.refusals import until
from tests.scripted_broker import ScriptedBroker, made_up_models
from tests.tiny_checkpoint import write_tiny_checkpoint

FUNCTION: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]
SIDES = {"enum": ["left", "right"]}
GBNF = 'root ::= side "!"\nside ::= "l\\u0065ft" | "right"\n'
PATH_FIELD = {"type": "object", "properties": {"format": {"type": "string", "format": "path"}}, "required": ["format"]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as found:
        yield found


@pytest.fixture
def seen(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """What reaches the engine."""
    asks, ask = list[Ask](), running.broker.ask
    monkeypatch.setattr(running.broker, "ask", lambda asked, on_event: (asks.append(asked), ask(asked, on_event))[1])
    return asks


def _post(running: Running, api: str, **fields: Any) -> httpx2.Response:
    return running.post(PATHS[api], {**GOOD[api], "stream": False, **fields})


def _text(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if "choices" in said:
        choice = said["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    if "output" in said:
        return str(said["output"][-1]["content"][0]["text"])
    return str(said["content"][-1]["text"] if "content" in said else said["message"]["content"])


def _at_two(apis: list[str], cases: list[tuple[dict[str, Any], str]]) -> list[tuple[str, dict[str, Any], str]]:
    """Each case at two interfaces, which are others for the next: all read the same tables."""
    ways = [(at, at + 1 + at // len(apis) % (len(apis) - 1)) for at in range(len(cases))]
    return [(apis[way % len(apis)], *case) for case, two in zip(cases, ways, strict=True) for way in two]


LONG_ENOUGH = {"max_tokens": 60, "max_output_tokens": 60, "options": {"num_predict": 60}}
NAMED = {"type": "json_schema", "schema": SIDES}
ANYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, r'"(left|right)"'),
    ({"text": {"format": {"name": "x", **NAMED}}}, r'"(left|right)"'),
    ({"output_config": {"format": NAMED}}, r'"(left|right)"'),
    ({"output_format": NAMED}, r'"(left|right)"'),
    ({"format": SIDES}, r'"(left|right)"'),
    ({"json_schema": SIDES}, r'"(left|right)"'),
    ({"guided_json": json.dumps(SIDES)}, r'"(left|right)"'),
    ({"structured_outputs": {"json": SIDES}}, r'"(left|right)"'),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"regex": r"a/b\d{2}"}}, r"a/b\d\d"),
    ({"guided_regex": r"^a/b\d{2}$"}, r"a/b\d\d"),
    ({"regex": "[xy]{3}"}, "[xy]{3}"),
    ({"grammar": GBNF}, "(left|right)!"),
    ({"ebnf": GBNF}, "(left|right)!"),
    ({"guided_grammar": 'start: "l" | "r"'}, "l|r"),
    ({"structured_outputs": {"grammar": GBNF}}, "(left|right)!"),
]


@pytest.mark.parametrize(("api", "fields", "pattern"), _at_two([*PATHS, "completions"], ANYWHERE))
def test_every_name_of_a_constraint_holds(running: Running, api: str, fields: dict[str, Any], pattern: str) -> None:
    if api == "completions":
        answer = running.post("/v1/completions", {"prompt": "One", "max_tokens": 60, **fields})
    else:
        answer = _post(running, api, **LONG_ENOUGH, **fields)
    assert re.fullmatch(pattern, _text(answer))


def test_an_object_of_any_kind(running: Running) -> None:
    for fields in (
        {"structured_outputs": {"json_object": True}},
        {"output_config": {"format": {"type": "json_object"}}},
    ):
        assert _text(_post(running, "openai", **LONG_ENOUGH, **fields)).startswith("{")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a("}, "grammar cannot be used"),
    ({"guided_regex": "(?=a)b"}, "grammar cannot be used"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_choice": ["x"] * 5000}, "choice cannot be used"),
    ({"guided_json": "{"}, "guided_json"),
    ({"json_schema": 3}, "json_schema"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": "root ::= other"}, "grammar"),
    ({"grammar": 'root ::= "\\'}, "grammar"),
    ({"grammar": 'root ::= "' + "a" * 2**16 + '"'}, "grammar"),
    ({"grammar": {"type": "json", "value": {}}}, "grammar"),
    ({"structured_outputs": "yes"}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"structured_outputs": {"json": SIDES, "choice": ["a"]}}, "leave one of them out"),
    ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "leave one of them out"),
    ({"output_format": {"type": "xml"}}, "output_format"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 123}}}, "response_format"),
    ({"text": "json"}, "text that is not an object"),
    ({"suffix": "end"}, "suffix"),
    ({"min_tokens": 3}, "least length"),
    ({"stop_token_ids": [1]}, "use stop"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"use_beam_search": True}, "beam search"),
    ({"skip_special_tokens": False}, "control tokens"),
    ({"chat_template": "{{ messages }}"}, "template"),
    ({"xtc_probability": 0.5}, "XTC"),
    ({"mirostat": 2}, "mirostat"),
    ({"web_search_options": {"user_location": None}}, "web search"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"thinking": {"type": "sometimes"}}, "thinking"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("api", "fields", "words"), _at_two([*PATHS], WRONG))
def test_what_cannot_be_given_is_refused(
    running: Running, api: str, fields: dict[str, Any], words: str, streams: bool
) -> None:
    answer = running.post(PATHS[api], {**GOOD[api], **fields, "stream": streams})
    check_error(api, answer, 400, "invalid_request_error")
    assert words in answer.text


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("responses", {"n": 2}),
        ("responses", {"prompt": {"id": "p"}}),
        ("responses", {"previous_response_id": "r"}),
        ("responses", {"background": True}),
        ("responses", {"top_logprobs": 2}),
        ("anthropic", {"mcp_servers": [{"type": "url"}]}),
        ("anthropic", {"container": "c"}),
        ("ollama", {"logprobs": True}),
        ("openai", {"echo": True}),
        ("openai", {"functions": [FUNCTION], "tools": [TOOL]}),
        ("openai", {"function_call": {"name": "weather"}}),
        ("openai", {"functions": "weather"}),
    ],
)
def test_what_some_interfaces_do_not_give(running: Running, api: str, fields: dict[str, Any]) -> None:
    check_error(api, _post(running, api, **fields), 400, "invalid_request_error")


@pytest.mark.parametrize("api", PATHS)
def test_what_asks_for_nothing_is_no_constraint(running: Running, api: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("response_format", "grammar", "structured_outputs", "functions", "suffix"))
    nothing |= {"min_tokens": 0, "best_of": 1, "n": 1, "echo": False, "typical_p": 1.0, "mirostat": 0, "bad_words": []}
    nothing |= {"skip_special_tokens": True, "modalities": ["text"], "length_penalty": 1.0, "structural_tag": ""}
    nothing |= {"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "auto", "verbosity": "low"}
    nothing |= {"guided_decoding_backend": "x", "prediction": {"type": "content", "content": "x"}, "seed": None}
    assert _post(running, api, **nothing).status_code == 200


@pytest.mark.parametrize(
    ("api", "name"), [("openai", "json_schema"), ("ollama", "format"), ("anthropic", "output_format")]
)
def test_formats_that_nobody_knows_are_annotations(running: Running, api: str, name: str) -> None:
    form = {"type": "json_schema", "schema": PATH_FIELD} if name == "output_format" else PATH_FIELD
    assert _post(running, api, **{name: form}).status_code == 200
    tool = {**FUNCTION, "parameters": PATH_FIELD}
    assert running.chat(tools=[{"type": "function", "function": tool}], tool_choice="required").status_code == 200


@pytest.mark.parametrize("call", [{"name": "weather"}, None])
def test_functions_are_called_in_their_own_form(running: Running, seen: list[Ask], call: Any) -> None:
    asked = {"functions": [FUNCTION], "function_call": call, "max_tokens": 200, "temperature": 0}
    answer = running.chat(**asked).json()["choices"][0]
    assert [tool.name for tool in seen[0].tools] == ["weather"]
    if call is None:
        return
    assert answer["finish_reason"] == "function_call"
    assert "tool_calls" not in answer["message"]
    called = answer["message"]["function_call"]
    assert json.loads(called["arguments"])["city"] in ("Rome", "Oslo")
    lines = running.chat(**asked, stream=True).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [choice["delta"]["function_call"] for choice in choices if choice["delta"].get("function_call")] == [called]
    assert choices[-1]["finish_reason"] == "function_call"
    turns = [*HELLO, answer["message"], {"role": "function", "name": "weather", "content": "rain"}]
    assert running.chat(**{**asked, "function_call": "none"}, messages=turns).status_code == 200
    replayed, result = seen[-1].messages[-2:]
    assert (replayed.tool_calls[0].arguments, replayed.tool_calls[0].id) == (called["arguments"], result.answers)


def test_a_function_without_described_arguments_takes_an_object(running: Running) -> None:
    asked = {"functions": [{"name": "a", "parameters": {}}], "function_call": {"name": "a"}, "temperature": 0}
    message = running.chat(**asked, max_tokens=200, seed=1).json()["choices"][0]
    if message["finish_reason"] == "function_call":
        assert isinstance(json.loads(message["message"]["function_call"]["arguments"]), dict)
    assert running.chat(**asked, max_tokens=9).status_code == 200


def test_the_prompt_may_stand_before_the_answer(running: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    tokens = running.post("/tokenize", {"content": "One two", "add_special": True}).json()["tokens"]
    plain = running.post("/v1/completions", {**asked, "prompt": "One two"}).json()["choices"][0]["text"]
    for prompt in ("One two", tokens):
        echoed = running.post("/v1/completions", {**asked, "prompt": prompt, "echo": True, "n": 2}).json()
        assert [choice["text"].endswith(f"One two{plain}") for choice in echoed["choices"]] == [True, True]
    lines = running.post("/v1/completions", {**asked, "prompt": "One two", "echo": True, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"One two{plain}"
    alone = running.post("/v1/completions", {"prompt": "One two", "echo": True, "max_tokens": 0}).json()
    assert (alone["choices"][0]["text"], alone["usage"]["completion_tokens"]) == ("One two", 0)
    with_chances = running.post("/v1/completions", {"prompt": "One", "echo": True, "logprobs": 1})
    check_error("openai", with_chances, 400, "invalid_request_error")


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[str, ScriptedBroker]]:
    broker = ScriptedBroker(ends=True)
    server = Server(Service(broker, made_up_models()), Address(port=0))
    yield f"http://127.0.0.1:{server.start()}", broker
    server.stop()


@pytest.mark.parametrize(
    ("api", "fields", "expected"),
    [
        ("openai", {"max_tokens": 3.0}, {"max_tokens": 3}),
        ("openai", {"max_tokens": -1, "ignore_eos": False}, {"max_tokens": NO_LIMIT}),
        ("openai", {"top_k": -1, "seed": 7.0}, {"top_k": 0, "seed": 7}),
        ("openai", {"top_k": 10**400}, {"top_k": NO_LIMIT}),
        ("openai", {"repeat_penalty": 1.1, "dry_multiplier": 0.8}, {"repetition_penalty": 1.1, "dry_multiplier": 0.8}),
        ("openai", {"reasoning": {"effort": "low"}}, {"thinking": "low"}),
        ("responses", {"max_output_tokens": 3.0}, {"max_tokens": 3}),
        ("responses", {"reasoning": {"effort": "high"}}, {"thinking": "high"}),
        ("anthropic", {"max_tokens": 3.0, "top_k": 40.0}, {"max_tokens": 3, "top_k": 40}),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": "on"}),
        ("anthropic", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"thinking": "high"}),
        ("anthropic", {"output_config": {"effort": "low"}}, {"thinking": None}),
        ("ollama", {"options": {"num_predict": 5.0}}, {"max_tokens": 5}),
        ("ollama", {"options": {"num_predict": -1}}, {"max_tokens": NO_LIMIT}),
        ("ollama", {"options": {"num_predict": -2, "top_k": 40.0}}, {"max_tokens": NO_LIMIT, "top_k": 40}),
        ("ollama", {"options": {"top_k": -1, "seed": -1, "num_ctx": 4096}}, {"top_k": 0, "seed": None}),
        ("ollama", {"think": "low"}, {"thinking": "low"}),
        ("ollama", {"think": False}, {"thinking": "off"}),
    ],
)
def test_numbers_mean_what_they_mean_to_each_client(
    scripted: tuple[str, ScriptedBroker], api: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    url, broker = scripted
    answer = plain_http.post(url + PATHS[api], json={**GOOD[api], "stream": False, **fields}, timeout=20)
    assert answer.status_code == 200, answer.text
    assert {name: broker.tickets[-1].ask.sampling.get(name) for name in expected} == expected


@pytest.mark.parametrize("value", [2.5, "3", True, [3], 0, -3])
@pytest.mark.parametrize("api", ["openai", "anthropic", "responses"])
def test_numbers_that_are_none(running: Running, api: str, value: Any) -> None:
    name = "max_output_tokens" if api == "responses" else "max_tokens"
    check_error(api, _post(running, api, **{name: value}), 400, "invalid_request_error")


def test_one_number_is_read_alike_where_only_openai_has_it(running: Running) -> None:
    answer = running.chat(n=2.0, logprobs=True, top_logprobs=1.0, max_tokens=2)
    assert len(answer.json()["choices"]) == 2


ODD: list[Any] = [None, {"a": 1}, 3, ["x"]]


@pytest.mark.parametrize("odd", ODD)
def test_no_odd_value_becomes_a_text_of_the_prompt(running: Running, odd: Any) -> None:
    part, missing = {"type": "text", "text": odd}, {"type": "text"}
    said = {"role": "assistant", "content": "x"}
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[tuple[str, dict[str, Any]]] = [
        *(("openai", {"messages": [{"role": "user", "content": [each]}]}) for each in (part, missing, odd)),
        ("openai", {"messages": [*HELLO, {**said, "content": [part]}, *HELLO]}),
        ("openai", {"messages": [{"role": "system", "content": [part]}, *HELLO]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": odd}]}]}),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": [part]}]}),
        ("anthropic", {"messages": [{"role": "user", "content": [part]}]}),
        ("anthropic", {"system": [part]}),
        ("anthropic", {"messages": [*HELLO, {**said, "content": [{"type": "thinking", "thinking": odd}]}, *HELLO]}),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [part]}]}]}),
        ("ollama", {"messages": [{"role": "user", "content": [part]}]}),
    ]
    if odd is not None:
        turns += [
            ("openai", {"messages": [*HELLO, {**said, "tool_calls": [{**called, "id": odd}]}, *HELLO]}),
            ("openai", {"messages": [*HELLO, {"role": "tool", "tool_call_id": odd, "content": "x"}]}),
            ("responses", {"input": [{"type": "function_call", "call_id": odd, "name": "f", "arguments": "{}"}]}),
            ("responses", {"input": [{"type": "function_call", "call_id": "a", "name": odd, "arguments": "{}"}]}),
            ("responses", {"instructions": odd}),
            ("anthropic", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": odd}]}]}),
        ]
    for api, fields in turns:
        check_error(api, _post(running, api, **fields), 400, "invalid_request_error")
    check_error("openai", running.post("/apply-template", turns[0][1]), 400, "invalid_request_error")
    for fields in ({"tools": odd or [odd]}, {"chat_template": "x"}, {"messages": odd}):
        shown = running.post("/apply-template", {"messages": HELLO, **fields})
        check_error("openai", shown, 400, "invalid_request_error")
    if odd is not None:
        generated = running.post("/api/generate", {"prompt": "x", "system": odd, "stream": False})
        check_error("ollama", generated, 400, "")


def test_offers_that_only_other_servers_can_run(running: Running, seen: list[Ask]) -> None:
    function = {"type": "function", **FUNCTION}
    foreign = [{"type": "web_search"}, {"type": "custom", "name": "p"}, {"type": "mcp", "server_url": "x"}]
    answer = _post(running, "responses", tools=[*foreign, function])
    assert [tool.name for tool in seen[-1].tools] == ["weather"]
    assert answer.json()["tools"] == [function]
    only_foreign = {"tools": foreign, "tool_choice": "required"}
    check_error("responses", _post(running, "responses", **only_foreign), 400, "invalid_request_error")
    for kind in ("web_search_20250305", "computer_20250124", "bash_20250124", "mcp_toolset"):
        refused = _post(running, "anthropic", tools=[{"type": kind, "name": "x"}])
        check_error("anthropic", refused, 400, "invalid_request_error")
        assert kind in refused.text
    tools = [{"type": "custom", "name": "weather", "input_schema": FUNCTION["parameters"]}]
    assert _post(running, "anthropic", tools=tools).status_code == 200


def test_a_response_that_was_cut_has_an_item_that_was(running: Running) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_output_tokens": 4}
    whole = _post(running, "responses", **asked).json()
    assert (whole["status"], whole["output"][-1]["status"]) == ("incomplete", "incomplete")
    lines = running.post("/v1/responses", {"input": "Hello", **asked, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert (done, events[-1]["type"]) == (["incomplete"], "response.incomplete")
    ended = _post(running, "responses", max_output_tokens=60, guided_choice=["yes"]).json()
    assert (ended["status"], ended["output"][-1]["status"]) == ("completed", "completed")


def test_what_ollamas_clients_are_told_a_model_can_do(running: Running, tmp_path: Path) -> None:
    models = made_up_models()
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    models.listed = lambda: [describe(folder, "mixtral")]  # type: ignore[method-assign]
    models.find = lambda _name: ("mixtral", folder)  # type: ignore[method-assign]
    server = Server(Service(ScriptedBroker(ends=True), models), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"

    def capabilities(template: Any) -> list[str]:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        shown = plain_http.post(f"{url}/api/show", json={"model": "mixtral"}, timeout=20).json()
        return list(shown["capabilities"])

    try:
        assert capabilities(None) == capabilities("{{ messages }}") == capabilities([3]) == ["completion"]
        assert capabilities("{{ tools }}") == ["completion", "tools"]
        assert capabilities("{% if enable_thinking %}{% endif %}") == ["completion", "thinking"]
        several = [{"name": "default", "template": "</think>"}, {"name": "tool_use", "template": "{{ tools }}"}]
        assert capabilities(several) == ["completion", "tools", "thinking"]
        (folder / "chat_template.jinja").write_text("{{ messages }}")  # counts in the place of the other
        assert capabilities(several) == ["completion"]
    finally:
        server.stop()
    for path in ("/api/embed", "/api/embeddings"):
        check_error("ollama", running.post(path, {"model": "mixtral", "input": "x"}), 400, "")


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        *((0, 0), ("0", 0), ("0s", 0), (30, 30), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("90", 90)),
        *(("250ms", 0.25), (-1, -1), ("-1", -1), ("-1m", -1), (10**400, -1), ("99999999h", -1)),
    ],
)
def test_how_long_a_model_is_kept(scripted: tuple[str, ScriptedBroker], keep_alive: Any, seconds: float) -> None:
    url, broker = scripted
    broker.released.clear()
    for streams in (False, True):
        body = {**GOOD["ollama"], "stream": streams, "keep_alive": keep_alive}
        assert plain_http.post(f"{url}/api/chat", json=body, timeout=20).status_code == 200
    assert plain_http.post(f"{url}/api/generate", json={"prompt": "x", "stream": False}, timeout=20).status_code == 200
    assert broker.released == [(Path("mixtral"), pytest.approx(seconds))] * 2


@pytest.mark.parametrize("keep_alive", ["soon", "", "5x", "m", "1h 30m", "--1", "nan", "inf", "1e3", True, [5], {}])
def test_no_time_to_keep_a_model(running: Running, keep_alive: Any) -> None:
    for path, body in (("/api/chat", GOOD["ollama"]), ("/api/chat", {"messages": []}), ("/api/generate", {})):
        answer = running.post(path, {**body, "keep_alive": keep_alive, "stream": False})
        check_error("ollama", answer, 400, "")


def test_a_model_goes_or_stays_when_it_was_said() -> None:
    def ask(running: Running, **fields: Any) -> None:
        assert _post(running, "ollama", **fields).status_code == 200

    with serving() as running:
        ask(running, keep_alive=0)
        until(lambda: running.broker.state.model is None)
        ask(running)
        ask(running, keep_alive="1ms")
        until(lambda: running.broker.state.model is None)
    with serving(idle_s=0.001) as running:
        ask(running, keep_alive=-1)
        ask(running)  # says nothing: what was said holds
        assert running.engine.loads == ["mixtral"]
        ask(running, keep_alive=0)
        until(lambda: running.broker.state.model is None)
    with serving(idle_s=threading.TIMEOUT_MAX * 2) as running:  # longer than the system can wait
        for _ in range(3):
            ask(running)
        assert running.engine.loads == ["mixtral"]


def _pictured(api: str, *urls: str, role: str = "user") -> dict[str, Any]:
    """A question with pictures between two texts, in each interface's form."""
    data = [url.partition(",")[2] for url in urls]
    if api == "ollama":
        return {"messages": [{"role": role, "content": "What is this?", "images": data}]}
    if api == "anthropic":
        sources = [{"type": "base64", "media_type": "image/png", "data": each} for each in data]
        sources = [
            source if url.startswith("data:") else {"type": "url", "url": url}
            for source, url in zip(sources, urls, strict=True)
        ]
        pictures: list[Any] = [{"type": "image", "source": source} for source in sources]
        said = "text"
    elif api == "responses":
        pictures = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        said = "input_text"
    else:
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        said = "text"
    content = [{"type": said, "text": "What "}, *pictures, {"type": said, "text": "is this?"}]
    return {"input" if api == "responses" else "messages": [{"role": role, "content": content}]}


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("api", PATHS)
def test_pictures_of_each_interface_reach_the_engine_in_one_form(running: Running, api: str, seen: list[Ask]) -> None:
    names = ("PNG, 16 bits", "PNG, moving", "JPEG, CMYK", "JPEG, turned 6", "GIF, moving", "WebP, moving")
    files = [MADE[name]() for name in names]
    answer = _post(running, api, **_pictured(api, *map(_url, files)))
    turn = seen[0].messages[-1]
    assert (turn.role, turn.content) == ("user", "What is this?")
    assert [base64.b64decode(each.data) for each in pictures_of(turn)] == files
    assert [each.media.partition("/")[2] for each in pictures_of(turn)] == [
        name.split(",")[0].lower() for name in names
    ]
    kinds = [part["type"] for part in json.loads(turn.parts)]
    assert kinds == ["image_url"] * 6 + ["text"] if api == "ollama" else ["text", *["image_url"] * 6, "text"]
    check_error(api, answer, 400, "invalid_request_error")
    assert "reads text only" in answer.text


WRONG_PICTURES = {
    "https://example.org/a.png": "nothing is fetched",
    "file:///etc/passwd": "nothing is fetched",
    _url(b""): "no picture",
    _url(file_of(coloured(), "PNG")[:60]): "cut off",
    _url(png_of(20_000, 20_000)): "20,000 × 20,000 pixels",
    _url(endless()): "far too many scans",
    _url(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"): "HEIC",
    _url(b"<svg></svg>"): "SVG",
    "data:image/png;base64,????": "not valid base64",
}


@pytest.mark.parametrize("api", PATHS)
def test_pictures_that_cannot_be_read_are_refused_in_a_sentence(running: Running, api: str, seen: list[Ask]) -> None:
    for url, words in WRONG_PICTURES.items():
        if api == "ollama" and not url.startswith("data:"):
            continue  # it takes no addresses
        answer = _post(running, api, **_pictured(api, url))
        check_error(api, answer, 400, "invalid_request_error")
        assert words in answer.text
    good = _url(file_of(coloured(), "PNG"))
    answer = _post(running, api, **_pictured(api, good, _url(b"Hello")))
    assert "number 2 of 2" in answer.text
    check_error(api, _post(running, api, **_pictured(api, *[good] * 65)), 400, "invalid_request_error")
    check_error(api, _post(running, api, **_pictured(api, good, role="assistant")), 400, "invalid_request_error")
    assert not seen


def test_pictures_in_what_tools_found_go_to_the_user_s_turn(running: Running, seen: list[Ask]) -> None:
    data = base64.b64encode(file_of(coloured(), "PNG")).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    found = [{"type": "text", "text": "A screen"}, picture]
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": found}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    _post(running, "anthropic", messages=turns)
    output = [{"type": "input_text", "text": "A screen"}, {"type": "input_image", "image_url": f"data:;base64,{data}"}]
    called = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    _post(
        running,
        "responses",
        input=[*HELLO, called, {"type": "function_call_output", "call_id": "a", "output": output}],
    )
    for ask in seen:
        tool, user = ask.messages[-2:]
        assert (tool.role, tool.content, tool.parts, tool.answers) == ("tool", "A screen", "", "a")
        assert (user.role, user.content, len(pictures_of(user))) == ("user", "", 1)


def test_ollama_s_generate_takes_pictures(running: Running, seen: list[Ask]) -> None:
    images = [base64.b64encode(file_of(coloured(), "PNG")).decode()]
    for prompt in ("What?", ""):
        running.post("/api/generate", {"model": "mixtral", "prompt": prompt, "images": images, "stream": False})
        assert (seen[-1].messages[-1].content, len(pictures_of(seen[-1].messages[-1]))) == (prompt, 1)
    raw = {"model": "mixtral", "prompt": "What?", "images": images, "raw": True}
    check_error("ollama", running.post("/api/generate", raw), 400, "invalid_request_error")
    check_error(
        "ollama", running.post("/api/generate", {"prompt": "What?", "images": "x"}), 400, "invalid_request_error"
    )


def test_lists_of_models_say_which_see(running: Running) -> None:
    shown = {name: running.post("/api/show", {"model": name}).json() for name in ("mixtral", "qwen3_moe")}
    assert ["vision" in each["capabilities"] for each in shown.values()] == [False, True]
    listed = {
        each["id"]: each["architecture"]["input_modalities"]
        for each in plain_http.get(f"{running.url}/v1/models").json()["data"]
    }
    assert (listed["mixtral"], listed["qwen3_moe"]) == (["text"], ["text", "image"])
