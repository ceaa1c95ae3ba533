"""The tokenizer of a GGUF file, written as the files of a checkpoint folder: tokenizer.json, tokenizer_config.json.

Vocabulary, special tokens and chat templates are in the file's metadata (`tokenizer.*`), but only names for how text
becomes tokens. What those mean was read from llama.cpp (src/llama-vocab.cpp, MIT licence): the tokens are the same.

How each pre-tokenizer that a GGUF file can name (`tokenizer.ggml.pre`) splits a text before byte pairs are merged.

From llama.cpp (src/llama-vocab.cpp, MIT licence). Where its regular expressions only approximate those of the model's
own tokenizer.json, whose engine it lacks, these are the original ones, which it quotes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from engine.checkpoint.gguf.file import Strings
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted

_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, digits: str, excluded: str = "", signs_ending: str = r"[\r\n/]*") -> str:
    """Words split where a capital letter follows a small one."""
    upper, lower = f"[{_UPPER}{excluded}]", f"[{_LOWER}{excluded}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{signs_ending}|{_LINES}"
    )


_O200K = _cased(rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}")
_JOINERS = "\u200c\u200d"
_LINES_APART = r"[^\n]+|\n+"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_GROUPS_OF_3 = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits grouped from the right: 1 234 567."""
_LETTERS_WITH_CASE = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    r"ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    r"ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_MANY_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split, and what llama.cpp derives from the name besides.

    Attributes:
        patterns: each splits what the one before it left; what matches none is a piece as well. An Oniguruma syntax.
        ignore_merges: a piece that is a token as a whole is that token, whatever the merges would make of it.
        add_bos: whether a text begins with the token of the beginning if the file does not say.
        bytes_as_characters: whether tokens are written in GPT-2's alphabet, which has a character for each byte.
            If not, they are plain text with `▁` for spaces, and bytes without a token are `<0x00>` to `<0xFF>`.
        marks_spaces: whether such plain text has that `▁`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    bytes_as_characters: bool = True
    marks_spaces: bool = True


