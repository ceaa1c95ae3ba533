"""Conversations by graphs, for any device that captures: a card, or the emulated one's stand-in."""

from pathlib import Path
from typing import Any

from engine.runtime.decode.graphs import GraphedSteps, GraphStep
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import BEAMS, NEW_TOKENS, PROMPT, Chats, answer, chatting, opened, reference

FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "phimoe",
    "granitemoe",
    "qwen2_moe",
    "qwen3_next",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
)


def graphs_of(session: Chats) -> GraphedSteps:
    """What repeats steps."""
    exact = session.batch.exact
    assert exact.graphs is not None
    return exact.graphs


def step_of(graphs: GraphedSteps, rows: int = 1) -> GraphStep:
    """The captured step of so many tokens."""
    step = graphs._kinds[rows].step
    assert step is not None
    return step


def check_conversation(family: str, folder: Path, **config: Any) -> LoadedModel:
    """Two turns, beams between them, the first again, and several at once."""
    expected = reference(family, folder)
    with opened(expected.folder, **config) as model, chatting(model) as session:
        assert model.devices is not None, model.info.device_note
        graphs = graphs_of(session)
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert graphs.refused is None, graphs.refused
        assert graphs.counters.replays > 0
        before = graphs.counters.replays
        again = answer(session, expected.second_prompt)
        assert list(again.token_ids) == expected.second
        assert again.reused_tokens > 0
        assert graphs.counters.replays > before
        assert list(answer(session, PROMPT, beams=BEAMS).token_ids) == expected.beams
        assert list(answer(session, PROMPT).token_ids) == expected.first
        prompts = [PROMPT, expected.second_prompt, random_prompt(20, seed=1)]
        alone = [answer(session, prompt).token_ids for prompt in prompts]
        assert session.together(prompts, NEW_TOKENS) == alone
        assert graphs.counters.eager == 0
        assert max(graphs._kinds) > 1 or graphs._gathers
    return model
