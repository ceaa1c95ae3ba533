"""A plugin of pytest for llama.cpp's own tests of its server: they ask `switchyard serve` instead.

Their `ServerProcess.start` starts a program with flags of its own.  Here it has `switchyard serve` answer, with a model
of the name and the chat template that the test wants; the server of the test before is kept where both want the same.
"""

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

STARTER, FOLDER = "SWITCHYARD_LLAMA_CPP_STARTER", "SWITCHYARD_LLAMA_CPP_FOLDER"
WORDLESS = "SWITCHYARD_LLAMA_CPP_WORDLESS"
"""Environment variables: the model, a folder to write in, and tests that compare an answer with their model's words."""
ASKED = ("test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002")
"""Names of models in those tests: their server answers to any."""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    "{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BOS = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
_ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": _BOS["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {_BOS["id"]: _BOS},
}


class _Running:
    """The server that answers now."""

    def __init__(self) -> None:
        self._wants: tuple[str, str, str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._models = 0
        self.port = 0

    def answer(self, name: str, template: str, key: str) -> None:
        """Has a server answer with a model of this name and template."""
        if self._wants == (name, template, key):
            return
        self.stop()
        model = self._model(name, template)
        command = [sys.executable, "-m", "engine.cli", "serve", "--model", str(model), "--port", "0", "--json"]
        for alias in ASKED:
            command += ["--alias", alias]
        environment = {**os.environ, "SWITCHYARD_KEY": key, "SWITCHYARD_HOME": str(_folder() / "home")}
        environment["SWITCHYARD_FIND_MODELS"] = "0"
        errors = (_folder() / "errors.txt").open("a")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert self._process.stdout is not None
        text = ""
        while line := self._process.stdout.readline():
            text += line
            if line == "}\n":
                break
        self.port, self._wants = json.loads(text)["port"], (name, template, key)

    def stop(self) -> None:
        """Ends it."""
        process, self._process, self._wants = self._process, None, None
        if process is not None:
            process.terminate()
            process.communicate(timeout=30)

    def _model(self, name: str, template: str) -> Path:
        """The model under this name, with this template, and a tokenizer that begins texts with a token."""
        self._models += 1
        model, source = _folder() / str(self._models) / name, Path(os.environ[STARTER])
        model.mkdir(parents=True)
        for file in source.iterdir():
            (model / file.name).symlink_to(file)
        for written, key, value in (
            ("tokenizer.json", "post_processor", _ADDS_BOS),
            ("tokenizer_config.json", "chat_template", template),
        ):
            fields = json.loads((source / written).read_text(encoding="utf-8"))
            (model / written).unlink()
            (model / written).write_text(json.dumps({**fields, key: value}), encoding="utf-8")
        return model


def _folder() -> Path:
    return Path(os.environ[FOLDER])


_RUNNING = _Running()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before their tests are imported."""
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # with which they fetch models
    sys.path.insert(0, os.getcwd())
    import utils

    def start(server: Any, timeout_seconds: int = 0) -> None:
        template = TEMPLATE
        if server.chat_template_file:
            template = Path(server.chat_template_file).read_text(encoding="utf-8")
        _RUNNING.answer(server.model_alias or "model", template, server.api_key or "")
        server.server_port = _RUNNING.port

    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda _server: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    match, wordless = utils.match_regex, tuple(os.environ[WORDLESS].split("\n"))

    @functools.wraps(match)
    def matches(regex: str, text: str) -> bool:
        is_wordless = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0] in wordless
        return bool(text) if is_wordless else bool(match(regex, text))

    utils.match_regex = matches


def pytest_unconfigure() -> None:
    """After the last of them."""
    _RUNNING.stop()
