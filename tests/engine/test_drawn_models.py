"""Models drawn at random say what transformers says of the same files: on the CPU, on a card and from disk, a question
alone and rows of a batch.

A dozen that are always the same, and with `-m exhaustive` 118 others each day, over all families; the seed is printed
where one fails, and SWITCHYARD_DRAWN_SEED=... draws the same ones again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine import on_devices
from tests.engine.drawn_models import FIXED_SEED, SEED_VARIABLE, DrawnModel, drawn_family, drawn_model, nightly_seed
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.test_disk_backed import on_disk
from tests.engine.tiny_configs import ADAPTED, DENSE, FAMILIES
from tests.engine.tiny_families import model_class, output_embeddings, tiny_checkpoint, tiny_config

DOZEN, ALL = 12, 118
NEW_TOKENS = 6
POLICY = BatchPolicy(rows=3, kv_bytes=2**22, sweep_tokens=40, micro_batch_tokens=25)


@dataclass(frozen=True)
class Expected:
    """What transformers says: logits [1, n, V] of the longest prompt, and greedy answers to all of them."""

    prompts: list[list[int]]
    logits: torch.Tensor
    answers: list[list[int]]


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("which", some(range(DOZEN)))
def test_a_drawn_model_answers_as_the_library_does(which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(FIXED_SEED, drawn_model(FIXED_SEED, which), tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", range(ALL))
def test_a_model_drawn_today_answers_as_the_library_does(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = nightly_seed()
    check(seed, drawn_model(seed, which), tmp_path, monkeypatch)


def test_all_families_are_drawn() -> None:
    assert {drawn_family(1, which) for which in range(ALL)} == {*FAMILIES, *ADAPTED}
    assert drawn_model(1, 5) == drawn_model(1, 5) != drawn_model(2, 5)


def check(seed: int, drawn: DrawnModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails with the way in which, and the place where, answers are not those of transformers."""
    print(f"{SEED_VARIABLE}={seed}: {drawn}\n{drawn.values}")  # noqa: T201 - pytest shows it where one fails
    tiny_checkpoint(drawn.family, folder, drawn=drawn.values, prepare=_spread_logits)
    expected = _expected(drawn, folder)
    _compare("cpu", on_devices.opened(folder, 0), expected)
    _compare("card", on_devices.opened(folder, 1, cache_slots=3), expected)
    if drawn.family not in DENSE:
        _compare("disk", on_disk(monkeypatch, folder, "fp32"), expected)


def _spread_logits(model: Any) -> None:
    """So that rounding does not decide which token is the likeliest."""
    with torch.no_grad():
        output_embeddings(model).weight.mul_(40)


def _expected(drawn: DrawnModel, folder: Path) -> Expected:
    config = tiny_config(drawn.family, drawn=drawn.values)
    model = model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(tokens, seed=row) for row, tokens in enumerate(drawn.prompts)]
    return Expected(prompts, _logits(model, prompts[0]), [_continued(model, prompt) for prompt in prompts])


def _continued(model: Any, prompt: list[int]) -> list[int]:
    if not model.config.is_encoder_decoder:
        return library_tokens(model, prompt, NEW_TOKENS)
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "max_new_tokens": NEW_TOKENS}
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return [int(index) for index in answer[0, 1:]]


def _logits(model: Any, prompt: list[int]) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([prompt])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[2, *prompt[:9]]])
    with torch.inference_mode():
        result: torch.Tensor = model(**inputs).logits
    return result


def _compare(place: str, opening: AbstractContextManager[LoadedModel], expected: Expected) -> None:
    with opening as loaded:
        difference = (_logits(loaded.model, expected.prompts[0]) - expected.logits).abs().max()
        assert difference < 2e-4 * expected.logits.std(), f"{place}: logits"
        session = Alone(loaded)
        alone = [
            list(session.generate_from_ids(prompt, _greedy(), end_ids=NO_END).token_ids) for prompt in expected.prompts
        ]
        session.clear()
        assert alone == expected.answers, f"{place}: alone"
        assert _in_a_batch(loaded, expected.prompts) == expected.answers, f"{place}: rows of a batch"


def _greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS)


def _in_a_batch(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    executor = BatchExecutor(loaded, POLICY)
    rows = [
        BatchRequest(row, ids=tuple(prompt), sampling=_greedy(), end_ids=NO_END) for row, prompt in enumerate(prompts)
    ]
    try:
        executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, list(answer.token_ids)))
    finally:
        executor.close()
    return [answers[row] for row in range(len(prompts))]
