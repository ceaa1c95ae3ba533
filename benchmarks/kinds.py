"""What a checkout adds to `switchyard bench`: kinds of benchmarks that maintainers measure with, and peers."""

from __future__ import annotations

import argparse
import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench.report import Report
from engine.formats import AUTO
from engine.verbs.bench import add_common, add_model, config_of, emit_report, lengths, new_report, reported, runs
from engine.verbs.options import add_engine_options, engine_config, parse_size, positive_int
from engine.verbs.output import note


def add_kinds(kinds: Any) -> None:
    decode, prefill, batch = (kinds.choices[name] for name in ("decode", "prefill", "batch"))
    _add_peers(decode)
    decode.add_argument(
        "--strategies",
        action="store_true",
        help="a cache for 25%% of the experts against each single way to serve misses",
    )
    decode.add_argument(
        "--predict",
        action="store_true",
        help="against the planner's predictions: --model in every precision, or a default set of models",
    )
    decode.add_argument(
        "--brute-force",
        action="store_true",
        help="time every setting that fits; compare the plan and the tuned settings with the best",
    )
    decode.set_defaults(model=None, run=_run_decode)

    _add_peers(prefill)
    prefill.add_argument(
        "--strategies", action="store_true", help="run on-demand fetch and all experts on the CPU as well"
    )
    prefill.set_defaults(model=None, run=_run_prefill)

    _add_peers(batch)
    batch.add_argument(
        "--schedules", action="store_true", help="on a device: every order of a layer's work against CGOPipe, in turn"
    )
    batch.add_argument(
        "--micro-batch", type=positive_int, default=8, metavar="N", help="rows of a micro-batch with --schedules"
    )
    batch.set_defaults(run=_run_batch)

    opening = kinds.add_parser("opening", help="gigabytes per second of loading a model, against the disk; memory")
    add_model(opening)
    opening.add_argument("--peers", action="store_true", help="also the memory of llama.cpp with the same GGUF file")
    add_common(opening, repeats=3)
    add_engine_options(opening)
    opening.set_defaults(run=_run_opening)

    machines = kinds.add_parser("machines", help="the engine's choices on 12 emulated machines, against fixed ones")
    add_model(machines)
    machines.set_defaults(model="synthetic:qwen3-30b-a3b?layers=4&vocab=4096")
    machines.add_argument("--machines", type=_names, default=(), metavar="N,N", help="only these")
    machines.add_argument(
        "--beside",
        type=_separated,
        default=(),
        metavar="C,C",
        help="only these choices, which are all held in RAM",
    )
    machines.add_argument("--tokens", type=positive_int, default=96, metavar="N", help="tokens decoded per repeat")
    machines.add_argument("--prompt-tokens", type=positive_int, default=512, metavar="N", help="length of the prompt")
    machines.add_argument(
        "--measured-host", action="store_true", help="measure what the processor does here; otherwise modelled, too"
    )
    add_common(machines, repeats=1)
    add_engine_options(machines)
    machines.set_defaults(run=_run_machines)

    papers = kinds.add_parser(
        "papers", help="five papers' gains over what they compare with, by the engine itself on emulated cards"
    )
    papers.add_argument(
        "--papers", type=_separated, default=(), metavar="P,P", help="only those with these in their names"
    )
    papers.add_argument("--quick", action="store_true", help="shorter texts, one machine for each paper, no batches")
    add_model(papers)
    papers.set_defaults(model="synthetic:mixtral-eighth", run=_run_papers)
    papers.add_argument("--json", action="store_true", help="print one JSON document")

    blocks = kinds.add_parser("blocks", help="ticks for a weight of each block type from the cache, beside ggml's own")
    add_common(blocks, repeats=3)
    blocks.set_defaults(run=runs("benchmarks.block_types:bench_blocks", None, "repeats", opens=False))

    chats = kinds.add_parser("chats", help="several chats at once against one after the other, and one beside a batch")
    add_model(chats)
    chats.add_argument("--chats", type=positive_int, default=8, metavar="N", help="asked at the same time")
    chats.add_argument("--tokens", type=positive_int, default=64, metavar="N", help="generated for each")
    add_common(chats, repeats=3)
    add_engine_options(chats)
    chats.set_defaults(run=runs("benchmarks.chats:bench_chats", "ChatsPlan", "chats", "tokens", "repeats"))

    cache = kinds.add_parser("cache", help="cache policies on recorded routing; cost of the bookkeeping")
    cache.add_argument(
        "--trace", type=Path, action="extend", nargs="+", default=[], metavar="FILE", help="recorded routing"
    )
    add_common(cache, repeats=5)
    cache.set_defaults(run=runs("benchmarks.cache:bench_cache", None, "trace", "repeats", opens=False))

    disk = kinds.add_parser("disk", help="preparing, loading, and decoding with experts on disk, against the disk")
    add_model(disk)
    disk.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="tokens decoded per repeat")
    disk.add_argument(
        "--expert-ram", type=parse_size, metavar="SIZE", help="RAM for experts (default: half of what they need)"
    )
    add_common(disk, repeats=3)
    add_engine_options(disk)
    disk.set_defaults(run=runs("benchmarks.disk:bench_disk", "DiskPlan", "tokens", "repeats", "expert_ram"))

    quality = kinds.add_parser("quality", help="perplexity of a text, and divergence from exact numbers")
    add_model(quality)
    quality.add_argument("--text", type=Path, required=True, metavar="FILE", help="plain text in UTF-8")
    quality.add_argument(
        "--tokens", type=positive_int, default=20_480, metavar="N", help="length to read, in windows of 512"
    )
    quality.add_argument("--reference-tokens", type=positive_int, metavar="N", help="read by the reference; all")
    quality.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep results there, and go on from them: of the same code"
    )
    quality.add_argument("--peers", action="store_true", help="also run llama.cpp's Q8_0, Q4_0 and Q4_1")
    quality.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(quality)
    quality.set_defaults(run=_run_quality)

    guesses = kinds.add_parser("speculation", help="answers with speculative decoding and without it")
    add_model(guesses)
    guesses.add_argument("--prompt-tokens", type=positive_int, default=2048, metavar="N", help="longest prompt")
    guesses.add_argument("--tokens", type=positive_int, default=384, metavar="N", help="longest answer")
    add_common(guesses, repeats=5)
    add_engine_options(guesses)
    guesses.set_defaults(run=_run_speculation)

    prefixes = kinds.add_parser(
        "prefixes", help="first token of a chat's second turn, after another chat and a restart"
    )
    add_model(prefixes)
    prefixes.add_argument(
        "--prompt-tokens", type=lengths, metavar="N,N", default=(4000,), help="lengths of the first turn's prompt"
    )
    add_common(prefixes, repeats=3)
    add_engine_options(prefixes)
    prefixes.set_defaults(run=runs("benchmarks.prefixes:bench_prefixes", "PrefixesPlan", "prompt_tokens", "repeats"))

    loops = kinds.add_parser("loops", help="how many answers to simple questions loop, with DRY and without")
    add_model(loops)
    loops.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="answers to each of 20 questions")
    loops.add_argument("--tokens", type=positive_int, default=400, metavar="N", help="longest answer")
    loops.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(loops)
    loops.set_defaults(run=runs("benchmarks.loops:bench_loops", "LoopsPlan", "seeds", "tokens"))

    serve = kinds.add_parser("serve", help="our server and llama.cpp's under the same load: throughput, first token")
    add_model(serve)
    serve.add_argument(
        "--clients", type=lengths, default=(1, 4, 16), metavar="N,N", help="at once, a load for each (default 1,4,16)"
    )
    serve.add_argument(
        "--rates", type=_rates, metavar="R,R", help="questions per second, or none (default: of what they get done)"
    )
    serve.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines with a prompt, and perhaps tokens")
    serve.add_argument("--per-load", type=positive_int, default=32, metavar="N", help="questions asked in each load")
    serve.add_argument("--threads", type=positive_int, metavar="N", help="of each server (default: all processors)")
    serve.add_argument("--peers", action="store_true", help="llama.cpp's server as well, in turn")
    add_common(serve, repeats=3)
    serve.set_defaults(run=_run_serve)

    cluster = kinds.add_parser("cluster", help="several nodes of a Ray cluster, a core each, against one; or simulated")
    add_model(cluster)
    cluster.add_argument(
        "--simulated", action="store_true", help="all but the nodes: what handing out a row takes, for up to 1,000"
    )
    cluster.add_argument("--nodes", type=lengths, metavar="N,N", help="(default: 2; simulated 1,10,100,1000)")
    cluster.add_argument("--rows", type=lengths, metavar="N,N", help="(default: 512; simulated 100000,1000000)")
    cluster.add_argument("--tokens", type=positive_int, default=12, metavar="N", help="of an answer (default 12)")
    add_common(cluster, repeats=5)
    add_engine_options(cluster)
    cluster.set_defaults(run=_run_cluster)

    endpoints = kinds.add_parser(
        "endpoints",
        help="a job over three servers of known speed, one of which is killed: its time against the least possible",
    )
    add_common(endpoints, repeats=5)
    endpoints.set_defaults(run=runs("benchmarks.endpoints:bench_endpoints", None, "repeats", opens=False))

    download = kinds.add_parser("download", help="megabytes per second of our downloader, against one curl")
    add_common(download, repeats=3)
    download.set_defaults(run=runs("benchmarks.download:bench_download", None, "repeats", opens=False))

    monitor = kinds.add_parser("monitor", help="what the window costs while the Monitor shows a fast decode")
    monitor.add_argument(
        "--seconds",
        type=positive_int,
        default=60,
        metavar="N",
        help="of decoding before measuring for as long again",
    )
    add_common(monitor, repeats=1)
    monitor.set_defaults(run=runs("benchmarks.monitor:bench_monitor", None, "seconds", "repeats", opens=False))


