"""`switchyard bench`: benchmarks on this machine, with peers in the same run if available."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.formats import AUTO
from engine.verbs.options import add_engine_options, engine_config, parse_size, positive_int
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.bench.report import Report
    from engine.common.config import EngineConfig


def add_parser(subparsers: Any) -> None:
    """Mount the verb and its kinds."""
    parser = subparsers.add_parser("bench", help="measure this machine, with peers in the same run")
    kinds = parser.add_subparsers(
        dest="kind",
        required=True,
        metavar="{startup,opening,decode,prefill,batch,chats,serve,cache,disk,kernels,quality,loops,speculation,prefixes,telemetry,monitor,download,endpoints}",
    )

    telemetry = kinds.add_parser("telemetry", help="decode with all telemetry on against off")
    _add_model(telemetry)
    telemetry.add_argument("--tokens", type=positive_int, default=16, metavar="N", help="tokens decoded per stretch")
    _add_common(telemetry, repeats=250)
    add_engine_options(telemetry)
    telemetry.set_defaults(run=_run_telemetry)

    endpoints = kinds.add_parser(
        "endpoints",
        help="a job over three servers of known speed, one of which is killed: its time against the least possible",
    )
    _add_common(endpoints, repeats=5)
    endpoints.set_defaults(run=_run_endpoints)

    startup = kinds.add_parser(
        "startup",
        help="seconds to a usable window and to the first token, and where they go; longest wait of the GUI; with "
        "--model, seconds of its second start against reading its prepared files",
    )
    _add_model(startup)
    startup.set_defaults(model=None)
    _add_common(startup, repeats=5)
    add_engine_options(startup)
    startup.set_defaults(run=_run_startup)

    opening = kinds.add_parser("opening", help="gigabytes per second of loading a model, against the disk")
    _add_model(opening)
    _add_common(opening, repeats=3)
    add_engine_options(opening)
    opening.set_defaults(run=_run_opening)

    monitor = kinds.add_parser("monitor", help="what the window costs while the Monitor shows a fast decode")
    monitor.add_argument(
        "--seconds",
        type=positive_int,
        default=60,
        metavar="N",
        help="of decoding before measuring for as long again",
    )
    _add_common(monitor, repeats=1)
    monitor.set_defaults(run=_run_monitor)

    decode = kinds.add_parser("decode", help="tokens per second at batch 1")
    _add_model(decode)
    decode.set_defaults(model=None)
    decode.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="tokens decoded per repeat")
    decode.add_argument(
        "--contexts",
        "--prompt-tokens",
        type=_lengths,
        metavar="N,N",
        default=(None,),
        help="lengths of the prompt before them, a row for each (default: a sentence)",
    )
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
    _add_common(decode, repeats=5)
    add_engine_options(decode)
    decode.set_defaults(run=_run_decode)

    machines = kinds.add_parser("machines", help="the engine's choices on 12 emulated machines, against fixed ones")
    _add_model(machines)
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
    _add_common(machines, repeats=1)
    add_engine_options(machines)
    machines.set_defaults(run=_run_machines)

    prefill = kinds.add_parser("prefill", help="tokens per second of a long prompt, and the decode cache after it")
    _add_model(prefill)
    prefill.set_defaults(model=None)
    prefill.add_argument("--prompt-tokens", type=positive_int, default=2000, metavar="N", help="length of the prompt")
    prefill.add_argument("--tokens", type=positive_int, default=96, metavar="N", help="decoded before and after it")
    _add_peers(prefill)
    prefill.add_argument(
        "--strategies", action="store_true", help="run on-demand fetch and all experts on the CPU as well"
    )
    _add_common(prefill, repeats=3)
    add_engine_options(prefill)
    prefill.set_defaults(run=_run_prefill)

    batch = kinds.add_parser("batch", help="tokens per second of many rows together")
    _add_model(batch)
    batch.add_argument("--rows", type=positive_int, default=64, metavar="N", help="prompts")
    batch.add_argument("--tokens", type=positive_int, default=32, metavar="N", help="generated for each")
    _add_peers(batch)
    batch.add_argument(
        "--schedules", action="store_true", help="on a device: every order of a layer's work against CGOPipe, in turn"
    )
    batch.add_argument(
        "--micro-batch", type=positive_int, default=8, metavar="N", help="rows of a micro-batch with --schedules"
    )
    _add_common(batch, repeats=3)
    add_engine_options(batch)
    batch.set_defaults(run=_run_batch)

    chats = kinds.add_parser("chats", help="several chats at once against one after the other, and one beside a batch")
    _add_model(chats)
    chats.add_argument("--chats", type=positive_int, default=8, metavar="N", help="asked at the same time")
    chats.add_argument("--tokens", type=positive_int, default=64, metavar="N", help="generated for each")
    _add_common(chats, repeats=3)
    add_engine_options(chats)
    chats.set_defaults(run=_run_chats)

    cache = kinds.add_parser("cache", help="cache policies on recorded routing; cost of the bookkeeping")
    cache.add_argument(
        "--trace", type=Path, action="extend", nargs="+", default=[], metavar="FILE", help="recorded routing"
    )
    _add_common(cache, repeats=5)
    cache.set_defaults(run=_run_cache)

    disk = kinds.add_parser("disk", help="preparing, loading, and decoding with experts on disk, against the disk")
    _add_model(disk)
    disk.add_argument("--tokens", type=positive_int, default=48, metavar="N", help="tokens decoded per repeat")
    disk.add_argument(
        "--expert-ram", type=parse_size, metavar="SIZE", help="RAM for experts (default: half of what they need)"
    )
    _add_common(disk, repeats=3)
    add_engine_options(disk)
    disk.set_defaults(run=_run_disk)

    kernels = kinds.add_parser("kernels", help="CPU expert kernels on cold weights, against the read bandwidth")
    kernels.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads that compute")
    kernels.add_argument("--tokens", type=positive_int, default=1, metavar="N", help="tokens per call")
    _add_common(kernels, repeats=5)
    kernels.set_defaults(run=_run_kernels)

    quality = kinds.add_parser("quality", help="perplexity of a text and divergence from bf16, in int8 and int4")
    _add_model(quality)
    quality.add_argument("--text", type=Path, required=True, metavar="FILE", help="plain text in UTF-8")
    quality.add_argument(
        "--tokens", type=positive_int, default=20_480, metavar="N", help="length to read, in windows of 512"
    )
    quality.add_argument("--peers", action="store_true", help="also run llama.cpp's Q8_0, Q4_0 and Q4_1")
    quality.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(quality)
    quality.set_defaults(run=_run_quality)

    guesses = kinds.add_parser("speculation", help="answers with speculative decoding and without it")
    _add_model(guesses)
    guesses.add_argument("--prompt-tokens", type=positive_int, default=2048, metavar="N", help="longest prompt")
    guesses.add_argument("--tokens", type=positive_int, default=384, metavar="N", help="longest answer")
    _add_common(guesses, repeats=5)
    add_engine_options(guesses)
    guesses.set_defaults(run=_run_speculation)

    prefixes = kinds.add_parser(
        "prefixes", help="first token of a chat's second turn, after another chat and a restart"
    )
    _add_model(prefixes)
    prefixes.add_argument(
        "--prompt-tokens", type=_lengths, metavar="N,N", default=(4000,), help="lengths of the first turn's prompt"
    )
    _add_common(prefixes, repeats=3)
    add_engine_options(prefixes)
    prefixes.set_defaults(run=_run_prefixes)

    card = kinds.add_parser("card", help="ten minutes on a graphics card: tests, link, kernels, decoding, in a file")
    card.add_argument("--device", default="cuda:0", metavar="D", help="cuda:0, or emulated:NAME to see what it does")
    card.add_argument("--model", metavar="M", help="as for decode (default: eight layers of Qwen3-30B-A3B's shape)")
    card.add_argument("--folder", type=Path, default=Path("docs/cards"), metavar="DIR", help="(default: docs/cards)")
    card.add_argument("--json", action="store_true", help="print one JSON document")
    card.set_defaults(run=_run_card)

    download = kinds.add_parser("download", help="megabytes per second of our downloader, against one curl")
    _add_common(download, repeats=3)
    download.set_defaults(run=_run_download)

    serve = kinds.add_parser("serve", help="our server and llama.cpp's under the same load: throughput, first token")
    _add_model(serve)
    serve.add_argument(
        "--clients", type=_lengths, default=(1, 4, 16), metavar="N,N", help="at once, a load for each (default 1,4,16)"
    )
    serve.add_argument(
        "--rates", type=_rates, metavar="R,R", help="questions per second, or none (default: of what they get done)"
    )
    serve.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines with a prompt, and perhaps tokens")
    serve.add_argument("--per-load", type=positive_int, default=32, metavar="N", help="questions asked in each load")
    serve.add_argument("--threads", type=positive_int, metavar="N", help="of each server (default: all processors)")
    serve.add_argument("--peers", action="store_true", help="llama.cpp's server as well, in turn")
    _add_common(serve, repeats=3)
    serve.set_defaults(run=_run_serve)

    cluster = kinds.add_parser("cluster", help="several nodes of a Ray cluster, a core each, against one; or simulated")
    _add_model(cluster)
    cluster.add_argument(
        "--simulated", action="store_true", help="all but the nodes: what handing out a row takes, for up to 1,000"
    )
    cluster.add_argument("--nodes", type=_lengths, metavar="N,N", help="(default: 2; simulated 1,10,100,1000)")
    cluster.add_argument("--rows", type=_lengths, metavar="N,N", help="(default: 512; simulated 100000,1000000)")
    cluster.add_argument("--tokens", type=positive_int, default=12, metavar="N", help="of an answer (default 12)")
    _add_common(cluster, repeats=5)
    add_engine_options(cluster)
    cluster.set_defaults(run=_run_cluster)

    loops = kinds.add_parser("loops", help="how many answers to simple questions loop, with DRY and without")
    _add_model(loops)
    loops.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="answers to each of 20 questions")
    loops.add_argument("--tokens", type=positive_int, default=400, metavar="N", help="longest answer")
    loops.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(loops)
    loops.set_defaults(run=_run_loops)
    for kind in kinds.choices.values():
        kind.set_defaults(run=_leaving_nothing(kind.get_default("run")))


def _leaving_nothing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same, without a trace of what it prepares of models, or in precisions, that are there to be measured."""

    def leaving_nothing(args: argparse.Namespace) -> int:
        from engine.bench.synthetic import is_synthetic

        many = args.kind == "card" or getattr(args, "predict", False) or getattr(args, "brute_force", False)
        if not many and not is_synthetic(getattr(args, "model", None) or ""):
            return run(args)
        from engine.bench.prepared_apart import prepared_apart

        with prepared_apart():
            return run(args)

    return leaving_nothing