def _each(names: str, *patterns: str, **how: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(patterns, **how))


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""llama.cpp's for files that name none, which is the case for the oldest ones only."""

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    **_each(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
        _GPT2,
    ),
    **_each("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_each("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_each(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    **_each("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_each("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_each(
        "k2-horizon",
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}{_JOINERS}]+|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}",
    ),
    **_each(
        "jais-2",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_MANY_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}",
    ),
    **_each(
        "minicpm5",
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}",
        ignore_merges=True,
    ),
    **_each("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2", _QWEN2),
    **_each("ufakzeka", rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"),
    **_each("laguna", _LINES_APART, _QWEN2),
    **_each(
        "qwen35",
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
    ),
    **_each("seed-coder", rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"),
    **_each(
        "bailingmoe bailingmoe2 llada-moe",
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|{_SPACES}",
    ),
    **_each(
        "exaone-moe",
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
    ),
    **_each(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_LETTERS_WITH_CASE}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _CJK_AND_HANGUL,
        r"\p{N}+",
    ),
    **_each("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}"),
    **_each("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3}[\r\n]*|{_LINES}"),
    **_each("spark2_5", r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3}|[\r\n]|{_SPACES}", r"\p{N}"),
    **_each(
        "afmoe",
        _GROUPS_OF_3,
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        rf"{_DEEPSEEK3}[\r\n]*|{_LINES}",
    ),
    **_each("tekken", _cased("", r"\p{N}"), ignore_merges=True, add_bos=True),
    **_each("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K),
    **_each("granite-embed-multi-97m", _O200K, ignore_merges=True),
    **_each("tiny_aya cohere2moe", _GROUPS_OF_3, _O200K),
    **_each(
        "youtu",
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _cased(rf"(?:{_CONTRACTION})?", r"\p{N}"),
        ignore_merges=True,
    ),
    **_each(
        "kimi-k2",
        r"\p{Han}+|" + _cased(rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*"),
    ),
    **_each("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_each("poro-chat bloom gpt3-finnish", _SENTENCES),
    **_each("viking", _SENTENCES, r"\p{N}"),
    **_each(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        add_bos=True,
    ),
    **_each("gemma4 granite-embed-multi-311m", _LINES_APART, add_bos=True, bytes_as_characters=False),
    **_each("sarvam-moe", _LINES_APART, bytes_as_characters=False),
    **_each("whitespace", r"\S+", bytes_as_characters=False, marks_spaces=False),
}


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MOST_TOKENS = 2**22
_MOST_BYTES = 128 * 2**20
"""Of all tokens, all merges or one template: ten times those of the biggest vocabularies."""
_MOST_SPLITS = 2**28
"""Sum of the squared lengths of SentencePiece's tokens, each of which is cut at every place: 2**24 for Gemma."""


def _names(names: str) -> list[str]:
    return names.split()


_ENDS = frozenset(
    _names(
        "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
        "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
        "<｜end▁of▁sentence｜> [e~["
    )
)
"""Tokens that end an answer in every vocabulary that has them."""
_BETWEEN_FILES = {
    "fim_pad": _names("<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "fim_rep": _names("<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": ["<|file_sep|>"],
}
"""Code models end with these; the first one that there is if the file does not say."""
_WITHIN_FILES = _names(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
)
_ALWAYS_CONTROL = _ENDS.union(_WITHIN_FILES, *_BETWEEN_FILES.values())
"""Control tokens even where a file calls them normal ones."""

_MOST_FOREIGN = 64
"""Added tokens that a decoder looks for: the most of a real vocabulary is 13."""

_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # sic
    "cls_token": "cls",
    "mask_token": "mask",
}
_ROLE_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
"""Of files that do not say, by `tokenizer.ggml.model`."""

Metadata = Mapping[str, object]
_Json = dict[str, Any]


def tokenizer_files(metadata: Metadata, path: Path) -> dict[str, str]:
    """The tokenizer of a GGUF file as the files of a checkpoint folder, complete: nothing else is needed to load it.

    Args:
        metadata: of the file; arrays of strings are any iterables with a length, of numbers also numpy's.
        path: the file, to name it in errors.

    Returns:
        Names and contents of tokenizer.json (in the format of the tokenizers library) and tokenizer_config.json.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` for a kind of tokenizer or a pre-tokenizer that is unknown here,
            `CHECKPOINT_DAMAGED` for metadata that contradict themselves.
    """
    with _explained(path):
        vocabulary = _Vocabulary.of(metadata)
        backend = _BUILDERS[vocabulary.kind](vocabulary, metadata)
        added = _added_tokens(vocabulary, metadata)
        config = _config(vocabulary, metadata)
        # The library finds them here without reading all of tokenizer.json in Python.
        config["added_tokens_decoder"] = {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in added
        }
        content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **backend}
        files = {
            "tokenizer.json": json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        }
        for text in files.values():
            text.encode("utf-8")  # half a surrogate pair cannot be written
    return files


def check_kind(metadata: Metadata, path: Path) -> None:
    """Checks that the tokenizer is of a kind that is known, without building it: for a file that is still elsewhere."""
    with _explained(path):
        if _BUILDERS[_kind(metadata)] is _byte_pairs:
            _pre_tokenizer(metadata)


def end_token_ids(metadata: Metadata, path: Path) -> tuple[int, ...]:
    """The tokens that end an answer: those that the file declares, and those known by their names; in order."""
    with _explained(path):
        return _Vocabulary.of(metadata).end_ids()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Makes an `EngineError` that names the file of what is found in its metadata."""
    try:
        yield
    except _UnsupportedError as error:
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{path} {error}.") from error
    except (_DamagedError, UnicodeError) as error:
        what = "has a text that is not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"The tokenizer in {path} {what}: get another version of the file."
        ) from error


class _DamagedError(Exception):
    """The argument completes "the tokenizer in FILE"."""


class _UnsupportedError(Exception):
    """The argument completes "FILE"."""


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens and what they are.

    Attributes:
        kind: `tokenizer.ggml.model`.
        tokens, types: in the order of their ids.
        index: the id of each.
        roles: ids of the special tokens that there are, by their name in the file (`bos`).
    """

    kind: str
    tokens: list[str]
    types: list[int]
    index: dict[str, int]
    roles: dict[str, int]

    @classmethod
    def of(cls, metadata: Metadata) -> _Vocabulary:
        kind = _kind(metadata)
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(_strings(metadata, "tokens"))]
        if not tokens:
            raise _DamagedError("has no vocabulary (tokenizer.ggml.tokens)")
        index = {token: number for number, token in enumerate(tokens)}
        if len(index) != len(tokens):
            twice = next(token for number, token in enumerate(tokens) if index[token] != number)
            raise _DamagedError(f"has the token {quoted(twice)} twice")
        vocabulary = cls(kind, tokens, _types(metadata, tokens), index, {})
        defaults = _ROLE_DEFAULTS.get(kind, {})
        for role in (*_ROLES.values(), "eot", "eom", *_BETWEEN_FILES):
            number = vocabulary._id(metadata, role, defaults.get(role))
            if number is not None:
                vocabulary.roles[role] = number
        return vocabulary

    def _id(self, metadata: Metadata, role: str, default: int | None) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        number = metadata.get(key)
        if number is not None:
            if not isinstance(number, SupportsIndex) or isinstance(number, bool | np.ndarray):
                raise _DamagedError(f"has no number as {key}")
            if 0 <= operator.index(number) < len(self.tokens):
                return operator.index(number)
        return default if default is not None and default < len(self.tokens) else None

    def role(self, role: str) -> str | None:
        return self.tokens[self.roles[role]] if role in self.roles else None

    def is_control(self, number: int) -> bool:
        """Whether it is no text, but tells the model something."""
        return self.types[number] in (_CONTROL, _UNKNOWN)

    def end_ids(self) -> tuple[int, ...]:
        ends = {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        for role, candidates in _BETWEEN_FILES.items():
            named = [self.index[name] for name in candidates if name in self.index]
            ends.update([self.roles[role]] if role in self.roles else named[:1])
        found = {name for name in _ENDS if name in self.index}
        # In these formats the same answer goes on after `<|end|>`, and `</s>` is plain text.
        if found >= {"<|return|>", "<|call|>"} or found >= {"<|calls|>", "<|flush|>"}:
            found.discard("<|end|>")
        if "<|tool_response>" in found:
            found.discard("</s>")
        ends.update(self.index[name] for name in found)
        return tuple(sorted(ends))


def _types(metadata: Metadata, tokens: list[str]) -> list[int]:
    found = _numbers(metadata, "token_type", "iu", len(tokens))
    types: list[int] = found.tolist() if found is not None else [_NORMAL] * len(tokens)
    plain = {"</s>"} if "<|tool_response>" in tokens else set()
    for number, token in enumerate(tokens):
        if token in _ALWAYS_CONTROL:
            types[number] = _NORMAL if token in plain else _CONTROL
    return types


def _added_tokens(vocabulary: _Vocabulary, metadata: Metadata) -> list[_Json]:
    """Tokens that are found in a text before anything else is done with it."""
    declared = set(vocabulary.roles.values())
    strips = _strips(metadata)
    added = []
    for number, token in enumerate(vocabulary.tokens):
        special = vocabulary.is_control(number) or number in declared
        if special or vocabulary.types[number] == _USER_DEFINED:
            left, right = strips(token)
            added.append(
                {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": left,
                    "rstrip": right,
                    "normalized": False,
                    "special": special,
                }
            )
    return added


def _strips(metadata: Metadata) -> Callable[[str], tuple[bool, bool]]:
    """Whether a token takes the spaces on its left and its right, which files do not say: some models' tokens do."""
    pre, architecture = str(metadata.get("tokenizer.ggml.pre")), str(metadata.get("general.architecture"))
    name = str(metadata.get("general.name")).lower()
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return lambda token: (token == "<mask>", False)
    if "phi-3" in name or "phi3" in name:
        return lambda token: (False, token not in ("<unk>", "<s>", "<|endoftext|>"))
    return lambda token: (token == "[MASK]" and "modern-bert" in name, False)


def _config(vocabulary: _Vocabulary, metadata: Metadata) -> _Json:
    config: _Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: vocabulary.role(name) for role, name in _ROLES.items() if name in vocabulary.roles},
    }
    if vocabulary.kind != "bert":
        config["add_bos_token"], config["add_eos_token"] = _ends_added(vocabulary, metadata)
    template = _templates(metadata)
    return config | ({"chat_template": template} if template else {})