_PEERS = ("transformers", "llama.cpp", "ik_llama.cpp")


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=_peers,
        nargs="?",
        const=_PEERS,
        default=(),
        metavar="P,P",
        help=f"also run these, in turn (all: {', '.join(_PEERS)})",
    )
    parser.add_argument("--avx2", action="store_true", help="limit everything, peers too, to AVX2")


def _names(text: str) -> tuple[str, ...]:
    from engine.hardware.profiles import timed_profiles

    names, known = tuple(text.split(",")), [profile.name for profile in timed_profiles()]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not a machine; use {', '.join(known)}")
    return names


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in _PEERS:
            raise argparse.ArgumentTypeError(f"there is no peer {name!r}: choose of {', '.join(_PEERS)}")
    return names


def _separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    if text == "none":
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} are no rates; use numbers above 0, such as 0.5,1,2")
    return rates


@reported
def _run_opening(args: argparse.Namespace, report: Report) -> None:
    config = config_of(args)
    from benchmarks.opening import bench_opening

    bench_opening(config, args.repeats, report, note, peers=args.peers)


@reported
def _run_machines(args: argparse.Namespace, report: Report) -> None:
    config = config_of(args)
    from benchmarks.machines import MachinesPlan, bench_machines

    plan = MachinesPlan(
        args.machines, args.beside, args.tokens, args.prompt_tokens, args.repeats, not args.measured_host
    )
    bench_machines(config, plan, report, note)


