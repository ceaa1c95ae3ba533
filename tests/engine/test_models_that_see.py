"""Models that see: logits and tokens are the library's, and what was read of a picture is never taken for another."""

import base64
import importlib
import inspect
import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from engine import cli
from engine.bench.opened import OneSequence
from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf import projector
from engine.checkpoint.gguf.file import Strings, read_gguf
from engine.checkpoint.library import show
from engine.checkpoint.pictures import picture_tokens
from engine.common.chat import ChatMessage, Picture
from engine.common.config import SamplingParams
from engine.common.costs import Cost, CostModel, Source
from engine.common.errors import EngineError, ErrorCode
from engine.common.kept_context import keep_chat
from engine.common.pictures import read_picture
from engine.families.pictures import SIGHTS
from engine.jobs.rows import never
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.kept_context import open_kept
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.picture_processors import processor_of
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, opened_model
from tests.engine.mmproj_files import CASES as MMPROJ
from tests.engine.mmproj_files import TEXTS
from tests.engine.on_devices import MIB, opened
from tests.engine.seeing_models import (
    SEEING,
    drawn,
    reference,
    seeing_checkpoint,
    turn,
    with_picture_tokens,
)
from tests.engine.test_disk_backed import on_disk
from tests.engine.test_gguf_architectures import unpacked
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

A, B = drawn(30, 22, 1), drawn(17, 40, 2)
MESSAGES = (turn("Look ", A, " and at ", B, " what is it?"),)
TOKENS = 6


@cache
def checkpoint(family: str, parent: Path) -> Path:
    return seeing_checkpoint(family, parent / family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def library_answer(
    model: LoadedModel, folder: Path, ids: Sequence[int], pictures: Sequence[Picture], tokens: int = TOKENS
) -> tuple[list[int], list[torch.Tensor]]:
    """What the library's whole model says to the same tokens and pictures: its tokens, and the logits before each."""
    given = dict(
        processor_of(folder, model.sight.sizes)(
            images=[read_picture(each, "") for each in pictures], return_tensors="pt"
        )
    )
    given = {name: value.float() if name == "pixel_values" else value for name, value in given.items()}
    prompt = torch.tensor([model.sight.plain(ids)])
    kinds = (prompt == model.sight.placeholder_id).int()
    theirs = reference(folder)
    takes = inspect.signature(theirs.forward).parameters
    given |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    if model.info.family == "ernie4_5_vl_moe":
        marks = torch.tensor([model.sight.placeholder_id + at for at in (-1, 0, 1)])
        given["moe_mm_token_type_ids"] = torch.isin(prompt, marks).int()
    for unread in ("aspect_ratios", "num_crops", "num_soft_tokens_per_image", "num_patches", "patch_newline_masks"):
        given.pop(unread, None)
    out = theirs.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **given,
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].tolist(), list(out.logits)


def ask(
    scheduler: Scheduler, *conversations: Sequence[ChatMessage], chat: str = "", **sampling: Any
) -> list[GenerationResult]:
    """All at once."""
    ends: dict[int, Outcome] = {}
    for number, messages in enumerate(conversations):
        params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **sampling})
        request = BatchRequest(0, tuple(messages), sampling=params, end_ids=NO_END, chat=chat)
        scheduler.submit(request, lambda outcome, number=number: ends.update({number: outcome}))  # type: ignore[misc]
    scheduler.serve()
    results = [ends[number] for number in range(len(conversations))]
    assert all(isinstance(result, GenerationResult) for result in results), results
    return results  # type: ignore[return-value]


def in_company(model: LoadedModel, policy: BatchPolicy, *conversations: Sequence[ChatMessage]) -> list[list[int]]:
    """As rows of a file that share their sweeps."""
    sampling, answers = SamplingParams(temperature=0, max_tokens=TOKENS), dict[int, GenerationResult]()
    rows = [BatchRequest(row, tuple(each), sampling=sampling, end_ids=NO_END) for row, each in enumerate(conversations)]
    with closing(BatchExecutor(model, policy)) as executor:
        assert "picture" not in executor.note  # some families read long prompts at once
        executor.run(iter(rows), lambda answer: answers.update({answer.row: answer}))
    assert not any(answer.error for answer in answers.values()), answers
    return [list(answers[row].token_ids) for row in range(len(rows))]


