"""A real small model in a chat with an MCP server: `pytest -m exhaustive`; `SWITCHYARD_CODER` names its GGUF file.

Made for Qwen2.5-Coder-1.5B-Instruct in Q4_K_M.
"""

import os
import sys
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue, ToolOffer, prompt_of
from app.services.chat_store import ChatStore, Conversation, Message, MessageState
from app.services.engine_client import EngineClient, EngineState
from app.services.settings import Settings
from app.services.tools import Tools
from engine.common.config import EngineConfig, SamplingParams
from tests.app.test_tools import server

MODEL = os.environ.get("SWITCHYARD_CODER", "")
QUESTIONS = (
    ("Use the tool add to add 17 and 25, and tell me the sum.", "add", "42"),
    ("Use the tool weather to find the weather in Oslo, and tell me.", "weather", "sunny"),
    ("Use the tool calculator to compute 12.5 * 16, and tell me the result.", "calculator", "200"),
)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path(MODEL).is_file(), reason="SWITCHYARD_CODER names no file")
@pytest.mark.timeout(1800)
def test_a_small_model_calls_three_tools_and_finishes(qtbot: QtBot) -> None:
    client, store, settings = EngineClient(), ChatStore(), Settings()
    tools = Tools(settings, lambda: pytest.fail("no documents here"), lambda _job, _rows: None)
    queue = AnswerQueue(client, store)
    try:
        client.start()
        qtbot.waitUntil(lambda: client.state is EngineState.READY, timeout=120_000)
        client.load(EngineConfig(MODEL))
        qtbot.waitUntil(lambda: client.model is not None, timeout=900_000)
        for name in ("clock", "read_file", "run_batch", "search_documents"):
            tools.set_on(name, is_on=False)
        tools.put(server("good"))
        tools.when_known(lambda: None)
        qtbot.waitUntil(lambda: len(tools.offered()) == 5, timeout=120_000)
        allowed = tuple(each.key for each in tools.offered())
        ended: list[Message] = []
        queue.changed.connect(
            lambda answer: ended.append(answer) if answer.state is not MessageState.STREAMING else None
        )
        for number, (question, wanted, told) in enumerate(QUESTIONS):
            # A chat for each: after one answer a model this small makes up the next without calling anything.
            asked = Message(f"q{number}", f"chat{number}", None, "user", question)
            answer = Message(f"a{number}", f"chat{number}", f"q{number}", "assistant", "", MessageState.STREAMING)
            store.create(Conversation(f"chat{number}"), [asked, answer])
            offer = ToolOffer(tools, tools.offered(), allowed)
            sampling = SamplingParams(temperature=0, max_tokens=300)
            queue.ask(answer, prompt_of("", [asked], calls=True), sampling, offer=offer)
            qtbot.waitUntil(lambda number=number: len(ended) == number + 1, timeout=600_000)
            made = [use for step in ended[-1].steps for use in step.calls]
            sys.stdout.write(f"{made}\n{ended[-1].content}\n")
            assert ended[-1].state is MessageState.COMPLETE, ended[-1]
            assert [use.name for use in made][:1] == [wanted], ended[-1]
            assert made[0].state == "done"
            assert told in made[0].result
            assert told in ended[-1].content
    finally:
        tools.close()
        client.close_now()
        store.close()
