"""The synthetic tokenizer: exact token counts, checked through the class that SGLang loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from config.lock import read_prompt
from engine.checkpoint.tokenizer import build_tokenizer, learn_merges


def test_the_published_prompt_has_537_ids_after_saving_and_loading(tmp_path: Path) -> None:
    text = read_prompt("starship")
    build_tokenizer(learn_merges(text, 537)).save_pretrained(tmp_path)
    loaded = Qwen2Tokenizer.from_pretrained(tmp_path)
    ids = loaded(text).input_ids
    assert len(ids) == 537
    assert loaded.decode(ids) == text


def test_other_prompts_round_trip() -> None:
    tokenizer = build_tokenizer(learn_merges(read_prompt("starship"), 537))
    for name in ("flamenco", "mechanics"):
        text = read_prompt(name)
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet="ab c", min_size=1, max_size=60), st.data())
def test_any_count_between_words_and_bytes_is_met(text: str, data: st.DataObject) -> None:
    words = build_tokenizer([]).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    count = data.draw(st.integers(len(words), sum(len(word) for word, _ in words)))
    assert len(build_tokenizer(learn_merges(text, count))(text).input_ids) == count


def test_an_impossible_count_is_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens asked of a text with 1 words, 3 bytes"):
        learn_merges("abc", 4)
