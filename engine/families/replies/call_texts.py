"""Calls of tools as families write them into an answer's text: each reader returns names and arguments as JSON text.

Text that is no call in the reader's format gives an empty list; nothing is raised.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by its name."""
Calls = list[tuple[str, str]]

_BROKEN = (ValueError, RecursionError)
_LONGEST_CODE = 200_000
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)', re.DOTALL)
_PYTHON_TEXT = re.compile(r"""\"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)|'(?:[^'\\]|\\(?:.|\Z))*(?:'|\Z)""", re.DOTALL)
_BRACED_TEXT = re.compile(r'<\|"\|>.*?(?:<\|"\|>|\Z)', re.DOTALL)
_NAME = re.compile(r"[\w.-]{1,200}")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEY_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MARK = "(?:｜DSML｜)?"
_INVOKE = re.compile(rf'<{_MARK}invoke name="([^"]+)">(.*?)</{_MARK}invoke>', re.DOTALL)
_INVOKE_PARAMETER = re.compile(
    rf'<{_MARK}parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</{_MARK}parameter>', re.DOTALL
)


def json_texts(inside: str) -> re.Pattern[str] | None:
    """What is a text within JSON; None where the calls are written otherwise."""
    return _JSON_TEXT if inside.lstrip()[:1] in ("{", "[") else None


def later_json_texts(_inside: str) -> re.Pattern[str]:
    """The same where a name stands before the JSON."""
    return _JSON_TEXT


def python_texts(_inside: str) -> re.Pattern[str]:
    """What is a text within a call as Python writes it."""
    return _PYTHON_TEXT


def braced_texts(_inside: str) -> re.Pattern[str]:
    """What is a text within Gemma's calls."""
    return _BRACED_TEXT


def find_outside(texts: re.Pattern[str] | None, mark: str, held: str) -> int:
    """Where a mark is that is in no text; -1 if there is none."""
    at = held.find(mark)
    if at < 0 or texts is None:
        return at
    for text in texts.finditer(held):
        if at < text.start():
            break
        if at < text.end():
            at = held.find(mark, text.end())
            if at < 0:
                break
    return at


def json_calls(text: str, _schemas: Schemas) -> Calls:
    """`{"name": ..., "arguments": {...}}`, or a list of such: Hermes, Qwen, Granite, Mistral and many others.

    Llama writes `parameters`.
    """
    try:
        value = json.loads(text)
    except _BROKEN:
        return []
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return []
        arguments = _object(entry.get("arguments", entry.get("parameters", {})))
        if arguments is None:
            return []
        calls.append((entry["name"], arguments))
    return calls


def tagged_calls(text: str, schemas: Schemas) -> Calls:
    """`<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder and Qwen3.5."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return []
    name = found[1].strip()
    return [(name, _arguments(name, _PARAMETER.findall(found[2]), schemas))]


def key_value_calls(text: str, schemas: Schemas) -> Calls:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`: GLM-4.5 and later."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not _NAME.fullmatch(name):
        return []
    return [(name, _arguments(name, _KEY_VALUE.findall(text), schemas))]


def tool_call(text: str, schemas: Schemas) -> Calls:
    """What stands between `<tool_call>` marks in any of the families that use these."""
    return json_calls(text, schemas) or tagged_calls(text, schemas) or key_value_calls(text, schemas)


def invoke_calls(text: str, schemas: Schemas) -> Calls:
    """`<invoke name="..."><parameter name="...">value</parameter></invoke>`: MiniMax, DeepSeek-V3.2 and V4.

    DeepSeek says with `string` whether the value is a text.
    """
    calls = []
    for name, inside in _INVOKE.findall(text):
        arguments = {}
        for key, is_text, value in _INVOKE_PARAMETER.findall(inside):
            arguments[key] = value if is_text == "true" else _value(name, key, value.strip("\n"), schemas)
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls


def separated_calls(text: str, _schemas: Schemas) -> Calls:
    """`name<｜tool▁sep｜>{...}` (DeepSeek-V3.1), or `function<｜tool▁sep｜>name` and a fenced block (V3, R1)."""
    head, separator, rest = text.partition("<｜tool▁sep｜>")
    if not separator:
        return []
    name, body = head.strip(), rest
    if "```" in rest:
        name, _, fenced = rest.partition("\n")
        body = fenced.partition("```json")[2].rpartition("```")[0]
    arguments = _object(body)
    return [(name.strip(), arguments)] if arguments is not None else []


def mistral_calls(text: str, schemas: Schemas) -> Calls:
    """A JSON list, or `name[ARGS]{...}`, with `[CALL_ID]id` after the name in some versions."""
    head, mark, rest = text.partition("[ARGS]")
    if not mark:
        return json_calls(text, schemas)
    arguments = _object(rest.strip())
    return [(head.partition("[CALL_ID]")[0].strip(), arguments)] if arguments is not None else []


def python_calls(text: str, schemas: Schemas) -> Calls:
    """`[name(key="value"), ...]`, as Python would write it: Llama 4 and LFM; or as `json_calls`."""
    if calls := json_calls(text, schemas):
        return calls
    if len(text) > _LONGEST_CODE:
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        entries = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = []
        for entry in entries:
            if not isinstance(entry, ast.Call) or entry.args:
                return []
            arguments = {str(keyword.arg): _constant(keyword.value) for keyword in entry.keywords}
            calls.append((ast.unparse(entry.func), json.dumps(arguments, ensure_ascii=False)))
    except (*_BROKEN, SyntaxError, MemoryError, TypeError):
        return []
    return calls


def braced_calls(text: str, _schemas: Schemas) -> Calls:
    """`call:name{key:<|"|>text<|"|>,other:3}`: Gemma 4."""
    found = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", text, re.DOTALL)
    if found is None:
        return []
    pieces = found[2].split('<|"|>')
    for place, piece in enumerate(pieces):
        is_text = place % 2 == 1
        pieces[place] = json.dumps(piece) if is_text else re.sub(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:', r'\1"\2":', piece)
    arguments = _object("".join(pieces))
    return [(found[1], arguments)] if arguments is not None else []


def _object(value: Any) -> str | None:
    """Arguments as JSON text, from an object or from its JSON; None if they are neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except _BROKEN:
            return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _arguments(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> str:
    arguments = {key.strip(): _value(name, key.strip(), value, schemas) for key, value in pairs}
    return json.dumps(arguments, ensure_ascii=False)


def _value(name: str, key: str, text: str, schemas: Schemas) -> Any:
    """What an argument without quotes is: a text where the schema says so, else JSON if it can be read as such."""
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    kind, meant = _WORDS.get(text.strip().lower(), ("", None))
    if kind in kinds and "string" not in kinds:  # some models write these words as Python does
        return meant
    try:
        value = json.loads(text)
    except _BROKEN:
        return text
    return text if "string" in kinds and not kinds & _KINDS_OF.get(type(value), set()) else value


_WORDS: dict[str, tuple[str, bool | None]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
_KINDS_OF = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if kinds is not None:
        return {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        return set[str]().union(*({"string"} if isinstance(each, str) else _KINDS_OF[type(each)] for each in choices))
    parts = schema.get("anyOf") or schema.get("oneOf")
    return set[str]().union(*map(_kinds, parts)) if isinstance(parts, list) else set()


def _constant(node: ast.expr) -> Any:
    """A value as Python or JSON writes it; raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_constant(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError
        return dict(zip(keys, (_constant(value) for value in node.values), strict=True))
    value = ast.literal_eval(node)
    json.dumps(value)  # raises TypeError for what JSON cannot say
    return value


_JSON_WORDS = {"true": True, "false": False, "null": None}
