"""`switchyard bench quality`: what int8 and int4, or a file as it is, cost on the user's text, beside llama.cpp.

Next-token probabilities of the contestants are compared with a reference stored on disk.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gguf import gguf_of
from benchmarks.peers.editions import LLAMA_CPP
from benchmarks.peers.peer import GgufPeer
from engine.bench.opened import opened
from engine.bench.report import PeerError, Report, ReportRow
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.export import Quantisation
from engine.common.errors import EngineError, ErrorCode
from engine.formats import AUTO

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel

Window = tuple[int, ...]
"""Token ids of a window of text, at least 2."""

Contestant = Callable[[Window], torch.Tensor]
"""A window -> logits of any floating type, [len(window) - 1, vocabulary]: row t is for the token after the t-th."""


@dataclass(frozen=True, slots=True)
class TextScore:
    """One contestant's figures for all tokens of all windows except first ones, fp32 or bool [tokens].

    Attributes:
        surprise: nats, negative log-likelihood of the actual token.
        divergence: nats, the Kullback-Leibler divergence from the reference's distribution; as far as that reads.
        agrees: whether its most likely token is the reference's; likewise.
    """

    surprise: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise."""
        return math.exp(float(self.surprise.double().mean()))


class Reference:
    """The reference distributions, and what contestants were found to be: files of a folder, for each window some.

    On disk, as distributions over the vocabulary for every token take gigabytes; what is there already is not computed
    again, of a longer text either.

    Args:
        contestant: the reference model.
        windows: the text.
        folder: folder for its logits; the caller deletes it.
        known: how many windows it reads; contestants read all.

    Attributes:
        score: its own.
        later: which of the tokens that it read have more than one before them, bool [tokens].
    """

    def __init__(
        self, contestant: Contestant, windows: Sequence[Window], folder: Path, known: int | None = None
    ) -> None:
        self._windows, self._folder = windows, folder
        surprise = []
        for number, window in enumerate(windows[:known]):
            if not self._file(number, "logits").is_file():
                _write(self._file(number, "logits"), contestant(window).cpu().float().contiguous().numpy().tofile)
            surprise.append(_surprise(self._logits(number).log_softmax(-1), window))
        self._known = len(surprise)
        together = torch.cat(surprise)
        self.score = TextScore(together, torch.zeros_like(together), torch.ones_like(together, dtype=torch.bool))
        self.later = torch.cat([torch.arange(len(each)) > 0 for each in surprise])

    def compare(self, contestant: Contestant, kept_as: str = "") -> TextScore:
        """The score of another contestant on the same windows.

        Args:
            kept_as: the name under which its scores are kept in the folder; empty: they are not.

        Raises:
            ValueError: its vocabulary size differs.
        """
        scores = []
        for number, window in enumerate(self._windows):
            file = self._file(number, f"{kept_as}.score")
            if not (kept_as and file.is_file()):
                score = self._compare(contestant, number, window)
                if not kept_as:
                    scores.append(score)
                    continue
                _write(file, partial(torch.save, [score.surprise, score.divergence, score.agrees]))
            scores.append(TextScore(*torch.load(file)))
        parts = ("surprise", "divergence", "agrees")
        return TextScore(*(torch.cat([getattr(score, part) for score in scores]) for part in parts))

    def _compare(self, contestant: Contestant, number: int, window: Window) -> TextScore:
        theirs = contestant(window).cpu().float().log_softmax(-1)
        if number >= self._known:
            return TextScore(_surprise(theirs, window), torch.empty(0), torch.empty(0, dtype=torch.bool))
        logits = self._logits(number)
        if theirs.shape[-1] != logits.shape[-1]:
            raise ValueError(f"it has {theirs.shape[-1]:,} ids, not {logits.shape[-1]:,}")
        ours = logits.log_softmax(-1)
        # An id with zero reference probability adds nothing.
        divergence = (ours.exp() * (ours - theirs)).nan_to_num_(0.0, posinf=torch.inf).sum(-1)
        return TextScore(_surprise(theirs, window), divergence, theirs.argmax(-1) == ours.argmax(-1))

    def _file(self, number: int, kind: str) -> Path:
        return self._folder / f"{_digest(self._windows[number])}.{kind}"

    def _logits(self, number: int) -> torch.Tensor:
        file = self._file(number, "logits")
        return torch.from_file(str(file), size=file.stat().st_size // 4).view(len(self._windows[number]) - 1, -1)


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """Whole or not at all."""
    partial_file = file.with_suffix(".part")
    write(partial_file)
    partial_file.replace(file)


def _surprise(log_probabilities: torch.Tensor, window: Window) -> torch.Tensor:
    return -log_probabilities.gather(-1, torch.tensor(window[1:])[:, None]).squeeze(-1)


_PEERS: dict[str, tuple[Quantisation | None, ...]] = {
    "int8": (Quantisation.Q8_0,),
    "int4": (Quantisation.Q4_0, Quantisation.Q4_1),
}
"""llama.cpp's types with similar bits; all use groups of 32."""
_OF_GGUF: dict[str, tuple[Quantisation | None, ...]] = {AUTO: (None,)}
"""A GGUF file as it is, by us and by llama.cpp."""


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """The first `tokens` of the file `text`, in windows of `window`; `peers`: also run llama.cpp on them.

    Attributes:
        reference_tokens: how many of them the reference reads, which takes longest; `None`: all.
        keep: a folder for what was computed, from which a later run of the same code goes on.
    """

    text: Path
    tokens: int
    peers: bool
    window: int = 512
    reference_tokens: int | None = None
    keep: Path | None = None


def bench_quality(config: EngineConfig, plan: QualityPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: perplexity, divergence from a reference, agreement of the most likely token, by precision.

    The reference is the checkpoint in bf16, and of a GGUF file its numbers in fp32. Every window starts from an empty
    context, and all its tokens but the first count: the perplexities are comparable with each other, but not with those
    of programs that only count tokens after a long context.
    """
    text, checkpoint = _read(plan.text), Path(config.model)
    exact, contestants = ("bf16", _PEERS) if gguf_at(checkpoint) is None else ("fp32", _OF_GGUF)
    with ExitStack() as stack:
        say(exact)
        with opened(replace(config, precision=exact)) as loaded:
            windows = _windows(loaded, text, plan)
            threads = loaded.info.threads
            if plan.keep is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="switchyard-quality-")))
            else:
                folder = _kept(plan.keep, checkpoint)
            known = None if plan.reference_tokens is None else max(1, plan.reference_tokens // len(windows[0]))
            reference = Reference(_contestant(loaded), windows, folder, known)
        _describe_reference(exact, reference.score, report)
        for precision, types in contestants.items():
            say(precision)
            with opened(replace(config, precision=precision)) as loaded:
                if loaded.info.device_note:  # without native kernels, say: other kernels round otherwise
                    say(loaded.info.device_note)
                score, precision = reference.compare(_contestant(loaded), precision), loaded.info.precision
            _describe(precision, score, exact, reference, report)
            for quantisation in types if plan.peers else ():
                name = f"llama.cpp, {quantisation.value if quantisation else 'same file'}"
                try:
                    say(name)
                    file = _file_for_peer(checkpoint, quantisation, say)
                    with GgufPeer(name, file, threads, plan.window) as peer:
                        theirs = reference.compare(_contestant_in_llama_cpp(peer), name)
                except (PeerError, EngineError, ValueError) as failure:
                    report.skip_peer(name, str(failure))
                    continue
                _describe(name, theirs, exact, reference, report)
                report.rows += [_perplexity(precision, score, name, theirs), *_above(precision, score, name, theirs)]
                more = (score.divergence - theirs.divergence)[reference.later]
                report.rows += [
                    ReportRow(f"divergence of {precision} above that of {name}, {_LATER}", _mean(more), "nats", 1),
                    ReportRow(f"standard error of that divergence ({precision}, {name})", _error(more), "nats", 1),
                ]


def _kept(keep: Path, checkpoint: Path) -> Path:
    """The folder of this state of the checkpoint."""
    parts = [each for each in (checkpoint, *sorted(checkpoint.glob("*"))) if each.is_file()]
    folder = keep / _digest((checkpoint, [(part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in parts]))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(of: object) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=8).hexdigest()


def _file_for_peer(checkpoint: Path, quantisation: Quantisation | None, say: Callable[[str], None]) -> Path:
    """Written only if llama.cpp can run it; without `quantisation` the checkpoint is one."""
    if LLAMA_CPP.python() is None:
        raise PeerError(f"it is not built: run {LLAMA_CPP.how_to_build()}")
    return gguf_of(checkpoint, quantisation or Quantisation.BF16, say)


def _describe_reference(exact: str, score: TextScore, report: Report) -> None:
    report.rows.append(ReportRow("tokens", len(score.surprise), "", 1))
    report.rows.append(ReportRow(f"perplexity of {exact}", score.perplexity, "", 1))


_LATER = "but for first tokens"
"""Of a window, whose activations are up to thousands of times as large as those of others."""


def _describe(name: str, score: TextScore, exact: str, reference: Reference, report: Report) -> None:
    """What can be said beside the reference, of the tokens that it read."""
    score = replace(score, surprise=score.surprise[: len(reference.score.surprise)])
    report.rows += [
        _perplexity(name, score, exact, reference.score),
        *_above(name, score, exact, reference.score),
        ReportRow(f"divergence of {name} from {exact}", _mean(score.divergence), "nats", 1),
        ReportRow(f"divergence of {name} from {exact}, {_LATER}", _mean(score.divergence[reference.later]), "nats", 1),
        ReportRow(f"tokens where {name} agrees with {exact}", 100 * float(score.agrees.float().mean()), "%", 1),
    ]


def _above(name: str, score: TextScore, peer: str, other: TextScore) -> list[ReportRow]:
    """By how much one's perplexity is above the other's; the error is that of differences token by token."""
    more = (score.surprise - other.surprise).double()
    return [
        ReportRow(f"perplexity of {name} above that of {peer}", 100 * math.expm1(float(more.mean())), "%", 1),
        ReportRow(f"standard error of that ({name}, {peer})", 100 * _error(more), "%", 1),
    ]


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def _error(values: torch.Tensor) -> float:
    """The standard error of their mean."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _perplexity(name: str, score: TextScore, peer: str, other: TextScore) -> ReportRow:
    """Lower is better, so the ratio is the other's over ours."""
    ratio = other.perplexity / score.perplexity
    return ReportRow(f"perplexity of {name}", score.perplexity, "", 1, peer, other.perplexity, ratio)


def _contestant(loaded: LoadedModel) -> Contestant:
    def logits(window: Window) -> torch.Tensor:
        ids = torch.tensor([window[:-1]], device=loaded.device)
        with torch.inference_mode():
            result: torch.Tensor = loaded.model(ids, use_cache=False).logits[0]
        return result

    return logits


def _contestant_in_llama_cpp(peer: GgufPeer) -> Contestant:
    return lambda window: torch.from_numpy(peer.logits(window[:-1]))


def _windows(loaded: LoadedModel, text: str, plan: QualityPlan) -> list[Window]:
    """Consecutive windows of the tokenized text; a last one with a single token is dropped."""
    if loaded.model.config.is_encoder_decoder:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{loaded.info.name} answers a text rather than going on with it, so its quality is not measured this way.",
        )
    ids: list[int] = loaded.tokenizer(text, verbose=False)["input_ids"][: plan.tokens]
    length = min(plan.window, loaded.context_tokens)
    windows = [tuple(ids[begin : begin + length]) for begin in range(0, len(ids), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{plan.text} is too short: it needs two tokens or more.")
    return windows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} is not text in UTF-8: choose another file.") from error
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({error.strerror}): choose another file."
        ) from error
