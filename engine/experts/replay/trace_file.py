"""Recorded expert routing on disk: which experts each token chose in each layer.

A trace is an `.npz` holding `experts` int16 [tokens, layers, k] (ids in the router's order, -1 where a layer did not
run for a token, as in the last layer of a prompt), `weights` float16 of the same shape, `sequence_starts` int64
(token index at which each sequence begins; the last entry is the token count) and `num_experts`.
No pickle is ever loaded.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile
from engine.common.foreign import open_foreign

_MOST_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Routing of consecutive tokens.

    Attributes:
        experts: int [tokens, layers, k]; -1 where the layer did not run.
        weights: float [tokens, layers, k].
        sequence_starts: token index where each sequence begins; the last entry is the number of tokens.
        num_experts: experts per layer.
        prefill_tokens: how many tokens at the front were a prompt, processed at once rather than one by one.
    """

    experts: NDArray[np.int16]
    weights: NDArray[np.float16]
    sequence_starts: NDArray[np.int64]
    num_experts: int
    prefill_tokens: int = 0

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def accesses(self) -> int:
        """Uses of an expert by a token: the denominator of hit rates."""
        return int(np.count_nonzero(self.experts >= 0))

    @property
    def per_token(self) -> int:
        return int(self.experts.shape[2])


def read_trace(path: Path) -> RoutingTrace:
    """The trace in `path`.

    Raises:
        EngineError: `INVALID_REQUEST`, the file is missing, damaged or not a routing trace.
    """
    try:
        # Opened here because numpy leaks the file if it is not an archive.
        with open_foreign(path) as file, np.load(file, allow_pickle=False) as arrays:
            if sum(part.file_size for part in arrays.zip.infolist()) > _MOST_BYTES:
                raise ValueError(f"it unpacks to more than {_MOST_BYTES // 2**30} GiB")
            experts = np.ascontiguousarray(arrays["experts"])
            weights = arrays["weights"] if "weights" in arrays else np.zeros(experts.shape, np.float16)
            starts = arrays["sequence_starts"] if "sequence_starts" in arrays else np.array([0, len(experts)])
            trace = RoutingTrace(
                experts,
                weights,
                starts.astype(np.int64),
                int(arrays["num_experts"]),
                int(arrays["prefill_tokens"]) if "prefill_tokens" in arrays else 0,
            )
    except FileNotFoundError:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no routing trace at {path}.") from None
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} is not a routing trace ({error}).",
        ) from error
    _check(trace, path)
    return trace


def write_trace(trace: RoutingTrace, path: Path) -> None:
    """Writes `trace` to `path` atomically."""
    with NewFile(path) as new:
        with new.path.open("wb") as file:
            np.savez_compressed(
                file,
                experts=trace.experts.astype(np.int16),
                weights=trace.weights.astype(np.float16),
                sequence_starts=trace.sequence_starts.astype(np.int64),
                num_experts=np.int64(trace.num_experts),
                prefill_tokens=np.int64(trace.prefill_tokens),
            )
        new.take_place()


def _check(trace: RoutingTrace, path: Path) -> None:
    def refuse(why: str) -> EngineError:
        return EngineError(ErrorCode.INVALID_REQUEST, f"{path} is not a usable routing trace: {why}.")

    if trace.experts.ndim != 3 or not np.issubdtype(trace.experts.dtype, np.integer):
        raise refuse("`experts` must be integers of shape [tokens, layers, k]")
    if trace.weights.shape != trace.experts.shape:
        raise refuse("`weights` and `experts` differ in shape")
    if trace.experts.size == 0:
        raise refuse("it holds no tokens")
    if trace.experts.min() < -1 or trace.experts.max() >= trace.num_experts:
        raise refuse(f"an expert id lies outside -1..{trace.num_experts - 1}")
    starts = trace.sequence_starts
    if starts.ndim != 1 or len(starts) < 2 or starts[-1] != trace.tokens or (np.diff(starts) < 0).any():
        raise refuse("`sequence_starts` does not rise from the first token to the token count")
