"""What is kept of prompts and answers is found again, by content alone, and changes no token."""

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.kept_context import folder_of, keep_chat, kept_context_dir, kept_files
from engine.jobs.rows import never
from engine.kernels.native.build import library_path
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.kept_context import kept_note, open_kept
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.blocks import BLOCK_TOKENS, BlockLayout, Part
from engine.runtime.prefix_cache.files import SpillFiles
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, open_model, opened_model, random_prompt, spread, tiny_loaded
from tests.engine.on_devices import chatting, opened
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

ROOT = bytes(16)
CHAT = "a chat"
native = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
POLICY = BatchPolicy(rows=5, kv_bytes=2**24, sweep_tokens=64, micro_batch_tokens=64, ahead=16)


def files_in(folder: Path) -> SpillFiles:
    """Which keep what is computed of one chat."""
    keep_chat(CHAT, folder)
    return SpillFiles(folder, lambda _folder, _held: 2**28)


@pytest.fixture(scope="module")
def qwen() -> LoadedModel:
    return tiny_loaded("qwen3_moe", context_tokens=512)


@pytest.fixture
def kept(qwen: LoadedModel, tmp_path: Path) -> Iterator[PrefixCache]:
    """On disk too."""
    qwen.kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    yield qwen.kept
    qwen.kept.close()
    qwen.kept = None


def ask(scheduler: Scheduler, *prompts: Sequence[int], tokens: int = 8, chat: str = CHAT) -> list[GenerationResult]:
    """All at once."""
    ends: dict[int, Outcome] = {}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens)
        request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=NO_END, chat=chat)
        scheduler.submit(request, lambda outcome, number=number: ends.update({number: outcome}))  # type: ignore[misc]
    scheduler.serve()
    results = [ends[number] for number in range(len(prompts))]
    assert all(isinstance(result, GenerationResult) for result in results), results
    return results  # type: ignore[return-value]


def fresh(loaded: LoadedModel, prompt: Sequence[int], tokens: int = 8) -> tuple[int, ...]:
    return Alone(loaded).generate_from_ids(list(prompt), SamplingParams(max_tokens=tokens), end_ids=NO_END).token_ids


def further(prompt: Sequence[int], result: GenerationResult, seed: int = 5) -> list[int]:
    return [*prompt, *result.token_ids, *random_prompt(10, seed=seed)]


A, B = random_prompt(210, seed=1), random_prompt(150, seed=2)


def test_a_chat_goes_on_after_another_one(qwen: LoadedModel, kept: PrefixCache) -> None:
    scheduler = Scheduler(qwen)
    (first,) = ask(scheduler, A)
    assert (first.reused_tokens, first.token_ids) == (0, fresh(qwen, A))
    ask(scheduler, B)
    again = further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(qwen, again)
    assert second.reused_tokens == 217  # the last token was never read
    (third,) = ask(scheduler, further(again, second))
    assert third.reused_tokens == len(again) + 7  # still there
    assert third.from_ram + third.from_disk == 0
    scheduler.close()


def test_a_chat_goes_on_after_a_restart(qwen: LoadedModel, kept: PrefixCache, tmp_path: Path) -> None:
    scheduler = Scheduler(qwen)
    (first,) = ask(scheduler, A)
    assert kept.settle(30)
    scheduler.close()
    kept.close()
    qwen.kept = restarted = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, again = Scheduler(qwen), further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(qwen, again)
    assert (second.reused_tokens, second.from_disk) == (192, 192)
    scheduler.close()
    restarted.close()


