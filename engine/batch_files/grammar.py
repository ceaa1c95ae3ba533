"""Constraints as llguidance grammars; schemas are validated here without a model."""

from __future__ import annotations

import json

from engine.batch_files.request import Constraint
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import DEEPEST, parse_json

_MOST_CHARACTERS, _MOST_ENTRIES = 2**18, 3_000
"""Limits of a schema: much bigger ones compile for minutes, uninterruptibly."""


def grammar_of(constraint: Constraint) -> str:
    """The constraint as a llguidance grammar.

    Raises:
        EngineError: `INVALID_REQUEST`, if the schema is unsupported.
    """
    from llguidance import LLMatcher

    if constraint.choices:
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
        return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))
    if len(constraint.schema) > _MOST_CHARACTERS or constraint.schema.count(":") > _MOST_ENTRIES:
        raise unfit(f"it has more than {_MOST_CHARACTERS:,} characters or {_MOST_ENTRIES:,} entries")
    try:
        schema = parse_json(constraint.schema, deepest=DEEPEST)
        # Compact JSON only: models that start to indent or pad may never end.
        grammar = str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
    except (ValueError, TypeError) as error:
        raise unfit(str(error)) from None
    refusal = LLMatcher.validate_grammar(grammar)
    if refusal:
        raise unfit(refusal)
    return grammar


def unfit(why: str) -> EngineError:
    """The error for an unsupported schema."""
    first = " ".join(why.split())[:160]
    return EngineError(ErrorCode.INVALID_REQUEST, f"The schema cannot be used ({first}): simplify or correct it.")
