"""`python -m benchmarks.peers build`: builds the peers of the benches, llama.cpp and ik_llama.cpp, in the cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.peers.build import Builder, PeerBuildError
from benchmarks.peers.editions import EDITIONS, LLAMA_CPP


def main() -> int:
    """0 if they are built and run, 1 if one is not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("command", choices=["build"])
    parser.add_argument("--only", choices=[edition.name for edition in EDITIONS], help="one of them")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="with --only: its sources, instead of those of the binding on the package index",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers that run at once")
    parser.add_argument("--avx2", action="store_true", help="for AVX2 alone as well, beside the build for this machine")
    parser.add_argument("--server", action="store_true", help="llama.cpp's server as well, for `bench serve`")
    args = parser.parse_args()
    if args.source and (not args.only or args.avx2 or args.server):
        parser.error(
            "--source names the sources of one program: choose it with --only, and leave out --avx2 and --server"
        )
    if args.server:
        return _build(Builder(LLAMA_CPP, _say, max(1, args.jobs)), "server")
    failed = 0
    for edition in EDITIONS:
        if args.only in (None, edition.name):
            failed |= _build(
                Builder(edition, _say, max(1, args.jobs), args.source), "avx2" if args.avx2 else "libraries"
            )
    return failed


def _build(builder: Builder, what: str) -> int:
    edition = builder.edition
    try:
        if what == "server":
            used, where = ", ".join(builder.build_server()) or "no special instructions", edition.server()
        elif what == "avx2":
            builder.build_for_avx2()
            used, where = "AVX2 alone", edition.avx2_tree()
        else:
            used, where = ", ".join(builder.build()) or "no special instructions", edition.home()
    except (PeerBuildError, OSError) as failure:
        _say(f"{edition.name} was not built: {failure}.")
        return 1
    _say(f"{edition.name} {'server ' if what == 'server' else ''}is built in {where} with {used}.")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
