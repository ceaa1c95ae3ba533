"""Calls of tools that are valid whatever the model would write: a constraint that begins when it opens a call.

It is an llguidance grammar in the family's own form (`call_rules`). The arguments satisfy the tool's JSON schema
wherever that can be compiled. Where a form writes texts without quotes, limits of a text (its pattern, its length) are
not held; where a schema cannot be compiled, any JSON object is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from engine.batch_files.rows import Constraint, grammar_of
from engine.common.chat import Tool, ToolChoice
from engine.common.errors import EngineError
from engine.common.untrusted import json_text
from engine.families.replies import DEEPSEEK, GEMMA, KIMI, LFM, LLAMA, MISTRAL, ReplyForm
from engine.families.replies.calls import (
    DSML,
    GLM_TAGS,
    MINIMAX_TAGS,
    NEST,
    QWEN_TAGS,
    Tagged,
    Tools,
    allowed_kinds,
    named_values,
    referred,
)
from engine.families.replies.reader import template_text
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.detokenizer import IncrementalDetokenizer

_SAYS_NOTHING = {"type", "title", "description", "default", "examples"}
"""What in a schema does not limit a value of its type."""
_MOST_SPACES = 12
"""Models indent their calls, or not; without a limit one that pads would never end."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """A place where calls begin.

    Attributes:
        begins: matches a text that ends there.
        opens: what a call that is required begins with; empty if it cannot begin here.
        body, rules: what follows, in llguidance's dialect of Lark.
    """

    begins: re.Pattern[str]
    opens: str
    body: str
    rules: str

    def grammar(self, before: str = "") -> str:
        return f"start: {before} ({self.body})\n{self.rules}"


def call_rules(
    form: ReplyForm,
    template: str,
    tools: Sequence[Tool],
    mark: Callable[[str], str],
    compiles: Callable[[str], bool],
    *,
    must: bool = False,
    several: bool = True,
) -> list[CallRule]:
    """Where calls may begin, the one that the template shows first.

    Args:
        template: the model's chat template, which shows one of the family's forms.
        mark: how a mark is written in a grammar: as its token, or as text.
        compiles: whether a JSON schema can be compiled.
        must: the answer is one call, which need not be written as the model would indent it.
        several: whether further calls may follow where the form has a place for them.
    """
    writer = _Writer(tools, mark, compiles, several and not must, 1 if must else _MOST_SPACES)
    if form.has_channels:
        head, ends = r"(?:\s(?:(?!<\|(?:message|end|start)\|>)[\s\S])*)?<\|message\|>", mark("<|call|>")
        return [
            writer.made(
                rf"to=(?:functions\.)?{re.escape(tool.name)}{head}$", "", f"SP? {writer.arguments(tool)} {ends}"
            )
            for tool in tools
        ]
    rules = [rule for call in form.calls if not call.is_said and (rule := writer.rule(form, call.opens, template))]
    if form.bare or any(call.is_said for call in form.calls):
        key = "parameters" if form.bare else "arguments"
        opens = r"^\s*" if form.bare else r"```(?:json|tool_call)?\n\s*"
        for tool in tools:
            name = re.escape(json.dumps(tool.name, ensure_ascii=False))
            begins = rf'{opens}\{{\s*"name"\s*:\s*{name}\s*,\s*"(?:{key}|arguments)"\s*:\s*$'
            ends = "" if form.bare else r'"\n```"'
            first = "" if not form.bare or rules else f'{{"name": {json.dumps(tool.name)}, "{key}": '
            rules.append(writer.made(begins, first, f'SP? {writer.arguments(tool)} SP? "}}" {ends}'))
    shown = [rule for rule in rules if rule.opens and rule.opens.strip() in template]
    return sorted(rules, key=lambda rule: (rule not in shown[:1], not rule.opens))


def json_call_schema(tools: Sequence[Tool], name: str = "name", arguments: str = "arguments") -> dict[str, Any]:
    """The schema of a call of any of the tools, as one JSON object."""
    if len(tools) == 1:
        return _call_schema(tools[0], "#", name, arguments)
    several = [_call_schema(tool, f"#/anyOf/{place}", name, arguments) for place, tool in enumerate(tools)]
    return {"anyOf": several}


def _call_schema(tool: Tool, place: str, name: str, arguments: str) -> dict[str, Any]:
    """What a call of the tool looks like; this stands at `place` of the whole schema."""
    parameters = {"type": "object", **_moved(json.loads(tool.parameters), f"{place}/properties/{arguments}")}
    return {
        "type": "object",
        "properties": {name: {"const": tool.name}, arguments: parameters},
        "required": [name, arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts are still right once it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(entry, place) for name, entry in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def closing(opens: str) -> str:
    return opens.replace("<", "</", 1)


def _unquoted(value: Any) -> str:
    """How a value is written where texts have no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _text(said: str) -> str:
    return json.dumps(said, ensure_ascii=False)


