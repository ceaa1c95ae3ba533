"""Runs llama.cpp or ik_llama.cpp: one JSON request per line on stdin, one answer per line on stdout.

    {"do": "types", "path", "type", "columns", "target"} -> {"types"}   type: a llama_ftype
    {"do": "load", "path", "repack"}             -> {"seconds"}
    {"do": "open", "threads", "context", "sequences", "flash", "fused", "latent"} -> {"seconds"}   an empty context
    {"do": "prefill", "ids"}                     -> {"seconds"}          from an empty context
    {"do": "fill", "ids"}                        -> {"seconds"}          as prefill, for decoding at that length: a long
                                                    prompt's beginning is read, and its keys and values are repeated
    {"do": "decode", "tokens"}                   -> {"seconds", "ids"}   greedy, from where the context ends
    {"do": "parallel", "prompts", "tokens"}      -> {"seconds"}          greedy, all together, prompts included
    {"do": "logits", "ids", "path"}              -> {"vocabulary"}       path receives float32 [ids, vocabulary]

Every answer may be {"error": sentence} instead.  The one argument is the Python binding's name, or the path of the
library that stands for one.  This file runs standalone: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

_READ_IN_FULL = 512
"""Tokens of a long prompt that `fill` reads."""


class Program(Protocol):
    """What both programs can do, each in its own words."""

    vocabulary: int
    most_at_once: int

    def load(self, path: str, repack: bool) -> bool: ...
    def open(self, settings: dict[str, Any]) -> bool: ...
    def clear(self) -> None: ...
    def run(
        self, tokens: Sequence[int], places: Sequence[int], owners: Sequence[int], wanted: Sequence[bool]
    ) -> int: ...
    def logits(self, place: int) -> Any: ...
    def repeat(self, length: int, times: int) -> bool: ...


class LlamaCpp:
    """llama.cpp through its Python binding."""

    def __init__(self, binding: str) -> None:
        self._api = importlib.import_module(binding)
        self._api.llama_backend_init()
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self.vocabulary = self.most_at_once = 0

    def load(self, path: str, repack: bool) -> bool:
        api, options = self._api, self._api.llama_model_default_params()
        self._close()
        if self._model:
            api.llama_model_free(self._model)
        options.n_gpu_layers = 0
        options.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(path.encode(), options)
        if self._model:
            self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        return bool(self._model)

    def open(self, settings: dict[str, Any]) -> bool:
        api, options = self._api, self._api.llama_context_default_params()
        self._close()
        options.n_ctx = settings["context"]
        options.n_seq_max = settings["sequences"]
        options.kv_unified = True  # sequences of different lengths share the context
        options.n_threads = options.n_threads_batch = settings["threads"]
        options.flash_attn_type = int(settings["flash"])
        self._context = api.llama_init_from_model(self._model, options)
        if self._context:
            self.most_at_once = api.llama_n_batch(self._context)
            self._batch = api.llama_batch_init(self.most_at_once, 0, 1)
        return bool(self._context)

    def _close(self) -> None:
        if self._context:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
            self._context = None

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def run(self, tokens: Sequence[int], places: Sequence[int], owners: Sequence[int], wanted: Sequence[bool]) -> int:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, places[at]
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, owners[at]
            batch.logits[at] = wanted[at]
        status = int(self._api.llama_decode(self._context, batch))
        self._api.llama_synchronize(self._context)
        return status

    def logits(self, place: int) -> Any:
        return self._api.llama_get_logits_ith(self._context, place)

    def repeat(self, length: int, times: int) -> bool:
        api = self._api
        memory = api.llama_get_memory(self._context)
        if not api.llama_memory_can_shift(memory):
            return False
        state = (ctypes.c_uint8 * api.llama_state_seq_get_size(self._context, 0))()
        size = api.llama_state_seq_get_data(self._context, state, len(state), 0)
        for copy in range(1, times + 1):
            if not size or not api.llama_state_seq_set_data(self._context, state, size, 1):
                return False
            api.llama_memory_seq_add(memory, 1, 0, -1, copy * length)
            api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            api.llama_memory_seq_rm(memory, 1, -1, -1)
        return True


class IkLlamaCpp:
    """ik_llama.cpp through the functions of `ik_interface.cpp`."""

    def __init__(self, library: str) -> None:
        self._api = ctypes.CDLL(library)
        self._api.peer_model.restype = self._api.peer_context.restype = ctypes.c_void_p
        self._api.peer_logits.restype = ctypes.POINTER(ctypes.c_float)
        self._api.peer_repeat.restype = ctypes.c_bool
        self._model, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        self.vocabulary = self.most_at_once = 0

    def load(self, path: str, repack: bool) -> bool:
        self._close()
        if self._model:
            self._api.peer_drop_model(self._model)
        self._model = ctypes.c_void_p(self._api.peer_model(path.encode(), ctypes.c_bool(repack)))
        if self._model:
            self.vocabulary = self._api.peer_vocabulary(self._model)
        return bool(self._model)

    def open(self, settings: dict[str, Any]) -> bool:
        self._close()
        numbers = (settings[name] for name in ("threads", "context", "sequences"))
        switches = (ctypes.c_bool(settings[name]) for name in ("flash", "fused"))
        options = (*numbers, *switches, settings["latent"])
        self._context = ctypes.c_void_p(self._api.peer_context(self._model, *options))
        if self._context:
            self.most_at_once = self._api.peer_most_at_once(self._context)
        return bool(self._context)

    def _close(self) -> None:
        if self._context:
            self._api.peer_drop_context(self._context)
            self._context = ctypes.c_void_p()

    def clear(self) -> None:
        self._api.peer_clear(self._context)

    def run(self, tokens: Sequence[int], places: Sequence[int], owners: Sequence[int], wanted: Sequence[bool]) -> int:
        numbers = ctypes.c_int * len(tokens)
        marks = (ctypes.c_byte * len(tokens))(*map(int, wanted))
        return int(
            self._api.peer_run(self._context, len(tokens), numbers(*tokens), numbers(*places), numbers(*owners), marks)
        )

    def logits(self, place: int) -> Any:
        return self._api.peer_logits(self._context, place)

    def repeat(self, length: int, times: int) -> bool:
        return bool(self._api.peer_repeat(self._context, length, times))


class Model:
    """One model with one context at a time, on the CPU."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._tokens = 0
        self._next = 0

    def load(self, path: str, repack: bool) -> None:
        if not self._program.load(path, repack):
            raise RuntimeError("it cannot load the file (its own words are on stderr)")

    def open(self, **settings: Any) -> None:
        if not self._program.open(settings):
            raise RuntimeError("it has no memory for the context")

    def prefill(self, ids: list[int]) -> None:
        """Reads a prompt, from an empty context."""
        self._program.clear()
        self._tokens = 0
        limit = self._program.most_at_once
        for begin in range(0, len(ids), limit):
            self._run(ids[begin : begin + limit])
        self._next = self._best()

    def fill(self, ids: list[int]) -> None:
        """A context as long as after `prefill`, of which only the beginning is read; the last token is read as well."""
        times = (len(ids) - 1) // _READ_IN_FULL - 1
        if times > 0:
            self.prefill(ids[:_READ_IN_FULL])
            if self._program.repeat(_READ_IN_FULL, times):
                self._tokens = _READ_IN_FULL * (times + 1)
                self._run(ids[self._tokens :])
                self._next = self._best()
                return
        self.prefill(ids)

    def decode(self, tokens: int) -> list[int]:
        """`tokens` further steps; the `tokens` + 1 greedy tokens, of which the first was known before."""
        chosen = [self._next]
        for _ in range(tokens):
            self._run(chosen[-1:])
            chosen.append(self._best())
        self._next = chosen[-1]
        return chosen

    def parallel(self, prompts: list[list[int]], tokens: int) -> None:
        """All prompts and `tokens` greedy tokens after each, as in llama.cpp's own `llama-batched`."""
        self._program.clear()
        last: list[int] = []
        limit = self._program.most_at_once
        # Prompts are packed together; one that ends in a batch gets its first token from it.
        flat = [
            (token, place, sequence, place + 1 == len(prompt))
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for begin in range(0, len(flat), limit):
            last += self._run_parallel(flat[begin : begin + limit])
        for step in range(tokens - 1):
            last = self._run_parallel(
                [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(last)]
            )

    def logits(self, ids: list[int], path: str) -> int:
        """Writes the logits after every id, from an empty context; returns the vocabulary size."""
        self._program.clear()
        limit = self._program.most_at_once
        with open(path, "wb") as file:
            for begin in range(0, len(ids), limit):
                piece = ids[begin : begin + limit]
                places = range(begin, begin + len(piece))
                self._checked(piece, places, [0] * len(piece), [True] * len(piece))
                for at in range(len(piece)):
                    self._logits(at).tofile(file)
        return self._program.vocabulary

    def _run_parallel(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether the next one is wanted) -> the most likely next ones."""
        ids, places, owners, wanted = zip(*tokens, strict=True)
        self._checked(ids, places, owners, wanted)
        return [self._best(at) for at, is_wanted in enumerate(wanted) if is_wanted]

    def _run(self, ids: Sequence[int]) -> None:
        """Reads them after what was read before, with logits after the last."""
        places = range(self._tokens, self._tokens + len(ids))
        self._checked(ids, places, [0] * len(ids), [False] * (len(ids) - 1) + [True])
        self._tokens += len(ids)

    def _checked(
        self, ids: Sequence[int], places: Sequence[int], owners: Sequence[int], wanted: Sequence[bool]
    ) -> None:
        status = self._program.run(ids, places, owners, wanted)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, place: int = -1) -> int:
        return int(self._logits(place).argmax())

    def _logits(self, place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.ctypeslib.as_array(self._program.logits(place), (self._program.vocabulary,))


def types(path: str, type: int, columns: dict[str, int], target: str) -> dict[str, str]:
    """The types that llama-quantize chooses for the model in `path`, whose matrices are plain numbers.

    Args:
        columns: of each matrix, those of all experts together: they are said to be equally important.  May be empty.
        target: where the quantised model is written, and no types are told; or nothing.
    """
    llama_cpp = importlib.import_module("llama_cpp")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.dry_run, options.nthread = type, not target, 1
    importance = (llama_cpp.llama_model_imatrix_data * (len(columns) + 1))()  # up to one without a name
    for each, (name, count) in zip(importance, columns.items(), strict=False):
        each.name, each.data, each.size = name.encode(), (ctypes.c_float * count)(*[1.0] * count), count
    if columns:
        options.imatrix = importance
    words: list[str] = []
    heard = llama_cpp.llama_log_callback(lambda _level, text, _data: words.append(text.decode("utf-8", "replace")))
    llama_cpp.llama_log_set(heard, None)
    failed = llama_cpp.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(options))
    sys.stderr.write("".join(words))
    if failed:
        raise RuntimeError("it cannot quantise the file (its own words are on stderr)")
    lines = re.findall(r"\] (\S+) +- \[.*\], type = +(\w+), size = .*?(?:\((\w+)\))?\n", "".join(words))
    return {} if target else {name: (new or old).upper() for name, old, new in lines}


def answer(model: Model, kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """What is answered to a request, but for the seconds it took."""
    if kind == "types":
        return {"types": types(**request)}
    if kind == "decode":
        return {"ids": model.decode(**request)}
    if kind == "logits":
        return {"vocabulary": model.logits(**request)}
    requests: dict[str, Callable[..., None]] = {
        "load": model.load,
        "open": model.open,
        "prefill": model.prefill,
        "fill": model.fill,
        "parallel": model.parallel,
    }
    requests[kind](**request)
    return {}


def main() -> None:
    """Answers until stdin ends."""
    # llama.cpp prints from C: redirect its stdout to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    interface = sys.argv[1]
    model = Model(IkLlamaCpp(interface) if os.path.sep in interface else LlamaCpp(interface))
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("do")
        started = time.perf_counter()
        try:
            answered = answer(model, kind, request)
            answered["seconds"] = time.perf_counter() - started
        except (RuntimeError, ValueError, OSError, ctypes.ArgumentError) as error:
            answered = {"error": str(error)}
        answers.write(json.dumps(answered) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
