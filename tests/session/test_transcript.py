"""What is known of a session's messages, in this life and the next."""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.canonical import message_digest
from kvws.chat.message import Message, ToolCall
from kvws.recall.spans import PromptSpans, Span
from kvws.session.commit import ROOT
from kvws.session.transcript import Given, Landmarks, Place, Transcript, place_in
from kvws.session.workspace import Workspace

SYSTEM, TASK = Message("system", "Be careful."), Message("user", "Fix it.")
CALL = ToolCall("c1", "Edit", '{"path": "a.py", "old": "x  "}')
SAID = Message("assistant", "Editing.", (CALL,))
REPLAYED = Message(
    "assistant", "Editing.", (ToolCall("c1", "Edit", '{"old":"x","all":false,"path":"a.py"}'),)
)
RESULT = Message("tool", "done", name="Edit", tool_call_id="c1")


def digests(*messages: Message) -> list[bytes]:
    chain = [b"main"]
    for message in messages:
        chain.append(message_digest(chain[-1], message))
    return chain


def grown(blocks: int) -> tuple[Workspace, tuple[int, ...]]:
    """A workspace whose main thread has that many blocks."""
    workspace = Workspace("w")
    line = tuple(workspace.allocate((), list(range(32 * blocks))))
    workspace.record(workspace.thread("main"), line, line, line)
    return workspace, line


def known_after_one_answer() -> tuple[Transcript, Place, Place]:
    transcript = Transcript()
    asked, answered = Place(2, 3, (7, 8)), Place(4, 5, (9,))
    transcript.learn(digests(SYSTEM, TASK)[-1], asked, Given(SAID, answered))
    return transcript, asked, answered


def test_nothing_is_known_of_a_list_that_begins_otherwise() -> None:
    transcript, _, _ = known_after_one_answer()
    other = (Message("system", "Be quick."), TASK)
    known = transcript.find(other, digests(*other))
    assert (known.messages, known.place) == (0, Place())


def test_a_list_that_is_asked_once_more_is_known_as_a_whole() -> None:
    transcript, asked, _ = known_after_one_answer()
    known = transcript.find((SYSTEM, TASK), digests(SYSTEM, TASK))
    assert (known.messages, known.place) == (2, asked)


def test_an_answer_is_recognised_in_the_words_of_the_client_and_then_by_them() -> None:
    transcript, _, answered = known_after_one_answer()
    messages = (SYSTEM, TASK, REPLAYED, RESULT)
    for _ in range(2):
        known = transcript.find(messages, digests(*messages))
        assert (known.messages, known.place) == (3, answered)


def test_a_turn_that_means_something_else_is_not_what_was_generated() -> None:
    transcript, asked, _ = known_after_one_answer()
    messages = (SYSTEM, TASK, Message("assistant", "Editing.", ()), TASK)
    known = transcript.find(messages, digests(*messages))
    assert (known.messages, known.place) == (2, asked)


def test_of_two_answers_to_one_question_the_one_that_the_client_kept_counts() -> None:
    transcript, asked, first = known_after_one_answer()
    second = Place(9, 9)
    transcript.learn(digests(SYSTEM, TASK)[-1], asked, Given(Message("assistant", "No."), second))
    for said, place in ((SAID, first), (Message("assistant", "No."), second)):
        messages = (SYSTEM, TASK, said, TASK)
        assert transcript.find(messages, digests(*messages)).place == place


def test_a_place_is_cut_where_the_blocks_end() -> None:
    line = (0, 1, 2, 3)
    tokens = list(range(100, 200))  # behind one block: blocks 1, 2 and 3, and four tokens
    marks = Landmarks(5)
    for end, head, blocks, tail in (
        (0, 0, 1, 0),
        (31, 0, 1, 31),
        (32, 1, 2, 0),
        (100, 3, 4, 4),
    ):
        place = place_in(line, 1, tokens, end, marks, {}, {})
        assert (place.head, place.blocks, len(place.tail)) == (head, blocks, tail)
        assert place.tail == tuple(tokens[end - tail : end])
        assert place.tokens == 32 + end
    lost = place_in(line[:2], 1, tokens, 100, marks, {}, {})  # two blocks were not kept
    assert (lost.head, lost.blocks, lost.tail) == (1, 2, tuple(tokens[32:]))
    assert place_in((), 0, tokens, 10, marks, {}, {}).head == ROOT


