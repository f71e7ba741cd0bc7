"""Text comes out early, once, and as if it had been decoded at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvws.chat.detokenise import Detokeniser, StopTexts

Decode = Callable[[list[int]], str]

TEXTS = [
    "plain words, and more of them",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 in a row 🎉🎉🎉",
    "混ぜた文字 и кириллица, ελληνικά, العربية, हिन्दी",
    "e\u0301 combining, \u200bzero width, \ufffd itself, \ufffd\ufffd twice",
    "code: def f(x):\n\treturn {'a': [1, 2]}\r\n\n    end",
    "",
]


@pytest.fixture(scope="module")
def bytelevel(smollm2: Path) -> Any:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """Llama's way: words begin with ▁, and what is no word is spelled in bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<s>"]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "a", "b", "▁a", "▁b", ",", "é"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer: Any = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def keeping(tokenizer: Any) -> Decode:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def skipping(tokenizer: Any) -> Decode:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def parts_of(ids: list[int], decode: Decode) -> list[str]:
    detokeniser = Detokeniser(decode)
    return [*(detokeniser.add(token) for token in ids), detokeniser.finish()]


@pytest.mark.parametrize("way", [keeping, skipping])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(
    text: str, way: Callable[[Any], Decode], bytelevel: Any
) -> None:
    ids = bytelevel.encode(text).ids
    assert "".join(parts_of(ids, way(bytelevel))) == text


@pytest.mark.parametrize("way", [keeping, skipping])
@pytest.mark.parametrize("seed", range(40))
def test_random_tokens_give_what_they_decode_to_at_once(
    seed: int, way: Callable[[Any], Decode], bytelevel: Any
) -> None:
    rng = random.Random(seed)
    some = [rng.randrange(bytelevel.get_vocab_size()) for _ in range(200)]
    # The first ids after the special ones are single bytes, most of them half a character.
    halves = [rng.randrange(300) for _ in range(200)]
    for ids in (some, halves, [rng.choice(pair) for pair in zip(some, halves, strict=True)]):
        decode = way(bytelevel)
        assert "".join(parts_of(ids, decode)) == decode(ids)


def test_a_character_of_many_tokens_comes_at_once_and_never_broken(bytelevel: Any) -> None:
    ids = bytelevel.encode("𓂀 𝒳").ids
    assert len(ids) > 6, "these characters take several tokens each"
    parts = [part for part in parts_of(ids, keeping(bytelevel)) if part]
    assert "".join(parts) == "𓂀 𝒳"
    assert not any("\ufffd" in part for part in parts)


def test_text_is_not_held_back_longer_than_its_last_character_needs(bytelevel: Any) -> None:
    ids = bytelevel.encode("some words and no riddles").ids
    decode = keeping(bytelevel)
    parts = parts_of(ids, decode)
    for count in range(len(ids)):
        assert "".join(parts[: count + 1]) == decode(ids[: count + 1])


def test_half_a_character_at_the_end_is_shown_as_broken(bytelevel: Any) -> None:
    ids = bytelevel.encode("ok 𓂀").ids[:-1]
    parts = parts_of(ids, keeping(bytelevel))
    assert "".join(parts) == bytelevel.decode(ids) != "ok 𓂀"
    assert "\ufffd" not in "".join(parts[:-1]) and "\ufffd" in parts[-1]


def test_endless_halves_of_characters_are_not_held_for_ever(bytelevel: Any) -> None:
    half = bytelevel.encode("𓂀").ids[0]
    assert any(parts_of([half] * 200, keeping(bytelevel))[:-1])


@pytest.mark.parametrize("text", ["Hello world", "a b, é Hello", "日本 é 🎉 a", " Hello", "▁a"])
def test_words_with_a_leading_blank_keep_it_where_bytes_are_spelled_out(
    text: str, byte_fallback: Any
) -> None:
    ids = byte_fallback.encode(text).ids
    decode = keeping(byte_fallback)
    assert "".join(parts_of(ids, decode)) == decode(ids)


def test_a_skipped_token_at_the_beginning_costs_no_blank(byte_fallback: Any) -> None:
    vocabulary = byte_fallback.get_vocab()
    ids = [vocabulary[piece] for piece in ("Hello", "<s>", "▁world", "<s>", "▁a")]
    decode = skipping(byte_fallback)
    assert "".join(parts_of(ids, decode)) == decode(ids) == "Hello world a"


# ---- stop texts --------------------------------------------------------------------------------


def cut(text: str, stops: list[str], pieces: list[int]) -> tuple[str, str | None]:
    """`text` through stop texts, in pieces of these lengths."""
    gate = StopTexts(stops)
    shown = ""
    begin = 0
    for length in [*pieces, len(text)]:
        shown += gate.add(text[begin : begin + length])
        begin += length
    return shown + gate.finish(), gate.matched


def test_a_stop_text_and_what_follows_are_cut_off() -> None:
    assert cut("one END two", ["END"], [5, 1, 1]) == ("one ", "END")


def test_what_only_looks_like_a_stop_text_is_shown_in_the_end() -> None:
    assert cut("the EN", ["END"], [4, 1]) == ("the EN", None)
    assert cut("the ENEND", ["END"], []) == ("the EN", "END")


def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    gate = StopTexts(["\n\nHuman:"])
    assert gate.add("Hi.\n\nHum") == "Hi."
    assert gate.add("ble pie") == "\n\nHumble pie"


def test_the_stop_text_that_is_complete_first_counts() -> None:
    assert cut("a\n\nb", ["\n\n", "\n"], []) == ("a", "\n")
    assert cut("xaby", ["ab", "xaby"], []) == ("x", "ab")
    assert cut("xab", ["ab", "xab"], []) == ("", "xab")


def test_nothing_comes_out_behind_a_stop_text() -> None:
    gate = StopTexts(["END"])
    gate.add("END")
    assert gate.add("more") + gate.finish() == ""


@settings(max_examples=300, derandomize=True)
@given(
    text=st.text("ab\n", max_size=20),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.integers(0, 4), max_size=12),
)
def test_how_text_is_cut_does_not_depend_on_its_pieces(
    text: str, stops: list[str], pieces: list[int]
) -> None:
    assert cut(text, stops, pieces) == cut(text, stops, [1] * len(text))
