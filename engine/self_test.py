"""Whether everything that answers works here: PyTorch, each card, the processor's kernels, and a tiny model's answer.

    python -m engine.self_test

Prints one JSON object.  `problem` is empty if models can be answered; a card that does not compute is told in `cards`,
and is no reason not to answer on the processor.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError
from engine.protocol import PROTOCOL_VERSION

_TOKENS = 4


def self_test() -> dict[str, Any]:
    """What works: `torch`, `transformers`, `cards`, `kernels`, `answered`, `protocol`, and what does not, `problem`."""
    found: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "problem": ""}
    for name, test in _TESTS.items():
        try:
            found |= test()
        except EngineError as error:
            return found | {"problem": f"{name}: {error.message}"}
        except Exception as error:  # whatever a library or a driver says
            said = str(error).strip().splitlines()
            return found | {"problem": f"{name}: {said[0] if said else type(error).__name__}"}
    return found


def _libraries() -> dict[str, Any]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _cards() -> dict[str, Any]:
    from engine.devices.card_proof import prove_cards

    return {"cards": [[each.name, each.failed] for each in prove_cards() or ()]}


def _kernels() -> dict[str, Any]:
    from engine.kernels.native.library import missing_note, usable_isas

    isas = usable_isas()
    return {"kernels": isas[-1].name if isas else missing_note()}


def _answer() -> dict[str, Any]:
    from engine.checkpoint.synthetic import parse, write_checkpoint
    from engine.common.config import EngineConfig, SamplingParams
    from engine.protocol import ChatMessage
    from engine.runtime.engine import Engine

    with tempfile.TemporaryDirectory(prefix="switchyard-test-") as name:
        write_checkpoint(Path(name), parse("synthetic:qwen3-moe-tiny")[1])
        engine = Engine()
        try:
            no: Callable[[], bool] = lambda: False  # noqa: E731
            engine.load(EngineConfig(model=name, device="cpu"), on_progress=lambda *_: None, cancelled=no)
            result = engine.generate(
                [ChatMessage("user", "Hello")],
                SamplingParams(temperature=0.0, max_tokens=_TOKENS),
                on_progress=lambda *_: None,
                on_text=lambda *_: None,
                cancelled=no,
            )
        finally:
            engine.unload()
    return {"answered": result.generated_tokens}


_TESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "PyTorch": _libraries,
    "graphics cards": _cards,
    "the processor's kernels": _kernels,
    "a small model": _answer,
}


def main() -> int:
    """Tests and reports; returns the exit code."""
    found = self_test()
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
