"""`switchyard bench cluster`: rows of a job on one node of a Ray cluster against several, each on a core of its own.

All nodes are on this machine, which bounds what they can gain: they share its memory, and its cores do what Ray and the
program that asks do, too.  So as many engines without Ray, each on its core, are measured against one as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.local_ray import LocalRay
from engine.batch_files.rows import Answer, RowRequest
from engine.bench.report import Report, in_turn, there_and_back
from engine.checkpoint.shards import content_digest
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module
from engine.jobs.rows import BatchOutcome, never
from engine.process.ray_driver import INSTALL
from engine.protocol import ClusterEvent, ClusterJob, ClusterNodes
from engine.remote.ray_rows import Link, RayLink, RayRows

_MEMORY = 4 * 10**9
_WARM_ROWS = 32
_WITHOUT = 3
"""Most repeats without a cluster: the engines load for each."""
_TOPICS = ("a river", "a bridge", "the night sky", "bread", "a lighthouse", "chess", "an orchard", "snow")


@dataclass(frozen=True, slots=True)
class RealClusterPlan:
    """What to run: `rows` for one node, and as many for several, of `tokens` each at most; in turn, `repeats` times."""

    nodes: int
    rows: int
    tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that were answered.

    Attributes:
        engines_s, others_s: processor time of the engines, and of Ray and of who asks.
    """

    rows: int
    tokens: int
    seconds: float
    engines_s: float
    others_s: float

    @property
    def rate(self) -> float:
        return self.rows / self.seconds


class _FewNodes:
    """A link that shows only the first nodes of a cluster."""

    def __init__(self, link: Link, nodes: set[str]) -> None:
        self._link, self._nodes = link, nodes
        self.send, self.close = link.send, link.close

    def events(self, wait_s: float) -> list[ClusterEvent]:
        return [
            ClusterNodes(tuple(each for each in event.nodes if each.ident in self._nodes))
            if isinstance(event, ClusterNodes)
            else event
            for event in self._link.events(wait_s)
        ]


class _OnNodes:
    """Answers rows on the first nodes of a cluster."""

    def __init__(self, ray: LocalRay, asked: ClusterJob, nodes: int) -> None:
        known = {node.ident for node in ray.nodes[:nodes]}
        self._ray, self._nodes = ray, nodes
        self.rows = RayRows(ray.address, asked, lambda address: _FewNodes(RayLink(address), known))

    def warm(self) -> None:
        """Until all of them answer."""
        self.rows.open(never)
        while True:
            self.run(_WARM_ROWS, 4, seed=-1)
            states = [place.state for place in self.rows.places]
            if states.count("working") == self._nodes:
                return
            if "out" in states:
                raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, self.rows.note)

    def run(self, count: int, tokens: int, seed: int) -> _Run:
        answers = list[Answer]()
        before, begun_s = self._processor_s(), time.perf_counter()
        outcome = self.rows.run(iter(requests(count, tokens, seed)), answers.append, never, never)
        took_s, after = time.perf_counter() - begun_s, self._processor_s()
        failed = next((answer.problem for answer in answers if answer.failed), "")
        if outcome is not BatchOutcome.FINISHED or failed:
            raise EngineError(ErrorCode.INTERNAL, f"Rows were not answered: {failed or outcome}.")
        generated = sum(answer.generated_tokens for answer in answers)
        return _Run(count, generated, took_s, after[0] - before[0], after[1] - before[1])

    def _processor_s(self) -> tuple[float, float]:
        """Of the engines, and of all else that belongs to the cluster, this process among it."""
        engines, others = 0.0, sum(psutil.Process().cpu_times()[:2])
        own = set(self._ray.engines())
        for process in self._ray.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                if process.pid in own:
                    engines += times.user + times.system
                else:
                    others += times.user + times.system
        return engines, others


def requests(count: int, tokens: int, seed: int) -> Iterator[RowRequest]:
    """Rows that no other seed has, so that no prompt is known from an earlier run."""
    sampling = SamplingParams(max_tokens=tokens)
    for number in range(count):
        topic = _TOPICS[number % len(_TOPICS)]
        text = f"{seed}.{number}: write what somebody who has never seen {topic} ought to know about it, and why."
        yield RowRequest(number, (ChatMessage("user", text),), sampling)


