"""A model's own draft head guesses what the library's does, and answers stay what they are."""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.bench.opened import OneSequence
from engine.checkpoint.library import converted_of
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import RequestCancelled
from engine.kernels.native.build import library_path
from engine.planner.placement import NotEnoughRamError
from engine.runtime.decode.speculation import Guess
from engine.runtime.draft_head import draft_head_of
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from tests.combinations import some
from tests.engine.draft_head_cases import BESIDE, LAYERED, checkpoint_with_head, library_guesses, without_head
from tests.engine.loaded_tiny import NO_END, open_model, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.test_gguf_architectures import rewritten, unpacked
from tests.engine.test_speculation import Eager

_ALWAYS = ("deepseek_v3", "glm4_moe", "qwen3_5_moe fused")
_WALKS = [
    ("qwen3_next", 2),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("glm4_moe", 1), ("deepseek_v3", 3))),
]


def loaded_from(path: Path, precision: str = "fp32", speculation: Any = "heads") -> LoadedModel:
    return open_model(path, precision, threads=2, speculation=speculation)


class Oracle:
    """Knows the answer, and is wrong now and then."""

    takes_s = 0.0

    def __init__(self, answer: Sequence[int], held: int, vocabulary: int = 300) -> None:
        self._vocabulary = vocabulary
        self._answer, self._at, self._draw = answer, -1, random.Random(4)
        self.came_true: list[int] = []

    def append(self, token_id: int) -> None:
        self._at += 1
        assert self._answer[self._at] == token_id

    def take(self, *_heard: object) -> None:
        """Of hidden states it makes nothing."""

    def take_back(self, tokens: int) -> None:
        """It knows."""

    def hopes(self) -> float:
        return 1.0

    def guess(self, most: int) -> Guess | None:
        ids = list(self._answer[self._at + 1 : self._at + 1 + min(most, self._draw.randrange(1, 5))])
        if not ids:
            return None
        if self._draw.random() < 0.5:
            wrong = self._draw.randrange(len(ids))
            ids[wrong] = (ids[wrong] + 1) % self._vocabulary
        return Guess(tuple(ids), (1.0,) * len(ids), (0,) * len(ids))

    def learn(self, guess: Guess, came_true: int) -> None:
        self.came_true.append(came_true - len(guess.ids))


