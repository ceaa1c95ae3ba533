"""Mutations that keep a file's structure: lengths, counts, offsets, types and values change, the rest still fits."""

import json
import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from engine.checkpoint.headers import DTYPE_BITS
from tests.fuzz.gguf_draft import GgufDraft, Value

Mutate = Callable[[bytes, Random], bytes]

_WHOLE = [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 64, 100, 255, 256, 4096, 4097, 65535, 65536, 2**20, 2**31 - 1, 2**31,
          2**32 - 1, 2**32, 2**40, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
_REAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3e38, 1e308, float("inf"), float("-inf"), float("nan")]
_TEXTS = [
    "", " ", "a", "\0", "\x1b[2J", "\n", "ä", "\u2028", "<s>", "</s>", "<unk>", "▁", "▁a", "##a", "[UNK]", "<0x41>",
    "true", "null", "none", "linear", "yarn", "llama3", "longrope", "dynamic", "gpt2", "llama", "t5", "bert",
    "gemma4", "gpt-2", "llama-bpe", "qwen2", "default", "a b", "a  b", " b", "x" * 300, "F32", "BF16", "I64",
    "F8_E4M3", "F4", "model.safetensors", "../x", "x.bin", "mixtral", "deepseek_v3", "qwen3_moe",
]  # fmt: skip
_BYTES = [0, 1, 2, 4, 8, 9, 10, 127, 128, 255]


def raw(data: bytes, random: Random) -> bytes:
    """Bytes changed, repeated, left out or put elsewhere; numbers of any width replaced."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        size = len(changed)
        at = random.randrange(size + 1)
        match random.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([random.choice(_BYTES)])
            case 1:
                changed[at : at + 1] = bytes([random.randrange(256)])
            case 2:
                width = random.choice((4, 8))
                number = random.choice([*_WHOLE, size, size - at, size + 1])
                changed[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
            case 3:
                del changed[at : at + random.choice((1, 4, 8, 64, size))]
            case 4:
                piece = changed[at : at + random.choice((1, 4, 8, 64))]
                to = random.randrange(size + 1)
                changed[to:to] = piece
            case 5 if size:
                at = random.randrange(size)
                changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def gguf(data: bytes, random: Random) -> bytes:
    """Of a GGUF file."""
    draft = GgufDraft.read(data) if random.random() < 0.8 else None
    if draft is None:
        return raw(data, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        if draft.tensors and random.random() < 0.4:
            _change_tensor(draft, random)
        else:
            _change_entry(draft, random)
    changed = draft.written(fitting=random.random() < 0.7)
    return raw(changed, random) if random.random() < 0.1 else changed


def _change_entry(draft: GgufDraft, random: Random) -> None:
    keys = list(draft.metadata)
    if not keys:
        return
    key = random.choice(keys)
    value = draft.metadata[key]
    match random.randrange(6):
        case 0:
            del draft.metadata[key]
        case 1:
            draft.metadata[key] = random.choice(list(draft.metadata.values()))
        case 2:
            draft.metadata[key] = _gguf_value(random)
        case 3:
            draft.metadata[random.choice(_TEXTS) if random.random() < 0.3 else random.choice(keys) + "x"] = value
        case _:
            draft.metadata[key] = Value(value.kind, _other_content(value.content, random))


def _gguf_value(random: Random) -> Value:
    kind = random.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12))
    match kind:
        case 8:
            return Value(kind, random.choice(_TEXTS))
        case 9:
            inner = random.choice((0, 4, 5, 6, 7, 8, 8, 10, 12))
            texts = [random.choice(_TEXTS) for _ in range(random.randrange(6))]
            numbers = [random.choice(_REAL if inner in (6, 12) else _WHOLE) for _ in range(random.randrange(6))]
            return Value(kind, (inner, texts if inner == 8 else numbers))
        case 6 | 12:
            return Value(kind, random.choice(_REAL))
    return Value(kind, random.choice(_WHOLE))


def _other_content(content: Any, random: Random) -> Any:
    if isinstance(content, tuple):
        kind, items = content
        items = list(items)
        at = random.randrange(len(items) + 1)
        match random.randrange(4):
            case 0:
                del items[at : at + random.choice((1, 1, 2, 100))]
            case 1 if items:
                items.insert(at, random.choice(items))
            case 2 if items:
                items[at - 1] = _other_content(items[at - 1], random)
            case _ if items:
                random.shuffle(items)
        return kind, items
    if isinstance(content, str):
        other = random.choice(_TEXTS)
        at = random.randrange(len(content) + 1)
        return random.choice((other, content + other, content[:at] + other + content[at:], content[:at], content[at:]))
    if isinstance(content, float):
        return random.choice([*_REAL, content * 2, -content])
    return random.choice([*_WHOLE, content + 1, content - 1, content * 2, -content])


def _change_tensor(draft: GgufDraft, random: Random) -> None:
    at = random.randrange(len(draft.tensors))
    tensor = draft.tensors[at]
    match random.randrange(7):
        case 0:
            del draft.tensors[at]
        case 1:
            tensor.name = random.choice([random.choice(draft.tensors).name, random.choice(_TEXTS), tensor.name + ".x"])
        case 2:
            tensor.kind = random.choice([*range(42), 200, 2**32 - 1])
        case 3:
            tensor.offset = random.choice([*_WHOLE, tensor.offset + 32, tensor.offset - 32, tensor.offset + 1])
        case 4:
            tensor.shape = [*tensor.shape, random.choice(_WHOLE[:8])][: random.randrange(1, 6)]
        case 5:
            random.shuffle(tensor.shape)
        case _ if tensor.shape:
            place = random.randrange(len(tensor.shape))
            tensor.shape[place] = random.choice([*_WHOLE, tensor.shape[place] + 1, tensor.shape[place] * 2, 32, 256])


def safetensors(data: bytes, random: Random) -> bytes:
    """Of a safetensors file: mostly of its header, the length of which then fits."""
    if random.random() < 0.2 or len(data) < 8:
        return raw(data, random)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    changed = json_text(header, random)
    if random.random() < 0.2:
        rest = raw(rest, random)
    return struct.pack("<Q", len(changed)) + changed + rest


def json_text(data: bytes, random: Random) -> bytes:
    """Of a JSON document."""
    try:
        value = json.loads(data) if random.random() < 0.85 else None
    except (ValueError, RecursionError):
        value = None
    if value is None:
        return raw(data, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _other_json(value, random)
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace")


def quantised(data: bytes, random: Random) -> bytes:
    """Of a configuration and a header, in which a tensor's bytes then follow from its shape."""
    changed = json_text(data, random)
    try:
        both = json.loads(changed)
        offset = 0
        for tensor in both["header"].values():
            if random.random() < 0.2:
                tensor["dtype"] = random.choice(list(DTYPE_BITS))
            if random.random() < 0.2:
                tensor["fill"] = random.choice(("00", "01", "ff", "7f", "0800000000000000", "feffffff", "000080ff"))
            if random.random() < 0.1:
                tensor["shape"] = random.choice([[], [0], [1], [8], [1, 8], [8, 1], [0, 8], [8, 0], [2, 8, 1]])
            nbytes = DTYPE_BITS[tensor["dtype"]] * math.prod(tensor["shape"]) // 8
            tensor["data_offsets"] = [offset, offset + nbytes]
            offset += nbytes
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return changed
    return json.dumps(both).encode() if 0 <= offset < 2**16 else changed


