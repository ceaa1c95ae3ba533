"""`switchyard bench serve`: our server, and llama.cpp's beside it, with the same weights under the same load, in turn.

Clients that ask again as soon as they are answered show how much a server gets done; questions that arrive whether or
not those before are answered show how long people wait.  Each server answers alone: the other one has nothing to do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.gguf import gguf_of, texts_of
from benchmarks.peers.editions import HOW_TO_BUILD, LLAMA_CPP, Flags
from benchmarks.serving_load import Asked, Load, Question, closed_loop, open_loop
from engine.bench.report import Report, in_turn, there_and_back
from engine.checkpoint.gguf.export import Quantisation
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module

_STARTS_S = 180.0
_SHARES = (0.3, 0.6, 0.9)
"""Of the questions that the slower server answers in a second when all clients ask: the rates at which they arrive."""
_SPARE = 32
_TRIES, _TRIED = 8, 12
"""Questions, and tokens of each answer, with which each of the peer's flags is tried."""
PEER = "llama.cpp's server"


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What to run.

    Attributes:
        clients: how many ask at once, a load for each.
        rates: questions that arrive in a second, a load for each; `None`: shares of what the slower server gets done.
        questions: for each load, the list again and again, each time with another number before it.
        per_load: how many.
        threads: of each server; `None`: each processor has one.
        peers: whether llama.cpp's server answers as well.
    """

    clients: tuple[int, ...]
    rates: tuple[float, ...] | None
    questions: Sequence[Asked]
    per_load: int
    repeats: int
    threads: int | None = None
    peers: bool = False


@dataclass(frozen=True, slots=True)
class _Contestant:
    name: str
    url: str


def bench_serving(model: Path, plan: ServingPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: generated tokens per second and the 95th percentile of the first token's wait, for each load.

    Args:
        model: a GGUF file, or a checkpoint, of which one in 8 bits is written first.
    """
    texts = ("-texts", texts_of(model))
    file = gguf_of(model, Quantisation.Q8_0, say, texts)
    with ExitStack() as running:
        say("starting our server")
        ours = running.enter_context(_ours(file, plan))
        asked = _Numbered(ours.url, plan)
        contestants = [ours]
        if plan.peers and not LLAMA_CPP.server().is_file():
            report.skip_peer(PEER, f"it is not built: run {HOW_TO_BUILD} --server")
        elif plan.peers:
            flags = _fastest(file, plan, asked, say)
            contestants.append(running.enter_context(_theirs(file, plan, asked.longest, flags)))
        for each in contestants:
            closed_loop(each.url, asked.next_ones(2), 2)
        slowest = float("inf")
        bench = _InTurn(contestants, plan, asked, report, say)
        for clients in plan.clients:
            name = f"{clients} client{'s' * (clients > 1)}"
            loads = bench.run(name, partial(closed_loop, clients=clients))
            done = (len(load.answers) / load.seconds for of_one in loads.values() for load in of_one)
            slowest = min(slowest, *done) if clients == max(plan.clients) else slowest
        rates = plan.rates if plan.rates is not None else tuple(round(share * slowest, 2) for share in _SHARES)
        for number, rate in enumerate(rates):
            bench.run(f"{rate:g} questions/s", partial(open_loop, per_s=rate, seed=number))


@dataclass(frozen=True, slots=True)
class _InTurn:
    contestants: Sequence[_Contestant]
    plan: ServingPlan
    asked: _Numbered
    report: Report
    say: Callable[[str], None]

    def run(self, name: str, work: Callable[[str, list[Question]], Load]) -> dict[str, list[Load]]:
        """All repeats of one load, and its rows; all contestants are asked the same, each time another one first."""
        questions = [self.asked.next_ones(self.plan.per_load) for _ in range(self.plan.repeats)]

        def load(url: str, repeat: int) -> Load:
            return work(url, questions[repeat - 1])

        turns = {each.name: partial(load, each.url) for each in self.contestants}
        loads = in_turn(turns, self.plan.repeats, self.report, self.say, warm_ups=0, what=name, order=there_and_back)
        self._add(
            f"{name}: generated", "tokens/s", [[load.tokens_per_s for load in of_one] for of_one in loads.values()]
        )
        waits = [[1000 * load.first_p95_s for load in of_one] for of_one in loads.values()]
        self._add(f"{name}: first token, 95th percentile", "ms", waits)
        return loads

    def _add(self, name: str, unit: str, values: list[list[float]]) -> None:
        ours, *others = values
        peer, peer_values = (self.contestants[1].name, others[0]) if others else (None, None)
        added = self.report.add(name, ours, unit, peer=peer, peer_values=peer_values, higher_is_better=unit != "ms")
        beside = f", {peer} {added.peer_value:.1f}" if added.peer_value is not None else ""
        self.say(f"  {name}: {added.value:.1f} {unit}{beside}")