def _templates(metadata: Metadata) -> str | list[dict[str, str]]:
    start = "tokenizer.chat_template"
    found = {
        "default" if key == start else key[len(start) + 1 :]: text
        for key, text in metadata.items()
        if key == start or key.startswith(f"{start}.")
    }
    for name, text in found.items():
        if not isinstance(text, str) or len(text) > _MOST_BYTES:
            raise _DamagedError(f"has no text as chat template {quoted(name)}")
    texts = {name: str(text) for name, text in found.items()}
    if texts.keys() == {"default"}:
        return texts["default"]
    return [{"name": name, "template": text} for name, text in texts.items()]


def _ends_added(vocabulary: _Vocabulary, metadata: Metadata) -> tuple[bool, bool]:
    pre = _pre_tokenizer(metadata) if vocabulary.kind in ("gpt2", "gemma4") else None
    bos = pre.add_bos if pre is not None else vocabulary.kind == "llama"
    bos = _flag(metadata, "add_bos_token", bos)
    if pre is not None and not pre.bytes_as_characters and pre.add_bos:
        bos = True  # whatever the file says: early ones of Gemma 4 are wrong
    eos = _flag(metadata, "add_eos_token", vocabulary.kind == "t5")
    return bos and "bos" in vocabulary.roles, eos and "eos" in vocabulary.roles


