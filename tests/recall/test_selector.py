"""The selector: what the blocks of a workspace say, and which of them deserve a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvws.recall.fusion import Scores
from kvws.recall.recipe import Recipe, SignalName, recipe_named
from kvws.recall.regions import Reason, Regions
from kvws.recall.selector import Asked, Choice, Selector
from kvws.session.workspace import Workspace
from tests.recall.text.toys import BLOCK, Words

CONTENT, LEXICAL, SUCCESSION = SignalName.CONTENT, SignalName.LEXICAL, SignalName.SUCCESSION
RECENCY, MEAN_K = SignalName.RECENCY, SignalName.MEAN_K


class Agent:
    """A workspace of one line, of which the first and the last block do not compete."""

    def __init__(self, recipe: Recipe, *, reads_text: bool = True) -> None:
        self.words = Words()
        self.workspace = Workspace("w")
        self.selector = Selector(recipe, self.words.spelling if reads_text else None)
        self.line: tuple[int, ...] = ()
        self._filler = 0

    def says(self, text: str) -> int:
        """Append a block that begins with a text, the rest of it words that occur once."""
        tokens = self.words(text)
        while len(tokens) < BLOCK:
            self._filler += 1
            tokens += self.words(f"filler{self._filler}")
        assert len(tokens) == BLOCK
        (number,) = self.workspace.allocate(self.line, tokens)
        self.line = (*self.line, number)
        return number

    def repeats(self, block: int) -> int:
        (number,) = self.workspace.allocate(self.line, self.workspace.block_tokens(block))
        self.line = (*self.line, number)
        return number

    def asks(
        self,
        question: str,
        *,
        budget: int = 6,
        in_view: Sequence[int] = (),
        **rank_scores: dict[int, float],
    ) -> Choice:
        while not self.selector.catch_up(self.workspace, at_most=3):
            pass
        regions = Regions.of_line(self.line, 1, 1)
        count = self.workspace.block_count
        by_signal: dict[SignalName, Scores] = {}
        for name, scores in rank_scores.items():
            array = by_signal[SignalName(name.replace("_", "-"))] = np.zeros(count, np.float32)
            array[list(scores)] = list(scores.values())
        words = self.words(question)
        asked = Asked(
            line=self.line,
            question=words,
            own=self.selector.content_rows(words),
            regions=regions,
            candidates=np.frombuffer(regions.competes(count), dtype=np.uint8),
            in_view=frozenset(in_view),
            budget_blocks=budget,
        )
        return self.selector.choose(asked, {**self.selector.first_look(asked), **by_signal})


def result(text: str) -> str:
    """A tool's, as agents wrap it."""
    return f"[ {text} ]"


def talk(recipe: Recipe, *, reads_text: bool = True) -> tuple[Agent, dict[str, int]]:
    """Ten blocks; the third names a port, the sixth a host."""
    agent = Agent(recipe, reads_text=reads_text)
    told = {"system": agent.says("You help"), "first": agent.says("Hello")}
    told["port"] = agent.says("the port of db.example is 5433")
    told["behind the port"] = agent.says("and so on")
    agent.says("nothing")
    told["host"] = agent.says("the host of the cache is redis.example")
    for _ in range(4):
        told["newest"] = agent.says("more work")
    return agent, told


def test_the_block_that_has_the_words_of_the_question_is_the_first_by_lexical() -> None:
    agent, told = talk(recipe_named("lexical"))
    first, *_ = agent.asks("which port has db.example ?").chosen
    assert first.block == told["port"]
    assert (first.reason, first.signal, first.ranks) == (Reason.SCORE, LEXICAL, {LEXICAL: 0})


def test_only_where_something_short_is_asked_common_words_tell_little() -> None:
    agent, told = talk(replace(recipe_named("lexical"), short_words=8))
    common = {"what", "is", "the", "more", "work"}
    knowing = replace(agent.words.spelling, rarity=lambda word: 0.05 if word in common else 1.0)
    agent.selector = Selector(agent.selector.recipe, knowing)
    wordy, rare = agent.says("what is the more of the work"), told["port"]
    agent.says("the newest does not compete")
    best = [agent.asks(question).chosen[0].block for question in (
        "what is the more work of 5433 ?",
        result("what is the more work of 5433"),
        "1 2 3 what is the more work of 5433 ?",
    )]  # fmt: skip
    assert best == [rare, wordy, wordy]