class _Numbered:
    """The questions as tokens; each begins with a number of its own, so that none was read before."""

    def __init__(self, url: str, plan: ServingPlan) -> None:
        self._tokens = [
            (_post(f"{url}/tokenize", {"content": each.text})["tokens"], each.tokens) for each in plan.questions
        ]
        self._url, self._number = url, 0
        self.longest = max(len(prompt) + tokens for prompt, tokens in self._tokens) + _SPARE

    def next_ones(self, count: int, most_tokens: int | None = None) -> list[Question]:
        """The next so many; with answers of so many tokens at most."""
        found = []
        for _ in range(count):
            prompt, tokens = self._tokens[self._number % len(self._tokens)]
            self._number += 1
            before = _post(f"{self._url}/tokenize", {"content": f"{self._number}. "})["tokens"]
            found.append(Question((*before, *prompt), min(tokens, most_tokens or tokens)))
        return found


@contextmanager
def _ours(file: Path, plan: ServingPlan) -> Iterator[_Contestant]:
    command, variables = python_module("engine.cli")
    command += ["serve", "--model", str(file), "--port", "0", "--json", "--speculation", "off"]
    command += ["--threads", str(plan.threads)] if plan.threads else []
    with _process(command, variables, subprocess.PIPE) as process:
        assert process.stdout is not None
        text = ""
        while (line := process.stdout.readline()) and line != "}\n":
            text += line
        if not line:
            raise EngineError(ErrorCode.INTERNAL, "Our server did not start: run switchyard serve to see why.")
        url = json.loads(text + line)["url"]
        _post(f"{url}/tokenize", {"content": "Hello"})  # once it is loaded
        yield _Contestant("ours", url)


def _fastest(file: Path, plan: ServingPlan, asked: _Numbered, say: Callable[[str], None]) -> Flags:
    """The flags with which their server gets most done, of those that the other benches try too."""
    rates = {}
    for flags in LLAMA_CPP.flags:
        with _theirs(file, plan, asked.longest, flags) as peer:
            closed_loop(peer.url, asked.next_ones(1, _TRIED), 1)
            rates[flags] = closed_loop(peer.url, asked.next_ones(_TRIES, _TRIED), _TRIES).tokens_per_s
        say(f"{peer.name}: {rates[flags]:.1f} tokens/s")
    return max(rates, key=rates.__getitem__)


@contextmanager
def _theirs(file: Path, plan: ServingPlan, longest: int, flags: Flags) -> Iterator[_Contestant]:
    """With a place for each client, and all of the processors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places, threads = max([*plan.clients, 16]), plan.threads or os.cpu_count() or 1
    command = [str(LLAMA_CPP.server()), "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(places), "--ctx-size", str(places * longest), "--threads", str(threads)]
    command += ["--threads-batch", str(threads), "--cache-ram", "0", *flags.words.split()]
    with _process(command, {}, subprocess.DEVNULL) as process:
        url, begun_s = f"http://127.0.0.1:{port}", time.monotonic()
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() - begun_s > _STARTS_S:
                raise EngineError(ErrorCode.INTERNAL, f"{PEER} did not start with {file}.")
            time.sleep(0.1)
        yield _Contestant(f"{PEER}, {flags.words}", url)


@contextmanager
def _process(command: list[str], variables: dict[str, str], said: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdout=said, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **variables}
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _post(url: str, body: dict[str, object]) -> dict[str, list[int]]:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_STARTS_S) as answer:
            found: dict[str, list[int]] = json.loads(answer.read())
            return found
    except (URLError, OSError, ValueError) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The server at {url} did not answer: {error}.") from error
