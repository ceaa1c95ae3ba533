"""`switchyard plan`: how a model would be run on a machine, what it would take, how fast it would be.

`models fit` asks the same: the machine and the workload that are meant, and a plan in words.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.formats import AUTO, LADDER, STORED
from engine.verbs.options import add_settings, amount, engine_settings, positive_int, time_span, two_prices
from engine.verbs.output import emit

if TYPE_CHECKING:
    from engine.checkpoint.model_shape import ModelShape
    from engine.planner.plan import Limits, Plan
    from engine.planner.plan_parts import Speed, TierBytes, Workload
    from engine.tuning.machine_state import MachineLook


HOUR_S, DAY_S = 3600.0, 86400.0
MOST_PCS = 8
"""More PCs than this are a cluster's work: somebody would have to look after them."""
LONGEST_S = 30 * DAY_S
"""A job that takes longer on one PC is not sensible there, whatever it costs."""
_MUCH = 1.5
"""A smaller difference of two costs is called about the same."""


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """A job and what it may take.

    Attributes:
        rows: of the input.
        prompt_tokens, generated_tokens: of each row.
        deadline_s: when it has to be done; None if there is no hurry.
    """

    rows: int
    prompt_tokens: float
    generated_tokens: float
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "generated_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if self.prompt_tokens < 0 or (self.deadline_s is not None and not self.deadline_s > 0):
            raise ValueError("prompt_tokens must not be negative, and a deadline must be above 0")


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost; None where it is not known.

    Attributes:
        watts: of the PC while it answers, at the socket.
        per_kwh: of electricity.
        per_million_read, per_million_written: tokens of an endpoint.
        endpoint_tokens_per_s: that an endpoint was measured to write for this job.
        currency: of all prices.
    """

    watts: float | None = None
    per_kwh: float | None = None
    per_million_read: float | None = None
    per_million_written: float | None = None
    endpoint_tokens_per_s: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        values = (self.watts, self.per_kwh, self.per_million_read, self.per_million_written, self.endpoint_tokens_per_s)
        if any(value is not None and not 0 <= value < math.inf for value in values):
            raise ValueError("prices, watts and speeds must not be negative")


@dataclass(frozen=True, slots=True)
class BeyondOnePc:
    """What a job takes on this PC and elsewhere.

    Attributes:
        seconds, kwh, cost: on this PC; energy and cost are None if watts or a price are not known.
        joules_per_token: for each token written.
        pcs: PCs like this one that would meet the deadline; 1 if this one does, or if there is none.
        endpoint_s, endpoint_cost: of the endpoint; None if not known.
        is_sensible: whether one PC is the place for it.
        sentence: all this for people.
    """

    seconds: float
    kwh: float | None
    joules_per_token: float | None
    cost: float | None
    pcs: int
    endpoint_s: float | None
    endpoint_cost: float | None
    is_sensible: bool
    sentence: str


def beyond_one_pc(needs: JobNeeds, tokens_per_s: float, prices: Prices = Prices()) -> BeyondOnePc:
    """Compares this PC with several and with an endpoint.

    Args:
        tokens_per_s: written tokens over the whole time of a batch job on this PC, reading prompts included: planned or
            measured.

    Raises:
        ValueError: the speed is not above 0.
    """
    if not 0 < tokens_per_s < math.inf:
        raise ValueError("the speed must be above 0")
    written, read = needs.rows * needs.generated_tokens, needs.rows * needs.prompt_tokens
    seconds = written / tokens_per_s
    kwh = None if prices.watts is None else prices.watts * seconds / 3.6e6
    cost = None if kwh is None or prices.per_kwh is None else kwh * prices.per_kwh
    joules = None if prices.watts is None else prices.watts / tokens_per_s
    pcs = 1 if needs.deadline_s is None else max(1, math.ceil(seconds / needs.deadline_s - 1e-9))
    there_s = written / prices.endpoint_tokens_per_s if prices.endpoint_tokens_per_s else None
    there = None
    if prices.per_million_written is not None or prices.per_million_read is not None:
        there = (read * (prices.per_million_read or 0.0) + written * (prices.per_million_written or 0.0)) / 1e6
    too_dear = cost is not None and there is not None and cost > _MUCH * there
    is_sensible = pcs == 1 and seconds <= LONGEST_S and not too_dear
    told = BeyondOnePc(seconds, kwh, joules, cost, pcs, there_s, there, is_sensible, "")
    sentence = " ".join(filter(None, (_here(needs, told, prices), _hurry(needs, told), _elsewhere(told, prices))))
    return BeyondOnePc(seconds, kwh, joules, cost, pcs, there_s, there, is_sensible, sentence)


def _here(needs: JobNeeds, told: BeyondOnePc, prices: Prices) -> str:
    rows = "1 row" if needs.rows == 1 else f"{needs.rows:,} rows"
    said = f"This PC answers {rows} in {span(told.seconds)}"
    if told.kwh is None or told.joules_per_token is None:
        return f"{said}."
    power = f"{_number(told.kwh)} kWh" if told.kwh >= 0.1 else f"{_number(1000 * told.kwh)} Wh"
    cost = f", {_money(told.cost, prices)}" if told.cost is not None else ""
    return f"{said}, with {power} ({_number(told.joules_per_token)} J per token{cost})."


def _hurry(needs: JobNeeds, told: BeyondOnePc) -> str:
    if needs.deadline_s is not None:
        limit = span(needs.deadline_s)
        if told.pcs == 1:
            return f"That is within {limit}: one PC is enough."
        if told.pcs <= MOST_PCS:
            return f"To be done within {limit}, {told.pcs} PCs like it have to share the rows: endpoints, or Ray."
        return (
            f"To be done within {limit} it would take {told.pcs:,} PCs like it: "
            "that is work for a server with large graphics cards, or for a cluster."
        )
    if told.seconds > LONGEST_S:
        return "That is more than a month: one PC is not the place for it."
    return ""


def _elsewhere(told: BeyondOnePc, prices: Prices) -> str:
    parts = []
    if told.endpoint_s is not None:
        faster = told.seconds / told.endpoint_s
        pace = f"{_number(faster)} times as fast" if faster >= 1 else f"{_number(1 / faster)} times slower"
        parts.append(f"takes {span(told.endpoint_s)}, {pace}")
    if told.endpoint_cost is not None:
        parts.append(f"costs {_money(told.endpoint_cost, prices)}")
    if not parts:
        return ""
    said = f"The endpoint {' and '.join(parts)}"
    if told.endpoint_cost is None or told.cost is None:
        return f"{said}."
    if told.cost > _MUCH * told.endpoint_cost:
        return f"{said}: less than the electricity here."
    if told.endpoint_cost > _MUCH * told.cost:
        return f"{said}: more than the electricity here, which is what running on this PC costs if you own it anyway."
    return f"{said}: about as much as the electricity here."


def _money(amount: float | None, prices: Prices) -> str:
    assert amount is not None
    text = f"{amount:,.2f}" if amount >= 0.005 else "less than 0.01"
    return f"{text} {prices.currency}".strip()


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(seconds: float) -> str:
    """A time for people: `40 s`, `12 min`, `5.5 h`, `3.2 days`."""
    for unit, length, most in (("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", HOUR_S, 2 * DAY_S)):
        if seconds < most:
            amount = seconds / length
            return f"{amount:.0f} {unit}" if unit != "h" or amount >= 10 else f"{amount:.1f} {unit}"
    return f"{seconds / DAY_S:,.1f} days" if seconds < 100 * DAY_S else f"{seconds / DAY_S:,.0f} days"


_ALIKE = 0.1
"""Deviations below this are not mentioned."""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add `--hardware`, `--workload` and the limits."""
    parser.add_argument(
        "--hardware", metavar="P", help="a machine: a name in resources/machines, or a JSON file (default: this one)"
    )
    add_limit_options(parser)
    parser.add_argument(
        "--workload",
        default="chat",
        metavar="W",
        help="chat, long-prefill, beam, batch, or PROMPTxGENERATED[xSEQUENCES[xBEAMS]] (default: chat)",
    )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add what bounds the memory and names the context and the precision."""
    parser.add_argument(
        "--precision",
        choices=[AUTO, STORED, *LADDER],
        default=AUTO,
        help="of the experts; stored: as they are in the files",
    )
    limits = ("device", "vram_bytes", "ram_bytes", "threads", "context_tokens", "kv_precision")
    add_settings(parser, engine_settings(*limits))


def asked_limits(args: argparse.Namespace) -> Limits:
    """The limits that the options of `add_plan_options` set."""
    from engine.planner.plan import Limits

    return Limits(
        vram_bytes=args.vram_bytes,
        ram_bytes=args.ram_bytes,
        threads=args.threads,
        context_tokens=args.context_tokens,
        precision=args.precision,
        use_card=args.device != "cpu",
        kv_precision=args.kv_precision,
    )


def this_machine(limits: Limits, device: str = "auto") -> tuple[MachineLook, Limits]:
    """(this machine with a device, what other programs leave of the limits)."""
    from engine.tuning.machine_state import look_at_machine

    look = look_at_machine(device if limits.use_card else "cpu")
    left = look.limits(EngineConfig(""))
    others = ("vram_of_others", "ram_of_others", "cpu_of_others")
    return look, replace(limits, **{name: getattr(left, name) for name in others})


def workload_of(args: argparse.Namespace) -> Workload:
    from engine.planner.plan_parts import parse_workload

    try:
        return parse_workload(args.workload)
    except ValueError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{error}.") from None


def plan_of(args: argparse.Namespace, model: ModelShape, workload: Workload) -> Plan:
    """The requested plan; on this machine corrected by timings of this model, as in Tune."""
    from engine.planner.batch_plan import read_policy
    from engine.planner.plan import make_plan
    from engine.planner.plan_parts import CHAT

    given = read_policy(args.policy) if getattr(args, "policy", None) else None
    if args.hardware:
        from engine.hardware.machine import read_machine

        return make_plan(read_machine(args.hardware), model, workload, asked_limits(args), given=given)
    from engine.tuning.known_speed import corrected_plan
    from engine.tuning.machine_state import corrections_here, plan_here

    look, limits = this_machine(asked_limits(args), args.device)
    if workload != CHAT:  # only chats are timed
        is_measured = look.measurements is not None
        plan = make_plan(look.profile, model, workload, limits, measured=is_measured, given=given)
        return corrected_plan(plan, corrections_here(look, args.model))
    asked = EngineConfig(
        args.model,
        args.device,
        vram_bytes=args.vram_bytes,
        ram_bytes=args.ram_bytes,
        context_tokens=args.context_tokens,
        kv_precision=args.kv_precision,
    )
    return plan_here(look, model, asked, limits)


def timing_text(speed: Speed) -> str:
    """The origin of a measured speed, and why it differs from the prediction; empty if predicted."""
    if not speed.timed_at:
        return ""
    said = f"Measured here, with real tokens, on {speed.timed_at[:10]}"
    off = speed.predicted / speed.decode_tokens_per_s - 1 if speed.decode_tokens_per_s else 0.0
    if not speed.predicted or abs(off) < _ALIKE:
        return f"{said}."
    why = (
        f"{off:.0%} too high: a prediction adds up what memory and processor can do, and leaves out what the engine "
        "does in between"
        if off > 0
        else f"{-off:.0%} too low: a prediction adds up what memory and processor were measured to do one by one, and "
        "together they do better"
    )
    return f"{said}, which is the figure to go by. {speed.predicted:.3g} had been predicted, {why}."


def plan_text(plan: Plan) -> str:
    from engine.planner.plan_words import picture_words

    work, speed, cache = plan.workload, plan.speed, plan.cache
    lines = [
        f"{plan.model} on {plan.machine}, {work.name}: {work.sequences} x {work.prompt_tokens} tokens read, "
        f"{work.generated_tokens} written" + (f", {work.beams} beams" if work.beams > 1 else ""),
        f"{plan.policy}, {plan.words(plan.precision)}, {plan.threads} threads: {speed.decode_tokens_per_s:.3g} steps/s "
        f"({speed.low:.3g} to {speed.high:.3g}), first token after {_seconds(speed.ttft_s)} s, "
        f"{speed.tokens_per_s:.3g} tokens/s in all",
        *filter(None, [timing_text(speed), plan.sharing_words, plan.gave_way]),
        plan.bottleneck,
        plan.what_helps,
        "",
    ]
    if plan.card is not None:
        lines.append(_tier("graphics card", plan.card))
    lines.append(_tier("RAM", plan.ram))
    if plan.disk_bytes:
        lines.append(f"{'disk':<14}{plan.disk_bytes / 1e9:.1f} GB of experts, read as they are needed")
    if plan.streamed_bytes:
        lines.append(f"{'disk':<14}{plan.streamed_bytes / 1e9:.1f} GB of layers, read for each token, or step of rows")
    if plan.table_bytes:
        each = f"{plan.table_rows} {'row' if plan.table_rows == 1 else 'rows'}, {plan.table_row_bytes:,} bytes"
        lines.append(f"{'disk':<14}{plan.table_bytes / 1e9:.1f} GB of embeddings, of which a token reads {each}")
    if said := picture_words(plan.pictures):
        lines.append(said[0].upper() + said[1:] + ", loaded with the first one.")
    if plan.written_bytes:
        lines.append(f"{'':<14}{plan.written_bytes / 1e9:.1f} GB must be free there for what is converted once")
    if plan.card is not None and cache.all_experts and plan.card.experts:
        lines.append("All experts are on the card.")
    elif cache.slots:
        shape = f"{cache.indexes} indexes x {cache.ways} ways" if cache.ways else "one pool"
        hits = f", about {cache.hit_rate:.0%} hits" if cache.hit_rate is not None else ""
        lines.append(f"expert cache  {cache.slots} slots, {shape}, {cache.policy}{hits}; misses: {cache.misses}")
    if cache.prefill_threshold is not None and not cache.all_experts:
        lines.append(f"An expert with {cache.prefill_threshold} rows or more is fetched, not computed by the CPU.")
    if plan.batch is not None:
        from engine.planner.schedules import SCHEDULES

        batch, decode = plan.batch, SCHEDULES[plan.batch.decode]
        lines.append(
            ("batches       " if batch.schedule == plan.policy else "batches, if made like ")
            + f"{batch.schedule}: N = {batch.sequences}, mu = {batch.micro_batch}, n = {batch.batches}"
            + (f" (to hide the transfers: {batch.fewest_batches})" if batch.fewest_batches else "")
            + ", "
            f"A_g = {decode.attends_on_card:d}, F_g = {not decode.experts_in_ram:d}, r_w = {batch.weights_on_card:g}, "
            f"r_c = {batch.cache_on_card:g}"
        )
    if plan.alternatives:
        lines += ["", f"{'tokens/s':>10} {'steps/s':>9} {'TTFT, s':>9}  other ways"]
    lines += [
        f"{other.speed.tokens_per_s:>10.3g} {other.speed.decode_tokens_per_s:>9.3g} {_seconds(other.speed.ttft_s):>9}  "
        f"{other.policy}, {plan.words(other.precision)}"
        + ("" if other.runs_here else " (simulated only, to compare with)")
        + (f" (measured; {other.speed.predicted:.3g} steps/s had been predicted)" if other.speed.timed_at else "")
        for other in plan.alternatives[:12]
    ]
    return "\n".join(lines)


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-like values; `timing` is the origin of a measured speed, empty if predicted."""
    return {**asdict(plan), "timing": timing_text(plan.speed)}


