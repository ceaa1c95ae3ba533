"""GGUF files of checkpoints, for the peers that read nothing else.

They lie in the cache folder, and are found again until what they are made of changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from gguf import TokenType

from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.export import Metadata, Quantisation, write_gguf
from engine.checkpoint.importing import staging_folder
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_FORMAT = 2
"""Part of the file's name: increase it when the output for a checkpoint changes."""


def gguf_of(
    checkpoint: Path,
    quantisation: Quantisation,
    say: Callable[[str], None] = lambda _text: None,
    vocabulary: tuple[str, Metadata | None] = ("", None),
) -> Path:
    """The GGUF file with this checkpoint's weights, in the cache folder, written if missing; a GGUF file is its own.

    Args:
        say: called with progress messages.
        vocabulary: a name of the tokenizer's keys, in that of the file, and these keys; else ids without texts.
    """
    own = gguf_at(checkpoint)
    if own is not None:
        return own
    tensors = read_tensors(checkpoint)
    made_of = json.dumps([_FORMAT, fingerprint(checkpoint)], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = cache_dir() / "gguf"
    name, keys = vocabulary
    path = folder / f"{checkpoint.name}{name}-{digest}-{quantisation.value}.gguf"
    if path.is_file():
        return path
    say(f"writing {path}, kept for the next time")
    tenths = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal tenths
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            say(f"{10 * tenths}% of {total / 1e9:.1f} GB")

    with disk_errors_explained(folder), staging_folder(folder) as staged:
        # The checkpoint's size bounds the file's, except for float32 norms.
        require_space(folder, sum(entry.nbytes for entry in tensors.values()))
        write_gguf(checkpoint, staged / path.name, quantisation, on_progress, keys)
        (staged / path.name).replace(path)
    return path


_MERGED = "\u0120\u0120"
"""Two spaces: llama.cpp asks for one merge at least."""


def texts_of(checkpoint: Path) -> Metadata:
    """The vocabulary, the merges and the chat template of a checkpoint whose tokens are made of bytes.

    Where there are no merges, the first made-up word becomes the result of the only one.
    """
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        words = "Its tokenizer is no byte-level BPE, the only kind that the benches write to GGUF: name a GGUF file."
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, words)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    named = {**{at: text for text, at in content["model"]["vocab"].items()}, **special}
    tokens = [named.get(at, f"<unused {at}>") for at in range(max(named) + 1)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"].get("merges", ())]
    if not merges:
        words_at = (at for at, token in enumerate(tokens) if at not in special and len(token) > 1)
        tokens[next(words_at, -1)] = _MERGED
        merges = [" ".join(_MERGED)]
    found: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if at in special else TokenType.NORMAL) for at in range(len(tokens))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if settings.get(name) in tokens:
            found[f"tokenizer.ggml.{key}_token_id"] = tokens.index(settings[name])
    if settings.get("chat_template"):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found