@pytest.mark.parametrize("family", some(SEEING, every=4))
def test_logits_are_those_of_the_library(family: str, folder: Path) -> None:
    """Two pictures of odd sizes between text, in one piece and in many, then token by token, alone and in company."""
    with opened_model(checkpoint(family, folder), "fp32") as model:
        assert model.info.sees
        inside = {"internvl": "qwen3_moe", "mistral3": "mistral4"}  # by which answers are read
        assert model.info.family == inside.get(family, family)
        assert "no images" not in model.info.device_note
        ids = Preparation(model).prompt(MESSAGES, never)
        tokens, expected = library_answer(model, checkpoint(family, folder), ids, (A, B))
        for chunk in (4096, 17):
            model.chunk_tokens = chunk
            sequence = OneSequence(model)
            found = [sequence.read(ids), *(sequence.step(token) for token in tokens[:-1])]
            sequence.close()
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert model.sight.read_pictures == 2
        for again in range(2):  # what came before is gone on with
            (answer,) = ask(Scheduler(model), MESSAGES)
            assert list(answer.token_ids) == tokens, again
            assert (answer.pictures, answer.pictures_kept) == (2, 2)
        text, one = (ChatMessage("user", "Which experts does a token use?"),), (turn("And ", B),)
        alone = [list(ask(Scheduler(model), each)[0].token_ids) for each in (text, one)]
        for sweep_tokens in (4096, 25):
            policy = BatchPolicy(rows=4, sweep_tokens=sweep_tokens)
            found = in_company(model, policy, MESSAGES, text, one, MESSAGES)
            assert found == [tokens, *alone, tokens], sweep_tokens
        assert model.sight.read_pictures == 2  # each once, whoever asks


@pytest.mark.parametrize("family", some(["qwen3_vl_moe", "qwen3_vl", "qwen3_5_moe", "gemma3"], every=4))
def test_in_16_bits_and_with_native_steps(family: str, folder: Path) -> None:
    place = checkpoint(family, folder)
    with opened_model(place, "bf16") as model:
        ids = Preparation(model).prompt(MESSAGES, never)
        _tokens, expected = library_answer(model, place, ids, (A, B))
        sequence = OneSequence(model)
        tokens = [int((logits := sequence.read(ids)).argmax())]
        while len(tokens) < TOKENS:
            tokens.append(int(sequence.step(tokens[-1]).argmax()))
        sequence.close()
        assert (logits.float() - expected[0]).abs().mean() < 0.2 * expected[0].std()  # one expert may be another
        (answer,) = ask(Scheduler(model), MESSAGES)
        (again,) = ask(Scheduler(model), MESSAGES)
        assert list(answer.token_ids) == list(again.token_ids) == tokens
        together = ask(Scheduler(model), (turn("And ", B),), MESSAGES, (turn(A, "?"),))
        assert [len(each.token_ids) for each in together] == [TOKENS] * 3  # of which near ties may change places