def _post_processor(vocabulary: _Vocabulary, metadata: Metadata) -> _Json | None:
    if vocabulary.kind == "bert":
        before, after = vocabulary.role("cls"), vocabulary.role("seperator")
    else:
        bos, eos = _ends_added(vocabulary, metadata)
        before, after = vocabulary.role("bos") if bos else None, vocabulary.role("eos") if eos else None
    if before is None and after is None:
        return None

    def part(token: str | None, sequence: int) -> list[_Json]:
        return [{"SpecialToken": {"id": token, "type_id": sequence}}] if token is not None else []

    def text(name: str, sequence: int) -> list[_Json]:
        return [{"Sequence": {"id": name, "type_id": sequence}}]

    first = [*part(before, 0), *text("A", 0), *part(after, 0)]
    again = [] if vocabulary.kind == "bert" else part(before, 1)
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *again, *text("B", 1), *part(after, 1)],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary.index[token]], "tokens": [token]}
            for token in (before, after)
            if token is not None
        },
    }


# The parts of tokenizer.json, for each kind of tokenizer.


def _kind(metadata: Metadata) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or not kind:
        raise _DamagedError("does not say of which kind it is (tokenizer.ggml.model)")
    if kind not in _BUILDERS:
        raise _UnsupportedError(
            f"has a tokenizer of the kind {quoted(kind)}, which Switchyard does not know: "
            "use the model's safetensors files instead"
        )
    return kind


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "")
    if metadata.get("tokenizer.ggml.model") == "gemma4":
        name = "gemma4"
    if not isinstance(name, str):
        raise _DamagedError("has no text as tokenizer.ggml.pre")
    if not name:
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise _UnsupportedError(
            f"splits text by the pre-tokenizer {quoted(name)}, which Switchyard does not know: "
            "update Switchyard, or use the model's safetensors files instead"
        )
    return PRE_TOKENIZERS[name]


