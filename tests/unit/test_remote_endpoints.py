"""How endpoints are named, kept without their keys, and found nearby, only when asked."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import keyring
import keyring.backend
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.remote import endpoint as keys
from engine.remote import nearby
from engine.remote.endpoint import (
    Endpoint,
    endpoint_at,
    endpoints_file,
    normal_url,
    parse_endpoint,
    parse_remote,
    remote_name,
    remove_endpoint,
    save_endpoint,
    saved_endpoints,
)
from engine.remote.nearby import Announcer, Nearby, look_around


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.5:8000/v1", "http://10.0.0.5:8000/v1"),
        (" HTTP://Server:8000/ ", "http://server:8000/v1"),
        ("10.0.0.5:8000", "http://10.0.0.5:8000/v1"),
        ("localhost:8490/v1/", "http://localhost:8490/v1"),
        ("api.example.org", "https://api.example.org/v1"),
        ("https://example.org:443/openai/v2", "https://example.org/openai/v2"),
        ("https://example.org/v1/chat/completions", "https://example.org/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("https://bücher.example", "https://xn--bcher-kva.example/v1"),
    ],
)
def test_an_address_has_one_plain_form(text: str, url: str) -> None:
    assert normal_url(text) == url
    assert normal_url(url) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "ftp://example.org/v1",
        "http://user:secret@example.org/v1",
        "http://example.org:99999/v1",
        "http://exa mple.org/v1",
        "http://example.org/v1?key=secret",
        "http://example.org/a b",
        "http://[::1/v1",
        "file:///etc/passwd",
    ],
)
def test_what_is_no_address_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(EngineError) as refused:
        endpoint_at(text)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert "secret" not in refused.value.message or "user" not in text


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        url = normal_url(text)
    except EngineError:
        return
    assert normal_url(url) == url


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": "a#b"},
        {"name": "x" * 41},
        {"name": "two\nlines"},
        {"at_once": 0},
        {"requests_per_minute": -1},
        {"price_in": -0.5},
        {"price_out": float("nan")},
        {"url": "http://example.org"},
    ],
)
def test_nonsense_is_no_endpoint(changes: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        replace(endpoint_at("http://example.org:1/v1", "e"), **changes)  # type: ignore[arg-type]


def test_saved_ones_are_found_by_name_changed_and_removed() -> None:
    rack = endpoint_at("http://10.0.0.5:8000/v1", "Rack 1", at_once=4, price_in=0.5, currency="€")
    save_endpoint(rack)
    save_endpoint(endpoint_at("https://api.example.org", "big one"))
    assert [each.name for each in saved_endpoints()] == ["big one", "Rack 1"]
    assert parse_endpoint("rack 1") == rack
    assert parse_endpoint("Rack 1#org/model").model == "org/model"
    assert parse_remote(remote_name(rack, "org/model")) == (rack, "org/model")
    assert parse_remote("endpoint:http://10.0.0.9:8000#m")[0].url == "http://10.0.0.9:8000/v1"
    with pytest.raises(EngineError, match="already"):
        save_endpoint(endpoint_at("http://10.0.0.6:1", "RACK-1"), instead_of="big one")
    moved = endpoint_at("http://10.0.0.6:8000/v1", "rack two")
    save_endpoint(moved, instead_of="Rack 1")
    assert [each.name for each in saved_endpoints()] == ["big one", "rack two"]
    remove_endpoint("BIG ONE")
    assert saved_endpoints() == (moved,)
    with pytest.raises(EngineError, match="rack two"):
        parse_endpoint("nobody")
    with pytest.raises(EngineError):
        remove_endpoint("nobody")


def test_entries_of_another_version_stay_and_do_no_harm() -> None:
    endpoints_file().parent.mkdir(parents=True, exist_ok=True)
    future = {"name": "future", "url": "http://a/v1", "beams": True}
    endpoints_file().write_text(json.dumps({"version": 9, "endpoints": [future, 3, {"name": "bad", "url": 1}]}))
    assert saved_endpoints() == ()
    save_endpoint(endpoint_at("http://10.0.0.5:8000/v1", "new"))
    assert future in json.loads(endpoints_file().read_text())["endpoints"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"endpoints": {}, }', "\xff"])
def test_a_damaged_list_is_said_not_replaced(content: str) -> None:
    endpoints_file().parent.mkdir(parents=True, exist_ok=True)
    endpoints_file().write_bytes(content.encode("latin-1"))
    for use in (saved_endpoints, lambda: save_endpoint(endpoint_at("http://10.0.0.5:8000/v1", "new"))):
        with pytest.raises(EngineError) as refused:
            use()
        assert str(endpoints_file()) in refused.value.message
    assert endpoints_file().read_bytes() == content.encode("latin-1")


# Keys

SECRET = "sk-very-secret-1234567890"


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], str]:
    """A keyring in memory, and a process that knows nothing."""
    held: dict[tuple[str, str], str] = {}
    monkeypatch.setattr(keyring, "get_password", lambda service, name: held.get((service, name)))
    monkeypatch.setattr(keyring, "set_password", lambda service, name, it: held.__setitem__((service, name), it))
    monkeypatch.setattr(keyring, "delete_password", lambda service, name: held.pop((service, name)))
    forget(monkeypatch)
    return held


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process."""
    monkeypatch.setattr(keys, "_this_run", {})
    monkeypatch.setattr(keys, "_of_keyring", {})


