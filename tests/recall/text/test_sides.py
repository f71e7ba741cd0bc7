"""Which neighbours of a block go on with what is asked."""

from __future__ import annotations

import pytest

from kvws.recall.text.sides import Sides, sides_of

RARITIES = {"the": 0.05, "some": 0.45, "router": 0.88, "module": 0.7}


def rarity(word: str) -> float:
    return RARITIES.get(word, 1.0)


@pytest.mark.parametrize(
    ("text", "behind", "before"),
    [
        ("lrwxrwxrwx 1 root root 24 crawler.sock -> /", True, False),
        ("crawler.sock -> /data/copper/glacier and so on", False, True),
        ("crawler begins, and much later crawler ends", True, True),
        ("nothing of the kind", False, False),
        ("", False, False),
    ],
)
def test_the_half_with_the_asked_word_may_be_cut_off(
    text: str, behind: bool, before: bool
) -> None:
    assert sides_of(text, {"crawler", "the"}, rarity) == Sides(behind, before)


def test_a_name_counts_by_any_of_its_terms() -> None:
    text = "x = 1; y = 2; z = 3; open(src/app/load_config.py)"
    assert sides_of(text, {"config"}, rarity) == Sides(behind=True, before=False)


def test_the_rarest_asked_word_tells_and_commoner_ones_do_not() -> None:
    text = "the module of this and that ... crawler"
    assert sides_of(text, {"module", "crawler"}, rarity) == Sides(behind=True, before=False)
    assert sides_of(text, {"module"}, rarity) == Sides(behind=False, before=True)


@pytest.mark.parametrize(("other", "tells"), [(0.95, True), (0.85, False)])
def test_a_word_that_is_nearly_as_rare_tells_too(other: float, tells: bool) -> None:
    rarities = {"crawler": 1.0, "router": other}
    found = sides_of("crawler ........ router", set(rarities), rarities.__getitem__)
    assert found == Sides(behind=tells, before=True)


def test_common_words_alone_tell_nothing() -> None:
    assert sides_of("some text of the kind", {"some", "the", "of"}, lambda _: 0.45) == Sides(
        behind=False, before=False
    )