class Heard(OneSequence):
    """A sequence whose hidden states a drafter hears, as in a batch."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        drafter = self.steps.drafter()
        assert drafter is not None
        self.drafter: Any = drafter
        self.steps.read, self.steps.write = map(self._listening, (self.steps.read, self.steps.write))  # type: ignore[method-assign]

    def _listening(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def heard(ids: Sequence[int], *more: Any) -> torch.Tensor:
            with self.steps.listening() as hidden:
                logits = compute(ids, *more)
            self.drafter.take(self._row.held, ids, hidden[0], self._row)
            return logits

        return heard

    @torch.inference_mode()
    def several(self, ids: Sequence[int], stay: int) -> None:
        """Tokens that are tried, of which so many stay."""
        row = self._row
        row.reserve_next()
        row.sequence.ids += ids[:stay]
        self.steps.write(ids, [row.piece(len(ids))], [row.held])
        self.drafter.take_back(len(ids) - stay)
        row.has_read(stay)


@pytest.mark.parametrize(
    "family",
    [
        family if family in _ALWAYS else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in (*LAYERED, *BESIDE, "qwen3_5_moe fused")
    ],
)
def test_guesses_are_the_librarys_and_answers_stay_the_same(family: str, tmp_path: Path) -> None:
    name, _, fused = family.partition(" ")
    path, model, head = checkpoint_with_head(name, tmp_path / "model", fused=bool(fused))
    ids = random_prompt(60)
    expected = library_guesses(model, head, ids)
    with closing(loaded_from(path)) as loaded:
        assert draft_head_of(loaded.model) is not None
        sequence = Heard(loaded)
        drafter = sequence.drafter
        with torch.inference_mode():
            sequence.read(ids[:40])
            for at in range(40, 60):
                drafter.append(ids[at])
                if at % 3:  # else it is given two at once
                    guess = drafter.guess(4)
                    assert guess.ids == (int(expected[at - 1].argmax()),)
                if at == 50 and sequence.steps.most_rows > 3 and sequence._row.state is None:  # tried, and taken back
                    sequence.several([ids[at], 7, 8], 1)
                else:
                    sequence.step(ids[at])
        _answers_stay_the_same(loaded)


def test_after_a_prompt_was_given_up_the_head_hears_nothing_of_others(tmp_path: Path) -> None:
    path, _model, _head = checkpoint_with_head("glm4_moe", tmp_path / "model")
    with closing(loaded_from(path)) as loaded:
        sequence, head = Heard(loaded), draft_head_of(loaded.model)

        def stops(*_: object) -> None:
            raise RequestCancelled

        handle = loaded.model.get_decoder().layers[-1].register_forward_pre_hook(stops)
        with torch.inference_mode(), pytest.raises(RequestCancelled):
            sequence.read(random_prompt(20))
        handle.remove()
        with torch.inference_mode():
            loaded.model(input_ids=torch.tensor([random_prompt(20)]))
        assert head.heard is None


@pytest.mark.parametrize(("family", "seed"), _WALKS)
def test_whatever_is_tried_and_taken_back_guesses_are_the_librarys(family: str, seed: int, tmp_path: Path) -> None:
    path, model, head = checkpoint_with_head(family, tmp_path / "model")
    loaded, draw = loaded_from(path), random.Random(seed)
    try:
        sequence = Heard(loaded)
        drafter = sequence.drafter
        ids = [draw.randrange(3, 300) for _ in range(50)]
        compared = 0
        with torch.inference_mode():
            sequence.read(ids)
            for _ in range(40):
                token = draw.randrange(3, 300)
                drafter.append(token)
                guess = drafter.guess(1) if draw.random() < 0.7 else None
                if guess is not None and drafter._given == list(range(len(ids))):
                    expected = library_guesses(model, head, [*ids, token])
                    assert guess.ids == (int(expected[-1].argmax()),)
                    compared += 1
                if draw.random() < 0.4 or sequence.steps.most_rows < 6 or sequence._row.state is not None:
                    sequence.step(token)
                    ids.append(token)
                else:
                    tried = [token, *(draw.randrange(3, 300) for _ in range(draw.randrange(1, 6)))]
                    stay = draw.randrange(1, len(tried) + 1)
                    sequence.several(tried, stay)
                    ids += tried[:stay]
                assert sequence._row.held == len(ids)
        assert compared > 5
    finally:
        loaded.close()


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_heads_guess_for_everybody_who_shares_steps(family: str, tmp_path: Path) -> None:
    loaded = loaded_from(checkpoint_with_head(family, tmp_path / "model")[0], "bf16")
    scheduler, ends = Scheduler(loaded), list[tuple[SamplingParams, Any]]()
    coming = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=20), SamplingParams(max_tokens=12, beams=3)]

    def ids(sampling: SamplingParams) -> tuple[int, ...]:
        return tuple(random_prompt(20, seed=sampling.max_tokens))

    def arrive() -> bool:
        if coming:
            sampling = coming.pop(0)
            request = BatchRequest(0, ids=ids(sampling), sampling=sampling, end_ids=NO_END)
            scheduler.submit(request, lambda outcome: ends.append((sampling, outcome)))
        return False

    try:
        scheduler._batch._prices = Eager()
        arrive()
        scheduler.serve(arrive)
        assert len(ends) == 3
        assert scheduler._batch.most_rows == 3
        turn = (*ids(ends[-1][0]), *ends[-1][1].token_ids, 5)  # whose beginning the head has not heard
        asked = BatchRequest(0, ids=turn, sampling=SamplingParams(max_tokens=20), end_ids=NO_END)
        further = scheduler.answer(asked)
        assert further.reused_tokens > 0
        assert further.guessed_tokens > 0
        alone = Alone(loaded, speculates=False)
        assert further.token_ids == alone.generate_from_ids(turn, asked.sampling, end_ids=NO_END).token_ids
        for sampling, found in ends:
            assert (found.guessed_tokens > 0) is (sampling.beams == 1)
            if sampling.beams == 1:
                alone = Alone(loaded, speculates=False).generate_from_ids(ids(sampling), sampling, end_ids=NO_END)
            else:
                alone = Scheduler(loaded).answer(BatchRequest(0, ids=ids(sampling), sampling=sampling, end_ids=NO_END))
            assert found.token_ids == alone.token_ids
    finally:
        scheduler.close()
        loaded.close()


def _answers_stay_the_same(loaded: LoadedModel, vocabulary: int = 300) -> None:
    prompt, sampling = [token % vocabulary for token in random_prompt(30, seed=3)], SamplingParams(max_tokens=48)
    # Goes on from the same tokens, computed in steps: a prompt is summed in another order.
    one_by_one = Alone(loaded, speculates=False)
    whole = one_by_one.generate_from_ids(prompt, sampling, end_ids=NO_END)
    session = Alone(loaded, speculates=True)
    session._prices = Eager()
    exact: Any = session._batch.exact
    told = Oracle(whole.token_ids, len(prompt), vocabulary)
    exact.drafter = lambda: told
    result = session.generate_from_ids(prompt, sampling, end_ids=NO_END)
    assert result.token_ids == whole.token_ids
    if exact.most_rows == 1:
        assert result.guessed_tokens == 0  # the library computes steps
        return
    assert result.accepted_tokens > 10
    assert min(told.came_true) < 0  # some were taken back
    del exact.drafter
    more = [*prompt, *whole.token_ids, 9]
    by_head = session.generate_from_ids(more, sampling, end_ids=NO_END)
    alone = one_by_one.generate_from_ids(more, sampling, end_ids=NO_END)
    assert by_head.token_ids == alone.token_ids
    assert by_head.guessed_tokens > 0


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("case", "raised"), some([("glm4-moe", 0), ("deepseek3", 0), ("qwen3next", 1), ("qwen35moe", 1)], every=4)
)
def test_the_head_in_a_gguf_file_is_the_one_it_was_converted_from(case: str, raised: int, tmp_path: Path) -> None:
    """`raised` is what llama.cpp's norms are raised by."""
    file, _ = unpacked(case, tmp_path)
    draw = np.random.default_rng(3)
    added: dict[str, Any] = {}

    def with_head(tensors: dict[str, Any]) -> dict[str, Any]:
        hidden = tensors["token_embd.weight"].shape[1]
        added["output.weight"] = tensors["output.weight"] * 40  # no two tokens are almost equally likely
        for name, values in tensors.items():
            if name.startswith("blk.1."):
                added[name.replace("blk.1.", "blk.2.")] = values + 0.1 * draw.standard_normal(values.shape)
        added["blk.2.nextn.eh_proj.weight"] = draw.standard_normal((hidden, 2 * hidden)) * hidden**-0.5
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            added[f"blk.2.nextn.{norm}.weight"] = 1 + 0.1 * draw.standard_normal(hidden)
        added["blk.2.nextn.shared_head_head.weight"] = added["output.weight"]
        added["blk.2.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]
        return {**tensors, **added}

    path = rewritten(file, tensors=with_head, block_count=3, nextn_predict_layers=1)
    with closing(loaded_from(path, speculation="auto")) as plain:
        assert draft_head_of(plain.model) is None
    with closing(loaded_from(path)) as loaded:
        head = draft_head_of(loaded.model)
        held = {
            "eh_proj": head.eh_proj,
            "enorm": head.enorm,
            "hnorm": head.hnorm,
            "shared_head_norm": head.norm,
        }
        for name, module in held.items():
            given = torch.from_numpy(added[f"blk.2.nextn.{name}.weight"]).float()
            torch.testing.assert_close(module.weight, given - raised * ("norm" in name))
        given = torch.from_numpy(added["blk.2.attn_output.weight"]).float()
        torch.testing.assert_close(head.block.self_attn.o_proj.weight, given)
        _answers_stay_the_same(loaded, 288)


def test_without_all_of_a_head_the_text_alone_guesses(tmp_path: Path) -> None:
    path, _, _ = checkpoint_with_head("glm4_moe", tmp_path / "model")
    without_head(path)
    with closing(loaded_from(path)) as loaded:
        assert draft_head_of(loaded.model) is None
        assert OneSequence(loaded).steps.drafter() is None
        assert "No layer for drafting tokens is used: this checkpoint has none" in loaded.info.device_note


def test_what_does_not_guess_holds_no_head(tmp_path: Path) -> None:
    path, _, _ = checkpoint_with_head("deepseek_v3", tmp_path / "model")
    sizes = {}
    for speculation in ("heads", "auto", "off"):
        loaded = loaded_from(path, speculation=speculation)
        sizes[speculation] = loaded.info.experts_bytes
        assert (draft_head_of(loaded.model) is None) == (speculation != "heads")
        assert "guessing" not in loaded.info.device_note
        loaded.close()
    assert sizes["heads"] > sizes["auto"] == sizes["off"]


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_experts_of_a_head_are_quantised_like_the_others(family: str, tmp_path: Path) -> None:
    path, _, _ = checkpoint_with_head(family, tmp_path / "model")
    with closing(loaded_from(path, "int8")) as loaded:
        _answers_stay_the_same(loaded)


def test_experts_of_a_model_with_a_head_are_read_from_its_files(tmp_path: Path) -> None:
    path, _, _ = checkpoint_with_head("glm4_moe", tmp_path / "model")
    config = EngineConfig(str(path), device="cpu", precision="fp32", threads=2, speculation="heads", ram_bytes=1)

    def load(config: EngineConfig) -> LoadedModel:
        return open_model(config)

    with pytest.raises(NotEnoughRamError) as caught:
        load(config)
    with closing(load(replace(config, ram_bytes=caught.value.needed))) as loaded:
        assert converted_of(path) == []
        assert loaded.disk_backed is not None
        _answers_stay_the_same(loaded)
        assert loaded.disk_backed.disk.records_read
