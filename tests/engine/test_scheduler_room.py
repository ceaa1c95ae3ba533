"""Requests that are longer than the pages that others share wait for a turn of their own, or keep their own cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.common.config import EngineConfig, SamplingParams
from engine.kernels.native.build import library_path
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Outcome, Scheduler
from engine.runtime.schedule.together import ContinuousBatch
from tests.engine.loaded_tiny import NO_END, random_prompt, tiny_loaded
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25, ahead=16)
PAGES = 4
"""Of 32 tokens."""


@pytest.fixture(scope="module")
def mixtral() -> LoadedModel:
    return tiny_loaded("mixtral")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model whose keys and values move between its own cache and pages."""
    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("room") / "model")
    config = EngineConfig(str(path), device="cpu", precision="bf16", threads=1)
    model = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    yield model
    model.close()


SHAPES = pytest.mark.parametrize(
    ("first", "second"),
    [((40, 150), (20, 30)), ((40, 150), (20, 100)), ((20, 30), (150, 20)), ((20, 30), (120, 40)), ((60, 60), (60, 60))],
)
"""(tokens of the prompt, and of the answer) of two; the second one comes while the first is answered."""


def request(number: int, shape: tuple[int, int]) -> BatchRequest:
    ids = tuple(random_prompt(shape[0], seed=number))
    return BatchRequest(0, ids=ids, sampling=SamplingParams(max_tokens=shape[1]), end_ids=NO_END)


def answered(loaded: LoadedModel, first: tuple[int, int], second: tuple[int, int]) -> list[GenerationResult]:
    scheduler, ends, looks = Scheduler(loaded), dict[int, Outcome](), 0
    scheduler._together = ContinuousBatch(PackedModel(loaded, POLICY), POLICY, most_pages=PAGES)

    def ask(number: int, shape: tuple[int, int]) -> None:
        scheduler.submit(request(number, shape), lambda outcome: ends.__setitem__(number, outcome))

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            ask(1, second)
        assert looks < 2000, "nobody gets on"
        return False

    ask(0, first)
    scheduler.serve(arrive)
    scheduler.close()
    found = [ends[number] for number in range(2)]
    for end in found:
        assert isinstance(end, GenerationResult), end
    return found  # type: ignore[return-value]


@SHAPES
def test_what_is_too_long_for_the_pages_is_answered_all_the_same(
    mixtral: LoadedModel, first: tuple[int, int], second: tuple[int, int]
) -> None:
    alone = Alone(mixtral)
    for number, end in enumerate(answered(mixtral, first, second)):
        asked = request(number, (first, second)[number])
        expected = alone.generate_from_ids(asked.ids, asked.sampling, end_ids=NO_END)
        assert (end.token_ids, end.finish_reason) == (expected.token_ids, expected.finish_reason)


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
@SHAPES
def test_what_could_not_stay_in_the_pages_does_not_move_there(
    quick: LoadedModel, first: tuple[int, int], second: tuple[int, int]
) -> None:
    for shape, end in zip((first, second), answered(quick, first, second), strict=True):
        assert (end.generated_tokens, end.finish_reason) == (shape[1], "length")
