"""Turns rows into prompts, or into the reason why that is impossible."""

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
    """The same template for every row.

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
        """The row's request, or its outcome if there is none."""
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
    """Every row has its own conversation and sampling.

    Attributes:
        defaults: for whatever a request omits.
    """

    defaults: SamplingParams

    def __call__(self, row: Row) -> RowRequest | Answer:
        """The row's request, or its outcome if it is invalid."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            return openai_request(row, self.defaults)
        except BadRequestError as error:
            return failed(row.index, str(error))


Prompts = TemplatePrompts | OpenAiPrompts
