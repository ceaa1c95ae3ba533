"""The child process that counts tokens: one JSON line in, one out, until stdin closes.

Reading a tokenizer, and encoding a long text, hold Python's lock for a quarter of a second: in a thread of the window
they would stop every key press for so long.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, BinaryIO


def load_tokenizer(model_path: str) -> Any:
    """The checkpoint's `tokenizer.json`, None where there is none that can be read."""
    file = Path(model_path) / "tokenizer.json"
    if not model_path or not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exception
        return None


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer `{"path": ..., "texts": [...]}` with `{"counts": [...]}`, or `{"counts": null}` without a tokenizer."""
    path, tokenizer = "", None
    for line in requests:
        request = json.loads(line)
        if request["path"] != path:
            path = request["path"]
            tokenizer = load_tokenizer(path)
        counts = None
        if tokenizer is not None:
            counts = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in request["texts"]]
        answers.write(json.dumps({"counts": counts}).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