@pytest.mark.parametrize(
    ("family", "index"),
    [
        ("deepseek_v32", {"index_topk": 32, "index_n_heads": 32}),
        ("glm_moe_dsa", {"index_topk": 32, "index_n_heads": 32}),
        ("hy_v4", {"index_topk": 32, "index_n_heads": 32}),
        ("qwen4_exp_text", {"indexer_budget": 32, "indexer_n_heads": 32}),
        ("minimax_m3_vl_text", {"index_topk_blocks": 8}),
    ],
)
def test_an_index_of_tokens_is_kept_with_them(family: str, index: dict[str, int], tmp_path: Path) -> None:
    loaded = tiny_loaded(family, context_tokens=512, **index)
    loaded.kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler = Scheduler(loaded)
    (first,) = ask(scheduler, A)
    ask(scheduler, B)
    again = further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(loaded, again)
    assert second.reused_tokens >= 192
    assert loaded.kept.settle(30)
    scheduler.close()
    loaded.kept.close()
    loaded.kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, more = Scheduler(loaded), further(again, second)
    (third,) = ask(scheduler, more)
    assert third.token_ids == fresh(loaded, more)
    assert third.from_disk >= 192
    scheduler.close()
    loaded.kept.close()


def test_a_prompt_that_begins_as_the_present_one_brings_what_is_behind(qwen: LoadedModel, kept: PrefixCache) -> None:
    scheduler = Scheduler(qwen)
    ask(scheduler, A)
    ask(scheduler, [*A[:100], *B[:90]])
    (result,) = ask(scheduler, A)
    assert (result.reused_tokens, result.token_ids) == (209, fresh(qwen, A))
    scheduler.close()


@pytest.fixture(scope="module", params=["auto", "int8"])
def quick(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """A model whose steps and sweeps the native kernels compute."""

    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("kept") / "model", prepare=spread)
    with opened_model(path, kv_precision=request.param) as model:
        yield model


@native
def test_rows_that_shared_sweeps_are_kept_and_find_what_is_kept(quick: LoadedModel, tmp_path: Path) -> None:
    quick.kept = kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, prompts = Scheduler(quick), [A[:140], B[:150], random_prompt(140, seed=3)]
    first = ask(scheduler, *prompts, tokens=20)
    together = scheduler._batch
    exact = quick.kv_type is None  # else sweeps and steps round to int8 from slightly different numbers
    for prompt, result in zip(prompts, first, strict=True):
        (second,) = ask(scheduler, further(prompt, result))
        assert second.reused_tokens >= 128
        assert not exact or second.token_ids == fresh(quick, further(prompt, result))
    for forget in (False, True):
        if forget:
            assert kept.settle(30)
            together.pool.forget_prefixes()
        others = [further(*each) for each in zip(prompts, first, strict=True)]
        answered = ask(scheduler, random_prompt(9, seed=8), *others)
        for prompt, result in zip(others, answered[1:], strict=True):
            assert not exact or result.token_ids == fresh(quick, prompt)
            assert result.reused_tokens >= 128
            assert (result.from_ram + result.from_disk > 0) or not forget
    assert kept.settle(30)
    ask(scheduler, [5])  # what is on disk by then is held no more
    together._left.give_up()
    assert together.pool.held == 0
    scheduler.close()
    kept.close()
    quick.kept = None


@native
def test_rows_of_a_file_find_what_chats_left(quick: LoadedModel) -> None:
    quick.kept = kept = PrefixCache(ROOT, 2**26)
    scheduler = Scheduler(quick)
    ask(scheduler, A[:180])
    lane, answers = scheduler.job_lane(replace(POLICY, kv_type=quick.kv_type)), dict[int, GenerationResult]()
    prompts = [[*A[:150], *random_prompt(20, seed=seed)] for seed in range(3)]
    rows = [
        BatchRequest(n, ids=tuple(prompt), sampling=SamplingParams(max_tokens=8), end_ids=NO_END)
        for n, prompt in enumerate(prompts)
    ]
    before = kept.ram_bytes
    prepared = Preparation(quick).rows(rows, pytest.fail, never)
    lane.run(prepared, lambda answer: answers.update({answer.row: answer}), never, never)
    lane.free()
    scheduler.close()
    for number, prompt in enumerate(prompts):
        assert_same_but_for_a_near_tie(quick, prompt, answers[number].token_ids, fresh(quick, prompt))
        assert answers[number].reused_tokens >= 128
    assert kept.ram_bytes == before
    kept.close()
    quick.kept = None


