"""The object that worker and command line drive: one model, one conversation, and every refusal a sentence."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.checkpoint import library
from engine.checkpoint.library import exclusive_use
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.protocol import ChatMessage
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.engine import Engine
from engine.runtime.loaded_model import LoadedModel
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

CPU = EngineConfig("", device="cpu", precision="fp32", threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.unload()


def load(engine: Engine, model: str | Path) -> None:
    engine.load(replace(CPU, model=str(model)), on_progress=lambda _done, _total: None, cancelled=lambda: False)


def ask(
    engine: Engine, prompt: str, sampling: SamplingParams | None = None, *, cancel: bool = False
) -> GenerationResult:
    return engine.generate(
        [ChatMessage("user", prompt)],
        sampling or SamplingParams(max_tokens=4),
        on_progress=lambda _done, _total: None,
        on_text=lambda _text, _tokens: None,
        cancelled=lambda: cancel,
    )


def test_a_loaded_model_is_in_use_and_its_answers_are_timed(
    engine: Engine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LEAST_TOKENS", 2)
    load(engine, tiny)
    with refused(ErrorCode.BUSY), exclusive_use(tiny):
        pass
    assert library.read_usage(tiny).last_used is not None
    answer = ask(engine, "a question")
    assert answer.generated_tokens > 1
    assert library.read_usage(tiny).tokens_per_s == (answer.tokens_per_s,)
    with pytest.raises(EngineError):
        load(engine, tiny.with_name("none"))
    with exclusive_use(tiny):
        pass


def test_a_model_that_cannot_be_closed_is_in_use_no_longer(
    engine: Engine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_loaded: LoadedModel) -> None:
        raise OSError("the device is gone")

    load(engine, tiny)
    with monkeypatch.context() as patched:
        patched.setattr(LoadedModel, "close", fails)
        with pytest.raises(OSError, match="device is gone"):
            engine.unload()
    with exclusive_use(tiny):
        pass
    load(engine, tiny)
    assert engine.info is not None


def test_load_answer_unload(engine: Engine, tiny: Path) -> None:
    assert engine.info is None
    load(engine, tiny)
    assert engine.info.family == "mixtral"
    first = ask(engine, "a question")
    assert first.prompt_tokens > 0
    assert engine.kv_tokens > 0
    assert engine.kv_bytes > 0
    again = ask(engine, "a question")
    assert again.text == first.text
    assert again.reused_tokens > 0
    engine.unload()
    engine.unload()
    assert (engine.info, engine.kv_tokens, engine.kv_bytes) == (None, 0, 0)


@pytest.mark.exhaustive
def test_an_unloaded_model_gives_its_memory_back_to_the_system(engine: Engine, starter: Path) -> None:
    process = psutil.Process()

    def cycle() -> tuple[int, int]:
        load(engine, starter)
        ask(engine, "a question")
        held = process.memory_info().rss
        engine.unload()
        return held, process.memory_info().rss

    cycle()  # imports what stays
    before = process.memory_info().rss
    held, after = cycle()
    assert held - before > 200e6
    assert after - before < 0.1 * (held - before)


def test_without_a_model(engine: Engine) -> None:
    for ask_something in (lambda: ask(engine, "hello"), engine.default_sampling):
        with refused(ErrorCode.INVALID_REQUEST):
            ask_something()


def test_a_load_that_fails_leaves_nothing(engine: Engine, tiny: Path) -> None:
    load(engine, tiny)
    with refused(ErrorCode.MODEL_NOT_FOUND):
        load(engine, "no-such-model")
    assert engine.info is None


def test_a_load_that_is_cancelled_leaves_nothing(engine: Engine, tiny: Path) -> None:
    with pytest.raises(RequestCancelled):
        engine.load(replace(CPU, model=str(tiny)), on_progress=lambda _done, _total: None, cancelled=lambda: True)
    assert engine.info is None


def test_a_refused_prompt_costs_nothing_of_the_conversation(engine: Engine, tiny: Path) -> None:
    load(engine, tiny)
    ask(engine, "a question")
    held = engine.kv_tokens
    with refused(ErrorCode.PROMPT_TOO_LONG):
        ask(engine, "word " * 20_000)
    assert engine.kv_tokens == held


def test_a_conversation_survives_a_fault_in_an_answer(engine: Engine, tiny: Path) -> None:
    load(engine, tiny)
    expected, held = ask(engine, "a question").text, engine.kv_tokens

    def fault(_text: str, _tokens: int) -> None:
        raise RuntimeError("in the middle of an answer")

    with pytest.raises(EngineError, match=r"RuntimeError at test_engine\.py"):
        engine.generate(
            [ChatMessage("user", "another question")],
            SamplingParams(),
            on_progress=lambda _done, _total: None,
            on_text=fault,
            cancelled=lambda: False,
        )
    assert engine.kv_tokens == held  # what was left before
    assert ask(engine, "a question").text == expected


def test_cancelled_before_the_first_token(engine: Engine, tiny: Path) -> None:
    load(engine, tiny)
    assert ask(engine, "a question", cancel=True).finish_reason == "cancelled"


def test_half_a_surrogate_pair_is_no_reason_to_fail(engine: Engine, tiny: Path) -> None:
    load(engine, tiny)
    assert ask(engine, "\ud83d").prompt_tokens > 0


@pytest.mark.parametrize(
    ("suggested", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.5}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.2, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
            SamplingParams(temperature=0.2, top_k=50, top_p=0.95, repetition_penalty=1.1),
        ),
        ({"repetition_penalty": 1.3}, SamplingParams(repetition_penalty=1.3)),
        (
            {"do_sample": True, "min_p": 0.1, "dry_multiplier": 0.8, "dry_breakers": ["\n"], "dry_range": 256},
            SamplingParams(temperature=1.0, min_p=0.1, dry_multiplier=0.8, dry_breakers=("\n",), dry_range=256),
        ),
        (
            {"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": None, "min_p": 0.1, "dry_breakers": [1]},
            SamplingParams(temperature=1.0, min_p=0.1),
        ),
    ],
)
def test_sampling_that_the_models_makers_suggest(
    engine: Engine, tmp_path: Path, suggested: dict[str, Any], expected: SamplingParams
) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "model")
    path = folder / "generation_config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **suggested}))
    load(engine, folder)
    assert engine.default_sampling() == expected