def test_places_and_near_misses_are_filled_though_no_signal_ranks_so_many() -> None:
    agent, told = talk(recipe_named("lexical"))
    choice = agent.asks("5433 ?", budget=6)
    assert len(choice.chosen) == 4 + 6 // 4
    assert [c.signal for c in choice.chosen[1:]] == [None] * 4
    others = [c.block for c in choice.chosen[1:]]
    assert others == sorted(others, reverse=True), "nothing is said for them: the newest"
    assert not {told["system"], told["newest"]} & {c.block for c in choice.chosen}


def test_a_choice_tells_which_signals_had_anything_to_say() -> None:
    agent, told = talk(recipe_named("lexical,recency,mean-k,succession"))
    assert agent.asks(result("port")).signals == (LEXICAL, RECENCY)
    assert agent.asks(result("unheard")).signals == (RECENCY,)
    scored = agent.asks(result("unheard"), mean_k={told["host"]: 0.5})
    assert set(scored.signals) == {RECENCY, MEAN_K}


def test_what_the_ranks_score_is_one_voice_among_those_of_the_text() -> None:
    weights = {MEAN_K: 1.0, LEXICAL: 1.0}
    agent, told = talk(Recipe(weights, rank_offset=5.0))
    ranked = {told["host"]: 0.9, told["port"]: 0.5}
    assert agent.asks("unheard", mean_k=ranked).chosen[0].block == told["host"]
    first = agent.asks("5433 ?", mean_k=ranked).chosen[0]
    assert first.block == told["port"] and first.ranks == {MEAN_K: 1, LEXICAL: 0}
    assert first.signal is LEXICAL


def test_newer_blocks_come_first_by_recency() -> None:
    agent, told = talk(recipe_named("recency"))
    blocks = [each.block for each in agent.asks("anything").chosen]
    assert blocks == [told["newest"] - 1 - place for place in range(5)]


SHORT = Recipe(
    {MEAN_K: 9.0, CONTENT: 1.0, LEXICAL: 1.0},
    rank_offset=5.0,
    question_least_shares={MEAN_K: 2.0},
    short_words=8,
)
"""Of a question, mean-k has nothing to say, as nothing is twice its best; of anything else, it
decides."""

ANCHORED = replace(
    SHORT, anchor_weights={CONTENT: 1.0, LEXICAL: 1.0}, anchor_share=1 / 6, told_words=8
)


def best_of(recipe: Recipe, question: str, *, reads_text: bool = True) -> str:
    """What the best block tells where mean-k is for the host and content for the port."""
    agent, told = talk(recipe, reads_text=reads_text)
    choice = agent.asks(question, mean_k={told["host"]: 1.0}, content={told["port"]: 1.0})
    (name,) = [name for name, block in told.items() if block == choice.chosen[0].block]
    return name


@pytest.mark.parametrize("mark", ["?", "\uff1f", "\u061f"])
def test_a_short_question_of_a_persons_is_read_as_a_question(mark: str) -> None:
    assert best_of(SHORT, f"where does it listen {mark}") == "port"
    assert best_of(SHORT, f"where does it listen{mark} tell me") == "port"


def test_a_short_order_is_read_as_a_question_too() -> None:
    assert best_of(SHORT, "tell me where it listens .") == "port"


def test_a_result_or_what_is_long_is_no_question() -> None:
    assert best_of(SHORT, result("where does it listen")) == "host"
    assert best_of(SHORT, "1 2 3 4 5 6 7 ?") == "port"
    assert best_of(SHORT, "1 2 3 4 5 6 7 8 ?") == "host"


def test_the_message_before_makes_no_question() -> None:
    header, opening = "<|im_start|> user", "<|im_end|> <|im_start|> assistant"
    assert best_of(SHORT, f"{header} 1 2 3 4 5 6 7 ? {opening}") == "port"
    before = "was it so ? <|im_end|>"
    assert best_of(SHORT, f"{before} {header} {result('ok')} {opening}") == "host"
    assert best_of(SHORT, f"{before} {header} 1 2 3 4 5 6 7 ? {opening}") == "port"


def test_without_a_spelling_nothing_reads_as_a_question() -> None:
    assert best_of(SHORT, "where does it listen ?", reads_text=False) == "host"


def test_a_choice_tells_the_signals_that_had_a_say_in_the_question() -> None:
    agent, told = talk(SHORT)
    mean_k, content = {told["host"]: 1.0}, {told["port"]: 1.0}
    asked = agent.asks("the host ?", mean_k=mean_k, content=content)
    assert set(asked.signals) == {CONTENT, LEXICAL}
    unasked = agent.asks(result("the host"), mean_k=mean_k, content=content)
    assert set(unasked.signals) == {MEAN_K, CONTENT, LEXICAL}


