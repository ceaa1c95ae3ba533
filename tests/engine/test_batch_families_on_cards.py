"""Families that attend or compute in ways of their own, on an emulated card: answers are those of the CPU."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.families import TABLE
from engine.planner.placement import NotEnoughRamError
from engine.planner.schedules import CGOPIPE, KLOTSKI, S4
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.kv.pages import PagePool
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.request import Outcome
from engine.runtime.schedule.scheduler import Scheduler
from tests.combinations import some
from tests.engine import on_devices
from tests.engine.loaded_tiny import library_tokens, opened_model, random_prompt, spread
from tests.engine.single_streams import answers_alone, answers_of, rows_of
from tests.engine.test_background import Job, serve
from tests.engine.test_kept_prefixes import ROOT, A, ask, files_in
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

_rows = partial(rows_of, [1, 40, 70, 12, 33], 5)


PACKED = [
    kind
    for name, family in TABLE.items()
    if family.packs_rows
    for kind in family.types or (name,)
    if kind in {**FAMILIES, **ADAPTED}
]
"""Whose layers schedules stop and call again: their modules may not change what others have returned."""


@pytest.mark.parametrize("family", some(PACKED, every=12))
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    with on_devices.opened(folder, 0) as loaded:
        wanted = answers_alone(loaded, _rows())
    with on_devices.opened(folder, 1, cache_slots=3) as loaded:
        for schedule in (CGOPIPE, S4, KLOTSKI, None):
            policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=100, micro_batch_rows=2, schedule=schedule)
            assert answers_of(loaded, _rows(), policy) == wanted, schedule


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
    options = {**CHOOSING, **SUMMING}[family]
    folder = tiny_checkpoint(family, tmp_path, prepare=spread, **options)
    config = tiny_config(family, **options)
    library = model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    wanted = {row.row: tuple(library_tokens(library, row.ids, 5)) for row in _rows()}
    where = {"cpu": {}, "disk": {"ram_bytes": _least(folder)}, "card": {"cache_slots": 3}}[place]
    with on_devices.opened(folder, int(place == "card"), **where) as loaded:
        assert (loaded.disk_backed is not None) == (place == "disk")
        policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=100, micro_batch_rows=2)
        assert answers_of(loaded, _rows(), policy) == wanted
        assert answers_alone(loaded, _rows()) == wanted
        for row in _rows():
            with torch.inference_mode():
                ids = torch.tensor([row.ids])
                found, theirs = (model(input_ids=ids).logits for model in (loaded.model, library))
            torch.testing.assert_close(found, theirs, rtol=0, atol=1e-3)


RUNS = {"compressed_sparse_attention": 5, "heavily_compressed_attention": 48}
"""Beyond a window of 40, and a page."""


@pytest.mark.takes_turns(2)
def test_what_lies_behind_a_window_is_compressed_in_pages_of_cards(tmp_path: Path) -> None:
    """Alone, in company, forked, found again and brought from disk: tokens are the library's and the CPU's."""
    options = MANY_HEADS | {"index_topk": 32, "sliding_window": 40, "max_position_embeddings": 1024}
    options |= {"compress_rates": RUNS}  # type: ignore[dict-item]
    folder = tiny_checkpoint("deepseek_v4", tmp_path / "model", **options)
    library = model_class(tiny_config("deepseek_v4", **options)).from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(20 + 60 * n, seed=n) for n in range(3)] + [A]
    wanted = [tuple(library_tokens(library, prompt, 8)) for prompt in prompts]
    again, found = [*A, *wanted[-1], 7, 8, 9], dict[int, tuple[object, ...]]()
    for cards in (0, 1, 2):
        with on_devices.opened(folder, cards, **({"cache_slots": 3} if cards else {})) as loaded:
            loaded.kept = kept = PrefixCache(ROOT, 2**26, files_in(tmp_path / f"kept {cards}"))
            with on_devices.chatting(loaded) as chats:
                assert [on_devices.answer(chats, prompt).token_ids for prompt in prompts] == wanted
                assert chats.together(prompts, 8) == wanted
                beams, most = on_devices.answer(chats, prompts[1], beams=3).token_ids, list[int]()
                told = partial(_note_windows, chats.batch.pool, most)
                long = on_devices.answer(chats, random_prompt(600), 40, on_text=told).token_ids
                assert max(most[2:]) <= 7  # what runs of 48 tokens see, and two pages before that, not 19
                ask(chats.scheduler, A)
                assert kept.settle(30)
            with on_devices.chatting(loaded) as chats:
                (result,) = ask(chats.scheduler, again)
                assert result.from_disk + result.from_ram == 192
                (second,) = ask(chats.scheduler, again)
                assert second.reused_tokens == len(again) - 1
                assert second.token_ids == result.token_ids
            kept.close()
            loaded.kept = None
            found[cards] = beams, long, result.token_ids
    assert found[0] == found[1] == found[2]


def _note_windows(pool: PagePool, held: list[int], _text: str, _tokens: int) -> None:
    held.append(pool.held_windows)


@pytest.mark.parametrize(("family", "cards"), [("deepseek_v4", 1), ("qwen3_next", 2), ("qwen3", 1)])
def test_rows_of_jobs_are_in_the_pages_of_chats_where_cards_attend(family: str, cards: int, tmp_path: Path) -> None:
    options = CHOOSING.get(family, {})
    folder = tiny_checkpoint(family, tmp_path, **options)
    library = model_class(tiny_config(family, **options)).from_pretrained(folder, dtype=torch.float32).eval()
    wanted = {row.row: tuple(library_tokens(library, row.ids, 5)) for row in _rows()}
    with on_devices.opened(folder, cards) as loaded:
        scheduler, ends, shared = Scheduler(loaded), dict[int, Outcome](), list[bool]()
        job = Job(scheduler, _rows(), BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=60, micro_batch_tokens=64))
        batch = scheduler._batch
        assert batch.model.caches is not None

        def arrive() -> bool:
            if batch.below:
                shared.append(batch.below[0].model is batch.model)
                if len(ends) < 2 and not scheduler.is_busy:
                    asked = _rows()[len(ends)]
                    scheduler.submit(asked, partial(ends.__setitem__, asked.row))
            if len(shared) in (3, 9):  # states of a card get other memory in the midst of a sweep
                batch.model.caches.state_generation += 1  # type: ignore[union-attr]
            return False

        serve(scheduler, [job], arrive)
        assert job.place.note == ""
        assert shared
        assert all(shared)
        assert {row: answer.token_ids for row, answer in job.answers.items()} == wanted
        for number, end in ends.items():
            assert end.token_ids == wanted[number]
        assert len(ends) == 2
        batch._left.give_up()
        assert (batch.pool.held, batch.pool.held_states, batch.pool.in_use) == (0, 0, 0)
        scheduler.close()


def _least(folder: Path) -> int:
    """The RAM in which the model just fits, its experts on disk."""
    with pytest.raises(NotEnoughRamError) as caught, opened_model(folder, "fp32", ram_bytes=1):
        pass
    return caught.value.needed
