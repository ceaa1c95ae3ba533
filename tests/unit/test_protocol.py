"""The codec between the processes: any message survives, any bytes are survived."""

import dataclasses
import json
import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import BatchJob, BatchStart, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import field_types
from engine.protocol import (
    MAX_LINE_BYTES,
    MESSAGES,
    ChatMessage,
    Generate,
    Heartbeat,
    LineReader,
    LoadModel,
    Message,
    Shutdown,
    TerminalEvent,
    Token,
    decode,
    encode,
    request_id_of,
)
from engine.remote.endpoint import Endpoint
from tests.refusals import refused

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 10**6),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 0.99),
    repetition_penalty=st.floats(0.01, 10),
    seed=st.none() | st.integers(),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    max_tokens=st.integers(1, 10**9),
    beams=st.integers(1, 64),
    dry_multiplier=st.floats(0, 100),
    dry_base=st.floats(1, 10),
    dry_allowed_length=st.integers(0, 10**6),
    dry_range=st.integers(-1, 10**9),
    dry_breakers=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
)
JOB = st.builds(
    BatchJob,
    input=TEXT,
    output=TEXT,
    template=TEXT,
    system=TEXT,
    sampling=SAMPLING,
    choices=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    tries=st.integers(1, 100),
    encoding=st.none() | TEXT,
    separator=st.none() | TEXT,
    whole_files=st.none() | st.booleans(),
    start=st.sampled_from(get_args(BatchStart)),
)
PRICES = st.none() | st.floats(0, 1000)
LIMITS = st.none() | st.integers(1, 10**6)
ENDPOINT = st.builds(
    Endpoint,
    name=st.sampled_from(("rack", "big one", "10.0.0.5:8000")),
    url=st.sampled_from(("http://10.0.0.5:8000/v1", "https://example.org/v2")),
    model=TEXT,
    at_once=LIMITS,
    requests_per_minute=LIMITS,
    tokens_per_minute=LIMITS,
    price_in=PRICES,
    price_out=PRICES,
    currency=TEXT,
    ca_file=TEXT,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's declared type."""
    if hint is SamplingParams:
        return SAMPLING
    if hint is BatchJob:
        return JOB
    if hint is Endpoint:
        return ENDPOINT
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(t) for name, t in field_types(hint).items()})
    if get_origin(hint) is typing.Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values, get_args(hint)), max_size=3)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is not Ellipsis:
            return st.tuples(*map(values, kinds))
        return st.lists(values(kinds[0]), max_size=3).map(tuple)
    if get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of(*(values(option) for option in get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    known = {
        str: TEXT,
        int: st.integers(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
        Path: TEXT.map(Path),
        Any: TEXT,
    }
    return known[hint]


ANY: st.SearchStrategy[Message] = st.sampled_from(list(MESSAGES.values())).flatmap(values)


@given(ANY)
def test_round_trip(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@given(st.lists(ANY, max_size=5), st.data())
def test_a_stream_cut_anywhere(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = LineReader()
    lines = [
        line
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for line in reader.feed(stream[start:end])
    ]
    assert [decode(line) for line in lines] == messages


@given(st.binary())
def test_garbage_is_a_protocol_error_and_nothing_else(line: bytes) -> None:
    try:
        decode(line)
    except EngineError as error:
        assert error.code in (ErrorCode.PROTOCOL, ErrorCode.INVALID_REQUEST)  # noqa: PT017 - it may also decode


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v)))
def test_a_field_of_a_wrong_type_is_a_protocol_error(value: Any) -> None:
    line = json.dumps({"type": "Token", "request_id": value, "text": value, "generated_tokens": value}).encode()
    with refused(ErrorCode.PROTOCOL):
        decode(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"Token"',
        b'{"type":"Nonsense"}',
        b'{"type":["Shutdown"]}',
        b'{"type":"Shutdown","extra":1}',
        b'{"type":"Cancel"}',
        b'{"type":"Heartbeat","monotonic_s":true}',
        b'{"type":"Heartbeat","monotonic_s":' + b"9" * 400 + b"}",
        b'{"type":"Progress","request_id":"r","phase":"lunch","done":1,"total":1}',
        b'{"type":"Failed","request_id":"r","code":"nonsense","message":""}',
        b'{"type":"Generate","request_id":"r","messages":"text","sampling":{}}',
        b'{"type":"LoadModel","request_id":"r","config":[]}',
        b"[" * 100_000,
        b'{"type":"Shutdown"',
        b"\xff\xfe",
        "Loading checkpoint shards: 100%|██████|".encode(),
    ],
)
def test_not_a_message(line: bytes) -> None:
    with refused(ErrorCode.PROTOCOL):
        decode(line)


def test_errors_quote_nothing_that_was_typed() -> None:
    line = b'{"type":"Generate","request_id":"r","messages":"SECRET","sampling":{"SECRET":1}}'
    with pytest.raises(EngineError) as caught:
        decode(line)
    assert "SECRET" not in caught.value.message
    assert caught.value.__cause__ is None
    assert request_id_of(line) == "r"


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"request_id":1}', b"\xff", b"[" * 100_000])
def test_a_line_without_a_request_id(line: bytes) -> None:
    assert request_id_of(line) is None


