"""Environment variables that libraries read on import: call this before importing torch or transformers."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """No network, no telemetry, no developer warnings, no forked tokenizer threads."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
