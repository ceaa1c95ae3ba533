"""Opens models for benches, one configuration at a time, and decodes a fixed text with them.

Decoding is teacher-forced: every contestant computes the same tokens, hence the same experts.

The models that benchmarks run: the user's, and synthetic ones; nothing that is prepared of these is left behind.

Also what else a checkout has to measure with: `benchmarks`, beside `engine`, and not packaged.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from engine.checkpoint.importing import staging_folder
from engine.checkpoint.library import converted_dir, resolve
from engine.checkpoint.packed import PackedEntry
from engine.checkpoint.shards import read_tensors
from engine.checkpoint.synthetic import is_synthetic, make_synthetic
from engine.common import clock
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, never_cancelled
from engine.common.files import disk_errors_explained
from engine.common.paths import PREPARED_VARIABLE
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.decode.sequence import Sequence
from engine.runtime.load.model import load_model
from engine.runtime.schedule.executor import batch_for
from engine.runtime.schedule.request import BatchRequest, Preparation

if TYPE_CHECKING:
    from collections import abc

    from engine.common.config import EngineConfig
    from engine.experts.vram_cache import VramCache
    from engine.runtime.loaded_model import LoadedModel
    from engine.runtime.schedule.row import PagedRow

_FILE_TYPE = "gguf="
_ROOT = Path(__file__).resolve().parents[2]


def from_checkout(module: str) -> Any:
    """The module of `benchmarks`; `None` where Switchyard is installed without it."""
    if not (_ROOT / "benchmarks" / f"{module}.py").is_file():
        return None
    if str(_ROOT) not in sys.path:  # `switchyard` as a command knows only what is packaged
        sys.path.append(str(_ROOT))
    return importlib.import_module(f"benchmarks.{module}")


def resolve_model(model: str, say: Callable[[str], None]) -> Path:
    """The checkpoint of a bench's model: as elsewhere, or a synthetic one; with `gguf=Q4_K_M`, as such a GGUF file."""
    if not is_synthetic(model):
        return resolve(model)
    plain, kind = without_file_type(model)
    if not kind:
        return make_synthetic(model, say)
    writer = from_checkout("shapes")
    if writer is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"Only a checkout writes synthetic models as {kind} files.")
    file: Path = writer.make_synthetic_gguf(plain, kind, say)
    return file


