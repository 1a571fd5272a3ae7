"""A byte-level BPE tokenizer whose token count of one given text is exactly what the caller asks for.

Text length decides the length of the packed document. The public Qwen vocabulary gives 537 ids for the published demo
prompt, hence the published 38,247 tokens; a synthetic checkpoint has to give the same count without shipping that
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def learn_merges(text: str, token_count: int) -> list[tuple[str, str]]:
    """Byte-pair merges after which `text` has exactly `token_count` tokens.

    Pairs are merged most frequent first, ties in lexical order. Where the most frequent pair would overshoot, one
    that occurs just often enough is taken: pairs that occur once are always there until every word is one token.

    Raises:
        ValueError: the text has fewer bytes, or more words, than `token_count`.
    """
    splitter = build_tokenizer([]).backend_tokenizer.pre_tokenizer
    words = [list(word) for word, _ in splitter.pre_tokenize_str(text)]
    if not len(words) <= token_count <= sum(map(len, words)):
        raise ValueError(f"{token_count} tokens asked of a text with {len(words)} words, {sum(map(len, words))} bytes")
    merges: list[tuple[str, str]] = []
    while (surplus := sum(map(len, words)) - token_count) > 0:
        occurrences: Counter[tuple[str, str]] = Counter()
        for word in words:
            occurrences.update(pairwise(word))
        for pair, _ in sorted(occurrences.items(), key=lambda item: (-item[1], item[0])):
            merged = [_merge(word, pair) for word in words]
            if sum(map(len, words)) - sum(map(len, merged)) <= surplus:
                break
        else:  # pragma: no cover - a pair that occurs once always fits
            raise ValueError("no pair fits")
        merges.append(pair)
        words = merged
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def build_tokenizer(merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    """Qwen's tokenizer (its word splitting and special tokens) over the 256 byte symbols and the given merges."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
