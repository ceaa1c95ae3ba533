"""Whatever the model would like to say, the answer satisfies what was asked of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.batch_files.rows import Constraint
from engine.common.errors import EngineError
from engine.runtime.decode.constrained import ConstrainedAnswers
from tests.engine.tiny_tokenizer import EOS, VOCABULARY, save_tiny_tokenizer

_WIDTH = VOCABULARY + 8  # models often have more logits than tokens

_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["late", "broken"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def answers(tokenizer: Any) -> ConstrainedAnswers:
    return ConstrainedAnswers(tokenizer, _WIDTH, frozenset({EOS}))


def _random_answer(answers: ConstrainedAnswers, constraint: Constraint, seed: int) -> list[int]:
    """Tokens drawn from random logits until the end is drawn."""
    generator = torch.Generator().manual_seed(seed)
    answer, tokens = answers.begin(constraint), []
    while len(tokens) < 200:
        token = int(answer.restrict(torch.randn(_WIDTH, generator=generator)).argmax())
        if token != EOS:
            tokens.append(token)
        if token == EOS or answer.accept(token):
            assert answer.complete
            return tokens
    raise AssertionError("the answer did not end")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_answers_satisfy_the_schema(tokenizer: Any, answers: ConstrainedAnswers, seed: int) -> None:
    tokens = _random_answer(answers, Constraint(schema=json.dumps(_SCHEMA)), seed)
    value = json.loads(tokenizer.decode(tokens))
    assert value["kind"] in ("late", "broken")
    assert isinstance(value["sure"], bool)
    assert set(value) == {"kind", "sure"}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    choices=st.lists(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12),
        min_size=1,
        max_size=5,
        unique=True,
    ),
)
def test_answers_are_one_of_the_choices(
    tokenizer: Any, answers: ConstrainedAnswers, seed: int, choices: list[str]
) -> None:
    tokens = _random_answer(answers, Constraint(choices=tuple(choices)), seed)
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) in choices


def test_an_answer_knows_when_it_may_end_and_when_it_must(answers: ConstrainedAnswers, tokenizer: Any) -> None:
    answer = answers.begin(Constraint(choices=("a", "ab")))
    assert not answer.complete
    answer.accept(tokenizer.convert_tokens_to_ids("a"))
    assert answer.complete
    allowed = answer.restrict(torch.zeros(_WIDTH)).isfinite().nonzero()[:, 0].tolist()
    assert set(allowed) == {EOS, tokenizer.convert_tokens_to_ids("b")}


@pytest.mark.parametrize("schema", ['{"type": 5}', "no json", '{"$ref": "http://example.com/x"}'])
def test_a_schema_that_cannot_be_followed_is_refused_in_one_sentence(answers: ConstrainedAnswers, schema: str) -> None:
    with pytest.raises(EngineError, match="The schema"):
        answers.begin(Constraint(schema=schema))