def _run_papers(args: argparse.Namespace) -> int:
    from engine.bench.opened import resolve_model
    from engine.verbs.simulate import emit_cells

    model = resolve_model(args.model, note)
    from benchmarks.papers import LONG, QUICK, paper_cells

    return emit_cells(list(paper_cells(model, QUICK if args.quick else LONG, args.papers, note)), as_json=args.json)


@reported
def _run_quality(args: argparse.Namespace, report: Report) -> None:
    config = config_of(args)
    from benchmarks.quality import QualityPlan, bench_quality

    bench_quality(
        config,
        QualityPlan(args.text, args.tokens, args.peers, reference_tokens=args.reference_tokens, keep=args.keep),
        report,
        note,
    )


@reported
def _run_speculation(args: argparse.Namespace, report: Report) -> None:
    config = dataclasses.replace(config_of(args), speculation=args.speculation)
    from benchmarks.speculation import SpeculationPlan, bench_speculation

    bench_speculation(config, SpeculationPlan(args.tokens, args.prompt_tokens, args.repeats), report, note)


@reported
def _run_serve(args: argparse.Namespace, report: Report) -> None:
    from benchmarks.serving import ServingPlan, bench_serving
    from benchmarks.serving_load import QUESTIONS, read_questions
    from engine.bench.opened import resolve_model

    questions = read_questions(args.questions) if args.questions else QUESTIONS
    model = resolve_model(args.model, note)
    plan = ServingPlan(args.clients, args.rates, questions, args.per_load, args.repeats, args.threads, args.peers)
    bench_serving(model, plan, report, note)


def _run_cluster(args: argparse.Namespace) -> int:
    if args.simulated:
        from benchmarks.simulated_cluster import ClusterPlan, bench_cluster

        report = new_report()
        nodes, rows = args.nodes or (1, 10, 100, 1000), args.rows or (100_000, 1_000_000)
        bench_cluster(ClusterPlan(nodes, rows), report, note)
        return emit_report(report, args)
    config, report = config_of(args), new_report()
    from benchmarks.cluster import RealClusterPlan, bench_real_cluster

    for nodes in args.nodes or (2,):
        for rows in args.rows or (512,):
            bench_real_cluster(config, RealClusterPlan(nodes, rows, args.tokens, args.repeats), report, note)
    return emit_report(report, args)