def test_content_and_words_together_find_the_anchors_of_whatever_is_short() -> None:
    agent, told = talk(ANCHORED)
    content = {told["host"]: 2.0, told["port"]: 1.0}  # and lexical is for the port alone
    shown = result("5433")
    chosen = agent.asks(shown, budget=10, content=content, mean_k={8: 1.0}).chosen
    assert [(each.block, each.reason) for each in chosen] == [
        (told["port"], Reason.ANCHOR),
        (told["host"], Reason.ANCHOR),
        (told["behind the port"], Reason.NEIGHBOUR),
        (told["first"], Reason.NEIGHBOUR),
        (told["host"] + 1, Reason.NEIGHBOUR),
        (told["host"] - 1, Reason.NEIGHBOUR),
        (8, Reason.SCORE),
        (7, Reason.SCORE),
    ]


def test_where_something_is_asked_an_anchor_brings_the_neighbour_that_its_words_are_next_to() -> (
    None
):
    agent, told = talk(ANCHORED)
    content = {told["host"]: 2.0, told["port"]: 1.0}
    chosen = agent.asks("5433 ?", budget=10, content=content).chosen
    assert [(each.block, each.reason) for each in chosen[:3]] == [
        (told["port"], Reason.ANCHOR),
        (told["host"], Reason.ANCHOR),  # without a word that is asked
        (told["first"], Reason.NEIGHBOUR),
    ]
    assert chosen[3].reason is Reason.SCORE


def test_what_asks_nothing_has_no_anchors_unless_the_recipe_says_so() -> None:
    agent, told = talk(replace(ANCHORED, told_words=0))
    hit = {told["port"]: 2.0}
    assert agent.asks(result("5433"), content=hit).chosen[0].reason is Reason.SCORE
    assert agent.asks("5433 ?", content=hit).chosen[0].reason is Reason.ANCHOR


def test_anchors_come_alone_if_the_recipe_says_so() -> None:
    agent, told = talk(replace(ANCHORED, anchor_neighbours=False))
    chosen = agent.asks("5433 ?", content={told["host"]: 2.0, told["port"]: 1.0}).chosen
    assert [each.block for each in chosen[:2]] == [told["port"], told["host"]]
    assert Reason.NEIGHBOUR not in {each.reason for each in chosen}


def test_anchors_are_the_best_of_their_signals_wherever_the_usual_weights_put_them() -> None:
    agent, told = talk(ANCHORED)
    scores = {"content": {told["port"]: 1.0}, "mean_k": {8: 1.0, 7: 0.5}}
    chosen = agent.asks(result("what now"), **scores).chosen
    anchors = [each for each in chosen if each.reason is Reason.ANCHOR]
    assert [each.block for each in anchors] == [told["port"]], "nothing is said for a second"
    assert anchors[0].ranks == {CONTENT: 0} and anchors[0].signal is CONTENT
    assert [each.block for each in chosen if each.reason is Reason.SCORE] == [8, 7]


def test_a_place_in_the_view_makes_no_anchor() -> None:
    agent, told = talk(replace(ANCHORED, stay_bonus=100.0))
    content = {told["port"]: 2.0, 6: 1.5, told["host"]: 1.0}
    shown, held = result("what now"), [told["host"]]
    chosen = agent.asks(shown, budget=10, in_view=held, content=content).chosen
    anchors = [each.block for each in chosen if each.reason is Reason.ANCHOR]
    assert anchors == [told["port"], 6]


def test_an_observation_has_neither_anchors_nor_the_weights_of_a_question() -> None:
    agent, told = talk(ANCHORED)
    mean_k, content = {told["host"]: 1.0}, {told["port"]: 1.0}
    choice = agent.asks("1 2 3 4 5 6 7 8 ?", mean_k=mean_k, content=content)
    assert choice.chosen[0].block == told["host"]
    assert {each.reason for each in choice.chosen} == {Reason.SCORE}


def test_only_the_questions_own_words_count_towards_its_length() -> None:
    agent, told = talk(ANCHORED)
    hit = {told["port"]: 2.0}
    before, opening = "1 2 3 <|im_end|>", "<|im_end|> <|im_start|> assistant"
    question = f"{before} <|im_start|> user a b c d e f g h {opening}"
    assert agent.asks(question, content=hit).chosen[0].reason is Reason.ANCHOR
    assert agent.asks("a b c d e f g h i", content=hit).chosen[0].reason is Reason.SCORE
    silence = f"<|im_start|> user {opening}"
    assert agent.asks(silence, content=hit).chosen[0].reason is Reason.SCORE