def _tier(name: str, tier: TierBytes) -> str:
    from engine.planner.plan_parts import total_held

    parts = ", ".join(f"{purpose.replace('_', ' ')} {_gb(nbytes)}" for purpose, nbytes in total_held(tier).items())
    return f"{name:<14}{_gb(tier.total)}: {parts}, free {_gb(tier.free)}"


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.0f} MB"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", help="how a model would run, and how fast")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="starter, a library name, a folder, a profile in resources/models, or a hub id such as Qwen/Qwen3-30B-A3B",
    )
    add_plan_options(parser)
    parser.add_argument(
        "--policy", metavar="FILE", help="of a batch: what --json has printed, edited; how fast it would be"
    )
    job = parser.add_argument_group("whether one PC is the place for a job")
    job.add_argument("--rows", type=positive_int, metavar="N", help="rows of the job (the workload is then batch)")
    job.add_argument("--deadline", type=time_span, metavar="T", help="when it has to be done, such as 90m, 12h or 3d")
    job.add_argument("--watts", type=amount, metavar="W", help="of this PC at work, at the socket")
    job.add_argument("--per-kwh", type=amount, metavar="P", help="price of electricity")
    job.add_argument("--endpoint-price", type=two_prices, metavar="R,W", help="of a million tokens read, and written")
    job.add_argument("--endpoint-speed", type=amount, metavar="T", help="tokens/s that it was measured to write")
    job.add_argument("--currency", default="", metavar="C", help="of the prices, such as EUR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans and prints; see `add_parser`."""
    from engine.checkpoint.catalogue import find_shape

    prices = (args.deadline, args.watts, args.per_kwh, args.endpoint_price, args.endpoint_speed)
    if args.rows is None and any(price is not None for price in prices):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, "A deadline and prices belong to a job: say how long it is, --rows."
        )
    if (args.rows is not None or args.policy) and args.workload == "chat":
        args.workload = "batch"
    workload = workload_of(args)
    plan = plan_of(args, find_shape(args.model), workload)
    told = _beyond(args, plan) if args.rows is not None else None
    document = plan_document(plan) | ({"beyond_one_pc": asdict(told)} if told is not None else {})
    words = f"\n\n{told.sentence}" if told is not None else ""
    emit(document, as_json=args.json, human=lambda: plan_text(plan) + words)
    return 0


def _beyond(args: argparse.Namespace, plan: Plan) -> BeyondOnePc:
    work = plan.workload
    read, written = args.endpoint_price or (None, None)
    needs = JobNeeds(args.rows, work.prompt_tokens, work.generated_tokens, args.deadline)
    prices = Prices(args.watts, args.per_kwh, read, written, args.endpoint_speed, args.currency)
    return beyond_one_pc(needs, plan.speed.tokens_per_s, prices)
