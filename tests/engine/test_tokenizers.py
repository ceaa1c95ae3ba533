"""A checkpoint's tokenizer is loaded, or refused in one sentence: whatever its files hold, however they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.common.errors import EngineError, ErrorCode
from engine.runtime.decode.prompt import encode
from engine.runtime.load.tokenizer import load_tokenizer
from engine.untrusted_text.process import UNTRUSTED_TEXT, RequestLimits
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.untrusted_tokenizers import (
    PANIC_TEXT,
    split_by,
    write_multiplying_tokenizer,
    write_panicking_tokenizer,
    write_tokenizer,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return tmp_path


def refused(folder: Path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load_tokenizer(folder)
    assert caught.value.code == ErrorCode.CHECKPOINT_DAMAGED
    assert len(caught.value.message.splitlines()) == 1
    return caught.value


def changed(folder: Path, **values: Any) -> None:
    """Other values in tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_sound_one(folder: Path) -> None:
    assert load_tokenizer(folder).chat_template


@pytest.mark.parametrize(
    "template", [{"a": 1}, [1, 2], 3, [["x"]], [{"name": "default"}], {"default": {"a": "b"}}, [{}]]
)
def test_a_chat_template_that_is_no_text(folder: Path, template: object) -> None:
    changed(folder, chat_template=template)
    refused(folder)


def test_several_chat_templates_with_names(folder: Path) -> None:
    changed(folder, chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}])
    assert load_tokenizer(folder).chat_template == {"default": "x", "tool_use": "y"}


@pytest.mark.parametrize("parts", [{"pre_tokenizer": split_by("(")}, {"model": {"type": "x"}}, {"added_tokens": [3]}])
def test_a_tokenizer_that_cannot_be_read(folder: Path, parts: dict[str, Any]) -> None:
    write_tokenizer(folder, **parts)
    refused(folder)


def test_a_tokenizer_that_multiplies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNTRUSTED_TEXT, "limits", RequestLimits(memory_bytes=200 * 2**20))
    write_multiplying_tokenizer(folder)
    refused(folder)


def test_a_decoder_that_multiplies(folder: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    write_tokenizer(folder, decoder={"type": "Sequence", "decoders": [replace] * 12})
    refused(folder)
    chain = [{"type": "Replace", "pattern": {"String": a}, "content": b * 10} for a, b in ("ab", "bc", "cd")]
    write_tokenizer(folder, decoder={"type": "Sequence", "decoders": chain})
    refused(folder)
    several = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}
    write_tokenizer(folder, decoder=several)
    refused(folder)


def test_a_tokenizer_that_panics_at_a_prompt(folder: Path) -> None:
    write_panicking_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(EngineError) as caught:
        encode(tokenizer, PANIC_TEXT, special=False)
    assert caught.value.code == ErrorCode.MODEL_UNSUPPORTED


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def far_too_big(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices in the file system")
@pytest.mark.parametrize("make", [a_pipe, an_endless_device, far_too_big])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_files_that_are_none(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert name in refused(folder).message
