"""Families that attend or compute in ways of their own, on an emulated card: answers are those of the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine.common.config import SamplingParams
from engine.planner.placement import NotEnoughRamError
from engine.planner.schedules import CGOPIPE, KLOTSKI, S4
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.test_family_parity import loaded as loaded_there
from tests.engine.tiny_families import model_class, output_embeddings, tiny_checkpoint, tiny_config

LENGTHS = [1, 40, 70, 12, 33]


def _rows() -> list[BatchRequest]:
    return [
        BatchRequest(row, ids=tuple(random_prompt(n, seed=row)), sampling=SamplingParams(max_tokens=5), end_ids=NO_END)
        for row, n in enumerate(LENGTHS)
    ]


def _alone(loaded: LoadedModel) -> dict[int, tuple[int, ...]]:
    chat = Alone(loaded)
    found = {row.row: chat.generate_from_ids(row.ids, row.sampling, end_ids=NO_END).token_ids for row in _rows()}
    chat.clear()
    return found


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",  # sinks, windows in every other layer, biases
        "qwen2_moe",  # a shared expert behind a gate
        "deepseek_v3",  # latent keys and values, a dense first layer, shared experts
        "glm4_moe",  # sigmoid router
        "mixtral",  # a window in every layer
    ],
)
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    with on_devices.opened(folder, 0) as loaded:
        wanted = _alone(loaded)
    with on_devices.opened(folder, 1, cache_slots=3) as loaded:
        for schedule in (CGOPIPE, S4, KLOTSKI, None):
            answers: dict[int, tuple[int, ...]] = {}
            policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=100, micro_batch_rows=2, schedule=schedule)
            executor = BatchExecutor(loaded, policy)
            assert not executor.note
            try:
                executor.run(iter(_rows()), lambda answer, to=answers: to.__setitem__(answer.row, answer.token_ids))  # type: ignore[misc]
            finally:
                executor.close()
            assert answers == wanted, schedule


MANY_HEADS = {"index_topk": 8, "index_n_heads": 32}
"""With few heads many tokens are equally important."""
CHOOSING = {
    "deepseek_v32": MANY_HEADS,
    "glm_moe_dsa": MANY_HEADS,
    "hy_v4": MANY_HEADS,
    "dots3_note_text": MANY_HEADS,
    "glm5_next_text": MANY_HEADS,
    "deepseek_v4": MANY_HEADS,
    "minimax_m3_vl_text": {},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_n_heads": 32},
}
"""Families whose layers attend to some tokens, or blocks of them, only: fewer here than a prompt has."""
SUMMING: dict[str, dict[str, int]] = {"jamba": {}, "minimax": {}}
"""Families of which we compute such layers ourselves as sum up what they have read."""


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "place"), some(itertools.product([*CHOOSING, *SUMMING], ["cpu", "disk", "card"]), every=8)
)
def test_rows_of_models_that_choose_or_sum_up_are_the_librarys(family: str, place: str, tmp_path: Path) -> None:
    def spread(model: torch.nn.Module) -> None:
        with torch.no_grad():
            output_embeddings(model).weight.mul_(40)

    options = {**CHOOSING, **SUMMING}[family]
    folder = tiny_checkpoint(family, tmp_path, prepare=spread, **options)
    config = tiny_config(family, **options)
    library = model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    wanted = {row.row: tuple(library_tokens(library, row.ids, 5)) for row in _rows()}
    where = {"cpu": {}, "disk": {"ram_bytes": _least(folder)}, "card": {"cache_slots": 3}}[place]
    with on_devices.opened(folder, int(place == "card"), **where) as loaded:
        assert (loaded.disk_backed is not None) == (place == "disk")
        policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=100, micro_batch_rows=2)
        executor, answers = BatchExecutor(loaded, policy), dict[int, tuple[int, ...]]()
        try:
            executor.run(iter(_rows()), lambda answer: answers.__setitem__(answer.row, answer.token_ids))
        finally:
            executor.close()
        assert answers == wanted
        assert _alone(loaded) == wanted
        for row in _rows():
            with torch.inference_mode():
                ids = torch.tensor([row.ids])
                found, theirs = (model(input_ids=ids).logits for model in (loaded.model, library))
            torch.testing.assert_close(found, theirs, rtol=0, atol=1e-3)


def _least(folder: Path) -> int:
    """The RAM in which the model just fits, its experts on disk."""
    with pytest.raises(NotEnoughRamError) as caught, loaded_there(folder, "fp32", ram_bytes=1):
        pass
    return caught.value.needed