def test_a_key_is_kept_in_the_keyring_and_in_no_file(
    ring: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoint_at("https://api.example.org", "big one")
    save_endpoint(endpoint)
    assert keys.save_key(endpoint, f" {SECRET}\n")
    forget(monkeypatch)
    assert keys.read_key(endpoint) == SECRET
    home = endpoints_file().parents[1]
    assert not any(SECRET in file.read_text(errors="replace") for file in home.rglob("*") if file.is_file())
    keys.forget_key(endpoint)
    assert keys.read_key(endpoint) == ""
    assert ring == {}


def test_a_key_is_for_the_address_that_it_was_given_for(ring: dict[tuple[str, str], str]) -> None:
    endpoint = endpoint_at("https://api.example.org", "big one")
    keys.save_key(endpoint, SECRET)
    assert keys.read_key(replace(endpoint, url="https://elsewhere.example.org/v1")) == ""
    assert keys.read_key(replace(endpoint, url="http://api.example.org/v1")) == ""
    assert keys.read_key(replace(endpoint, url="https://api.example.org/v2")) == ""
    assert keys.read_key(replace(endpoint, name="renamed")) == SECRET


def test_without_a_keyring_a_key_lasts_for_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    endpoint = endpoint_at("https://api.example.org", "big one")
    assert not keys.save_key(endpoint, SECRET)
    assert keys.read_key(endpoint) == keys.key_of_this_run(endpoint) == SECRET
    forget(monkeypatch)
    assert keys.read_key(endpoint) == ""


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    endpoint = endpoint_at("https://10.0.0.5:8000/v1")
    assert keys.variable_of(endpoint) == "SWITCHYARD_KEY_10_0_0_5_8000"
    monkeypatch.setenv("SWITCHYARD_KEY_10_0_0_5_8000", SECRET)
    assert keys.read_key(endpoint) == SECRET


@pytest.mark.parametrize("key", ["two words", "tab\tkey", "ünïcode", "x" * 5000])
def test_what_cannot_be_a_key(key: str) -> None:
    with pytest.raises(EngineError) as refused:
        keys.save_key(endpoint_at("https://api.example.org"), key)
    assert key not in refused.value.message


@pytest.mark.parametrize("address", ["http://10.0.0.5:8000", "http://example.org", "http://[fe80::1]:80"])
def test_no_key_crosses_the_network_readable(address: str) -> None:
    with pytest.raises(EngineError, match="readable") as refused:
        keys.save_key(endpoint_at(address), SECRET)
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8000", "http://localhost:80", "http://[::1]:80", "https://a.org"]
)
def test_where_a_key_may_go(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    assert keys.check_key(endpoint_at(address), SECRET) == SECRET


def test_an_endpoint_shows_no_key(tmp_path: Path) -> None:
    assert "key" not in Endpoint.__dataclass_fields__


HERE = ("127.0.0.1", 0)


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    found = Announcer("Rack in the cellar", 8490, is_https=True, group=HERE)
    found.start()
    yield found
    found.stop()


def test_who_announces_itself_is_found(announcer: Announcer) -> None:
    found = look_around(group=("127.0.0.1", announcer.port), listen_s=0.5)
    assert found == (Nearby("Rack in the cellar", "https://127.0.0.1:8490/v1"),)


def test_names_are_cut_to_what_fits_and_cannot_harm() -> None:
    long = Announcer("ü" * 60 + "\x1b[2J", 1, is_https=False, group=HERE)
    long.start()
    (found,) = look_around(group=("127.0.0.1", long.port), listen_s=0.5)
    long.stop()
    assert found.url == "http://127.0.0.1:1/v1"
    assert set(found.name) == {"ü"}


def test_nobody_answers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(HERE)
        assert look_around(group=silent.getsockname(), listen_s=0.1) == ()
        assert look_around(cancelled=lambda: True, group=silent.getsockname()) == ()


def test_nonsense_is_no_server() -> None:
    answers = (b"", b"\0" * 12, b"\xff" * 500, struct.pack(">6H", 0, 0x8400, 0, 9, 0, 0) + b"\xc0\x0c")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as strange:
        strange.bind(HERE)

        def reply() -> None:
            _packet, sender = strange.recvfrom(9000)
            for answer in answers:
                strange.sendto(answer, sender)

        thread = threading.Thread(target=reply)
        thread.start()
        assert look_around(group=strange.getsockname(), listen_s=0.3) == ()
        thread.join()


@given(st.binary(max_size=300))
def test_any_packet_is_survived(packet: bytes) -> None:
    nearby._asks(packet)
    nearby._answer_in(packet, "10.0.0.5")
    nearby._answer_in(struct.pack(">6H", 0, 0x8400, 0, 3, 0, 0) + packet, "10.0.0.5")


def test_questions_of_others_are_not_answered(announcer: Announcer) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.3)
        other = struct.pack(">6H", 7, 0, 1, 0, 0, 0) + b"\x05_http\x04_tcp\x05local\0" + struct.pack(">HH", 12, 1)
        asking.sendto(other, ("127.0.0.1", announcer.port))
        with pytest.raises(TimeoutError):
            asking.recvfrom(9000)
