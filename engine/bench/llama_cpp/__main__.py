"""`python -m engine.bench.llama_cpp build`: builds llama.cpp as a peer of the benches, in the cache folder."""

from __future__ import annotations

import argparse
import sys

from engine.bench.llama_cpp.build import PeerBuildError, build, build_for_avx2
from engine.bench.llama_cpp.peer import VERSION, avx2_tree, home


def main() -> int:
    """0 if it is built and runs, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.llama_cpp", description=__doc__)
    parser.add_argument("command", choices=["build"])
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers that run at once")
    parser.add_argument("--avx2", action="store_true", help="for AVX2 alone as well, beside the build for this machine")
    args = parser.parse_args()
    jobs = max(1, args.jobs)
    try:
        if args.avx2:
            build_for_avx2(_say, jobs)
            _say(f"llama.cpp {VERSION} is built in {avx2_tree()} with AVX2 alone.")
            return 0
        instructions = build(_say, jobs)
    except (PeerBuildError, OSError) as failure:
        _say(f"llama.cpp was not built: {failure}.")
        return 1
    _say(f"llama.cpp {VERSION} is built in {home()} with {', '.join(instructions) or 'no special instructions'}.")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