def bench_real_cluster(config: EngineConfig, plan: RealClusterPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: rows per second of one node and of several, and of as many engines without a cluster."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < plan.nodes:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{plan.nodes} nodes need a core each, and {len(cores)} can be given to them here: use --nodes with fewer.",
        )
    try:
        import ray  # noqa: F401
    except ImportError:
        why = f"Ray is not installed: run {INSTALL}."
        raise EngineError(ErrorCode.INVALID_REQUEST, why) from None
    config = replace(config, device="cpu", threads=1)
    with_ray, limits = _with_ray(config, plan, cores, report, say), _without(config, plan, cores, report, say)
    one, several = ([run.rate for run in runs] for runs in with_ray)
    alone, together = limits
    name = f"{plan.rows:,} rows of {plan.tokens} tokens"
    report.add(f"{name}: {plan.nodes} nodes", several, "rows/s", peer="one node", peer_values=one)
    title = f"{name}: {plan.nodes} engines without a cluster"
    report.add(title, together, "rows/s", peer="one engine", peer_values=alone)
    for what, runs in zip(("one node", f"{plan.nodes} nodes"), with_ray, strict=True):
        share = [run.others_s / run.seconds for run in runs]
        report.add(f"{name}: processor time of Ray and of who asks, {what}", share, "cores")


def _with_ray(
    config: EngineConfig, plan: RealClusterPlan, cores: list[int], report: Report, say: Callable[[str], None]
) -> tuple[list[_Run], ...]:
    """One node and several, in turn."""
    sample = tuple((0.1, each) for each in requests(_WARM_ROWS, plan.tokens, -1))
    digest = content_digest(Path(config.model))
    asked = ClusterJob((config.model,), digest, config, BatchJob("rows", "answers", ray="auto"), sample)
    with contextlib.ExitStack() as held:
        ray = LocalRay()
        held.callback(ray.close)
        for core in cores[: plan.nodes]:
            ray.add(2, _MEMORY, core)
        held.enter_context(_environment(ray.environment))
        one, several = _OnNodes(ray, asked, 1), _OnNodes(ray, asked, plan.nodes)
        held.callback(one.rows.close)
        held.callback(several.rows.close)
        for each in (one, several):
            say("warm-up: the engines load")
            each.warm()

        def run(nodes: _OnNodes, repeat: int) -> _Run:
            done = nodes.run(plan.rows, plan.tokens, repeat)
            say(
                f"  {done.rate:.2f} rows/s, {done.seconds:.1f} s, {done.tokens:,} tokens, engines "
                f"{done.engines_s / done.seconds:.2f} cores, others {done.others_s / done.seconds:.2f}"
            )
            return done

        turns = {"one node": partial(run, one), f"{plan.nodes} nodes": partial(run, several)}
        return tuple(in_turn(turns, plan.repeats, report, say, warm_ups=0, order=there_and_back).values())


def _without(
    config: EngineConfig, plan: RealClusterPlan, cores: list[int], report: Report, say: Callable[[str], None]
) -> tuple[list[float], ...]:
    """(rows per second of one `switchyard batch` on a core, and of several at once together), in turn."""
    with TemporaryDirectory() as folder:

        def run(count: int, repeat: int) -> float:
            return sum(_batches(config, plan, cores[:count], Path(folder), repeat))

        turns = {"one engine": partial(run, 1), f"{plan.nodes} engines": partial(run, plan.nodes)}
        repeats = min(_WITHOUT, plan.repeats)
        return tuple(in_turn(turns, repeats, report, say, warm_ups=0, what="without a cluster").values())


def _batches(config: EngineConfig, plan: RealClusterPlan, cores: list[int], folder: Path, repeat: int) -> list[float]:
    """Rows per second of each; all of them do the same."""
    each = max(1, plan.rows // plan.nodes)
    rows = folder / "rows.jsonl"
    texts = (request.messages[0].content for request in requests(each, plan.tokens, repeat))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command, extra = python_module("engine.cli")
    words = ["batch", str(rows), "--json", "--restart", "--model", config.model, "--device", "cpu", "--threads", "1"]
    words += ["--precision", config.precision, "--max-tokens", str(plan.tokens)]
    begun = []
    for core in cores:
        begun.append(
            subprocess.Popen(
                [*command, *words, "-o", str(folder / f"answers-{core}.jsonl")],
                env={**os.environ, **extra},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        os.sched_setaffinity(begun[-1].pid, {core})
    rates = []
    for process in begun:
        said, _ = process.communicate()
        if process.returncode:
            raise EngineError(ErrorCode.INTERNAL, f"switchyard batch ended with {process.returncode}.")
        rates.append(each / json.loads(said)["computing_seconds"])
    return rates


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """For the processes that are begun within."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
