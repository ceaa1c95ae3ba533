"""Runs the parts one after the other, and writes what is known after each: a failure loses nothing before it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_whole
from engine.common.paths import python_module
from engine.common.untrusted import reason

if TYPE_CHECKING:
    import torch

    from engine.devices.device import Device
    from engine.kernels.cuda.driver import Launcher
    from engine.kernels.gpu.stored import CardKernels

Figures = dict[str, Any]
"""Texts, and numbers with their unit at the end of the name."""

REPEATS = 30
_KV_TOKENS = 4096
_IN_GRAPH = 50
"""Launches, one after the other."""


def number_of(device: str) -> int:
    """Of the card that is meant; the first if none is named."""
    _, _, number = device.partition(":")
    return int(number) if number.isdecimal() else 0


def median_seconds(work: Callable[[], object]) -> float:
    spans = []
    for _ in range(REPEATS):
        begun_s = clock.now()
        work()
        spans.append(clock.now() - begun_s)
    return statistics.median(spans)


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    per_token: int


_QWEN = Shape(2048, 32, 4, 128, 128, 8)


def kernels(device: str, _model: str) -> Figures:
    """How long it takes until the card's kernels are compiled and compute rightly, and which ones they are."""
    import torch

    from engine.kernels.gpu.proof import kernels_of, why_not

    place = torch.device("cuda", number_of(device)) if device.startswith("cuda") else torch.device("cpu")
    begun_s = clock.now()
    chosen, refused = kernels_of(place), why_not(place)
    took_s = clock.now() - begun_s
    few = many = "torch's operators"
    if chosen is not None:
        few = f"CUDA C, up to {chosen.most_few} visits"
        many = "CUDA C" if chosen.many is not None else many
    found = {"few visits": few, "many": many, "why no others": refused or "", "until they are proven, s": took_s}
    return found | _attention(place)


