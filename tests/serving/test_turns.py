"""Calls of one session: what is computed again, and what never is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.chat.answer import Text
from kvws.chat.call import ModelCall, ToolChoice
from kvws.chat.message import Message
from kvws.errors import PromptTooLong
from kvws.session.caller import Caller
from tests.serving.rig import Rig
from tests.step.session import in_loop

SYSTEM = Message("system", "You are a careful engineer. " * 40)
TASK = Message("user", "Find the fault in the parser, and tell me its line.")


def tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def result(number: int, words: int = 60) -> Message:
    text = " ".join(f"line {number}.{word} of the file" for word in range(words))
    return Message("tool", text, name="Read", tool_call_id=f"c{number}")


@pytest.fixture
def rig(smollm2: Path) -> Rig:
    return Rig.start(smollm2)


@in_loop
async def test_the_next_call_computes_only_what_is_new(rig: Rig) -> None:
    history = [SYSTEM, TASK]
    first = await rig.say("I will look.", history)
    assert first.text == "I will look."
    assert first.finished.usage.reused_tokens == 0
    history += [first.message, result(1)]
    second = await rig.say("Still looking.", history)
    new_tokens = len(rig.words.encode(result(1).content))
    assert second.computed_tokens < new_tokens + 60
    await rig.engine.check_integrity()


@in_loop
async def test_a_turn_that_comes_back_respelled_keeps_its_own_tokens(rig: Rig) -> None:
    for spelled in (str.strip, str.rstrip):
        history = [SYSTEM, TASK]
        answer = "  The fault is near line 7.  \n\n"
        said = await rig.say(answer, history, session=spelled.__name__)
        history += [replace(said.message, content=spelled(said.text)), result(2)]
        again = await rig.say("Done.", history, session=spelled.__name__)
        new_tokens = len(rig.words.encode(result(2).content))
        assert again.computed_tokens < new_tokens + 60


@in_loop
async def test_a_turn_that_the_client_changed_is_told_as_the_client_tells_it(rig: Rig) -> None:
    history = [SYSTEM, TASK]
    await rig.say("The fault is in line 7.", history)
    history += [Message("assistant", "The fault is in line 9."), Message("user", "Sure?")]
    await rig.say("Yes.", history)
    asked = rig.engine.requests[-1]
    assert "line 9" in rig.words.decode(asked.token_ids)
    assert "line 7" not in rig.words.decode(asked.token_ids)


@in_loop
async def test_a_call_that_is_sent_again_after_its_answer_was_heard_is_answered_anew(
    rig: Rig,
) -> None:
    history = [SYSTEM, TASK]
    first = await rig.say("One.", history)
    second = await rig.say("Two.", history)
    assert (first.text, second.text) == ("One.", "Two.")
    assert second.computed_tokens < 40
    for said in (first, second):  # whichever the client went on with
        third = await rig.say("Good.", [*history, said.message, Message("user", "Go on.")])
        assert third.computed_tokens < 60


@in_loop
async def test_a_client_that_left_finds_what_was_said_and_hears_the_rest(rig: Rig) -> None:
    history = (SYSTEM, TASK)
    whole = "one two three four five six seven"
    rig.script.play(rig.words.encode(whole))
    turn = await rig.service.admit(
        ModelCall("any", history), Caller("s1", "main", "x-session-id"), salt=""
    )
    events = turn.events()
    heard = [await anext(events), await anext(events)]
    await events.aclose()
    assert all(isinstance(event, Text) for event in heard)
    assert not rig.script.is_over
    again = await rig.ask(history)
    assert again.text == whole and rig.script.is_over
    assert again.computed_tokens < 40  # the prompt's blocks were kept


@in_loop
async def test_an_answer_that_was_complete_but_unheard_is_given_again(rig: Rig) -> None:
    history = (SYSTEM, TASK)
    rig.script.play(rig.words.encode("one two three"))
    turn = await rig.service.admit(
        ModelCall("any", history), Caller("s1", "main", "x-session-id"), salt=""
    )
    events = turn.events()
    await anext(events)
    for _ in range(2000):  # the answer is made whether it is listened to or not
        await asyncio.sleep(0)
    assert rig.script.is_over
    await events.aclose()
    rig.script.play(rig.words.encode("something else"))
    asked = len(rig.engine.requests)
    again = await rig.ask(history)
    assert again.text == "one two three"
    assert len(rig.engine.requests) == asked


@in_loop
async def test_an_answer_longer_than_the_room_beside_its_view_goes_on(rig: Rig) -> None:
    rig.script.forever = rig.words.encode(" on")[0]
    heard = await rig.ask([SYSTEM, TASK], max_tokens=1500)
    assert heard.finished.reason == "length"
    assert heard.finished.usage.answer_tokens == 1500
    assert heard.text == " on" * 1500
    rig.script.forever = None
    history = [SYSTEM, TASK, heard.message, Message("user", "Enough.")]
    after = await rig.say("Yes.", history)
    assert after.computed_tokens < 100  # the long answer is in blocks


@in_loop
async def test_a_side_call_leaves_no_trace_in_its_session(rig: Rig) -> None:
    history = [SYSTEM, TASK]
    first = await rig.say("I will look.", history)
    threads = set((await rig.service.inspect_session("s1", salt=""))["threads"])
    title = await rig.say(
        "A title", [Message("user", "Name this session.")], side_call=True
    )
    assert title.text == "A title"
    state = await rig.service.inspect_session("s1", salt="")
    assert state is not None and set(state["threads"]) == threads == {"main"}
    history += [first.message, result(1)]
    second = await rig.say("Still looking.", history)
    assert second.computed_tokens < len(rig.words.encode(result(1).content)) + 60


@in_loop
async def test_interleaved_threads_share_their_prefix_and_nothing_else(rig: Rig) -> None:
    names = ("main", "agent-a", "agent-b")
    histories = {
        name: [SYSTEM, Message("user", f"You are {name}. " + TASK.content)] for name in names
    }
    for number in range(4):
        answers = {}
        for name in names:
            answers[name] = await rig.say(
                f"{name} says {number}.", histories[name], thread=name
            )
        for name in names:
            assert answers[name].text == f"{name} says {number}."
            histories[name] += [answers[name].message, result(number)]
            if number:
                new = len(rig.words.encode(result(number).content))
                assert answers[name].computed_tokens < new + 60
    shared = len(rig.words.encode(SYSTEM.content)) // 32
    workspace = rig.workspace("s1")
    lines = [workspace.thread(name).line for name in names]
    assert len({line[:shared] for line in lines}) == 1
    for name in names:  # nobody's view shows another's work
        others = [other for other in names if other != name]
        for block in workspace.thread(name).view:
            text = rig.words.decode(workspace.block_tokens(block))
            assert not any(other in text for other in others)


@in_loop
async def test_two_keys_share_no_block(rig: Rig) -> None:
    await rig.say("One.", [SYSTEM, TASK], salt="a")
    other = await rig.say("Two.", [SYSTEM, TASK], salt="b")
    assert other.finished.usage.reused_tokens == 0
    assert len(rig.service.open_sessions) == 2
    assert await rig.service.inspect_session("s1", salt="c") is None


@in_loop
async def test_only_a_full_window_is_too_long(smollm2: Path) -> None:
    rig = Rig.start(smollm2, window_tokens=3000)
    history = [SYSTEM, TASK]
    refused = None
    for number in range(40):
        try:
            said = await rig.say("More.", history)
        except PromptTooLong as error:
            refused = error
            break
        history += [said.message, result(number)]
    assert refused is not None
    assert refused.window_tokens == 3000 <= refused.prompt_tokens
    assert "prompt is too long: " in str(refused)
    # The session is as usable as before.
    assert (await rig.say("Fine.", history[:-2])).text == "Fine."


@in_loop
async def test_a_changed_date_is_told_at_the_end_and_costs_nothing_before_it(rig: Rig) -> None:
    dated = Message("user", "Today's date is 2026-11-29.\n" + "Background. " * 100)
    history = [SYSTEM, dated, TASK]
    said = await rig.say("I will look.", history)
    later = replace(dated, content=dated.content.replace("11-29", "11-30"))
    history = [SYSTEM, later, TASK, said.message, result(1)]
    again = await rig.say("Looking.", history)
    assert again.computed_tokens < len(rig.words.encode(result(1).content)) + 100
    prompt = rig.words.decode(rig.engine.requests[-1].token_ids)
    assert "2026-11-30" in prompt
    history += [again.message, result(2)]
    third = await rig.say("Looking.", history)  # told once
    assert third.computed_tokens < len(rig.words.encode(result(2).content)) + 60


@in_loop
async def test_a_tool_that_is_offered_later_is_told_at_the_end(rig: Rig) -> None:
    history = [SYSTEM, TASK]
    said = await rig.say("I will look.", history, tools=(tool("Read"), tool("Write")))
    history += [said.message, result(1)]
    tools = (tool("Fetch"), tool("Read"), tool("Write"))
    again = await rig.say("Looking.", history, tools=tools)
    assert again.computed_tokens < len(rig.words.encode(result(1).content)) + 160
    prompt = rig.words.decode(rig.engine.requests[-1].token_ids)
    assert "Fetch" in prompt
    history += [again.message, result(2)]
    third = await rig.say("Looking.", history, tools=tools)  # told once
    assert third.computed_tokens < len(rig.words.encode(result(2).content)) + 60


@in_loop
async def test_what_a_compaction_summarised_away_is_recalled(rig: Rig) -> None:
    """The simulated model's tokens have topics by their ids: the detail's are its own."""
    history = [SYSTEM, TASK]
    for number in range(12):
        said = await rig.say("Next.", history)
        history += [said.message, result(number)]
    before = rig.workspace("s1").registered_blocks
    summary = Message("user", "This session is being continued. Summary: we read files.")
    after = await rig.say("Going on.", [SYSTEM, summary])
    workspace = rig.workspace("s1")
    assert workspace.registered_blocks >= before
    recallable = workspace.recallable("main", workspace.thread("main").line)
    assert sum(recallable) == workspace.registered_blocks
    assert after.finished.usage.reused_tokens >= 32 * (
        len(rig.words.encode(SYSTEM.content)) // 32
    )


@in_loop
async def test_counting_tokens_is_what_a_call_is_charged(rig: Rig) -> None:
    call = ModelCall("any", (SYSTEM, TASK), (tool("Read"),), ToolChoice("auto"))
    counted = await rig.service.count_tokens(call)
    heard = await rig.say("Fine.", [SYSTEM, TASK], tools=(tool("Read"),))
    assert heard.finished.usage.prompt_tokens == counted


@in_loop
async def test_a_loop_of_two_hundred_steps_at_ten_times_the_budget(rig: Rig) -> None:
    history = [SYSTEM, TASK]
    for number in range(200):
        said = await rig.say(f"Step {number}.", history)
        new = len(rig.words.encode(result(number, 12).content))
        assert said.text == f"Step {number}."
        if number:
            assert said.computed_tokens < new + 60
            view = rig.workspace("s1").thread("main").view
            shown = rig.words.decode(rig.engine.requests[-1].token_ids)
            assert f"line {number - 1}.11" in shown, "the newest step is in view"
            assert len(view) * 32 <= 1024 + 512
        history += [said.message, result(number, 12)]
    tokens = 32 * len(rig.workspace("s1").thread("main").line)
    assert tokens >= 10 * 1024
