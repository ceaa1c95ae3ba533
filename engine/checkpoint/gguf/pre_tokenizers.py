"""How each pre-tokenizer that a GGUF file can name (`tokenizer.ggml.pre`) splits a text before byte pairs are merged.

From llama.cpp (src/llama-vocab.cpp, MIT licence). Where its regular expressions only approximate those of the model's
own tokenizer.json, whose engine it lacks, these are the original ones, which it quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
