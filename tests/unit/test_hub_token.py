"""Tokens of hubs: kept where the system keeps passwords, each for its host."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import keyring
import pytest
from keyring.backend import KeyringBackend

from engine.checkpoint.hub import http as tokens
from engine.checkpoint.hub.http import (
    for_child,
    forget_token,
    hosts_with_tokens,
    read_token,
    save_token,
    set_aside,
)
from engine.common.errors import EngineError
from engine.common.paths import config_dir


class Memory(KeyringBackend):
    """A keyring for one test."""

    priority = 1

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    before, backend = keyring.get_keyring(), Memory()
    keyring.set_keyring(backend)
    yield backend
    keyring.set_keyring(before)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("_this_run", "_of_keyring"):
        monkeypatch.setattr(tokens, name, {})
    monkeypatch.setattr(tokens, "_refused", set())
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN", "SWITCHYARD_HUB_TOKENS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", f"{tmp_path}/none")


def test_a_token_is_kept_for_its_host_alone(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_token("Hub.example", "hf_abc\n")
    monkeypatch.setattr(tokens, "_this_run", {})  # the next start
    assert read_token("hub.example") == "hf_abc"
    assert read_token("other.example") == ""
    assert read_token("huggingface.co") == ""
    forget_token("hub.example")
    assert read_token("hub.example") == ""
    forget_token("hub.example")
    assert memory.kept == {}


def test_without_a_keyring_it_is_for_this_run_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not save_token("hub.example", "hf_abc")
    assert read_token("hub.example") == "hf_abc"
    child = for_child()
    monkeypatch.setattr(tokens, "_this_run", {})
    assert read_token("hub.example") == ""
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert read_token("hub.example") == "hf_abc"
    monkeypatch.setenv("SWITCHYARD_HUB_TOKENS", "[nonsense")
    assert read_token("hub.example") == ""


def test_the_hosts_with_tokens_are_known_without_asking_the_keyring(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosts_with_tokens() == ()
    save_token("hub.example", "hf_abc")
    save_token("mirror.example", "hf_def")
    monkeypatch.setattr(tokens, "_this_run", {})  # the next start
    monkeypatch.setattr(memory, "get_password", None)
    assert hosts_with_tokens() == ("hub.example", "mirror.example")
    forget_token("hub.example")
    assert hosts_with_tokens() == ("mirror.example",)
    noted = config_dir() / "token-hosts.json"
    assert "hf_" not in noted.read_text()
    for damaged in ("[]", '{"hosts": 3}', '{"hosts": [1, "a\\nb"]}'):
        noted.write_text(damaged)
        assert hosts_with_tokens() == ()


def test_a_keyring_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert not save_token("hub.example", "hf_abc")
    assert read_token("hub.example") == "hf_abc"
    forget_token("hub.example")
    assert read_token("hub.example") == ""


@pytest.mark.parametrize("token", ["", "two words", "hf_abc\r\nHost: evil", "ümlaut", "x" * 5000])
def test_what_cannot_be_a_token_is_refused(token: str) -> None:
    with pytest.raises(EngineError, match="not a token"):
        save_token("hub.example", token)


def test_what_the_hub_s_own_programs_have_goes_to_that_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_env")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms_env")
    assert read_token("huggingface.co") == "hf_env"
    assert read_token("www.modelscope.cn") == "ms_env"
    assert read_token("mirror.example") == ""
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert read_token("mirror.example") == "hf_env"


def test_a_keyring_is_asked_once_for_a_host_by_however_many(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked one may open a dialog each time, also where it holds nothing."""
    asked: list[str] = []

    def ask(_service: str, host: str) -> str | None:
        asked.append(host)
        return memory.kept.get(("Switchyard", host))

    monkeypatch.setattr(memory, "get_password", ask)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(read_token, ["hub.example"] * 64)) == {""}
    assert asked == ["hub.example"]
    assert save_token("hub.example", "hf_abc")
    monkeypatch.setattr(tokens, "_this_run", {})
    assert [read_token("hub.example") for _ in range(3)] == ["hf_abc"] * 3
    assert asked == ["hub.example"] * 2  # once more, to see whether it stays
    forget_token("hub.example")
    assert read_token("hub.example") == ""


def test_a_token_that_is_set_aside_leaves_the_next_one(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_env")
    save_token("huggingface.co", "hf_old")
    set_aside("huggingface.co", "hf_old")
    assert read_token("huggingface.co") == "hf_env"
    set_aside("huggingface.co", "hf_env")
    assert read_token("huggingface.co") == ""
    save_token("huggingface.co", "hf_old")  # given again: it may be accepted now
    assert read_token("huggingface.co") == "hf_old"
    assert memory.kept