_DENSE = ("gemma3", "glm46v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    "family", some((each for each in SEEING if each not in _DENSE), ("qwen3_vl_moe", "step3p7"), every=16)
)
def test_in_company_on_disk_and_on_a_card(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, text = checkpoint(family, folder), (ChatMessage("user", "Which experts does a token use?"),)
    with opened_model(place, "fp32") as model:
        alone = [ask(Scheduler(model), messages)[0].token_ids for messages in (MESSAGES, text)]
        ids = Preparation(model).prompt(MESSAGES, never)
        assert list(alone[0]) == library_answer(model, place, ids, (A, B))[0]
        together = ask(Scheduler(model), text, MESSAGES, (turn("And ", B),))
        assert [each.token_ids for each in together[:2]] == alone[::-1]
        (beams,) = ask(Scheduler(model), MESSAGES, beams=2)
        assert len(beams.token_ids) == TOKENS
        layout = model.sight.layout(ids) if model.sight is not None else None
        rows = layout.features(layout.spans[0]).rows
    with on_disk(monkeypatch, place, "fp32") as model:
        assert "read from disk" in model.info.device_note
        assert model.sight is not None
        moved = layout.seen_by(model.sight)  # of a request that goes on elsewhere
        assert model.sight.layout(ids) is not None
        torch.testing.assert_close(moved.features(moved.spans[0]).rows, rows)
        assert ask(Scheduler(model), MESSAGES)[0].token_ids == alone[0]
    for card_s, on_card in ((0.1, 2), (10.0, 0)):  # the planner says where
        with opened(place, vram_bytes=512 * MIB) as model:
            scheduler, sight = Scheduler(model), model.sight
            assert sight.costs_of().predict(Cost.CARD_PICTURE, 1) > sight.costs_of().predict(Cost.H2D, 1)
            sight.costs_of = CostModel
            sight.costs.know(Cost.CARD_PICTURE, lambda _gflops, card_s=card_s: card_s)  # type: ignore[misc]
            sight.costs.know(Cost.CPU_PICTURE, lambda _gflops: 1.0)
            assert ask(scheduler, MESSAGES)[0].token_ids == alone[0]
            assert (sight.read_pictures, sight.read_on_card) == (2, on_card)
            both = ask(scheduler, text, MESSAGES, (turn("And ", B),))
            assert [each.token_ids for each in both[:2]] == alone[::-1]
            answered = in_company(model, BatchPolicy(rows=3), MESSAGES, text, (turn("And ", B),))
            assert [tuple(each) for each in answered[:2]] == alone
            seen = Cost.CARD_PICTURE if on_card else Cost.CPU_PICTURE
            assert [kind for kind in Cost if sight.costs.source(kind) is Source.OBSERVED] == [seen]
            scheduler.close()


def test_a_picture_is_read_once_and_never_taken_for_another(folder: Path) -> None:
    same_size = drawn(17, 40, 3)
    with opened_model(checkpoint("qwen3_vl_moe", folder), "fp32") as model:
        scheduler, sight = Scheduler(model), model.sight
        (first,) = ask(scheduler, (turn("Look ", B, " what?"),))
        (again,) = ask(scheduler, (turn("Look ", B, " who?"),))
        (other,) = ask(scheduler, (turn("Look ", same_size, " what?"),))
        assert sight.read_pictures == 2
        begin = Preparation(model).prompt((turn("Look ", B, " what?"),), never)
        assert again.reused_tokens > begin.index(max(begin))  # more than up to the picture's last token
        assert other.prompt_tokens == first.prompt_tokens
        assert other.reused_tokens == next(place for place, token in enumerate(begin) if token >= 2**62)
        fresh = ask(Scheduler(model), (turn("Look ", same_size, " what?"),))[0]
        assert other.token_ids == fresh.token_ids


def test_a_damaged_picture_harms_no_other_row_and_the_time_of_each_is_recorded(folder: Path) -> None:
    cut = Picture("image/png", base64.b64encode(_without_pixels(base64.b64decode(B.data))).decode())
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS)
    asked = ((turn("Look ", cut),), MESSAGES, (turn("Look ", A, cut),), (turn("And ", B),))
    rows = [BatchRequest(row, each, sampling=sampling, end_ids=NO_END) for row, each in enumerate(asked)]
    with opened_model(checkpoint("qwen3_vl_moe", folder), "fp32") as model:
        expected = [ask(Scheduler(model), each)[0].token_ids for each in (MESSAGES, asked[3])]
        assert model.sight is not None
        for most in (4, 1):
            answers = dict[int, GenerationResult]()
            executor = BatchExecutor(model, BatchPolicy(rows=most))
            model.sight.close()
            RECORDER.start()
            try:
                executor.run(iter(rows), lambda answer, found=answers: found.update({answer.row: answer}))  # type: ignore[misc]
                spans = RECORDER.take_spans()
            finally:
                RECORDER.stop()
                executor.close()
            assert [answers[row].token_ids for row in (1, 3)] == expected
            for row in (0, 2):
                assert "damaged" in str(answers[row].error)
            pictures = spans[spans["lane"] == lanes.PICTURES]
            assert pictures["name"].tolist() == [lanes.PICTURE] * 2
            assert pictures["count"].tolist() == [each.tokens - 2 for each in _grids(model, A, B)]
            read = [answers[row] for row in (1, 3)]
            assert sum(each.pictures - each.pictures_kept for each in read) == 2
            assert all((each.pictures_s > 0) == (each.pictures_kept < each.pictures) for each in read)


def _grids(model: LoadedModel, *pictures: Picture) -> list[Any]:
    assert model.sight is not None
    return [model.sight.see(each).grid for each in pictures]


def _without_pixels(data: bytes) -> bytes:
    """A PNG whose chunks are those of one, and whose pixels are none."""
    at = data.index(b"IDAT")
    nbytes = int.from_bytes(data[at - 4 : at], "big")
    return data[: at + 4] + bytes(nbytes) + data[at + 4 + nbytes :]