@dataclass
class _Writer:
    """Writes the grammars of one set of tools."""

    tools: Sequence[Tool]
    mark: Callable[[str], str]
    compiles: Callable[[str], bool]
    several: bool
    spaces: int
    _rules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tools = [
            tool if self.compiles(self._object(tool)) else Tool(tool.name, "", '{"type":"object"}')
            for tool in self.tools
        ]
        self._read = Tools(tuple(self.tools))

    @staticmethod
    def _object(tool: Tool) -> str:
        return json_text({"type": "object", **json.loads(tool.parameters)})

    def made(self, begins: str, opens: str, body: str) -> CallRule:
        """A place of calls, with the rules that its body needs."""
        rules, self._rules = self._rules, []
        return CallRule(re.compile(begins), opens, body, "\n".join((*rules, rf"SP: /[ \n]{{1,{self.spaces}}}/", "")))

    def rule(self, form: ReplyForm, opens: str, template: str) -> CallRule | None:
        after, body = self._behind(form, opens, template)
        return self.made(re.escape(opens) + "$", opens + after, body) if body else None

    def arguments(self, tool: Tool) -> str:
        known = next(each for each in self.tools if each.name == tool.name)
        return self._json(json.loads(self._object(known)))

    def _json(self, schema: Any) -> str:
        spaces = {"x-guidance": {"whitespace_pattern": rf"[ \n]{{0,{self.spaces}}}"}}
        return self._named(f"%json {json_text({**schema, **spaces})}")

    def _named(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _more(self, other: str) -> str:
        return f"({other})*" if self.several else ""

    def _free(self, suffix: str = "") -> str:
        """Any text, up to a suffix that ends it."""
        return self._named(r"/(.|\n)*/", f"[suffix={_text(suffix)}]" if suffix else "")

    def _calls(self, name: str = "name", arguments: str = "arguments", *, listed: bool = False) -> str:
        if listed:  # references to its own parts would have to move on
            one = json_call_schema(self.tools, name, arguments)
            first, other = self._json(one), self._json(one)
            return f'"[" SP? {first} {self._more(f"""SP? "," SP? {other}""")} SP? "]"'
        return self._json(json_call_schema(self.tools, name, arguments))

    def _behind(self, form: ReplyForm, opens: str, template: str) -> tuple[str, str]:
        """What a required call has between the mark and the grammar, and the grammar."""
        mark, either = self.mark, " | ".join
        if form is GEMMA:
            names = either(f"{_text(tool.name)} {self._pairs(tool, ':', '{', '}', gemma=True)}" for tool in self.tools)
            return "", f'"call:" ({names}) {mark("<tool_call|>")}'
        if form is DEEPSEEK and "DSML" not in opens:
            begin, sep, end = "<｜tool▁call▁begin｜>", mark("<｜tool▁sep｜>"), mark("<｜tool▁call▁end｜>")
            fenced = "```json" in template
            calls = [
                f'"function" {sep} {_text(tool.name)} "\\n```json\\n" {self.arguments(tool)} "\\n```" {end}'
                if fenced
                else f"{_text(tool.name)} {sep} {self.arguments(tool)} {end}"
                for tool in self.tools
            ]
            one = self._named(either(calls))
            first = f"{mark(begin)} " if opens != begin else ""
            return "", f"{first}{one} {self._more(f'SP? {mark(begin)} {one}')} {mark('<｜tool▁calls▁end｜>')}"
        if form is KIMI:
            begin, sep, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            calls = [f"{_text('functions.' + t.name)} NUMBER {mark(sep)} {self.arguments(t)}" for t in self.tools]
            self._rules.append("NUMBER: /:[0-9]{1,2}/")
            one = self._named(f"({either(calls)}) {mark(end)}")
            first = f"{mark(begin)} " if opens != begin else ""
            more = self._more(f"SP? {mark(begin)} {one}")
            return "", f"{first}{one} {more} {mark('<|tool_calls_section_end|>')}"
        if opens == MISTRAL.calls[0].opens:
            if "[ARGS]" in template:
                return "", either(f"{_text(t.name)} {mark('[ARGS]')} {self.arguments(t)}" for t in self.tools)
            return "", self._calls(listed=True)
        if opens in (LFM.calls[0].opens, LLAMA.calls[0].opens):
            one = self._named(either(f"{_text(tool.name)} {self._pairs(tool, '=', '(', ')')}" for tool in self.tools))
            more = self._more(f'"," SP? {one}')
            return "", f'"[" {one} {more} "]" {mark(opens.replace("start", "end"))}'
        if opens == "<|python_tag|>":
            return "", self._calls(arguments="parameters")
        if opens == "<|tool_call|>":
            return "", f"SP? {self._calls(listed=True)}"
        if opens == "<|START_ACTION|>":
            return "", f"{self._calls('tool_name', 'parameters', listed=True)} {mark('<|END_ACTION|>')}"
        if opens in ("<tool_calls>", "<TOOLCALL>", "<longcat_tool_call>"):
            one = self._calls()
            if f"{opens}[" in template:
                return "", f"{self._calls(listed=True)} {mark(closing(opens))}"
            return "\n", f"SP? {one} {self._more(f'SP {one}')} SP? {mark(closing(opens))}"
        if opens.startswith(NEST):
            begins = _text('<invoke name="')
            names = either(f"{_text(tool.name + MINIMAX_TAGS.named)} {self._nested_pairs(tool)}" for tool in self.tools)
            one = self._named(f'{mark(NEST)} {begins} ({names}) {mark(NEST)} "</invoke>"')
            return "\n", f'SP? {one} {self._more(f"SP? {one}")} SP? {mark(NEST)} "</tool_call>"'
        tagged = {QWEN_TAGS.opens: QWEN_TAGS, MINIMAX_TAGS.opens: MINIMAX_TAGS, DSML.opens: DSML}.get(opens)
        if tagged is not None:
            return "", self._tagged(tagged)
        if opens == "<tool_call>":
            if "<arg_key>" in template:
                return "", self._tagged(GLM_TAGS)
            if "<function=" in template:
                return "\n", f"SP? {mark(QWEN_TAGS.opens)} {self._tagged(QWEN_TAGS)} SP? {mark('</tool_call>')}"
            return "\n", f"SP? {self._calls()} SP? {mark('</tool_call>')}"
        around = {"<minimax:tool_call>": MINIMAX_TAGS, "<｜DSML｜function_calls>": DSML, "<｜DSML｜tool_calls>": DSML}
        if (inner := around.get(opens)) is not None:
            one = f"{mark(inner.opens)} {self._tagged(inner)}"
            return "\n", f"SP? {one} {self._more(f'SP? {one}')} SP? {mark(closing(opens))}"
        return "", ""

    def _nested_pairs(self, tool: Tool) -> str:
        must, may = self._keys(tool)
        pairs = [self._nested(tool, key, schema) for key, schema in must.items()]
        return " ".join((*pairs, *(f"({self._nested(tool, key, schema)})?" for key, schema in may.items())))

    def _nested(self, tool: Tool, key: str, schema: Any) -> str:
        """A value in MiniMax-M3's tags: objects and lists are such tags again, where nothing else limits them."""
        nest, closes, root = self.mark(NEST), _text(f"</{key}>"), json.loads(tool.parameters)
        kinds, said = allowed_kinds(schema, root), schema if isinstance(schema, Mapping) else {}
        properties, items = said.get("properties"), said.get("items")
        is_plain = set(said) <= _SAYS_NOTHING | {"properties", "required", "additionalProperties"}
        if "string" in kinds or not kinds:
            if alternatives := self._alternatives(tool, schema):
                value = f"({' | '.join(each for _is_text, each in alternatives)}) {nest}"
            else:
                value = f"{self._free()} {nest}" if nest.startswith("<[") else self._free(NEST)
        elif kinds == {"object"} and is_plain and isinstance(properties, Mapping) and set(properties) - {"item"}:
            needed = said.get("required") or ()
            inner = {name: self._nested(tool, name, each) for name, each in properties.items()}
            value = f"{' '.join(each if name in needed else f'({each})?' for name, each in inner.items())} {nest}"
        elif kinds == {"array"} and set(said) <= {*_SAYS_NOTHING, "items"} and isinstance(items, Mapping):
            value = f"({self._nested(tool, 'item', items)})* {nest}"
        else:
            value = f"{self._value(tool, schema)} {nest}"
        return f"{nest} {_text(f'<{key}>')} {value} {closes}"

    def _pairs(self, tool: Tool, equals: str, opens: str, closes: str, *, gemma: bool = False) -> str:
        """Keys without quotes, each with its value: what must be there first."""
        must, may = self._keys(tool)
        pairs = {
            key: f"{_text(key + equals)} {self._quoted(tool, schema) if gemma else self._value(tool, schema)}"
            for key, schema in {**must, **may}.items()
        }
        rest = [f'("," SP? {pairs[key]})?' for key in may]
        if must:
            body = ' "," SP? '.join(pairs[key] for key in must) + " " + " ".join(rest)
        else:
            body = " | ".join(f"{pairs[key]} {' '.join(rest[at + 1 :])}" for at, key in enumerate(may))
            body = f"({body})?" if body else ""
        return self._named(f"{_text(opens)} {body} {_text(closes)}")

    def _quoted(self, tool: Tool, schema: Any) -> str:
        if allowed_kinds(schema, json.loads(tool.parameters)) != {"string"}:
            return self._value(tool, schema)
        quote = self.mark('<|"|>')
        if choices := named_values(schema, json.loads(tool.parameters)):
            return f"{quote} ({' | '.join(map(_text, choices))}) {quote}"
        if quote.startswith("<["):
            return f"{quote} {self._free()} {quote}"
        return f"{quote} {self._free(json.loads(quote))}"

    def _tagged(self, form: Tagged) -> str:
        """A call behind the mark that opens it."""
        each = []
        for tool in self.tools:
            must, may = self._keys(tool)
            pairs = [self._pair(form, tool, key, schema) for key, schema in must.items()]
            pairs += [f"({self._pair(form, tool, key, schema)})?" for key, schema in may.items()]
            named = f"{_text(tool.name + form.named)}"
            each.append(f"{named} SP? {' '.join(pairs)}")
        return self._named(f"({' | '.join(each)}) {self.mark(form.closes)}")

    def _pair(self, form: Tagged, tool: Tool, key: str, schema: Any) -> str:
        kinds = allowed_kinds(schema, json.loads(tool.parameters))
        line, end = _text("\n") if form.is_apart else "", self.mark(form.value_closes)
        if "string" not in kinds and kinds:
            return self._between(form, key, f"{self._value(tool, schema)} {line} {end}", is_text=False)
        alternatives = self._alternatives(tool, schema)
        if alternatives is None:
            suffix = ("\n" if form.is_apart else "") + form.value_closes
            free = f"{self._free()} {end}" if end.startswith("<[") else self._free(suffix)
            return self._between(form, key, free, is_text=True)
        says_which = form is DSML
        pairs = []
        for is_text in (True, False) if says_which else (True,):
            own = [each for said, each in alternatives if said == is_text or not says_which]
            if own:
                pairs.append(self._between(form, key, f"({' | '.join(own)}) {line} {end}", is_text=is_text))
        return f"({' | '.join(pairs)})"

    def _between(self, form: Tagged, key: str, value: str, *, is_text: bool) -> str:
        """A value, with what closes it, behind its key."""
        closes = form.key_closes[0 if form is not DSML else 1 if is_text else 2]
        line = _text("\n") if form.is_apart else ""
        opened = f"{self.mark(form.key_opens)} {_text(key)} {self.mark(closes)}"
        opened += f" SP? {self.mark(form.value_opens)}" if form.value_opens else ""
        return f"{opened} {line} {value} SP?"

    def _alternatives(self, tool: Tool, schema: Any) -> list[tuple[bool, str]] | None:
        """What may stand for a value where texts have no quotes, and whether each is a text; `None`: any text."""
        root, seen, found = json.loads(tool.parameters), set[int](), list[tuple[bool, str]]()
        waiting = [schema]
        while waiting:
            part = waiting.pop(0)
            if (named := named_values(part, root)) is not None:
                found += [(isinstance(each, str), _text(_unquoted(each))) for each in named]
                continue
            kinds = allowed_kinds(part, root)
            if kinds and "string" not in kinds:
                found.append((False, self._value(tool, part)))
                continue
            said = [key for key in part if key not in _SAYS_NOTHING - {"type"}] if isinstance(part, Mapping) else []
            inner: Any = part[said[0]] if len(said) == 1 else None
            if id(part) in seen or not (
                said == ["$ref"] or (said in (["anyOf"], ["oneOf"]) and isinstance(inner, list))
            ):
                return None
            seen.add(id(part))
            waiting += [referred(part, root)] if said == ["$ref"] else inner
        return found

    def _value(self, tool: Tool, schema: Any) -> str:
        """A value as JSON; what its schema refers to stands where it stood."""
        root = json.loads(tool.parameters)
        kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = {**(schema if isinstance(schema, Mapping) else {}), **kept}
        return self._json(value if self.compiles(json_text(value)) else {})

    def _keys(self, tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
        wanted = json.loads(tool.parameters).get("required")
        needed = wanted if isinstance(wanted, list) else []
        keys = {key: schema for key, schema in self._read.keys(tool.name).items() if isinstance(key, str)}
        must = {key: keys.get(key, {}) for key in needed if isinstance(key, str)}
        return must, {key: schema for key, schema in keys.items() if key not in must}


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
        self._rules, self._form = rules, form
        self._tokenizer, self._choice, self._shown = tokenizer, choice, shown
        self._call, self._thinks = first, thinks
        self._tail, self._detokenizer = "", IncrementalDetokenizer(tokenizer, shown)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._call is None else self._call.restrict(logits)

    def accept(self, token_id: int) -> bool:
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
