"""Calls of tools that are valid whatever the model would write: a constraint that begins when it opens a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from engine.batch_files.rows import Constraint, grammar_of
from engine.common.chat import Tool, ToolChoice
from engine.common.errors import EngineError
from engine.common.untrusted import json_text
from engine.families.replies import ReplyForm
from engine.families.replies.call_grammar import CallRule, call_rules, json_call_schema
from engine.families.replies.thinking import template_text
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import torch

_TAIL_CHARACTERS = 600
"""Enough for a head of a call with the longest name of a tool."""
_MOST_TO_BEGIN = 40
"""Tokens of a call that came in one token with its mark, which the grammar is to take."""


class CallGrammars:
    """The places where calls begin, for sets of tools, as this model writes them.

    Args:
        form: of its family's answers.
        tokenizer: transformers' tokenizer of the model.
    """

    def __init__(self, answers: ConstrainedAnswers, form: ReplyForm, tokenizer: Any) -> None:
        self._answers, self._form, self._tokenizer = answers, form, tokenizer
        self._special = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def begin(
        self, tools: Sequence[Tool], choice: ToolChoice, *, thinks: bool, shown: Sequence[int]
    ) -> ConstrainedCalls | ConstrainedAnswer | None:
        """What holds an answer's calls to their schemas; a plain constraint where the whole answer is a call as JSON.

        None where calls of this family have no grammar and none is required.

        Args:
            thinks: whether the prompt has opened the reasoning, in which nothing is held to anything.
            shown: see `IncrementalDetokenizer`.

        Raises:
            EngineError: `INVALID_REQUEST`, if a call is required whose schema cannot be followed.
        """
        tools = [tool for tool in tools if not choice.names or tool.name in choice.names]
        if choice.must:
            for tool in tools:  # who insists on a call insists on its schema
                grammar_of(Constraint(schema=json_text(json_call_schema([tool]))))
        how = {"must": choice.must, "several": choice.several}
        rules = call_rules(self._form, template_text(self._tokenizer), tools, self._mark, _compiles, **how)
        begun = [(rule, began) for rule in rules if (began := self._begun(rule)) is not None]
        if not choice.must:
            return ConstrainedCalls(begun, None, self._form, self._tokenizer, choice, thinks, shown) if begun else None
        opens = next((rule for rule, _answer in begun if rule.opens), None)
        if opens is None:
            return self._answers.begin(Constraint(schema=json_text(json_call_schema(tools))))
        answer = self._answers.begin(Constraint(grammar=opens.grammar(self._written(opens.opens))))
        return ConstrainedCalls(begun, answer, self._form, self._tokenizer, choice, False, shown)

    def _begun(self, rule: CallRule) -> ConstrainedAnswer | None:
        try:
            return self._answers.begin(Constraint(grammar=rule.grammar()))
        except EngineError:  # too large, or a form that these tools do not fit: the model is trusted with it
            return None

    def _mark(self, mark: str) -> str:
        index = self._special.get(mark)
        return json_text(mark) if index is None else f"<[{index}]>"

    def _written(self, text: str) -> str:
        """A text that may begin with a mark."""
        mark = next((each for each in self._special if text.startswith(each)), "")
        rest = text.removeprefix(mark)
        return " ".join(filter(None, (self._mark(mark) if mark else "", json_text(rest) if rest else "")))


@cache
def _compiles(schema: str) -> bool:
    try:
        grammar_of(Constraint(schema=schema))
    except EngineError:
        return False
    return True


class ConstrainedCalls:
    """Leaves an answer free until a call begins, and holds that to its grammar.

    Args:
        rules: where calls begin, each with what holds what follows.
        first: what the answer must begin with.
        thinks, shown: see `CallGrammars.begin`.
    """

    def __init__(
        self,
        rules: list[tuple[CallRule, ConstrainedAnswer]],
        first: ConstrainedAnswer | None,
        form: ReplyForm,
        tokenizer: Any,
        choice: ToolChoice,
        thinks: bool,
        shown: Sequence[int],
    ) -> None:
        self._rules, self._first, self._form = rules, first, form
        self._tokenizer, self._choice, self._shown = tokenizer, choice, shown
        self._begins_thinking = thinks
        self.reset()

    def reset(self) -> None:
        """See `TokenConstraint`."""
        if self._first is not None:
            self._first.reset()
        self._call, self._thinks = self._first, self._begins_thinking
        self._tail, self._detokenizer = "", IncrementalDetokenizer(self._tokenizer, self._shown)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """See `TokenConstraint`."""
        return logits if self._call is None else self._call.restrict(logits)

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint`."""
        if self._call is not None:
            if not self._call.accept(token_id):
                return False
            self._call, self._tail = None, ""
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, self._shown)
            return self._choice.must or not self._choice.several
        self._read(self._detokenizer.feed(token_id))
        return False

    def _read(self, text: str) -> None:
        for at, character in enumerate(text):
            self._tail = (self._tail + character)[-_TAIL_CHARACTERS:]
            if not self._form.has_channels:
                marks = (closes if self._thinks else opens for opens, closes in self._form.thoughts)
                self._thinks ^= self._tail.endswith(tuple(marks))
            if self._thinks:
                continue
            for rule, answer in self._rules:
                if rule.begins.search(self._tail) is not None:
                    self._open(answer, text[at + 1 :])
                    return

    def _open(self, answer: ConstrainedAnswer, begun: str) -> None:
        """A call begins, of which so much stands there; one that cannot go on as a call is text."""
        answer.reset()
        ids = self._tokenizer.encode(begun, add_special_tokens=False) if begun else []
        if len(ids) <= _MOST_TO_BEGIN and answer.takes(ids):
            self._call = answer
