"""What the libraries read from the environment when they are imported: call this before torch or transformers is."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """No network, no telemetry, no advice meant for programmers, no forked tokenizer threads."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