def test_words_are_looked_for_that_the_question_says_and_not_the_message_before() -> None:
    agent, told = talk(recipe_named("lexical"))
    before = "5433 <|im_end|>"
    asked = "<|im_start|> user redis ? <|im_end|> <|im_start|> assistant"
    ranks = {each.block: each.ranks for each in agent.asks(f"{before} {asked}").chosen}
    assert ranks[told["host"]] == {LEXICAL: 0}
    assert not any(of_block for block, of_block in ranks.items() if block != told["host"])


def test_a_block_that_is_read_again_gives_its_place_to_its_newest_copy() -> None:
    recipe = Recipe({LEXICAL: 1.0}, rank_offset=5.0, newest_copies=True)
    agent, told = talk(recipe)
    copy = agent.repeats(told["port"])
    agent.says("and more work")
    chosen = agent.asks("the port of db.example ?").chosen
    assert (chosen[0].block, chosen[0].reason) in {
        (copy, Reason.NEWEST_COPY),
        (copy, Reason.SCORE),
    }
    assert told["port"] not in {each.block for each in chosen}


def test_a_block_whose_copy_is_in_every_view_takes_no_place() -> None:
    recipe = Recipe({LEXICAL: 1.0}, rank_offset=5.0, newest_copies=True)
    agent, told = talk(recipe)
    agent.repeats(told["port"])  # and so the newest block of the line
    chosen = agent.asks("the port of db.example ?").chosen
    assert told["port"] not in {each.block for each in chosen}


def test_without_a_spelling_the_text_says_nothing_and_every_row_counts() -> None:
    agent, told = talk(recipe_named("lexical,recency,mean-k"), reads_text=False)
    choice = agent.asks("the port of db.example ?", mean_k={told["host"]: 0.5})
    assert set(choice.signals) == {RECENCY, MEAN_K}
    marked = agent.words("<|im_start|> user hello")
    assert agent.selector.content_rows(marked).tolist() == [1, 1, 1]


def test_rows_of_the_template_do_not_count_for_content() -> None:
    agent, _ = talk(recipe_named("auto"))
    marked = agent.words("<|im_start|> user hello there <|im_end|> <|im_start|> assistant")
    assert agent.selector.content_rows(marked).tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_new_blocks_are_read_some_at_a_time() -> None:
    agent, _ = talk(recipe_named("lexical"))
    done = [agent.selector.catch_up(agent.workspace, at_most=3) for _ in range(5)]
    assert done == [False, False, False, True, True]


def test_a_block_that_is_not_read_yet_is_no_trouble() -> None:
    agent, told = talk(recipe_named("lexical,succession,recency"))
    agent.asks("port")
    unread = agent.says("the port is another one")
    regions = Regions.of_line(agent.line, 1, 0)
    question = agent.words(result("port"))
    asked = Asked(
        agent.line,
        question,
        agent.selector.content_rows(question),
        regions,
        np.frombuffer(regions.competes(agent.workspace.block_count), dtype=np.uint8),
        frozenset(),
        6,
    )
    chosen = agent.selector.choose(asked, agent.selector.first_look(asked)).chosen
    ranks = {each.block: each.ranks for each in chosen}
    assert LEXICAL in ranks[told["port"]] and ranks[unread].keys() == {RECENCY}


def test_a_selector_by_another_recipe_knows_the_same_blocks() -> None:
    agent, told = talk(recipe_named("lexical"))
    agent.asks("port")
    agent.selector = agent.selector.by(recipe_named("recency"))
    assert agent.asks("port").chosen[0].block == told["newest"] - 1
    agent.selector = agent.selector.by(recipe_named("lexical"))
    assert agent.asks("port").chosen[0].block == told["port"]


def test_an_earlier_turn_is_recalled_by_what_it_followed() -> None:
    agent = Agent(recipe_named("succession"))
    turns = {}
    for topic in ("database", "network", "printer"):
        agent.says(f"<|im_start|> user the {topic} broke {topic} error {topic} log")
        turns[topic] = agent.says(f"<|im_start|> assistant {topic}fix")
    agent.says("<|im_start|> user what now")
    choice = agent.asks("network error network log <|im_start|> assistant")
    assert choice.signals == (SUCCESSION,)
    assert choice.chosen[0].block == turns["network"]


@pytest.mark.parametrize("name", ["mean-k", "rotated-mean", "content"])
def test_a_signal_of_the_ranks_alone_is_its_own_order(name: str) -> None:
    agent, _ = talk(recipe_named(name))
    scores = {3: 0.4, 5: 0.9, 2: 0.1, 7: 0.2}
    choice = agent.asks("the port of db.example ?", **{name.replace("-", "_"): scores})
    assert [each.block for each in choice.chosen][:4] == [5, 3, 7, 2]
    assert {each.reason for each in choice.chosen} == {Reason.SCORE}
