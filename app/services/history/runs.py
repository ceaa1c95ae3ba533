"""Phases as runs: a prefill of many chunks is one run, and so is a decode of many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from engine.telemetry.lanes import BATCH_STEP, DECODE, PREFILL, PROMPT, SAMPLE
from engine.telemetry.records import Records

MOST_RUNS = 20_000
_GAP_NS = 2_000_000
_KIND = {PROMPT: PREFILL, SAMPLE: PREFILL}
"""Phases that are part of another phase's run."""


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """Consecutive steps of one phase (`PREFILL`, `DECODE`, `BATCH_STEP`, or another name).

    Attributes:
        first_step: number of the first of them.
    """

    phase: int
    request: int
    start_ns: int
    end_ns: int
    tokens: int
    first_step: int = -1


class RunHistory:
    """The last runs, in the order they began."""

    def __init__(self) -> None:
        self._runs: deque[PhaseRun] = deque(maxlen=MOST_RUNS)

    def add(self, steps: Records) -> None:
        """Add steps, in order."""
        phases, requests = steps["name"].tolist(), steps["request"].tolist()
        starts, ends, tokens = steps["start_ns"].tolist(), steps["end_ns"].tolist(), steps["tokens"].tolist()
        numbers = steps["step"].tolist()
        for phase, request, start, end, made, number in zip(
            phases, requests, starts, ends, tokens, numbers, strict=True
        ):
            kind = _KIND.get(phase, phase)
            read = made if phase in (PREFILL, DECODE, BATCH_STEP) else 0  # a prompt's tokens count once
            last = self._runs[-1] if self._runs else None
            if last is not None and (last.phase, last.request) == (kind, request) and start - last.end_ns <= _GAP_NS:
                self._runs[-1] = replace(last, end_ns=max(end, last.end_ns), tokens=last.tokens + read)
            else:
                self._runs.append(PhaseRun(kind, request, start, end, read, number))

    def between(self, start_ns: float, end_ns: float) -> list[PhaseRun]:
        found = []
        for run in reversed(self._runs):
            if run.end_ns <= start_ns:
                break
            if run.start_ns < end_ns:
                found.append(run)
        return found[::-1]

    def last_request(self, before_ns: float) -> list[PhaseRun]:
        """Runs of the last request with a decode that began before a moment, up to that decode; empty if none."""
        found: list[PhaseRun] = []
        for run in reversed(self._runs):
            if not found and not (run.phase == DECODE and run.start_ns < before_ns):
                continue
            if found and run.request != found[-1].request:
                break  # step numbers restart with each engine
            found.append(run)
        return found[::-1]

    def copy(self) -> RunHistory:
        """A copy that no longer changes with this one."""
        other = RunHistory()
        other._runs = self._runs.copy()
        return other