def _attention(place: torch.device) -> Figures:
    """Attention of one token after many others, with heads as Qwen3-30B-A3B has them."""
    import torch

    from engine.kernels.gpu.pages import PageTable
    from engine.kernels.gpu.proof import attention_of
    from engine.kernels.native.paged_attention import AttentionTerms, KvType

    kernel = attention_of(place)
    if kernel is None:
        return {"attention": "torch's operators"}
    states = torch.zeros(2, _QWEN.kv_heads, _KV_TOKENS, _QWEN.head_dim, dtype=torch.bfloat16, device=place)
    queries = states.new_zeros(1, 8 * _QWEN.kv_heads, _QWEN.head_dim)
    new, held = states[0, None, :, 0], torch.tensor([_KV_TOKENS - 1], device=place)
    table = PageTable(KvType.BF16, 1, _KV_TOKENS // 32, place)
    table.set_rows(0, list(states))

    def attended() -> None:
        for _ in range(REPEATS):
            kernel.attend(table, AttentionTerms(_QWEN.head_dim**-0.5), queries, new, new, held)
        torch.cuda.synchronize(place)

    try:
        attended()
    except LookupError as error:
        return {"attention": f"torch's operators: {error}"}
    return {
        "attention": "a kernel",
        f"attention after {_KV_TOKENS:,}, us": 1e6 * median_seconds(attended) / REPEATS,
    }


def between(device: str, _model: str) -> Figures:
    """What stands between products: each by its kernel and by torch's operators, one after the other in a graph."""
    import torch

    from engine.devices.opening import open_devices
    from engine.kernels.cuda.driver import card_of
    from engine.kernels.gpu.proof import kernels_of

    found: Figures = {}
    with open_devices(device)[0] as opened, torch.inference_mode():
        place = opened.torch_device
        if opened.new_capture is None:
            return {"graphs": "this device captures none"}
        for name, own, operators in works(_QWEN, place, card_of(place), kernels_of(place)):
            if own is not None:
                found[f"{name}, us"] = 1e6 * _seconds_in_graph(opened, own)
            found[f"{name} by operators, us"] = 1e6 * _seconds_in_graph(opened, operators)
    return found


def _seconds_in_graph(device: Device, work: Callable[[], object]) -> float:
    assert device.new_capture is not None
    work()  # compiles, and allocates what stays
    capture = device.new_capture()
    try:
        capture.begin()
        for _ in range(_IN_GRAPH):
            work()
        graph = capture.end()

        def replayed() -> None:
            graph.replay()
            device.synchronize()

        return median_seconds(replayed) / _IN_GRAPH
    finally:
        capture.close()


Work = Callable[[], "tuple[torch.Tensor, ...]"]


def works(
    shape: Shape, place: torch.device, card: Launcher | None, kernels: CardKernels | None
) -> Iterator[tuple[str, Work | None, Work]]:
    """(name, by its kernel, by torch's operators) of what a layer does besides products of one matrix.

    Args:
        card: `None`: it has no kernels.
        kernels: its products.
    """
    import torch

    from engine.formats.int4 import INT4
    from engine.kernels.gpu.linear import CardLinear, JoinedLinears
    from engine.kernels.gpu.modules import CudaNorm, NormForm
    from engine.kernels.gpu.rotations import CudaRotary, HeadNorms, RotaryForm
    from engine.kernels.gpu.routers import CudaRouter, Routing
    from engine.kernels.repack import quantise

    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(place, torch.bfloat16)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    x, more, weight = drawn(1, shape.hidden), drawn(1, shape.hidden), drawn(shape.hidden)
    norm = CudaNorm(card).add if card is not None else None

    def sum_by_operators() -> tuple[torch.Tensor, ...]:
        both = x + more
        return both, normed(both, weight)

    own_sum = None if norm is None else lambda: norm(x, more, weight, 1e-6, NormForm())
    yield "residual sum and norm", own_sum, sum_by_operators

    q, k = (drawn(1, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads))
    of_q, of_k, angles = drawn(shape.head_dim), drawn(shape.head_dim), drawn(1, shape.head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    rotary, form = CudaRotary(card) if card is not None else None, RotaryForm(False, 1, 2, False)
    norms = HeadNorms(of_q, of_k, 1e-6, 0.0, rounds_once=False, all_heads=False)

    def rotated(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states = normed(states, weight)
        first, second = states.chunk(2, -1)
        return states * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    own_rotation = None if rotary is None else lambda: rotary(q, k, cos, sin, form, norms)
    yield "head norms and rotation", own_rotation, lambda: (rotated(q, of_q), rotated(k, of_k))

    router_weight = drawn(shape.experts, shape.hidden)
    how = Routing(shape.per_token, normalises=True, rounds_shares=True)
    router = CudaRouter(card) if card is not None else None

    def routed() -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(x, router_weight)

        shares, ids = logits.float().softmax(-1).topk(shape.per_token)
        return logits, (shares / shares.sum(-1, keepdim=True)).to(x.dtype), ids

    yield "router", None if router is None else lambda: router(x, router_weight, how), routed

    if kernels is None:
        return
    rows = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    matrices = [quantise(drawn(each, shape.hidden).cpu(), INT4) for each in rows]
    joined = JoinedLinears(matrices, [None] * 3, place, kernels)
    alone = [CardLinear(each, None, place, kernels) for each in matrices]
    yield (
        "queries, keys and values in int4, one launch",
        lambda: tuple(forward(x) for forward in joined.forwards),
        lambda: tuple(forward(x) for forward in alone),
    )


MODEL = "synthetic:qwen3-30b-a3b?layers=8&vocab=4096"
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run.

    Attributes:
        title: for people.
        name: of the function in `parts`; `tests` runs the tests of cards.
        limit_s: after which it is ended.
        is_fresh: whether nothing that earlier parts have kept may be used.
    """

    title: str
    name: str
    limit_s: float
    is_fresh: bool = False


TESTS = "tests"
ALL = (
    Part("Versions", "machine", 120),
    Part("Kernels, for the first time", "kernels", 240, is_fresh=True),
    Part("Kernels, once they are kept", "kernels", 120),
    Part("Tests on the card", TESTS, 240),
    Part("What stands between products", "between", 120),
    Part("Link and launches", "link", 120),
    Part("Experts as the dispatcher measures them", "experts", 180),
    Part("Decoding, all experts on the card", "resident", 180),
    Part("Decoding, half of the experts on the card", "mixed", 180),
    Part("Decoding, the other half on the CPU", "on_cpu", 180),
    Part("Tokens that the card runs by itself", "tokens", 180),
    Part("Decoding, the other half fetched", "fetched", 180),
    Part("Reading a prompt", "prompt", 180),
    Part("What a token asks of the card", "profile", 180),
)
"""In this order: what later ones need, earlier ones prove."""

Run = Callable[[Sequence[str], float, dict[str, str]], tuple[int, str, str]]
"""(exit code, output, errors) of a command within so many seconds; TimeoutError after them."""


def bench_card(
    device: str,
    model: str,
    folder: Path,
    say: Callable[[str], None],
    *,
    parts: Sequence[Part] = ALL,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measures a card and writes `DATE-CARD.json` and `.md` into `folder`, again after each part.

    Args:
        device: `cuda`, `cuda:1`, or an emulated one, to see what it does.
        run: runs a command; for tests.

    Returns:
        What was written.
    """
    run = run or _run
    begun = datetime.now(UTC)
    document: dict[str, Any] = {
        "date": begun.isoformat(timespec="seconds"),
        "device": device,
        "model": model,
        "parts": [],
    }
    with tempfile.TemporaryDirectory(prefix="switchyard-card-") as home:
        for part in parts:
            say(f"{part.title} ...")
            done = _done(part, device, model, Path(home), run)
            document["parts"].append(done)
            document.setdefault("card", device)
            document["card"] = done["figures"].get("card", document["card"])
            _write(document, folder, begun)
            say(f"  {done['outcome']}{': ' + done['why'] if done['why'] else ''}")
            for name, value in done["figures"].items():
                say(f"  {name}: {_shown(value)}")
    return document


def _done(part: Part, device: str, model: str, home: Path, run: Run) -> dict[str, Any]:
    command, variables = python_module("engine.bench.card.parts")
    command = [*command, part.name, device, model]
    if part.name == TESTS:
        root = Path(__file__).resolve().parents[3]
        if not (root / "tests" / "gpu").is_dir() or not device.startswith("cuda"):
            why = "this is no checkout" if device.startswith("cuda") else "they are for real cards"
            return _outcome(part, "skipped", 0.0, why)
        command, variables = [sys.executable, "-m", "pytest", "-q", "--no-header", str(root / "tests" / "gpu")], {}
    if part.name == "kernels":  # twice the same home: what the first one compiles, the second one finds
        variables = {**variables, "SWITCHYARD_HOME": str(home)}
    begun_s = time.monotonic()
    try:
        code, out, errors = run(command, part.limit_s, variables)
    except TimeoutError:
        return _outcome(part, "ended", time.monotonic() - begun_s, f"it took longer than {part.limit_s:.0f} s")
    except OSError as error:
        return _outcome(part, "failed", time.monotonic() - begun_s, reason(error))
    took_s = time.monotonic() - begun_s
    if part.name == TESTS:
        counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", out)}
        return _outcome(part, "done" if code == 0 else "failed", took_s, "" if code == 0 else _last(out), counts)
    try:
        figures = json.loads(out.strip().splitlines()[-1]) if code == 0 else {}
    except (ValueError, IndexError):
        code, figures = 1, {}
    return _outcome(part, "done" if code == 0 else "failed", took_s, "" if code == 0 else _last(errors), figures)


def _outcome(
    part: Part, outcome: str, took_s: float, why: str = "", figures: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "part": part.name,
        "title": part.title,
        "outcome": outcome,
        "seconds": round(took_s, 1),
        "why": why,
        "figures": figures or {},
    }


def _last(text: str) -> str:
    """The last line that says something, which is that of the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LAST_WORDS] if lines else "it said nothing"


def _write(document: dict[str, Any], folder: Path, begun: datetime) -> None:
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(document["card"])).strip("-").lower()[:60]
    path = folder / f"{begun:%Y-%m-%d-%H%M%S}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{begun:%Y-%m-%d-%H%M%S}-*"):
            if old.stem != path.name:  # the card's name was not known yet
                old.unlink()
        write_whole(path.with_name(f"{path.name}.json"), json.dumps(document, indent=1) + "\n")
        write_whole(path.with_name(f"{path.name}.md"), as_markdown(document))
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{folder} cannot be written to ({reason(error)}): choose another folder with --folder.",
        ) from error


def as_markdown(document: dict[str, Any]) -> str:
    """A page with a table for people."""
    lines = [
        f"# {document['card']}",
        "",
        f"{document['date']}, device {document['device']}, `{document['model']}` in int4.",
        "Made by `switchyard bench card`.",
        "",
        "| part | figure | value |",
        "|---|---|---|",
    ]
    for done in document["parts"]:
        outcome = done["outcome"] + (f": {done['why']}" if done["why"] else f" in {done['seconds']:.0f} s")
        lines.append(f"| {done['title']} | | {outcome.replace('|', '/')} |")
        lines += [f"| | {name} | {_shown(value)} |" for name, value in done["figures"].items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/")


def _run(command: Sequence[str], limit_s: float, variables: dict[str, str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **variables},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError from late
    return done.returncode, done.stdout, done.stderr
