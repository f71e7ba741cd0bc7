"""All that one workspace's blocks say, kept up to date."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.recall.text.copies import TAIL_TOKENS, CopyIndex
from kvws.recall.text.index import TextIndex
from kvws.recall.text.spelling import Spelling
from kvws.session.workspace import Workspace
from tests.recall.text.toys import BLOCK, Blocks, Words, byte_spelling, padded, spell

SAY, HEAR = "<|im_start|>assistant\n", "<|im_start|>user\n"
LOG = (
    f"{HEAR}what does the parser of src/app/reader.py do<|im_end|>\n"
    f"{SAY}I open src/app/reader.py and look for parse_header<|im_end|>\n"
    f"{HEAR}def parse_header(line): naïve 🙂 port 8080<|im_end|>\n"
    f"{SAY}I open src/app/reader.py and look for parse_body<|im_end|>\n"
    f"{HEAR}def parse_header(line): naïve 🙂 port 8080<|im_end|>\n"
) * 2


def found(index: TextIndex, question: str, blocks: int) -> list[int]:
    scores = index.lexical(spell(question), np.ones(blocks, dtype=np.uint8))
    return np.flatnonzero(scores).tolist()


def forked() -> tuple[Blocks, list[tuple[int, ...]]]:
    """A line, and a second one that leaves it after its fourth block."""
    blocks = Blocks()
    main = blocks.extend(spell(LOG))
    side = blocks.extend(spell(LOG.replace("reader", "writer"))[4 * BLOCK :], behind=main[3])
    return blocks, [main, (*main[:4], *side)]


def everything(index: TextIndex, blocks: Blocks, lines: list[tuple[int, ...]]) -> list[object]:
    mask = np.ones(len(blocks.tokens), dtype=np.uint8)
    question = spell(f"{SAY}parse_header in reader<|im_end|>\n{HEAR}def naïve port{SAY}")
    answers: list[object] = [index.lexical(question, mask).tolist()]
    for line in lines:
        scores = index.succession(line, question, mask)
        answers.append(None if scores is None else scores.tolist())
    numbers = range(len(blocks.tokens))
    answers += [index.newer_copy(block, numbers) for block in numbers]
    return answers


def test_words_that_are_everywhere_do_not_outweigh_the_one_that_is_asked_about() -> None:
    words = Words()
    prose = "who reads the changes of the module is what the note says about the code"
    said = [prose, "lrwxrwxrwx root tagger.sock to /data/ripple", *["x = f ( y )"] * 30]
    blocks, behind = Blocks(), None
    for text in said:
        (behind,) = blocks.extend(padded(words(text), words("-")[0], 1), behind)
    common = {"who", "reads", "the", "of", "is", "what", "about"}
    rarities = {True: 0.05, False: 1.0}
    knowing = replace(words.spelling, rarity=lambda word: rarities[word in common])
    index, every = TextIndex(knowing), np.ones(len(said), dtype=np.uint8)
    blocks.read_into(index)
    question = words("what is the path of the tagger about")
    assert index.lexical(question, every).argmax() == 0
    assert index.lexical(question, every, in_other_words=True).argmax() == 1


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 40)), at_most=st.integers(1, 9))
def test_read_bit_by_bit_it_says_what_it_says_read_at_once(cuts: list[int], at_most: int) -> None:
    blocks, lines = forked()
    at_once, bit_by_bit = TextIndex(byte_spelling()), TextIndex(byte_spelling())
    assert blocks.read_into(at_once)
    for upto in sorted(min(cut, len(blocks.tokens)) for cut in cuts):
        blocks.read_into(bit_by_bit, upto=upto, at_most=at_most)
    while not blocks.read_into(bit_by_bit, at_most=at_most):
        pass
    assert everything(bit_by_bit, blocks, lines) == everything(at_once, blocks, lines)


def test_it_reads_no_more_than_it_is_told_to() -> None:
    blocks = Blocks()
    line = blocks.extend([token for n in range(10) for token in spell(f"word{n} ".ljust(BLOCK))])
    index = TextIndex(byte_spelling())
    assert not blocks.read_into(index, at_most=4)
    assert [n for n in line if found(index, f"word{n}", 10)] == [0, 1, 2, 3]
    assert blocks.read_into(index, at_most=6), "none is left"
    assert [n for n in line if found(index, f"word{n}", 10)] == list(line)


def test_a_word_cut_by_a_border_is_found_on_both_sides() -> None:
    blocks = Blocks()
    blocks.extend(spell("x " * 14 + "conf" + "iguration " + "y " * 30))
    index = TextIndex(byte_spelling())
    blocks.read_into(index, upto=1)
    assert found(index, "configuration", 3) == []
    blocks.read_into(index)
    assert found(index, "configuration", 3) == [0, 1]


def test_each_branch_completes_the_word_that_the_fork_cut() -> None:
    blocks = Blocks()
    trunk = blocks.extend(spell("x " * 14 + "pars"))[-1]
    for ending in ("er a", "ing", "er b"):
        blocks.extend(spell(ending.ljust(BLOCK)), behind=trunk)
    index = TextIndex(byte_spelling())
    blocks.read_into(index)
    assert found(index, "parser", 4) == [0, 1, 3]
    assert found(index, "parsing", 4) == [0, 2]
    only_trunk = np.array([1, 0, 0, 0], dtype=np.uint8)
    once = TextIndex(byte_spelling())
    blocks.read_into(once, upto=3)
    assert (
        index.lexical(spell("parser"), only_trunk) == once.lexical(spell("parser"), only_trunk)
    ).all(), "two branches that go on alike complete it once"


def test_a_word_is_completed_once_however_often_branches_go_on_alike() -> None:
    blocks = Blocks()
    trunk = blocks.extend(spell("x " * 14 + "pars"))[-1]
    only_trunk = np.array([1, 0, 0, 0, 0], dtype=np.uint8)
    index = TextIndex(byte_spelling())
    scores: list[list[float]] = []
    for ending in ("ing a", "er a", "er b", "ing b"):
        blocks.extend(spell(ending.ljust(BLOCK)), behind=trunk)
        blocks.read_into(index)
        scores.append(index.lexical(spell("parser parsing"), only_trunk).tolist())
    assert scores[0] < scores[1] == scores[2] == scores[3]


def test_numbers_that_were_taken_back_are_read_when_they_come_back() -> None:
    blocks, lines = forked()
    all_there = TextIndex(byte_spelling())
    blocks.read_into(all_there)
    index = TextIndex(byte_spelling())
    tail = lines[0][-3:]
    kept = {number: blocks.tokens[number] for number in tail}
    for number in tail:
        blocks.tokens[number] = None
    assert blocks.read_into(index)
    assert not set(found(index, "parse_header", len(blocks.tokens))) & set(tail)
    blocks.tokens[tail[0]] = kept[tail[0]]
    assert blocks.read_into(index)
    for number in tail[1:]:
        blocks.tokens[number] = kept[number]
    assert not blocks.read_into(index, at_most=1)
    assert blocks.read_into(index, at_most=1)
    assert everything(index, blocks, lines) == everything(all_there, blocks, lines)


def test_a_number_that_is_taken_back_after_it_was_read_is_not_read_twice() -> None:
    blocks, lines = forked()
    index = TextIndex(byte_spelling())
    blocks.read_into(index)
    before = everything(index, blocks, lines)
    last = lines[0][-1]
    tokens, blocks.tokens[last] = blocks.tokens[last], None
    assert blocks.read_into(index)
    blocks.tokens[last] = tokens
    assert blocks.read_into(index)
    assert everything(index, blocks, lines) == before


def test_only_candidates_are_scored() -> None:
    blocks = Blocks()
    blocks.extend(spell("the same words in every block .. " * 8)[: 8 * BLOCK])
    index = TextIndex(byte_spelling())
    blocks.read_into(index)
    candidates = np.array([0, 1, 0, 1, 1, 0, 0, 0], dtype=np.uint8)
    scores = index.lexical(spell("same words"), candidates)
    assert scores.dtype == np.float32 and scores.shape == (8,)
    assert set(np.flatnonzero(scores).tolist()) <= {1, 3, 4}


def test_a_file_that_is_read_again_is_found_again() -> None:
    words = Words()
    rng = random.Random(3)
    file = words(" ".join(f"name{rng.randrange(500)}" for _ in range(4 * BLOCK)))
    blocks = Blocks()
    line = blocks.extend(file + words("and " * 50 + "now") + file + words("so " * 40))
    index = TextIndex(words.spelling)
    blocks.read_into(index)
    copy = index.newer_copy(1, set(line))
    assert copy is not None and min(copy) > 3
    assert index.newer_copy(1, set(line[:5])) is None


def test_a_copy_that_a_small_sample_suggests_is_compared_in_full() -> None:
    rng = random.Random(1)
    deceived = 0
    for _ in range(40):
        block = rng.choices(range(50_000), k=BLOCK)
        again = [*block[:20], *rng.choices(range(50_000), k=12)]  # 13 of its 25 shingles
        blocks = Blocks()
        line = blocks.extend([*block, *again])
        index, sample = TextIndex(Spelling(lambda _: "")), CopyIndex()
        blocks.read_into(index)
        sample.add(0, block)
        sample.add(1, [*block[-TAIL_TOKENS:], *again])
        deceived += sample.newer_copy(0, line) is not None
        assert index.newer_copy(0, line) is None
    assert deceived, "the sample alone would have been good enough"


def test_it_follows_a_workspace() -> None:
    workspace = Workspace("w")
    index = TextIndex(byte_spelling())

    def catch_up() -> bool:
        return index.catch_up(
            workspace.block_count, workspace.exists, workspace.block_tokens, workspace.parent
        )

    line = workspace.allocate((), spell(LOG))
    assert catch_up()
    workspace.take_back(line[-4:])
    other = workspace.allocate(line[:-4], spell("quite another ending of this".ljust(2 * BLOCK)))
    assert catch_up()
    assert found(index, "ending", workspace.block_count) == other[:1]


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    return ChatRenderer(smollm2)


def test_with_a_models_own_tokenizer(renderer: ChatRenderer) -> None:
    """Names, turns and copies of a rendered chat."""
    listing = "".join(
        f"def handle_{name}(request):\n    return {name.title()}Response(port={port})\n"
        for name, port in zip(["alpha", "beta", "gamma", "delta"], range(8080, 8084), strict=True)
    )
    messages = [Message("user", "Where is the héllo 🙂 service?")]
    for name in ("app/server.py", "app/ünïcode_client.py", "app/server.py"):
        messages.append(Message("assistant", f"I read {name}."))
        messages.append(Message("user", f"{name}:\n{listing}" if "server" in name else "empty"))
    tokens = renderer.tokens(messages)
    opening = tuple(renderer.pieces("<|im_start|>assistant\n"))
    spelling = Spelling(renderer.decode, opening)
    assert spelling.message_start == opening[0]
    blocks = Blocks()
    index = TextIndex(spelling)
    line = blocks.extend(tokens)
    assert blocks.read_into(index)
    mask = np.ones(len(line), dtype=np.uint8)

    def holds(name: str) -> list[int]:
        return np.flatnonzero(index.lexical(renderer.pieces(name), mask)).tolist()

    def says(name: str) -> list[int]:
        """Blocks in which a name ends."""
        ends = [block * BLOCK for block in range(1, len(line) + 1)]
        before = [renderer.decode(tokens[:end]).count(name) for end in [0, *ends]]
        return [block for block in line if before[block] < before[block + 1]]

    for name in ("gamma", "8082", "héllo", "ünïcode"):
        ended_in = says(name)
        assert ended_in and set(ended_in) <= set(holds(name)), name
        assert set(holds(name)) <= {*ended_in, *(block - 1 for block in ended_in)}, name
    text = renderer.decode(tokens[: len(line) * BLOCK])
    assert text.count("<|im_start|>assistant") == 3
    scores = index.succession(line, tokens[len(line) * BLOCK :], mask)
    assert scores is not None and scores.any()
    assert index.newer_copy(holds("gamma")[0], line) is not None, "the listing was read again"


def test_a_million_tokens_are_read_and_scored(capsys: pytest.CaptureFixture[str]) -> None:
    words = Words()
    rng = np.random.default_rng(5)
    vocabulary = words(" ".join(f"{a}_{b}" for a in "abcdefghij" for b in range(2000)))
    say, hear = words("<|im_start|> assistant"), words("<|im_start|> user")
    tokens: list[int] = []
    while len(tokens) < 1_000_000:
        for role in (say, hear):
            said = np.minimum(rng.zipf(1.3, rng.integers(20, 600)), len(vocabulary)) - 1
            tokens += [*role, *(vocabulary[word] for word in said)]
    blocks = Blocks()
    line = blocks.extend(tokens)
    index = TextIndex(words.spelling)
    ms: dict[str, float] = {}

    def measured(name: str, since: float) -> None:
        ms[name] = 1e3 * (time.perf_counter() - since)

    begin = time.perf_counter()
    while not blocks.read_into(index, at_most=512):
        pass
    measured("reading", begin)
    mask = np.ones(len(line), dtype=np.uint8)
    question = [*tokens[-300:], *say]
    begin = time.perf_counter()
    lexical = index.lexical(question, mask)
    measured("lexical", begin)
    begin = time.perf_counter()
    succession = index.succession(line, question, mask)
    measured("succession", begin)
    begin = time.perf_counter()
    for block in range(0, len(line), 300):
        index.newer_copy(block, line)
    measured("100 copies", begin)
    with capsys.disabled():
        print(f"\n{len(line)} blocks:", {name: round(value, 1) for name, value in ms.items()})
    assert len(line) >= 31_000
    assert lexical.shape == (len(line),) and lexical.argmax() > 0
    assert succession is not None and succession.any()
