"""Pre-tokenization: how each `tokenizer.ggml.pre` splits text into words before byte-level BPE.

The patterns are those of the models' own tokenizer.json files. An unknown name is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarn.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


CHUNK_CHARACTERS = 16384  # pre-tokenized in some 40 ms
MAX_RUN = 65536  # characters without a place to split: no natural text, and split anyway

# Before a space between something and a Latin letter, and after a single line break before a letter.
_SPLIT = re.compile(r"(?<=\S) (?=[A-Za-z])|(?<=\S\n)(?=[^\W\d_])")


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """Patterns applied one after another, each match becoming a word of its own."""

    patterns: tuple[str, ...]
    gpt2_words: bool = False  # then split with GPT-2's own rule
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    nfc: bool = False  # the text is composed first
    adds_bos: bool = False  # unless add_bos_token says otherwise


def pre_tokenizer_rule(name: str | None) -> PreTokenizerRule:
    """Return the rule of a name in GGUF's tokenizer.ggml.pre; a file that has none gets llama.cpp's default."""
    if name is None:
        return RULES["default"]
    if name not in RULES:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name[:80]!r}, which is not known here; known are: {', '.join(sorted(RULES))}",
            fields=("tokenizer.ggml.pre",),
        )
    return RULES[name]


def build_pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """Build the pre-tokenizer of a rule with the tokenizers package."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=rule.gpt2_words)])


def split_long_text(text: str, size: int = CHUNK_CHARACTERS, max_run: int = MAX_RUN) -> Iterator[str]:
    """Split a text into chunks of about size characters, where no rule sees a word on both sides.

    The tokenizers package blocks every other thread while it splits a text into words: two seconds for a megabyte.
    """
    start = 0
    while len(text) - start > size:
        found = _SPLIT.search(text, start + size, start + max_run)
        stop = start + max_run if found is None else found.start()
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Words with at most one change from upper to lower case.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# As above, and a run of Han characters is a word of its own.
_UPPER_NO_HAN, _LOWER_NO_HAN = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

_CJK_KOREAN = r"[一-龥ࠀ-一가-퟿]+"
_CJK_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Letters with case, as the deepseek-llm file lists them.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SYMBOL_RUN = r"[\p{P}\$\+<=>\^~\|`]+"

_gpt2 = PreTokenizerRule((), gpt2_words=True)
_gpt2_nfc = PreTokenizerRule((), gpt2_words=True, nfc=True)
_single_digits = PreTokenizerRule((r"\p{N}",), gpt2_words=True)
_gpt4 = PreTokenizerRule((_GPT4,))
_llama3 = PreTokenizerRule((_GPT4,), ignore_merges=True, adds_bos=True)
_qwen2 = PreTokenizerRule((_QWEN2,), nfc=True)
_qwen2_plain = PreTokenizerRule((_QWEN2,))
_gpt4o = PreTokenizerRule((_GPT4O,))
_deepseek_v3 = PreTokenizerRule((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3))
_bailing = PreTokenizerRule(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)

RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule((_SYMBOL_RUN.replace("`", ""), _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "jais": _gpt2,
    "jina-es": _gpt2,
    "jina-de": _gpt2,
    "jina-v1-en": _gpt2,
    "jina-v2-es": _gpt2,
    "jina-v2-de": _gpt2,
    "jina-v2-code": _gpt2,
    "roberta-bpe": _gpt2,
    "gigachat": _gpt2,
    "mellum": _gpt2,
    "modern-bert": _gpt2,
    "a.x-4.0": _gpt2,
    "exaone4": _gpt2,
    "trillion": _gpt2,
    "granite-docling": _gpt2,
    "olmo": _gpt2_nfc,
    "mpt": _gpt2_nfc,
    "gpt-neox": _gpt2_nfc,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "smollm": _single_digits,
    "codeshell": _single_digits,
    "exaone": _single_digits,
    "minerva-7b": _single_digits,
    "command-r": PreTokenizerRule((r"\p{N}",), gpt2_words=True, nfc=True),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "falcon-h1": _llama3,
    "pixtral": _llama3,
    "midm-2.0": _llama3,
    "lfm2": _llama3,
    "dbrx": _gpt4,
    "smaug-bpe": _gpt4,
    "chatglm-bpe": _gpt4,
    "glm4": PreTokenizerRule((_GPT4,), ignore_merges=True),
    "qwen2": _qwen2,
    "qwen35": PreTokenizerRule((_QWEN35,), nfc=True),
    "stablelm2": _qwen2_plain,
    "deepseek-r1-qwen": _qwen2_plain,
    "megrez": _qwen2_plain,
    "hunyuan": _qwen2_plain,
    "grok-2": _qwen2_plain,
    "kormo": _qwen2_plain,
    "solar-open": _qwen2_plain,
    "tekken": PreTokenizerRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "kimi-k2": PreTokenizerRule((_KIMI,)),
    "gpt-4o": _gpt4o,
    "llama4": _gpt4o,
    "kanana2": _gpt4o,
    "minimax-m2": _gpt4o,
    "falcon": PreTokenizerRule((_SYMBOL_RUN, _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizerRule(
        ("[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK_KOREAN, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizerRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_KOREAN, r"\p{N}")),
    "deepseek-v3": _deepseek_v3,
    "hunyuan-dense": _deepseek_v3,
    "joyai-llm": _deepseek_v3,
    "bailingmoe": _bailing,
    "bailingmoe2": _bailing,
    "llada-moe": _bailing,
    "seed-coder": PreTokenizerRule(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "bloom": PreTokenizerRule((_BLOOM,)),
    "poro-chat": PreTokenizerRule((_BLOOM,)),
    "gpt3-finnish": PreTokenizerRule((_BLOOM,)),
    "viking": PreTokenizerRule((_BLOOM, r"\p{N}")),
}
