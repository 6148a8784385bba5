"""A model's vocabulary as llguidance needs it: the bytes of every token, and which tokens are control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kvarn.errors import ConstraintError
from kvarn.sampling.token_masks import mask_without

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_FORCED_CHARACTERS = 256  # of a forced text (one without alternatives) that are tokenised ahead of time
ENDS_FIRST = b'"}]0123456789'
TEXT_BYTES = (*b"\n", *range(0x20, 0x7F))  # that every vocabulary must be able to write


class GrammarTokenizer(Protocol):
    """kvarn.tokenizer.Tokenizer, as this module needs it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def unused_ids(self) -> frozenset[int]: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def bos_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_control(self, token_id: int) -> bool: ...


class TokenTable:
    """The interface that llguidance's LLTokenizer wraps, over vocab_size ids; unknown ids have no text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        known = [i for i in range(min(vocab_size, tokenizer.vocab_size)) if i not in tokenizer.unused_ids]
        # Control tokens are no text: allowed only where a grammar names them. The end token is one, even where the
        # file marks it as a normal token.
        self.eos_ids = tuple(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size)
        if not self.eos_ids:
            raise ConstraintError("the model has no token that ends a text, so no answer could end; use another model")
        self.special_token_ids = [i for i in known if tokenizer.is_control(i) or i in self.eos_ids]
        self.allowed = mask_without(set(range(vocab_size)).difference(known), vocab_size)
        self.tokens = [b""] * vocab_size
        for token_id in known:
            self.tokens[token_id] = tokenizer.token_bytes(token_id)
        self._special = frozenset(self.special_token_ids)
        self._require_bytes()
        self.eos_token_id = self.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    @cached_property
    def trie(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self, n_vocab=len(self.tokens), eos_token=list(self.eos_ids))  # type: ignore[arg-type]

    @cached_property
    def single_ids(self) -> tuple[int, ...]:
        """Tokens of one printable byte: what ends a value first, then what most grammars take."""
        ids = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in self._special}
        return tuple(ids[byte] for byte in dict.fromkeys((*ENDS_FIRST, *TEXT_BYTES)) if byte in ids)

    @property
    def special(self) -> dict[int, str]:
        """Texts of the tokens a grammar may name."""
        return {i: self.tokens[i].decode("utf-8", "replace") for i in self.special_token_ids}

    def __call__(self, text: str) -> Sequence[int]:
        """The tokens of a forced text; of a long one only its beginning, since llguidance calls this at every step."""
        text = text[:MAX_FORCED_CHARACTERS]
        data = text.encode("utf-8")
        # After a line break, as some tokenizers put a space before a text; what does not come out as it went in
        # is cut into the longest tokens instead.
        ids = self._tokenizer.encode("\n" + text, add_special=False)
        while ids and self._bytes(ids) != data:
            ids = ids[1:] if len(self._bytes(ids)) > len(data) else []
        return ids or self.trie.greedy_tokenize(text)

    def _require_bytes(self) -> None:
        """Every printable ASCII byte needs a token: forced text without tokens would be a dead end."""
        single = {token for i, token in enumerate(self.tokens) if len(token) == 1 and i not in self._special}
        missing = [byte for byte in TEXT_BYTES if bytes([byte]) not in single]
        if missing:
            raise ConstraintError(
                f"the vocabulary has no token for the byte 0x{missing[0]:02X} and {len(missing) - 1} others, "
                "so it cannot follow a constraint; use another model"
            )

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(b"" if i in self._special else self.tokens[i] for i in ids)