def _run_decode(args: argparse.Namespace) -> int:
    if args.predict:
        return _run_predictions(args)
    args.model = args.model or _file_of_library(wanted=bool(args.peers) and not args.strategies) or "starter"
    if args.brute_force:
        return runs("benchmarks.brute_force:bench_brute_force", None, "tokens", "repeats")(args)
    _limit(args)
    config, report = config_of(args), new_report()
    if args.strategies:
        from benchmarks.strategies import StrategyPlan, bench_strategies
        from engine.checkpoint.synthetic import is_synthetic

        bench_strategies(config, StrategyPlan(args.tokens, args.repeats, not is_synthetic(args.model)), report, note)
        if args.peers:
            report.skip_peer("transformers", "strategies are compared with each other: run --peers by itself")
        return emit_report(report, args)
    from benchmarks.cut import add_whole, cut_of, shorter
    from benchmarks.peers.beside import DecodingPeers
    from engine.bench.decode import DecodePlan, bench_decode

    cut, peers = cut_of(args.model), DecodingPeers(args.peers, report, note)
    plan = DecodePlan(args.tokens, args.repeats, args.contexts, cut.words if cut is not None else "")
    found = bench_decode(config, plan, report, note, peers.beside, shorter(config, cut, note))
    if cut is not None:
        for name, measured in found.items():
            add_whole(name, cut, measured, report)
    if args.peers:
        peers.add_ready(config, min(args.repeats, 3))
    return emit_report(report, args)


def _file_of_library(*, wanted: bool) -> str | None:
    """The user's GGUF file that was used last: what peers are best compared with, as both read it as it is."""
    if not wanted:
        return None
    from engine.checkpoint.gguf import gguf_at
    from engine.checkpoint.library import list_models

    files = [entry for entry in list_models() if not entry.problem and gguf_at(entry.path) is not None]
    if not files:
        return None
    found = max(files, key=lambda entry: entry.last_used or 0.0)
    note(f"with {found.name}, a GGUF file of your library; --model starter is the model that comes with Switchyard")
    return str(found.path)


def _run_predictions(args: argparse.Namespace) -> int:
    from engine.process.lifetime import quiet_libraries

    quiet_libraries()
    from benchmarks.predicted_decode import PredictionPlan, bench_predictions

    report, plan = new_report(), PredictionPlan(args.tokens, args.repeats)
    if args.model is not None:
        plan = dataclasses.replace(plan, models=(args.model,))
    if args.precision != AUTO:
        plan = dataclasses.replace(plan, precisions=(args.precision,))
    if args.device != "auto":
        plan = dataclasses.replace(plan, devices=(args.device,))
    bench_predictions(engine_config(args, "starter"), plan, report, note)
    return emit_report(report, args)


@reported
def _run_prefill(args: argparse.Namespace, report: Report) -> None:
    args.model = args.model or _file_of_library(wanted=bool(args.peers) and not args.strategies) or "starter"
    _limit(args)
    config = config_of(args)
    from benchmarks.cut import cut_of
    from benchmarks.strategies import bench_prefill_beside
    from engine.bench.decode import PrefillPlan

    cut = cut_of(args.model)
    plan = PrefillPlan(args.prompt_tokens, args.tokens, args.repeats, cut.words if cut is not None else "")
    bench_prefill_beside(config, plan, args.peers, report, note, strategies=args.strategies)


def _run_batch(args: argparse.Namespace) -> int:
    _limit(args)
    config, report = config_of(args), new_report()
    if args.schedules:
        from benchmarks.schedules import SchedulesPlan, bench_schedules

        bench_schedules(config, SchedulesPlan(args.rows, args.tokens, args.repeats, args.micro_batch), report, note)
        return emit_report(report, args)
    from benchmarks.peers.beside import batched_peers
    from engine.bench.decode import BatchBenchPlan, bench_batch

    if not args.peers:
        report.skip_peer("transformers' batched generate, parallel decoding of llama.cpp", "asked for with --peers")
    plan = BatchBenchPlan(args.rows, args.tokens, args.repeats)
    bench_batch(config, plan, report, note, partial(batched_peers, config, args.tokens, args.peers, report, note))
    return emit_report(report, args)


def _limit(args: argparse.Namespace) -> None:
    """To AVX2, if that is asked for; before anything imports torch."""
    if args.avx2:
        os.environ |= {"SWITCHYARD_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
