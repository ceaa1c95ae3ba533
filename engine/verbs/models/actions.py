"""What the actions of `switchyard models` share: how they are added, and what a model may be called."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol

MODEL = "`starter`, the name of a model on this machine, a checkpoint directory or a GGUF file"


class AddAction(Protocol):
    """Adds an action, with `--json`; returns its parser for its other arguments."""

    def __call__(
        self, name: str, help_text: str, function: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser: ...
