"""`switchyard cache TRACE`: hit rates of expert caches by policy and size, on recorded routing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.verbs.options import positive_int
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.experts.replay import ReplayResult, RoutingTrace

_SHARES = (0.1, 0.25, 0.5)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("cache", help="replay recorded routing: hit rates by policy and size")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="recorded routing, an .npz file")
    parser.add_argument(
        "--slots", type=positive_int, metavar="N", help="total slots (default: 10, 25 and 50%% of the experts)"
    )
    parser.add_argument("--policy", metavar="P", help="lru, fifo, lfu, lfru, random, static or adopted; default: all")
    parser.add_argument("--ways", action="store_true", help="one cache per layer instead of one for all")
    parser.add_argument("--calibration", type=Path, metavar="TRACE", help="ranks the experts for static placement")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and report; see `add_parser`."""
    from engine.experts.cache.policies import POLICY_NAMES
    from engine.experts.replay import (
        ADOPTED,
        belady_hits,
        hit_ratio_curve,
        popularity_of,
        read_trace,
        replay,
        stack_distances,
    )

    trace = read_trace(args.trace)
    popularity = popularity_of(read_trace(args.calibration)) if args.calibration else None
    policies = _policies(args.policy, (*POLICY_NAMES, ADOPTED), has_calibration=popularity is not None)
    results: list[dict[str, Any]] = []
    for slots in _sizes(args.slots, trace, per_layer=args.ways):
        bound = belady_hits(trace, slots, per_layer=args.ways)
        results.append(_entry("belady", slots, trace, args.ways, bound.tolist(), float(bound.sum() / trace.accesses)))
        for policy in policies:
            note(f"{policy}, {slots} slots{' per layer' if args.ways else ''}")
            done = replay(trace, policy, slots, per_layer=args.ways, popularity=popularity)
            results.append(_replayed(done, trace, args.ways))
    curve = hit_ratio_curve(stack_distances(trace, per_layer=args.ways))
    document = {
        "trace": str(args.trace),
        "tokens": trace.tokens,
        "layers": trace.layers,
        "experts": trace.num_experts,
        "experts_per_token": trace.per_token,
        "per_layer": args.ways,
        "results": results,
        "lru_miss_ratio_curve": [round(1 - float(rate), 6) for rate in curve],
    }
    emit(document, as_json=args.json, human=lambda: _text(document))
    return 0


def _policies(wanted: str | None, known: tuple[str, ...], *, has_calibration: bool) -> list[str]:
    if wanted is None:
        return [name for name in known if name != "static" or has_calibration]
    if wanted not in known:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"There is no cache policy {wanted!r}: use one of {', '.join(known)}."
        )
    if wanted == "static" and not has_calibration:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            "Static placement ranks experts by another trace: give one with --calibration (not the same one).",
        )
    return [wanted]


def _sizes(slots: int | None, trace: RoutingTrace, *, per_layer: bool) -> list[int]:
    everything = trace.num_experts * (1 if per_layer else trace.layers)
    if slots is None:
        return sorted({max(1, int(everything * share)) for share in _SHARES})
    return [max(1, slots // trace.layers) if per_layer else slots]


def _replayed(result: ReplayResult, trace: RoutingTrace, per_layer: bool) -> dict[str, Any]:
    return _entry(result.policy, result.slots, trace, per_layer, result.hits.tolist(), result.hit_rate)


def _entry(
    policy: str, slots: int, trace: RoutingTrace, per_layer: bool, hits: list[int], rate: float
) -> dict[str, Any]:
    accesses = (trace.experts >= 0).sum(axis=(0, 2)).tolist()
    return {
        "policy": policy,
        "slots": slots * trace.layers if per_layer else slots,
        "ways": slots if per_layer else None,
        "hit_rate": round(rate, 6),
        "layer_hit_rates": [round(hit / max(seen, 1), 4) for hit, seen in zip(hits, accesses, strict=True)],
    }


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"{document['tokens']:,} tokens, {document['layers']} layers x {document['experts']} experts, "
        f"top-{document['experts_per_token']}",
        f"{'slots':>8}  {'policy':8} {'hit rate':>9}   worst and best layer",
    ]
    for entry in document["results"]:
        layers = entry["layer_hit_rates"]
        lines.append(
            f"{entry['slots']:>8}  {entry['policy']:8} {entry['hit_rate']:>9.1%}   "
            f"{min(layers):.0%} .. {max(layers):.0%}"
        )
    curve = document["lru_miss_ratio_curve"]
    lines.append("LRU misses by size: " + ", ".join(_point(curve, share) for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)))
    return "\n".join(lines)


def _point(curve: list[float], share: float) -> str:
    return f"{share:.0%} of the experts {curve[int((len(curve) - 1) * share)]:.1%}"