def _add_common(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument("--repeats", type=positive_int, default=repeats, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


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


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


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


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="starter",
        metavar="M",
        help="starter, a library name, a checkpoint folder, a GGUF file, or synthetic:NAME?layers=4 for random weights "
        "(&gguf=Q4_K_M: in a GGUF file, quantised by llama.cpp)",
    )


def _run_startup(args: argparse.Namespace) -> int:
    if args.model is not None:
        config, report = _config(args), _report()
        from engine.bench.second_start import bench_second_start

        bench_second_start(config, args.repeats, report, note)
        return _emit(report, args)
    from engine.bench.startup import bench_startup

    report = _report()
    bench_startup(args.repeats, report, note)
    return _emit(report, args)


def _run_opening(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.opening import bench_opening

    bench_opening(config, args.repeats, report, note)
    return _emit(report, args)


def _run_card(args: argparse.Namespace) -> int:
    from engine.bench.card.run import MODEL, as_markdown, bench_card

    done = bench_card(args.device, args.model or MODEL, args.folder, note)
    emit(done, as_json=args.json, human=lambda: as_markdown(done))
    return 0 if all(part["outcome"] in ("done", "skipped") for part in done["parts"]) else 1


def _run_endpoints(args: argparse.Namespace) -> int:
    from engine.bench.endpoints import bench_endpoints

    report = _report()
    bench_endpoints(args.repeats, report, note)
    return _emit(report, args)


def _run_download(args: argparse.Namespace) -> int:
    from engine.bench.download import bench_download

    report = _report()
    bench_download(args.repeats, report, note)
    return _emit(report, args)


def _run_monitor(args: argparse.Namespace) -> int:
    from engine.bench.window import bench_monitor

    report = _report()
    bench_monitor(args.seconds, args.repeats, report, note)
    return _emit(report, args)


def _run_decode(args: argparse.Namespace) -> int:
    if args.predict:
        return _run_predictions(args)
    args.model = args.model or _file_of_library(wanted=bool(args.peers) and not args.strategies) or "starter"
    if args.brute_force:
        return _run_brute_force(args)
    config, report = _config(args), _report()
    if args.strategies:
        from engine.bench.strategies import StrategyPlan, bench_strategies
        from engine.bench.synthetic import is_synthetic

        bench_strategies(config, StrategyPlan(args.tokens, args.repeats, not is_synthetic(args.model)), report, note)
        if args.peers:
            report.skip_peer("transformers", "strategies are compared with each other: run --peers by itself")
    else:
        from engine.bench.decode import DecodePlan, bench_decode
        from engine.bench.synthetic import cut_of

        plan = DecodePlan(args.tokens, args.repeats, args.peers, args.contexts, cut_of(args.model))
        bench_decode(config, plan, report, note)
    return _emit(report, args)


def _file_of_library(*, wanted: bool) -> str | None:
    """The user's GGUF file that was used last: what peers are best compared with, as both read it as it is."""
    if not wanted:
        return None
    from engine.checkpoint.gguf.names import gguf_at
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
    from engine.bench.predicted_decode import PredictionPlan, bench_predictions

    report, plan = _report(), PredictionPlan(args.tokens, args.repeats)
    if args.model is not None:
        plan = dataclasses.replace(plan, models=(args.model,))
    if args.precision != AUTO:
        plan = dataclasses.replace(plan, precisions=(args.precision,))
    if args.device != "auto":
        plan = dataclasses.replace(plan, devices=(args.device,))
    bench_predictions(engine_config(args, "starter"), plan, report, note)
    return _emit(report, args)


def _run_brute_force(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.brute_force import bench_brute_force

    bench_brute_force(config, args.tokens, args.repeats, report, note)
    return _emit(report, args)


def _run_machines(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.machines import MachinesPlan, bench_machines

    plan = MachinesPlan(
        args.machines, args.beside, args.tokens, args.prompt_tokens, args.repeats, not args.measured_host
    )
    bench_machines(config, plan, report, note)
    return _emit(report, args)


def _run_prefill(args: argparse.Namespace) -> int:
    args.model = args.model or _file_of_library(wanted=bool(args.peers) and not args.strategies) or "starter"
    config, report = _config(args), _report()
    from engine.bench.prefill import PrefillPlan, bench_prefill
    from engine.bench.synthetic import cut_of

    plan = PrefillPlan(args.prompt_tokens, args.tokens, args.repeats, args.strategies, args.peers, cut_of(args.model))
    bench_prefill(config, plan, report, note)
    return _emit(report, args)


def _run_batch(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.batch import BatchBenchPlan, bench_batch

    if args.schedules:
        from engine.bench.batch import SchedulesPlan, bench_schedules

        bench_schedules(config, SchedulesPlan(args.rows, args.tokens, args.repeats, args.micro_batch), report, note)
        return _emit(report, args)
    bench_batch(config, BatchBenchPlan(args.rows, args.tokens, args.repeats, args.peers), report, note)
    return _emit(report, args)


def _run_chats(args: argparse.Namespace) -> int:
    from engine.bench.chats import ChatsPlan, bench_chats

    report = _report()
    bench_chats(_config(args), ChatsPlan(args.chats, args.tokens, args.repeats), report, note)
    return _emit(report, args)


def _run_cache(args: argparse.Namespace) -> int:
    from engine.bench.cache import bench_cache

    report = _report()
    bench_cache(args.trace, args.repeats, report, note)
    return _emit(report, args)


def _run_disk(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.disk import DiskPlan, bench_disk

    bench_disk(config, DiskPlan(args.tokens, args.repeats, args.expert_ram), report, note)
    return _emit(report, args)


def _run_kernels(args: argparse.Namespace) -> int:
    from engine.bench.kernels import bench_kernels
    from engine.common.errors import EngineError, ErrorCode
    from engine.kernels.native.build import BuildError, build

    try:
        build()
    except BuildError as failure:
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"There are no native kernels to measure: {failure}."
        ) from failure
    return _emit(bench_kernels(args.threads, args.repeats, tokens=args.tokens, on_progress=note), args)


def _run_quality(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.quality import QualityPlan, bench_quality

    bench_quality(config, QualityPlan(args.text, args.tokens, args.peers), report, note)
    return _emit(report, args)


def _run_serve(args: argparse.Namespace) -> int:
    from engine.bench.serving import ServingPlan, bench_serving
    from engine.bench.serving_texts import QUESTIONS, read_questions
    from engine.bench.synthetic import resolve_model

    questions = read_questions(args.questions) if args.questions else QUESTIONS
    model, report = resolve_model(args.model, note), _report()
    plan = ServingPlan(args.clients, args.rates, questions, args.per_load, args.repeats, args.threads, args.peers)
    bench_serving(model, plan, report, note)
    return _emit(report, args)


def _run_cluster(args: argparse.Namespace) -> int:
    if args.simulated:
        from engine.bench.cluster import ClusterPlan, bench_cluster

        report = _report()
        nodes, rows = args.nodes or (1, 10, 100, 1000), args.rows or (100_000, 1_000_000)
        bench_cluster(ClusterPlan(nodes, rows), report, note)
        return _emit(report, args)
    config, report = _config(args), _report()
    from engine.bench.real_cluster import RealClusterPlan, bench_real_cluster

    for nodes in args.nodes or (2,):
        for rows in args.rows or (512,):
            bench_real_cluster(config, RealClusterPlan(nodes, rows, args.tokens, args.repeats), report, note)
    return _emit(report, args)


def _run_loops(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.loops import LoopsPlan, bench_loops

    bench_loops(config, LoopsPlan(args.seeds, args.tokens), report, note)
    return _emit(report, args)


def _run_speculation(args: argparse.Namespace) -> int:
    config, report = dataclasses.replace(_config(args), speculation=args.speculation), _report()
    from engine.bench.speculation import SpeculationPlan, bench_speculation

    bench_speculation(config, SpeculationPlan(args.tokens, args.prompt_tokens, args.repeats), report, note)
    return _emit(report, args)


def _run_prefixes(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.prefixes import PrefixesPlan, bench_prefixes

    bench_prefixes(config, PrefixesPlan(args.prompt_tokens, args.repeats), report, note)
    return _emit(report, args)


def _run_telemetry(args: argparse.Namespace) -> int:
    config, report = _config(args), _report()
    from engine.bench.telemetry import TelemetryPlan, bench_telemetry

    bench_telemetry(config, TelemetryPlan(args.tokens, args.repeats), report, note)
    return _emit(report, args)


def _config(args: argparse.Namespace) -> EngineConfig:
    """What to open; sets the environment of torch, so nothing that imports it comes before."""
    from engine.process.lifetime import quiet_libraries

    quiet_libraries()
    if getattr(args, "avx2", False):
        os.environ |= {"SWITCHYARD_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    from engine.bench.synthetic import resolve_model

    checkpoint = resolve_model(args.model, note)
    # Random weights, and tokens past an end, repeat themselves: drafted, they would be timed as if all answers did.
    return dataclasses.replace(engine_config(args, str(checkpoint)), speculation="off")


def _report() -> Report:
    from engine.bench.report import Report
    from engine.hardware.probe import probe

    return Report(dataclasses.asdict(probe()))


def _emit(report: Report, args: argparse.Namespace) -> int:
    emit(report.document(), as_json=args.json, human=report.text)
    return 0
