"""A real worker process around an engine that does what the prompt says: run as a program, never imported by tests.

Prompts: `count N` streams N tokens, 10 ms each; `flood N` streams N at once; `think N` N of reasoning and one of
an answer; `print` prints on stdout from Python and below it; `raise NAME` raises; `exit` calls sys.exit; `stuck`
computes without ever letting another thread run.
Models: `slow` loads until it is cancelled, `missing` is not found, anything else loads.
"""

import os
import re
import sys
import time

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.runtime.decode.generation import GenerationResult
from engine.worker import serve


class ScriptedEngine:
    info = None
    kv_tokens = 7
    kv_bytes = 70
    device_memory = (0, 0, 0)
    telemetry = None

    def __init__(self):
        self._waiting = []

    def load(self, config, *, on_progress, cancelled, on_phase):
        self.info = None
        if config.model == "missing":
            raise EngineError(ErrorCode.MODEL_NOT_FOUND, "There is no model 'missing'.")
        on_phase("converting")
        for step in range(10_000 if os.path.basename(config.model) == "slow" else 3):
            if cancelled():
                raise RequestCancelled
            on_progress(step, 10_000)
            time.sleep(0.01)
        self.info = ModelInfo(config.model, "/", "fake", "cpu", "fp32", 1, 1, 1, 0, 0, 100, 1, 1, 1)
        return self.info

    def unload(self):
        self.info = None

    def begin(self, request, on_end, _on_begin):
        self._waiting.append((request, on_end))

    @property
    def scheduler(self):
        return self

    @property
    def is_answering(self):
        return bool(self._waiting)

    is_busy = is_answering

    def serve(self, until):
        while self._waiting:
            request, on_end = self._waiting.pop(0)
            try:
                outcome = self._answer(request)
            except BaseException as error:
                outcome = error
            on_end(outcome)
            until()

    def is_due(self):
        return self.is_answering

    def share(self, until):
        self.serve(until)

    def _answer(self, request):
        on_text = request.on_text
        verb, _, argument = request.messages[-1].content.partition(" ")
        request.on_progress(1, 1)
        count = int(argument) if verb in ("count", "flood") else 0
        for n in range(1, count + 1):
            for asked in [each for each in self._waiting if each[0].cancelled()]:
                self._waiting.remove(asked)
                asked[-1](GenerationResult("", "cancelled", 1, 0, 0, 0.0, 0.0))
            if request.cancelled():
                return GenerationResult("", "cancelled", 1, 0, n - 1, 0.0, 0.0)
            on_text(f"{n} ", n)
            if verb == "count":
                time.sleep(0.01)
        if verb == "think":
            count = int(argument) + 1
            for n in range(1, count):
                request.on_reasoning(f"{n} ", n)
            on_text("so", count)
        if verb == "print":
            print("stray print", flush=True)  # noqa: T201
            os.write(1, b"stray write\n")
            os.system("echo stray child")
        if verb == "raise":
            raise {"memory": MemoryError(), "value": ValueError("quoting: " + argument)}[argument.split()[0]]
        if verb == "exit":
            sys.exit(3)
        if verb == "stuck":
            on_text("stuck", 1)
            time.sleep(0.3)  # so that the token is out before nothing else can run
            re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for ages
        return GenerationResult("", "stop", 1, 0, count, 0.1, 10.0)


if __name__ == "__main__":
    serve(ScriptedEngine)