def _byte_pairs(vocabulary: _Vocabulary, metadata: Metadata) -> _Json:
    """Byte pairs merged in the order of a list (GPT-2, and nearly all since Llama 3)."""
    pre = _pre_tokenizer(metadata)
    splits: list[_Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    if pre.bytes_as_characters:
        splits.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {
        "normalizer": None if pre.bytes_as_characters or not pre.marks_spaces else _replace(" ", _SPACE),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": _post_processor(vocabulary, metadata),
        "decoder": _byte_decoder(vocabulary) if pre.bytes_as_characters else _plain_decoder(strip=False),
        "model": _bpe(
            vocabulary,
            _merges(vocabulary, metadata),
            byte_fallback=not pre.bytes_as_characters,
            ignore_merges=pre.ignore_merges,
        ),
    }


def _byte_decoder(vocabulary: _Vocabulary) -> _Json:
    """From GPT-2's alphabet to text; added tokens, which are not written in it, stay what they are.

    The library reads an added token in that alphabet if it can: DeepSeek's `ü` would be a byte that is no text. Where
    no other token has its characters, it is written in the alphabet first.
    """
    alphabet = _alphabet()
    readable = set(alphabet)
    decoder: _Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    foreign = [
        token
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.types[number] in (_USER_DEFINED, _CONTROL) and not token.isascii() and readable.issuperset(token)
    ]
    everything = "\n".join(vocabulary.tokens) if foreign else ""
    steps = [
        _replace(token, "".join(alphabet[byte] for byte in token.encode("utf-8")))
        for token in foreign[:_MOST_FOREIGN]
        if everything.count(token) == 1
    ]
    return {"type": "Sequence", "decoders": [*steps, decoder]} if steps else decoder


def _alphabet() -> list[str]:
    """GPT-2's character for each byte: itself if it can be seen, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(0x100)]


def _merges(vocabulary: _Vocabulary, metadata: Metadata) -> list[str]:
    merges = list(dict.fromkeys(_strings(metadata, "merges")))
    index = vocabulary.index
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in index or right not in index or left + right not in index or " " in right:
            raise _DamagedError(f"merges {quoted(merge)}, which is not in its vocabulary")
    if not merges:
        raise _DamagedError("has no merges (tokenizer.ggml.merges)")
    return merges


def _sentence_piece(vocabulary: _Vocabulary, metadata: Metadata) -> _Json:
    """Neighbours merged in the order of the scores of what they make (Llama 2, Mistral, Gemma)."""
    prefix = _flag(metadata, "add_space_prefix", True)
    spaces = _replace(" ", _SPACE)
    prepend = {"type": "Prepend", "prepend": _SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, spaces]} if prefix else spaces,
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary, metadata),
        "decoder": _plain_decoder(strip=prefix),
        "model": _bpe(
            vocabulary,
            _merges_by_score(vocabulary, metadata),
            byte_fallback=True,
            unknown=vocabulary.role("unknown"),
        ),
    }


def _merges_by_score(vocabulary: _Vocabulary, metadata: Metadata) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best token's first."""
    scores = _scores(vocabulary, metadata)
    pieces = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind not in (_CONTROL, _UNKNOWN, _BYTE)
    }
    if sum(len(token) ** 2 for token in pieces) > _MOST_SPLITS:
        raise _DamagedError("has longer tokens than any text has words")
    merges = []
    for number in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
        token = vocabulary.tokens[number]
        if token in pieces:
            for at in range(1, len(token)):
                left = token[:at]
                if left in pieces and token[at:] in pieces:
                    merges.append((left, token[at:]))
    return merges


def _unigram(vocabulary: _Vocabulary, metadata: Metadata) -> _Json:
    """The most probable of all divisions into tokens (T5, XLM-RoBERTa)."""
    scores = _scores(vocabulary, metadata)
    least = min((score for score, kind in zip(scores, vocabulary.types, strict=True) if kind == _NORMAL), default=0.0)
    merge_spaces = _flag(metadata, "remove_extra_whitespaces", False)
    prefix = _flag(metadata, "add_space_prefix", False) or merge_spaces
    steps = _characters(metadata)
    if merge_spaces:
        steps += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    steps.append(_replace(" ", _SPACE))
    if prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    if "unknown" not in vocabulary.roles:
        raise _DamagedError("has no unknown token (tokenizer.ggml.unknown_token_id)")
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary, metadata),
        "decoder": _plain_decoder(strip=prefix),
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.roles["unknown"],
            "vocab": [[token, max(score, least)] for token, score in zip(vocabulary.tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _characters(metadata: Metadata) -> list[_Json]:
    """The replacements of characters that SentencePiece compiled for this model."""
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is None:
        return []
    found = np.asarray(charsmap if not isinstance(charsmap, bytes) else bytearray(charsmap))
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.size > _MOST_BYTES:
        raise _DamagedError("has no bytes as tokenizer.ggml.precompiled_charsmap")
    content = found.astype(np.uint8).tobytes()
    length = int.from_bytes(content[:4], "little")
    if len(content) < 4 or length + 4 >= len(content) or length % 4 or content[-1]:
        raise _DamagedError("has an incomplete tokenizer.ggml.precompiled_charsmap")
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode("ascii")}]