def test_the_line_of_a_place_does_not_depend_on_where_its_thread_went() -> None:
    workspace, line = grown(6)
    thread = workspace.thread("main")
    place = Place(line[3], 4)
    assert place.line(thread, workspace) == line[:4]
    branch = tuple(workspace.allocate(line[:2], [5] * 64))
    workspace.record(thread, line[:2] + branch, (), branch)
    assert place.line(thread, workspace) == line[:4]
    assert Place().line(thread, workspace) == ()


def test_landmarks_become_spans_of_the_prompt() -> None:
    marks = Landmarks(40, {"CLAUDE.md": Span(40, 60)}, Span(60, 70))
    assert marks.spans(100) == PromptSpans(
        Span(0, 40), (Span(40, 60),), Span(60, 70), Span(70, 100)
    )
    assert Landmarks().spans(100) == PromptSpans()


TEXT = st.text(max_size=8)
TOOLS = st.dictionaries(TEXT, st.binary(min_size=16, max_size=16), max_size=3)


@settings(max_examples=60)
@given(
    told=st.dictionaries(TEXT, TEXT, max_size=2),
    tools=TOOLS,
    tail=st.lists(st.integers(0, 2**31), max_size=31),
    message=st.builds(
        Message,
        st.just("assistant"),
        TEXT,
        st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple),
        reasoning=TEXT,
    ),
)
def test_notes_bring_everything_back(
    told: dict[str, str], tools: dict[str, bytes], tail: list[int], message: Message
) -> None:
    workspace, line = grown(4)
    marks = Landmarks(8, {"A.md": Span(8, 20)}, Span(20, 30))
    place = Place(line[1], 2, tuple(tail), marks, told, tools)
    answer = Place(line[3], 4, (1,), marks, told, tools)
    before, after = Transcript(), Transcript()
    notes = [
        before.learn(b"one", place, Given(message, answer)),
        before.learn(b"two", answer, None),
    ]
    stored = [msgpack.unpackb(msgpack.packb(note), use_list=True) for note in notes]
    after.recall([{"kind": "other"}, None, *stored], workspace)
    assert after.find((), [b"one"]) == before.find((), [b"one"])
    assert after.find((), [b"two"]) == before.find((), [b"two"])
    if message.content.strip() or message.tool_calls:
        asked = ((message,), [b"one", b"one+"])
        assert after.find(*asked) == before.find(*asked)
        assert after.find(*asked).messages == 1


def test_notes_of_blocks_that_are_gone_are_left_aside() -> None:
    _, line = grown(4)
    smaller, _ = grown(2)
    transcript, restored = Transcript(), Transcript()
    note = transcript.learn(b"one", Place(line[1], 2), Given(SAID, Place(line[3], 4)))
    other = transcript.learn(b"two", Place(line[3], 4), None)
    restored.recall([note, other], smaller)
    assert restored.find((), [b"one"]).place.head == line[1]
    assert restored.find((SAID,), [b"one", b"x"]).messages == 0
    assert restored.find((), [b"two"]).place == Place()


def test_a_tool_set_is_written_down_once() -> None:
    transcript = Transcript()
    tools = {"Read": b"0" * 16}
    first = transcript.learn(b"one", Place(tools=tools), None)
    second = transcript.learn(b"two", Place(tools=dict(tools)), None)
    assert first["tools"][1] == tools and second["tools"][1] is None
    assert first["tools"][0] == second["tools"][0]
