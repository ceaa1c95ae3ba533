"""Runs llama.cpp in the Python with its binding: one JSON request per line on stdin, one answer per line on stdout.

    {"do": "quantise", "path", "target", "type", "threads"} -> {"seconds"}   type: number of a llama_ftype
    {"do": "load", "path", "threads", "context", "sequences"} -> {"seconds"}
    {"do": "prefill", "ids"}                     -> {"seconds"}
    {"do": "decode", "ids", "tokens"}            -> {"seconds", "ids"}   greedy; the time of the steps after the prompt
    {"do": "parallel", "prompts", "tokens"}      -> {"seconds"}          greedy, all together, prompts included
    {"do": "logits", "ids", "path"}              -> {"vocabulary"}       path receives float32 [ids, vocabulary]

Every answer may be {"error": sentence} instead.  This file runs standalone: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class Model:
    """One model with one context, on the CPU; otherwise with llama.cpp's defaults, such as repacked weights."""

    def __init__(self, path: str, threads: int, context: int, sequences: int = 1) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file (its own words are on stderr)")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = context
        settings.n_seq_max = sequences
        settings.kv_unified = True  # sequences of different lengths share the context
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp has no memory for the context")
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, ids: list[int]) -> float:
        """Seconds of the prompt, from an empty context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        started = time.perf_counter()
        limit = llama_cpp.llama_n_batch(self._context)
        for begin in range(0, len(ids), limit):
            self._run(ids[begin : begin + limit])
        return time.perf_counter() - started

    def decode(self, ids: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds of `tokens` steps after the prompt, and the `tokens` + 1 greedy tokens."""
        self.prefill(ids)
        chosen = [self._best()]
        started = time.perf_counter()
        for _ in range(tokens):
            self._run(chosen[-1:])
            chosen.append(self._best())
        return time.perf_counter() - started, chosen

    def parallel(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of all prompts and of `tokens` greedy tokens after each, as in llama.cpp's own `llama-batched`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        started = time.perf_counter()
        last: list[int] = []
        limit = llama_cpp.llama_n_batch(self._context)
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
        return time.perf_counter() - started

    def _run_parallel(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether the next one is wanted) -> the most likely next ones."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for at, (token, place, sequence, is_wanted) in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = int(is_wanted)
            status = llama_cpp.llama_decode(self._context, batch)
            llama_cpp.llama_synchronize(self._context)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._best(at) for at, token in enumerate(tokens) if token[3]]

    def logits(self, ids: list[int], path: str) -> int:
        """Writes the logits after every id, from an empty context; returns the vocabulary size."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        limit = llama_cpp.llama_n_batch(self._context)
        with open(path, "wb") as file:
            for begin in range(0, len(ids), limit):
                piece = ids[begin : begin + limit]
                self._run_all(piece, begin)
                logits = llama_cpp.llama_get_logits(self._context)
                np.ctypeslib.as_array(logits, (len(piece), self._vocabulary)).tofile(file)
        return self._vocabulary

    def _run_all(self, ids: list[int], begin: int) -> None:
        """As `_run`, but with logits for every token."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for place, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, begin + place
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
                batch.logits[place] = 1
            status = llama_cpp.llama_decode(self._context, batch)
            llama_cpp.llama_synchronize(self._context)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _run(self, ids: list[int]) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(ids)))
        llama_cpp.llama_synchronize(self._context)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, place: int = -1) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def quantise(path: str, target: str, type: int, threads: int) -> float:
    """Seconds of writing the model in `path`, whose matrices are plain numbers, to `target` as llama-quantize does."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = type, threads
    started = time.perf_counter()
    if llama_cpp.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(options)):
        raise RuntimeError("llama.cpp cannot quantise the file (its own words are on stderr)")
    return time.perf_counter() - started


def main() -> None:
    """Answers until stdin ends."""
    # llama.cpp prints from C: redirect its stdout to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model: Model | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        kind = request.pop("do")
        answer: dict[str, Any]
        try:
            if kind == "load":
                started = time.perf_counter()
                model = Model(**request)
                answer = {"seconds": time.perf_counter() - started}
            elif kind == "quantise":
                answer = {"seconds": quantise(**request)}
            elif model is None:
                answer = {"error": "no model is loaded"}
            elif kind == "prefill":
                answer = {"seconds": model.prefill(**request)}
            elif kind == "parallel":
                answer = {"seconds": model.parallel(**request)}
            elif kind == "logits":
                answer = {"vocabulary": model.logits(**request)}
            else:
                seconds, ids = model.decode(**request)
                answer = {"seconds": seconds, "ids": ids}
        except (RuntimeError, ValueError, OSError, ctypes.ArgumentError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