def _word_pieces(vocabulary: _Vocabulary, metadata: Metadata) -> _Json:
    """Words, divided into the longest tokens that there are from the left (BERT)."""
    # In the file, tokens that begin a word have a mark instead of those that do not.
    pieces = {}
    for number, token in enumerate(vocabulary.tokens):
        begins, is_name = token.startswith(_SPACE), token.startswith("[") and token.endswith("]")
        piece = token[1:] if begins else token if is_name or vocabulary.is_control(number) else "##" + token
        pieces[piece] = number
    if len(pieces) != len(vocabulary.tokens) or vocabulary.role("unknown") not in pieces:
        raise _DamagedError("has a broken vocabulary (tokenizer.ggml.tokens)")
    lowercase = _flag(metadata, "normalizer.lowercase", True)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": _flag(metadata, "normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _post_processor(vocabulary, metadata),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.role("unknown"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 4096,
            "vocab": pieces,
        },
    }


_BUILDERS = {
    "gpt2": _byte_pairs,
    "gemma4": _byte_pairs,
    "llama": _sentence_piece,
    "t5": _unigram,
    "bert": _word_pieces,
}
"""By `tokenizer.ggml.model`."""


def _bpe(
    vocabulary: _Vocabulary,
    merges: Sequence[str | tuple[str, str]],
    *,
    byte_fallback: bool,
    ignore_merges: bool = False,
    unknown: str | None = None,
) -> _Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.index,
        "merges": merges,
    }


def _plain_decoder(*, strip: bool) -> _Json:
    """For tokens that are text, or a byte each."""
    steps = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: str | _Json, content: str) -> _Json:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


# The metadata, checked.


def _flag(metadata: Metadata, key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool | np.bool_):
        raise _DamagedError(f"has neither true nor false as tokenizer.ggml.{key}")
    return bool(value)


def _strings(metadata: Metadata, key: str) -> Sequence[str]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return []
    if isinstance(found, str | bytes | np.ndarray) or not isinstance(found, Iterable) or not isinstance(found, Sized):
        raise _DamagedError(f"has no texts as tokenizer.ggml.{key}")
    if len(found) > _MOST_TOKENS:
        raise _DamagedError(f"has {len(found):,} tokenizer.ggml.{key}, more than any vocabulary")
    if isinstance(found, Strings) and len(found.raw) <= _MOST_BYTES:
        return list(found)
    texts = []
    size = 0
    for text in found:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if not isinstance(text, str):
            raise _DamagedError(f"has no texts as tokenizer.ggml.{key}")
        size += len(text)
        if size > _MOST_BYTES:
            raise _DamagedError(f"has more text as tokenizer.ggml.{key} than any vocabulary")
        texts.append(text)
    return texts


def _numbers(metadata: Metadata, key: str, kinds: str, count: int) -> np.ndarray[Any, Any] | None:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return None
    try:
        numbers = np.asarray(found)
    except (ValueError, TypeError, OverflowError):
        numbers = np.zeros((), object)
    if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
        raise _DamagedError(f"has no numbers as tokenizer.ggml.{key}")
    if len(numbers) < count:
        raise _DamagedError(f"has {len(numbers):,} tokenizer.ggml.{key} for {count:,} tokens")
    return numbers[:count]


def _scores(vocabulary: _Vocabulary, metadata: Metadata) -> list[float]:
    found = _numbers(metadata, "scores", "iuf", len(vocabulary.tokens))
    scores: list[float] = found.astype(np.float64).tolist() if found is not None else [0.0] * len(vocabulary.tokens)
    if not all(map(math.isfinite, scores)):
        raise _DamagedError("has scores that are no numbers (tokenizer.ggml.scores)")
    return scores