@pytest.mark.parametrize("words", ["", " and where do they stand, from left to right, and what is beside them" * 2])
def test_what_was_read_of_pictures_survives_a_restart(folder: Path, words: str) -> None:
    """Also what a tower has to do with them: nothing at all, where as much as a block of text comes behind them."""
    place, chat = checkpoint("qwen3_vl_moe", folder), f"a chat with pictures {words}"
    messages = [turn(drawn(60, 60, 5), drawn(50, 62, 6), f" what are they{words}?")]
    keep_chat(chat)
    answers = []
    for restart in range(2):
        with opened_model(place, "fp32") as model:
            model.kept = open_kept(model)
            assert model.kept is not None
            assert model.sight is not None
            scheduler = Scheduler(model)
            (answer,) = ask(scheduler, messages, chat=chat)
            answers.append(answer.token_ids)
            blocks = 2 if words else 1
            assert answer.from_disk == (64 * blocks if restart else 0)
            # Without these words the second begins behind the first 64 tokens.
            assert model.sight.read_pictures == (0 if restart and words else 2 - restart)
            assert model.kept.settle(30)
            scheduler.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", some([*SIGHTS, "llama4 large"], every=2, first=1))
def test_pictures_cost_what_the_librarys_processors_make_of_them(family: str) -> None:
    vision = {"patch_size": 16} if family.startswith("qwen3") else {}
    family, _, large = family.partition(" ")
    sizes = SIGHTS[family].reading(vision, {"resize_to_max_canvas": bool(large)}, {"spatial_merge_size": 2})
    processor, drawing = processor_of(Path("a-model"), sizes), np.random.default_rng(0)
    wide = 900 if family != "step3p7" else 4000
    for _ in range(10):
        width, height = (int(side) for side in drawing.integers(1, wide, 2))
        try:
            grid = sizes.grid(width, height)
        except ValueError:
            with pytest.raises(ValueError, match="aspect"):
                processor(images=[Image.new("RGB", (width, height))])
            continue
        made = processor(images=[Image.new("RGB", (width, height))])
        if "aspect_ratios" in made:
            rows, columns = made["aspect_ratios"][0].tolist()
            assert (grid.rows, grid.columns) == ((rows, columns) if rows * columns > 1 else (0, 0)), (width, height)
            assert sum(map(len, made["pixel_values"])) * grid.whole == grid.seen
        elif "num_local_patches" in made:
            assert made["num_local_patches"] == [grid.rows * grid.columns], (width, height)
            if family == "step3p7":
                assert sum(made.get("patch_newline_masks", [[]])[0]) == max(0, grid.rows - 1)
        elif "image_grid_thw" in made:
            merge = sizes.merge if sizes.sight.rule != "cells" else 1
            _, rows, columns = np.asarray(made["image_grid_thw"])[0] // (1, merge, merge)
            assert (rows, columns + sizes.sight.row_token) == grid[:2], (width, height)
        elif "image_grid_hw" in made:
            assert [*np.asarray(made["image_grid_hw"])[0] // sizes.merge] == [*grid[:2]], (width, height)
        elif "num_patches" in made:
            assert int(made["num_patches"][0]) * max(1, grid.whole) == grid.seen, (width, height)
        elif "num_soft_tokens_per_image" in made:
            assert made["num_soft_tokens_per_image"][0] == grid.rows * grid.columns
        elif "image_sizes" in made:
            side = sizes.patch * sizes.merge
            assert [edge // side for edge in made["image_sizes"][0]] == [grid.rows, grid.columns], (width, height)
        else:
            assert grid.rows * grid.columns == 256


def test_what_stands_for_torchvision_makes_of_pictures_what_pil_does() -> None:
    """MiniMax's processor, which there is for torchvision alone, cuts and resizes as Qwen's of PIL does."""
    image = read_picture(drawn(301, 97, 4), "")
    theirs, ours = (
        processor_of(Path("a-model"), SIGHTS[family].reading({}, {"min_pixels": 4096, "max_pixels": 20_000}, {}))(
            images=[image], return_tensors="pt"
        )
        for family in ("qwen2_vl", "minimax_m3_vl")
    )
    assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"].tolist()
    assert (ours["pixel_values"] - theirs["pixel_values"]).abs().max() < 0.035  # of 256 levels two


def test_a_command_reads_a_picture_and_a_listing_says_its_price(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = checkpoint("qwen3_vl_moe", folder)
    file = tmp_path / "a.png"
    file.write_bytes(base64.b64decode(A.data))
    options = ["--device", "cpu", "--precision", "fp32", "--threads", "1", "--max-tokens", "3", "--json"]
    ask_about = ["chat", "--model", str(place), *options, "--prompt", "What?", "--image", str(file)]
    assert cli.main([*ask_about, "--image", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    cost = picture_tokens(place, 30, 22)
    assert cost == 14
    assert document["prompt_tokens"] > 2 * cost
    assert (document["pictures"], document["pictures_kept"]) == (2, 1)
    assert document["pictures_s"] > 0
    assert cli.main(["models", "show", str(place)]) == 0
    said = capsys.readouterr().out
    assert "text and pictures (512 x 512: " in said
    assert re.search(r"; [\d.e-]+ s each \(1024 x 1024\) on the CPU, ", said)
    for verb in (["plan", "--model"], ["models", "fit"]):
        assert cli.main([*verb, str(place), "--device", "cpu", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["pictures"]
        assert told["nbytes"] > 10_000
        assert told["seconds"] > 0
        assert not told["on_card"]
    assert show(str(place)).sees
    blind = tiny_checkpoint("mixtral", tmp_path / "mixtral")
    assert cli.main([*ask_about[:2], str(blind), *ask_about[3:]]) == 2
    said = capsys.readouterr()
    assert "mixtral reads text only: it was made for text. Send the text alone" in said.out + said.err


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("name", some(MMPROJ, every=6))
def test_nonsense_in_an_mmproj_file_is_harmless_or_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_gguf(with_picture_tokens(unpacked(TEXTS.get(name, name), tmp_path)[0], tmp_path / "a-model-Q8_0.gguf"))
    whole = projector.read_projector(unpacked(f"mmproj-{name}", tmp_path)[0])
    assert projector.projector_of(model) is not None
    for key in whole.metadata:
        for value in ("text", 0, -1, 2**40, float("nan"), np.array([3, 1]), np.array([1.5] * 3), Strings(0, b"")):
            changed = replace(whole, metadata={**whole.metadata, key: value})
            monkeypatch.setattr(projector, "read_projector", lambda _file, changed=changed: changed)
            projector._looked_at.cache_clear()
            assert (projector.projector_of(model) is None) == bool(projector.why_not(model))
    projector._looked_at.cache_clear()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("name", some(MMPROJ, ("deepseek3", "minimax-m3", "step35"), every=4, first=1))
def test_a_gguf_file_sees_with_its_mmproj(name: str, tmp_path: Path) -> None:
    """Written by llama.cpp's converter: rows are transformers' of the same tower, and nearly llama.cpp's."""
    file = with_picture_tokens(unpacked(TEXTS.get(name, name), tmp_path)[0], tmp_path / "a-model-Q8_0.gguf")
    text = (ChatMessage("user", "Which one?"),)
    with opened_model(file, "fp32") as blind:
        assert not blind.info.sees
        with pytest.raises(EngineError, match="there is no mmproj file"):
            Preparation(blind).prompt(MESSAGES, never)
        alone = ask(Scheduler(blind), text)[0].token_ids
    written, wanted = unpacked(f"mmproj-{name}", tmp_path)
    picture = Picture("image/png", wanted["picture"])
    assert show(str(file)).sees
    with opened_model(file, "fp32") as ours:
        assert ours.info.sees
        assert ask(Scheduler(ours), text)[0].token_ids == alone
        # Pictures of Gemma 4 take 280 tokens each, and pieces of Step's 961.
        seen = (turn("Look ", A),) if name in ("gemma4", "step35") else MESSAGES
        (answer,) = ask(Scheduler(ours), seen, repetition_penalty=1.1)
        assert len(answer.token_ids) == TOKENS
        layout = ours.sight.layout(Preparation(ours).prompt((turn("Look ", picture),), never))
        features = ours.sight.features(layout.spans[0].seen)
        rows = torch.cat([features.rows, *features.deep], dim=1)
        assert len(rows) == wanted["rows"]
        found, theirs = rows[wanted["places"]], torch.tensor(wanted["transformers"])
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()) + 1e-5)
        away = (found - torch.tensor(wanted["llama.cpp"])).abs().max() / theirs.abs().max()
        assert away < wanted["apart"]
        for width, height, tokens in wanted["tokens"]:
            assert ours.sight.sizes.grid(width, height).seen == tokens, (width, height)
    other = next(each for each in MMPROJ if MMPROJ[each][0] != MMPROJ[name][0])
    written.write_bytes(unpacked(f"mmproj-{other}", tmp_path)[0].read_bytes())
    with opened_model(file, "fp32") as ours:
        assert ask(Scheduler(ours), text)[0].token_ids == alone
        with pytest.raises(EngineError, match=r"mmproj-\S+\.gguf beside it is the part of another model"):
            Preparation(ours).prompt(MESSAGES, never)
    for each in tmp_path.glob("mmproj*"):
        each.write_bytes(each.read_bytes()[:3000])
    with opened_model(file, "fp32") as ours, pytest.raises(EngineError, match="reads text only"):
        Preparation(ours).prompt(MESSAGES, never)


def test_a_gguf_file_of_a_family_that_sees_elsewhere_says_why_not_here(tmp_path: Path) -> None:
    for name, why in (
        ("ernie4-5-moe", "llama.cpp writes no mmproj files of ERNIE 4.5 VL"),
        ("qwen3moe-Q8_0", "not known"),
    ):
        file = unpacked(name, tmp_path)[0]
        written = unpacked("mmproj-qwen3vlmoe", tmp_path)[0]
        assert why in projector.why_not(read_gguf(file))
        assert not show(str(file)).sees
        written.unlink()


def test_glm_4_1_v_writes_as_glm_4_does(tmp_path: Path) -> None:
    """Whose files have queries and keys in another order."""
    plain = unpacked("glm4", tmp_path)[0]
    seeing = with_picture_tokens(plain, tmp_path / "a-model-Q8_0.gguf")
    found = []
    for file in (plain, seeing):
        with opened_model(file, "fp32") as model:
            found.append(OneSequence(model).read([1, 5, 9, 40, 41, 42, 7]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_nothing_of_another_tower_is_used_again(tmp_path: Path) -> None:
    file = with_picture_tokens(unpacked("qwen3vl", tmp_path)[0], tmp_path / "a-model-Q8_0.gguf")
    written, chat = unpacked("mmproj-qwen3vl", tmp_path)[0], "a chat about a picture"
    first = written.read_bytes()
    keep_chat(chat)
    asked, answers = [turn(drawn(60, 60, 5), " what is it? " * 8)], list[Any]()
    for tower in ("first", "first", "second"):
        if tower == "second":
            written.write_bytes(first[:-4096] + bytes(4096))
        with opened_model(file, "fp32") as model:
            (fresh,) = ask(Scheduler(model), asked)
            model.kept = open_kept(model)
            assert model.kept is not None
            scheduler = Scheduler(model)
            answers += ask(scheduler, asked, chat=chat)
            assert answers[-1].token_ids == fresh.token_ids
            assert model.kept.settle(30)
            scheduler.close()
    assert [bool(answer.from_disk) for answer in answers] == [False, True, False]
    with opened_model(file, "fp32") as model:  # one that comes after the model, and before its first picture
        written.write_bytes(first)
        with pytest.raises(EngineError, match="another one than when the model was loaded"):
            Scheduler(model).answer(BatchRequest(0, tuple(asked)))


def test_who_lacks_a_tower_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SIGHTS, "aria")
    place = seeing_checkpoint("qwen3_vl_moe", tmp_path / "cut")
    weights = place / "model.safetensors"
    save_file(
        {key: value for key, value in load_file(weights).items() if ".visual." not in key}, weights, {"format": "pt"}
    )
    assert picture_tokens(place, 30, 22) == 14
    for model, why in ((place, "lacks the weights that see"), (None, "aria models see is not known")):
        where = model or tiny_checkpoint("aria", tmp_path / "aria")
        with opened_model(where, "fp32") as blind:
            assert not blind.info.sees
            with refused(ErrorCode.PICTURES_NOT_READ, match=why):
                Preparation(blind).prompt(MESSAGES, never)
    damaged = seeing_checkpoint("qwen3_vl_moe", tmp_path / "damaged")
    (damaged / "preprocessor_config.json").write_text('{"image_mean": "much"}')
    with opened_model(damaged, "fp32") as model, pytest.raises(EngineError, match=r"preprocessor_config\.json again"):
        Scheduler(model).answer(BatchRequest(0, MESSAGES))
    assert read_config(damaged)["model_type"] == "qwen3_vl_moe"
    assert importlib.util.find_spec("torchvision") is None  # nothing here may need it