def _other_json(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        changed = dict(value)
        match random.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[random.choice(_TEXTS)] = changed[key]
            case 2:
                changed[key] = changed[random.choice(list(value))]
            case 3:
                changed[key + random.choice(_TEXTS)] = changed.pop(key)
            case _:
                changed[key] = _other_json(changed[key], random)
        return changed
    if isinstance(value, list) and value and random.random() < 0.8:
        items = list(value)
        at = random.randrange(len(items))
        match random.randrange(4):
            case 0:
                del items[at]
            case 1:
                items.insert(at, random.choice(items))
            case _:
                items[at] = _other_json(items[at], random)
        return items
    if random.random() < 0.5 and isinstance(value, str | int | float) and not isinstance(value, bool):
        return _other_content(value, random)
    small = [None, True, False, [], {}, [[]], {"a": {}}, [value], {"a": value}, -1, 10**30, 10**400, -0.5]
    return random.choice([*small, random.choice(_WHOLE), random.choice(_REAL), random.choice(_TEXTS)])


_PIECES = [
    "{{", "}}", "{%", "%}", "{#", "#}", "{%-", "-%}", "{% for a in messages %}", "{% endfor %}", "{% if a %}",
    "{% else %}", "{% endif %}", "{% set x = x + x %}", "{% set ns = namespace(a=1) %}",
    "{% set ns.a = ns.a ~ ns.a %}", "{% macro m(a) %}", "{% endmacro %}", "{{ m(m) }}", "{% generation %}",
    "{% endgeneration %}", "{% break %}", "{% continue %}", "{% call m(1) %}", "{% endcall %}", "{% filter upper %}",
    "{% endfilter %}", "{% raw %}", "{% endraw %}", "{% block b %}", "{% endblock %}", "{{ self.b() }}",
    "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% autoescape true %}", "{% recursive %}",
    "{{ loop(a) }}", "{{ range(99999) | list }}", "{{ 'a' * 99999999 }}", "{{ 9 ** (9 ** 9) }}",
    "{{ '%099999999d' % 1 }}", "{{ 'a' | center(999999999) }}", "{{ messages | tojson(indent=2) }}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ dict(a=1) }}", "{{ ''.__class__ }}",
    "{{ messages[0].content }}", "{{ messages[-1]['role'] }}", "{{ bos_token }}", "| map(attribute=",
    "| selectattr('role', 'equalto', 'user')", "| join(', ')", "| trim", "| default(", "| groupby('role')",
    "| batch(2)", "| int", "| float", "| round(400)", "| format(1, 2)", "| indent(99999)", "| wordwrap(1)",
    "| urlize", "| slice(0)", "| sort", "| sum", "| random", "| pprint", "| xmlattr", "| replace('', 'aaaaaaaa')",
    "[::0]", "[1:]", ".items()", ".split('')", ".format(a=1)", "is defined", "is mapping", "not", "in", "~", "(", ")",
    "[", "]", "1e999", "0", "//", "%", "lipsum(n=99)", "cycler(1, 2)", "joiner()", "loop.index", "loop.previtem",
    "loop.changed(1)",
]  # fmt: skip


def template(data: bytes, random: Random) -> bytes:
    """Of a chat template."""
    if random.random() < 0.2:
        return raw(data, random)
    text = data.decode("utf-8", "replace")
    for _ in range(random.choice((1, 2, 3))):
        at = random.randrange(len(text) + 1)
        end = at + random.choice((0, 0, 0, 1, 5, 30))
        text = text[:at] + random.choice((random.choice(_PIECES), text[at : at + 60], "")) + text[end:]
    return text.encode("utf-8", "replace")
