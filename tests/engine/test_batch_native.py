"""Batches by native kernels against the library's own layers, in bf16 and quantised."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.common.config import SamplingParams
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import KvType
from engine.runtime.batch.layers import NativeRows
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor, ContinuousBatch
from engine.runtime.schedule.request import BatchRequest
from tests.engine.loaded_tiny import NO_END, open_model, random_prompt
from tests.engine.single_streams import Alone, rows_of
from tests.engine.tiny_families import tiny_checkpoint

_load = partial(open_model, threads=2)

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

POLICY = BatchPolicy(rows=4, kv_bytes=2**22, sweep_tokens=60, micro_batch_tokens=45)
_WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4, "moe_intermediate_size": 264}
"""Large enough for linear layers to be native."""


def _answers(
    loaded: LoadedModel, rows: list[BatchRequest], monkeypatch: pytest.MonkeyPatch, policy: BatchPolicy = POLICY
) -> tuple[dict[int, GenerationResult], dict[int, list[torch.Tensor]]]:
    """Answers, and the logits of each of their tokens."""
    answers: dict[int, GenerationResult] = {}
    seen: dict[int, list[torch.Tensor]] = {}

    def choose(sequence: Sequence, logits: torch.Tensor) -> int:
        seen.setdefault(sequence.request.row, []).append(logits[0].float())
        return int(logits.float().argmax())

    monkeypatch.setattr(Sequence, "choose", choose)
    executor = BatchExecutor(loaded, policy)
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer))
    assert isinstance(executor._batch, ContinuousBatch)
    executor.close()
    return answers, seen


def _astray(
    loaded: LoadedModel,
    rows: list[BatchRequest],
    answers: dict[int, GenerationResult],
    seen: dict[int, list[torch.Tensor]],
    beyond: float = 0.1,
) -> float:
    """Which part of the logits' vectors are further from the library's than some steps of bf16."""
    astray = total = 0
    for row in rows:
        ids = torch.tensor([[*row.ids, *answers[row.row].token_ids[:-1]]])
        with torch.inference_mode():
            wanted = loaded.model(input_ids=ids, use_cache=False).logits[0, len(row.ids) - 1 :].float()
        off = (torch.stack(seen[row.row]) - wanted).abs().amax(-1) / wanted.std(-1)
        astray += int((off > beyond).sum())
        total += len(off)
    return astray / total


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mixtral", {}),
        ("mixtral", {**_WIDE, "intermediate_size": 264, "sliding_window": 20}),
        ("qwen3_moe", _WIDE),
        ("llama", {**_WIDE, "intermediate_size": 512}),
        ("qwen3", _WIDE),
        ("olmoe", {**_WIDE, "intermediate_size": 264}),
        ("qwen2_moe", _WIDE),
        ("gpt_oss", {**_WIDE, "intermediate_size": 264}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {"n_group": 2}),
        ("glm4_moe_lite", {}),
        ("glm4_moe", _WIDE),
    ],
)
def test_logits_are_those_of_the_library(
    family: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(family, tmp_path, **overrides)
    native = _load(path)
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    # In bf16 the library rounds hidden states, and so is further from this than the kernels are.
    library = open_model(path, "fp32")
    try:
        rows = rows_of([1, 40, 33, 70, 12], 4)
        answers, seen = _answers(native, rows, monkeypatch)
        # In bf16 a near tie of a router may fall either way.
        assert _astray(library, rows, answers, seen) <= (0.2 if native.info.experts else 0)
    finally:
        native.close()
        library.close()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_a_few_rows_go_through_all_layers_in_one_native_call(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _load(tiny_checkpoint(family, tmp_path, **(_WIDE if "deepseek" not in family else {})))
    calls, own = list[int](), NativeRows.few

    def counted(self: NativeRows, ids: list[int], *rest: Any) -> torch.Tensor:
        calls.append(len(ids))
        return own(self, ids, *rest)

    try:
        monkeypatch.setattr(NativeRows, "few", counted)
        rows = rows_of([5, 40, 33], 9)
        _, few = _answers(loaded, rows, monkeypatch)
        assert (len(calls), max(calls)) == (8, 3)
        monkeypatch.setattr(NativeRows, "takes_few", lambda _self, _rows: False)
        _, many = _answers(loaded, rows, monkeypatch)
    finally:
        loaded.close()
    for number in range(3):
        # The same prompts, so the same first token; a step of both ways is off by some steps of bf16.
        together = [torch.stack(seen[number][:2]) for seen in (few, many)]
        off = (together[0] - together[1]).abs().amax(-1) / together[1].std(-1)
        assert float(off.median()) < 0.1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_layers_are_as_in_a_chat(
    precision: Literal["int8", "int4"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(_load(tiny_checkpoint("llama", tmp_path, **{**_WIDE, "intermediate_size": 512}), precision)) as loaded:
        rows = rows_of([1, 40, 33, 12], 6)
        answers, seen = _answers(loaded, rows, monkeypatch)
        # Few vectors are quantised to int8 for products with quantised weights, many are not.
        assert _astray(loaded, rows, answers, seen, beyond=0.4) == 0


def test_a_row_has_the_same_logits_bit_by_bit_whatever_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(_load(tiny_checkpoint("llama", tmp_path, **{**_WIDE, "intermediate_size": 512}))) as loaded:
        rows = rows_of([9, 40, 33, 70, 12, 5], 5)
        _, together = _answers(loaded, rows, monkeypatch)
        for row in rows[:3]:
            _, alone = _answers(loaded, [row], monkeypatch, BatchPolicy(rows=1, kv_bytes=2**22))
            assert torch.equal(torch.stack(together[row.row]), torch.stack(alone[row.row]))


@pytest.mark.parametrize("kv_type", [KvType.FP16, KvType.INT8])
def test_keys_and_values_may_be_held_in_other_types(
    kv_type: KvType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(_load(tiny_checkpoint("llama", tmp_path, **{**_WIDE, "intermediate_size": 512}))) as loaded:
        rows = rows_of([9, 60], 4)
        policy = BatchPolicy(rows=4, kv_bytes=2**22, kv_type=kv_type)
        answers, seen = _answers(loaded, rows, monkeypatch, policy)
        assert _astray(loaded, rows, answers, seen) <= (0 if kv_type is KvType.FP16 else 0.25)


def test_a_chat_in_between_is_computed_as_before(tmp_path: Path) -> None:
    with closing(
        _load(tiny_checkpoint("mixtral", tmp_path, **{**_WIDE, "intermediate_size": 264, "sliding_window": None}))
    ) as loaded:
        prompt, sampling = random_prompt(30), SamplingParams(max_tokens=12)
        chat = Alone(loaded)
        before = chat.generate_from_ids(prompt, sampling, end_ids=NO_END).token_ids
        executor = BatchExecutor(loaded, POLICY)
        asked: list[int] = []
        executor.run(iter(rows_of([20, 30], 5)), lambda _: None, lambda: len(asked) > 4 or asked.append(0) is not None)
        chat.clear()
        assert chat.generate_from_ids(prompt, sampling, end_ids=NO_END).token_ids == before
        executor.close()
