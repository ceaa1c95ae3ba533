"""From rows to prompts: what is asked of each, or why it cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch_files.answer import Answer, failed
from engine.batch_files.openai_requests import BadRequestError, openai_request
from engine.batch_files.request import Constraint, RowRequest
from engine.batch_files.row import Row
from engine.batch_files.template import EmptyFieldError, Template
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams


@dataclass(frozen=True, slots=True)
class TemplatePrompts:
    """The same question about every row.

    Attributes:
        template: the user's message.
        system: of every conversation; none if empty.
        sampling, constraint: of every answer.
    """

    template: Template
    system: str
    sampling: SamplingParams
    constraint: Constraint | None = None

    def __call__(self, row: Row) -> RowRequest | Answer:
        """What to ask of this row, or its ending."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            question = ChatMessage("user", self.template.fill(row))
        except EmptyFieldError as error:
            return failed(row.index, str(error))
        before = (ChatMessage("system", self.system),) if self.system else ()
        return RowRequest(row.index, (*before, question), self.sampling, self.constraint)


@dataclass(frozen=True, slots=True)
class OpenAiPrompts:
    """Every row brings its own conversation and sampling.

    Attributes:
        defaults: of what a request does not say.
    """

    defaults: SamplingParams

    def __call__(self, row: Row) -> RowRequest | Answer:
        """What to ask of this row, or its ending."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            return openai_request(row, self.defaults)
        except BadRequestError as error:
            return failed(row.index, str(error))


Prompts = TemplatePrompts | OpenAiPrompts
