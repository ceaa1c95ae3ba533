"""Program run by `engine.experts.prediction.learning`: ROUTES.npz PREDICTOR.safetensors OPTIONS."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 3 if there is too little to learn from."""
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(19)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    trace_file, target, options = arguments
    from engine.experts.prediction.training import load_if_usable, loss_on, save_mlp, train
    from engine.experts.replay import read_trace

    try:
        trace = read_trace(Path(trace_file))
        trained = train(trace, **json.loads(options))
    except ValueError:
        return 3
    # An earlier predictor may be better, having seen more steps than the ring buffer still has.
    earlier, _ = load_if_usable(Path(target), trace.layers, trace.num_experts)
    if (
        earlier is None
        or earlier.statistics.distance != trained.statistics.distance
        or loss_on(earlier, trace) > trained.loss
    ):
        save_mlp(trained, Path(target))
    return 0


def _end_with_parent() -> None:
    """Exits at end of file on stdin, which happens however the parent process ends."""
    while os.read(0, 4096):  # not `sys.stdin`, whose lock would block the interpreter's shutdown
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