def test_sampling_out_of_range_is_the_requests_fault() -> None:
    line = b'{"type":"Generate","request_id":"r","messages":[],"sampling":{"temperature":-1.0}}'
    with refused(ErrorCode.INVALID_REQUEST, "temperature"):
        decode(line)


def test_lone_surrogates_do_not_kill_the_stream() -> None:
    half = "half an emoji: \ud83d"
    message = Generate("r", (ChatMessage("user", half),), SamplingParams(stop=(half,)))
    back = decode(encode(message))
    assert back.messages[0].content == back.sampling.stop[0] == "half an emoji: ?"


@pytest.mark.parametrize("text", ["line\nbreak", "\r\n", "\u2028\u2029\x85", "\x00\x1b[2J", '"}\n{"', "𝄞" * 1000])
def test_text_that_looks_like_the_end_of_a_line_is_not(text: str) -> None:
    token = Token("r", text, 1)
    (line,) = LineReader().feed(encode(token))
    assert decode(line) == token


def test_a_line_of_many_megabytes() -> None:
    message = Generate("r", (ChatMessage("user", "word " * 2_000_000),), SamplingParams())
    stream = encode(message) + encode(Shutdown())
    reader = LineReader()
    lines = [line for start in range(0, len(stream), 65536) for line in reader.feed(stream[start : start + 65536])]
    assert [decode(line) for line in lines] == [message, Shutdown()]


def test_a_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    reader = LineReader()
    for _ in range(16):
        assert reader.feed(b"x" * (MAX_LINE_BYTES // 16)) == []
    with refused(ErrorCode.PROTOCOL):
        reader.feed(b"x")


def test_blank_lines_are_passed_over() -> None:
    assert LineReader().feed(b"\n\r\n  \n" + encode(Heartbeat(1.0))) == [encode(Heartbeat(1.0)).rstrip(b"\n")]


def test_a_bad_line_costs_that_line_alone() -> None:
    lines = LineReader().feed(encode(Heartbeat(1.0)) + b"garbage\n" + encode(Heartbeat(2.0)))
    assert [decode(lines[0]), decode(lines[2])] == [Heartbeat(1.0), Heartbeat(2.0)]


def test_whole_numbers_are_accepted_for_seconds() -> None:
    back = decode(b'{"type":"Heartbeat","monotonic_s":3}')
    assert isinstance(back.monotonic_s, float)


def test_defaults_may_be_left_out() -> None:
    line = b'{"type":"LoadModel","request_id":"r","config":{"model":"starter"}}'
    assert decode(line) == LoadModel("r", EngineConfig("starter"))


def test_a_kind_of_messages_is_no_message() -> None:
    assert not {"Message", "Request", "Event", "RequestEvent", "OfRequest", "TerminalEvent"} & MESSAGES.keys()
    assert {kind.__name__ for kind in TerminalEvent.__subclasses__()} < MESSAGES.keys()