def files_of(model: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint."""
    entries = read_tensors(model).values()
    stored = (entry.sources if isinstance(entry, PackedEntry) else (entry,) for entry in entries)
    return sorted({source.file for sources in stored for source in sources})


def without_file_type(model: str) -> tuple[str, str]:
    name, _, query = model.partition("?")
    parts = query.split("&") if query else []
    kinds = [part.removeprefix(_FILE_TYPE) for part in parts if part.startswith(_FILE_TYPE)]
    rest = "&".join(part for part in parts if not part.startswith(_FILE_TYPE))
    return (f"{name}?{rest}" if rest else name), kinds[-1] if kinds else ""


@contextlib.contextmanager
def prepared_apart() -> Iterator[Path]:
    """A folder, empty at first, where this process and those that it starts find and keep prepared weights meanwhile.

    It is on the same disk as ever, and removed at the end, also after Ctrl+C; one that a killed bench left is removed
    by the next one.
    """
    before = os.environ.get(PREPARED_VARIABLE)
    usual = converted_dir()
    with contextlib.ExitStack() as held:
        with disk_errors_explained(usual):
            folder = held.enter_context(staging_folder(usual))
        os.environ[PREPARED_VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[PREPARED_VARIABLE]
            else:
                os.environ[PREPARED_VARIABLE] = before


_FEWEST_STEPS = 3
"""Steps that are always timed."""


@dataclass(frozen=True, slots=True)
class ForcedText:
    """Token ids: the prompt, and the forced continuation."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def random_text(vocabulary: int, prompt: int, answer: int, seed: int = 0) -> ForcedText:
    """Random ids, for a model with random weights."""
    draw = random.Random(seed)
    ids = [draw.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(prompt + answer)]
    return ForcedText(tuple(ids[:prompt]), tuple(ids[prompt:]))


def own_text(loaded: LoadedModel, prompt: abc.Sequence[int], answer: int) -> ForcedText:
    """The prompt and the model's greedy continuation, past the end of its answer."""
    ids: list[int] = []
    with _sequence(loaded) as sequence:
        logits = sequence.read(prompt)
        with loaded.token_by_token():
            for _ in range(answer):
                ids.append(int(logits.argmax()))
                logits = sequence.step(ids[-1])
    return ForcedText(tuple(prompt), tuple(ids))


def decode_seconds(loaded: LoadedModel, text: ForcedText, at_most_s: float = float("inf")) -> list[float]:
    """Seconds of each decode step, until the answer ends or the steps together have taken `at_most_s`."""
    seconds: list[float] = []
    with _sequence(loaded) as sequence:
        sequence.read(text.prompt)
        with loaded.token_by_token():
            for token in text.answer:
                begun_s = clock.now()
                sequence.step(token).argmax().item()  # reading the result waits for the card
                seconds.append(clock.now() - begun_s)
                if len(seconds) >= _FEWEST_STEPS and sum(seconds) > at_most_s:
                    break
    return seconds


def prefill_seconds(loaded: LoadedModel, prompt: abc.Sequence[int]) -> float:
    """Seconds from an empty context to the logits after the prompt."""
    with _sequence(loaded) as sequence:
        begun_s = clock.now()
        sequence.read(prompt).argmax().item()
        return clock.now() - begun_s


class OneSequence:
    """A sequence with a model for itself, computed as a chat's is, without what is round that."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._batch = batch_for(loaded, None)
        # A prompt may take all of the context: nothing has to follow it.
        self._prepare = Preparation(replace(loaded, context_tokens=loaded.context_tokens + 1)).prepare
        self._loaded, self._row = loaded, cast("PagedRow", None)
        assert self._batch.exact is not None
        self.steps = self._batch.exact

    def read(self, prompt: abc.Sequence[int]) -> torch.Tensor:
        """Logits [1, V] after a prompt, of which nothing is there yet."""
        self.close_row()
        self._row = row = self._begun(prompt)
        logits = torch.empty(0)
        with torch.inference_mode():
            while row.is_reading:
                tokens = row.up_to(self.steps.at_once(len(prompt) - row.held, row.undivided))
                ids, at = row.next_ids(tokens), row.position(row.held)
                given = row.given(ids, self._loaded.model)
                piece = row.piece(tokens)
                logits = self.steps.read(ids, piece, len(prompt), ignore_progress, never_cancelled, at, given)
                row.has_read(tokens)
        return logits

    @torch.inference_mode()
    def _begun(self, prompt: abc.Sequence[int]) -> PagedRow:
        room = max(1, self._loaded.context_tokens - len(prompt))
        asked = BatchRequest(0, ids=tuple(prompt), sampling=SamplingParams(max_tokens=room, seed=1))
        row, caches = self._batch.row_of(self._prepare(Sequence(asked)), self._batch.own), self._batch.model.caches
        if not row.reserve():
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There is not enough memory for this context.")
        if caches is not None and caches.have_states:
            row.find_state(caches, None)
        return row

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Logits [1, V] after one more token."""
        row = self._row
        row.reserve_next()
        row.sequence.ids.append(token)
        at, piece = row.position(row.held), row.piece(1, in_place=self.steps.graphs is None)
        logits = self.steps.write([token], [piece], [at])
        row.has_read(1)
        return logits

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return self._batch.held_bytes

    def close_row(self) -> None:
        """Forgets all tokens."""
        if self._row is not None:
            self._row.close()
            self._batch.pool.forget_prefixes()

    def close(self) -> None:
        """Frees all that is held."""
        self.close_row()
        self._batch.free()


@contextmanager
def _sequence(loaded: LoadedModel) -> Iterator[OneSequence]:
    """A separate context, freed at the end."""
    sequence = OneSequence(loaded)
    try:
        yield sequence
    finally:
        sequence.close()


@contextmanager
def opened(config: EngineConfig) -> Iterator[LoadedModel]:
    gc.freeze()  # as the engine's process does: collections need not look through modules, which are there for good
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        yield loaded
    finally:
        loaded.close()
        gc.unfreeze()


def hybrid_layers(model: Any) -> list[tuple[Any, HybridExperts]]:
    """The experts modules of a loaded model that compute on a device and the CPU, in the order of its layers."""
    found = []
    for module in model.modules():
        bound = module.__dict__.get(BANK_LAYER)
        if bound is not None and isinstance(bound[1], HybridExperts):
            found.append((module, bound[1]))
    return found


def vocabulary_of(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config().vocab_size)


def caches_of(loaded: LoadedModel) -> list[VramCache]:
    return list({id(experts.cache): experts.cache for _, experts in hybrid_layers(loaded.model)}.values())
