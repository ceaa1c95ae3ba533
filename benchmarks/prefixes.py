"""`switchyard bench prefixes`: the first token of a chat's second turn, after another chat and after a restart.

A restart is a new store over the same folder, whose files are dropped from the system's cache first: the first token
waits for the disk.  Weights are as warm in every turn.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from engine.bench.opened import random_text
from engine.bench.report import Report, in_turn
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.kept_context import keep_chat, kept_context_dir, kept_files
from engine.measure.link import forget_cached
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.kept_context import open_kept, why_not_kept
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.files import SpillFiles
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.scheduler import Scheduler

_ANSWER, _QUESTION = 24, 24
_SETTLE_S = 120.0
_ROOM = 64 * 10**9
_CHAT = "bench"


@dataclass(frozen=True, slots=True)
class PrefixesPlan:
    """What to run.

    Attributes:
        lengths: of the first turn's prompt, in tokens; a group of rows for each.
        other_tokens: of the chat in between.
    """

    lengths: tuple[int, ...]
    repeats: int
    other_tokens: int = 200


def bench_prefixes(config: EngineConfig, plan: PrefixesPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds, for each length: seconds to the first token of the first turn, and of the second one in each case.

    Raises:
        EngineError: as `load_model`, or a prompt is longer than the context; `MODEL_UNSUPPORTED` if nothing is kept.
    """
    say("loading the model")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    with closing(loaded):
        why = why_not_kept(loaded.model)
        if why:
            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, why)
        kept_context_dir().parent.mkdir(parents=True, exist_ok=True)
        for tokens in plan.lengths:

            def run(repeat: int, tokens: int = tokens) -> dict[str, float]:
                with tempfile.TemporaryDirectory(dir=kept_context_dir().parent, prefix="bench-") as folder:
                    return _turns(loaded, tokens, plan.other_tokens, repeat, Path(folder), say)

            name = f"{tokens:,} tokens"
            found = in_turn({"turns": run}, plan.repeats, report, say, warm_ups=0, what=name)["turns"]
            seconds = {turn: [took[turn] for took in found] for turn in found[0]}
            first = seconds.pop("first turn")
            report.add(f"first token of {name}, first turn", first, "s")
            for turn, second in seconds.items():
                report.add(f"{name}, {turn}", second, "s", peer="first turn", peer_values=first, higher_is_better=False)


def _turns(
    loaded: LoadedModel, tokens: int, other_tokens: int, seed: int, folder: Path, say: Callable[[str], None]
) -> dict[str, float]:
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size

    def text(length: int, number: int) -> list[int]:
        return list(random_text(vocabulary, length, 0, seed=100 * seed + number).prompt)

    def open_store() -> None:
        usual = open_kept(loaded)
        assert usual is not None
        files = SpillFiles(folder, lambda _folder, _held: _ROOM, lambda: key)
        loaded.kept = PrefixCache(usual.root, usual.ram_budget, files)
        usual.close()

    def close_store() -> None:
        assert loaded.kept is not None
        loaded.kept.close()
        loaded.kept = None

    keep_chat(_CHAT, folder)
    key, took, chat = os.urandom(32), dict[str, float](), text(tokens, 1)
    _ask(loaded, text(other_tokens, 2))  # everything is warm
    open_store()
    scheduler = Scheduler(loaded)
    first = _ask_with(scheduler, chat)
    took["first turn"] = first.ttft_s
    chat += first.token_ids
    assert loaded.kept is not None
    if not loaded.kept.settle(_SETTLE_S):
        say("the disk did not keep up")
    _ask_with(scheduler, text(other_tokens, 4))
    second = _ask_with(scheduler, [*chat, *text(_QUESTION, 3)])
    _tell(second, say)
    took["second turn after another chat"] = second.ttft_s
    loaded.kept.settle(_SETTLE_S)
    scheduler.close()
    close_store()
    _write_through(folder)
    forget_cached(file.path for file in kept_files(folder))
    open_store()
    scheduler = Scheduler(loaded)
    second = _ask_with(scheduler, [*chat, *text(_QUESTION, 5)])
    _tell(second, say)
    took["second turn after a restart"] = second.ttft_s
    scheduler.close()
    close_store()
    return took


def _write_through(folder: Path) -> None:
    """What has not reached the disk cannot be dropped."""
    for file in kept_files(folder):
        with open(file.path, "rb+") as opened:
            os.fsync(opened.fileno())


def _tell(result: GenerationResult, say: Callable[[str], None]) -> None:
    say(
        f"{result.reused_tokens:,} of {result.prompt_tokens:,} tokens reused: {result.from_ram:,} from RAM, "
        f"{result.from_disk:,} from disk"
    )


def _ask(loaded: LoadedModel, prompt: Sequence[int]) -> None:
    scheduler = Scheduler(loaded)
    _ask_with(scheduler, prompt)
    scheduler.close()


def _ask_with(scheduler: Scheduler, prompt: Sequence[int]) -> GenerationResult:
    ended: list[Outcome] = []
    sampling = SamplingParams(max_tokens=_ANSWER)
    request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=frozenset(), chat=_CHAT)
    scheduler.submit(request, ended.append)
    scheduler.serve()
    (outcome,) = ended
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