def assert_same_but_for_a_near_tie(
    loaded: LoadedModel, prompt: Sequence[int], mine: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    """Rows round what goes into attention's output to bf16, a single answer does not: where the last token's logits, or
    those by which a router (gpt-oss) chooses its experts, are nearly the same, another one may be chosen."""
    same = next((at for at, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1), None)
    if same is None:
        return
    margins, hooks = list[float](), list[torch.utils.hooks.RemovableHandle]()

    def listen(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _out: object) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])[-1].float()
        scores = (router.weight.float() @ hidden + router.bias.float()).sort(descending=True).values
        margins.append(float((scores[router.top_k - 1] - scores[router.top_k]) / scores.abs().max()))

    for module in loaded.model.modules():
        if type(module).__name__ == "GptOssTopKRouter":
            hooks.append(module.register_forward_hook(listen))
    try:
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([[*prompt, *theirs[:same]]])).logits[0, -1].float()
    finally:
        for hook in hooks:
            hook.remove()
    margins.append(abs(float(logits[mine[same]] - logits[theirs[same]])) / float(logits.abs().max()))
    assert min(margins) < 0.01


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "another version"])
def test_damaged_files_do_no_harm(qwen: LoadedModel, kept: PrefixCache, tmp_path: Path, damage: str) -> None:
    scheduler = Scheduler(qwen)
    (first,) = ask(scheduler, A)
    assert kept.settle(30)
    scheduler.close()
    kept.close()
    files = sorted(tmp_path.rglob("*.kept"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    assert len(files) == 3
    damaged, content = files[1], bytearray(files[1].read_bytes())
    content[{"another version": 7}.get(damage, -5)] ^= 4
    damaged.write_bytes({"cut": content[:-9], "emptied": b""}.get(damage, content))
    qwen.kept = restarted = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, again = Scheduler(qwen), further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(qwen, again)
    assert second.reused_tokens == 64
    assert restarted.settle(30)  # written again
    assert damaged.stat().st_size == files[0].stat().st_size
    scheduler.close()
    restarted.close()


def test_a_folder_that_cannot_be_written_is_told_once(qwen: LoadedModel, tmp_path: Path) -> None:
    keep_chat(CHAT, tmp_path / "other")
    (tmp_path / "other" / "lock").mkdir()
    qwen.kept = kept = PrefixCache(ROOT, 2**26, SpillFiles(tmp_path / "other"))
    scheduler = Scheduler(qwen)
    (first,) = ask(scheduler, A)
    kept.settle(30)
    assert "not kept on disk" in kept.note
    ask(scheduler, B)
    (second,) = ask(scheduler, further(A, first))
    assert (second.reused_tokens, second.from_ram) == (217, 0)  # it is in pages
    scheduler.close()
    kept.close()
    qwen.kept = None


def test_nothing_is_written_while_somebody_is_answered(qwen: LoadedModel, kept: PrefixCache, tmp_path: Path) -> None:
    scheduler, seen = Scheduler(qwen), list[int]()
    request = BatchRequest(
        0,
        ids=tuple(B),
        sampling=SamplingParams(max_tokens=4),
        end_ids=NO_END,
        on_text=lambda _text, _count: seen.append(len(list(tmp_path.rglob("*")))),
    )
    ask(scheduler, A)
    scheduler.submit(request, lambda _outcome: None)
    before = threading.Event()
    before.wait(0.05)
    there = len(list(tmp_path.rglob("*.kept")))
    scheduler.serve()
    assert len(seen) >= 4
    assert len(set(seen)) == 1, (seen, there)
    scheduler.close()


def test_only_chats_reach_the_disk_and_each_finds_its_own(qwen: LoadedModel, kept: PrefixCache, tmp_path: Path) -> None:
    other = "another chat"
    keep_chat(other, tmp_path)
    scheduler = Scheduler(qwen)
    for chat in ("", "one that was never kept", CHAT, other, ""):  # the same in RAM for all
        ask(scheduler, A, chat=chat)
        assert kept.settle(30)
        ask(scheduler, B, chat="")
    scheduler.close()
    kept.close()
    there = [file.path.parent for file in kept_files(tmp_path)]
    assert sorted(there) == sorted([folder_of(chat, tmp_path) for chat in (CHAT, other)] * 3)
    for chat, prompt, reused in (("", A, 0), (CHAT, B, 0), (other, A, 192), (CHAT, A, 192)):
        qwen.kept = restarted = PrefixCache(ROOT, 2**26, SpillFiles(tmp_path, lambda _folder, _held: 2**28))
        scheduler = Scheduler(qwen)
        (result,) = ask(scheduler, [*prompt, 1], chat=chat)
        assert (result.from_disk, result.token_ids) == (reused, fresh(qwen, [*prompt, 1]))
        scheduler.close()
        restarted.close()


def test_a_chat_that_is_deleted_while_it_is_answered_leaves_nothing(
    qwen: LoadedModel, kept: PrefixCache, tmp_path: Path
) -> None:
    scheduler = Scheduler(qwen)
    ask(scheduler, A)
    assert kept.settle(30)
    request = BatchRequest(
        0,
        ids=tuple(further(A, ask(scheduler, A)[0])),
        sampling=SamplingParams(max_tokens=4),
        end_ids=NO_END,
        on_text=lambda _text, _count: shutil.rmtree(folder_of(CHAT, tmp_path), ignore_errors=True),
        chat=CHAT,
    )
    scheduler.submit(request, lambda _outcome: None)
    scheduler.serve()
    ask(scheduler, B, chat="")
    assert kept.settle(30)
    scheduler.close()
    kept.close()
    assert list(tmp_path.rglob("*.kept")) == []


@native
def test_a_prompt_goes_on_within_a_page_and_a_deleted_chat_is_found_no_more(quick: LoadedModel, tmp_path: Path) -> None:
    quick.kept = kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler = Scheduler(quick)
    for prompt in (A[:75], B[:50]):
        ask(scheduler, prompt)
    changed = [*A[:70], *random_prompt(20, seed=6)]
    (again,) = ask(scheduler, changed, chat="")
    assert (again.reused_tokens, again.token_ids) == (70, fresh(quick, changed))
    shutil.rmtree(folder_of(CHAT, tmp_path))
    ask(scheduler, random_prompt(5, seed=7), chat="")  # a request notices
    (other,) = ask(scheduler, B[:50], chat="")
    assert other.reused_tokens <= 1  # another one begins with that token
    scheduler.close()
    kept.close()
    quick.kept = None


def test_swapped_weights_of_the_same_size_and_time_find_nothing(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    before, answers = weights.stat(), list[tuple[int, ...]]()
    for swapped in (False, True):
        if swapped:  # a value in the middle of the file
            content = bytearray(weights.read_bytes())
            for at in range(len(content) // 2, len(content) // 2 + 4000, 4):
                content[at + 3] ^= 0x80
            weights.write_bytes(content)
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        loaded = open_model(folder)
        keep_chat(CHAT)
        loaded.kept = kept = open_kept(loaded)
        scheduler = Scheduler(loaded)
        (result,) = ask(scheduler, A, tokens=16)
        assert result.reused_tokens == 0
        answers.append(result.token_ids)
        assert result.token_ids == fresh(loaded, A, 16)
        assert kept.settle(30)
        scheduler.close()
        loaded.close()
    assert weights.stat().st_size == before.st_size
    assert len(kept_files(kept_context_dir())) == 2 * 3


def test_models_of_one_kind_share_nothing(tmp_path: Path) -> None:
    folder, ids = files_in(tmp_path), random_prompt(130)
    loaded = tiny_loaded("olmoe")
    loaded.kept = PrefixCache(bytes(16), 2**26, folder)
    scheduler = Scheduler(loaded)
    ask(scheduler, ids)
    assert loaded.kept.settle(30)
    scheduler.close()
    loaded.kept.close()
    other = PrefixCache(bytes(15) + b"1", 2**26, folder)
    assert other.find([*ids, 1], 0, CHAT) is None
    other.close()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_read_on_devices_is_kept_too(devices: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    with opened(folder, devices) as model:
        assert model.devices is not None
        model.kept = PrefixCache(ROOT, 2**26, files_in(tmp_path / "kept"))
        scheduler = Scheduler(model)
        (first,) = ask(scheduler, A[:150])
        ask(scheduler, B[:100])
        again = further(A[:150], first)
        (second,) = ask(scheduler, again)
        assert second.reused_tokens == len(A[:150]) + len(first.token_ids) - 1  # both are in pages there
        scheduler.close()
        with chatting(model) as alone:
            sampling = SamplingParams(max_tokens=8)
            assert alone.generate_from_ids(again, sampling, end_ids=NO_END).token_ids == second.token_ids


def test_a_window_is_kept_before_and_after_something_slid_out_of_it(tmp_path: Path) -> None:
    loaded = tiny_loaded("mixtral", context_tokens=512, sliding_window=150)
    loaded.kept = PrefixCache(ROOT, 2**26)
    scheduler = Scheduler(loaded)
    for tokens, reused in ((130, 137), (170, 177)):
        prompt = random_prompt(tokens, seed=tokens)
        (first,) = ask(scheduler, prompt)
        ask(scheduler, B)
        again = further(prompt, first)
        (second,) = ask(scheduler, again)
        assert second.reused_tokens == reused
        assert second.token_ids == fresh(loaded, again)
    scheduler.close()
    loaded.kept.close()


class Held:
    """A cache whose blocks say which tokens they are of."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def copy(self, index: int, data: torch.Tensor) -> None:
        piece = torch.tensor(self.ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS], dtype=torch.float32)
        (((part,),),) = (LAYOUT.parts(data),)
        part.copy_(piece.view(1, -1, 1))


LAYOUT = BlockLayout(0, ((Part("rows 0", (1, BLOCK_TOKENS, 1), "float32"),),))
_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
"""What each block of a text consists of."""
_DO = st.lists(
    st.tuples(st.sampled_from(["offer", "take", "withdraw", "find", "write", "damage"]), _TEXTS, st.integers(0, 300)),
    max_size=25,
)


_DAMAGED: list[tuple[str, list[int], int]] = [
    *(("offer", [0, 1], 300), ("write", [2, 1, 1], 142), ("damage", [0, 2, 1], 133), ("offer", [2, 2, 0, 0, 2], 198)),
    *(("write", [0, 2], 255), ("withdraw", [1], 286), ("write", [2, 2, 1], 200), ("find", [2, 2, 0, 0, 2], 0)),
]
"""What the disk had no room for is withdrawn while nobody writes."""


@example(steps=_DAMAGED, room=8, on_disk=3)
@settings(max_examples=20)
@given(steps=_DO, room=st.integers(0, 9), on_disk=st.integers(0, 9))
def test_a_block_is_found_if_all_before_it_is_kept_and_no_budget_is_exceeded(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int], int]], room: int, on_disk: int
) -> None:
    folder, size = tmp_path_factory.mktemp("kept"), LAYOUT.nbytes + 128
    keep_chat(CHAT, folder)
    files = SpillFiles(folder, lambda _folder, _held: on_disk * size)
    kept = PrefixCache(ROOT, room * LAYOUT.nbytes, files if on_disk else None)
    for what, text, number in steps:
        ids = [token for token in text for _ in range(BLOCK_TOKENS)]
        if what == "offer":
            kept.withdraw("one")
            kept.offer("one", ids, LAYOUT, Held(ids).copy, CHAT)
        elif what == "take":
            kept.offer("two", ids, LAYOUT, Held(ids).copy, CHAT)
            kept.withdraw("two")
        elif what == "withdraw":
            kept.withdraw("one")
        elif what == "write":
            assert kept.settle(30)
        elif what == "damage":
            # In place: the thread that writes may be removing this very file, which must not come back.
            with suppress(FileNotFoundError), min(folder.rglob("*.kept"), default=folder / "none").open("r+b") as file:
                content = file.read()
                file.seek(number % len(content))
                file.write(bytes([content[number % len(content)] ^ 1]))
        found = kept.find([*ids, 7], 0, CHAT)
        if found is not None:
            brought: dict[int, list[float]] = {}

            def take(index: int, data: torch.Tensor, brought: dict[int, list[float]] = brought) -> None:
                brought[index] = LAYOUT.parts(data)[0][0].flatten().tolist()

            there = found.bring(0, take)
            assert there <= found.tokens
            assert found.reused.tokens == there
            for index in range(there // BLOCK_TOKENS):
                assert brought[index] == ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        assert kept.ram_bytes == sum(block.data.nbytes for block in kept._blocks.values()) <= kept.ram_budget
        # One look into the folder: the thread that writes may remove a file between its listing and its size.
        assert sum(file.nbytes for file in kept_files(folder)) <= on_disk * size
    kept.withdraw("one")
    kept.close()
    assert kept.ram_bytes == 0


def test_the_end_of_a_text_that_is_too_long_for_the_disk_does_not_replace_its_beginning(tmp_path: Path) -> None:
    keep_chat(CHAT, tmp_path)
    room, ids = 3 * (LAYOUT.nbytes + 128), [token for token in range(5) for _ in range(BLOCK_TOKENS)]
    kept = PrefixCache(ROOT, 2**20, SpillFiles(tmp_path, lambda _folder, _held: room))
    kept.offer("one", ids, LAYOUT, Held(ids).copy, CHAT)
    assert kept.settle(30)
    kept.withdraw("one")
    assert kept.settle(30)
    found = kept.find([*ids, 7], 0, CHAT)
    assert found.tokens == len(ids)  # the rest is in RAM
    kept.close()
    kept = PrefixCache(ROOT, 0, SpillFiles(tmp_path, lambda _folder, _held: room))
    found = kept.find([*ids, 7], 0, CHAT)
    assert found.tokens == 3 * BLOCK_TOKENS
    kept.close()


def test_a_long_beginning_is_found_in_its_midst() -> None:
    loaded = tiny_loaded("lfm2_moe", context_tokens=4096)
    loaded.chunk_tokens = 512
    loaded.kept = PrefixCache(ROOT, 2**28)
    scheduler, rules = Scheduler(loaded), random_prompt(1400, seed=6)
    ask(scheduler, [*rules, *random_prompt(200, seed=7)])
    ask(scheduler, B)
    prompt = [*rules, *random_prompt(90, seed=8)]
    (result,) = ask(scheduler, prompt)
    assert result.reused_tokens == 1024
    assert result.token_ids == fresh(loaded, prompt)
    scheduler.close()
    loaded.kept.close()


def test_descriptions_that_make_no_sense_are_of_no_use() -> None:
    assert BlockLayout.read(LAYOUT.described) == LAYOUT
    for description in (b"", b"[]", b"[1,[]]", b"[1,[[3]]]", b'[1,[[1,[["keys",[-1],"int8"]]]]]', b"[" * 10_000):
        assert BlockLayout.read(description) is None
    for described in (b"[0,[[5000,[]]]]", b'[0,[[1,[["keys",[1],"list"]]]]]', b"[-1,[[1,[]]]]"):
        assert BlockLayout.read(described) is None


def test_models_say_what_is_not_kept() -> None:
    assert "read again" in kept_note(tiny_loaded("qwen3_next").model)
    assert "read again" in kept_note(tiny_loaded("mixtral", sliding_window=16).model)
    assert "read again" in kept_note(tiny_loaded("deepseek_v4").model)
    loaded = tiny_loaded("olmoe")
    assert kept_note(loaded.model) == ""
    kept = open_kept(loaded)
    kept.close()
    assert "not kept" in kept_note(tiny_loaded("zaya").model)
