"""Asks a model about planted facts, and notes how each of its heads scores the blocks.

A head's score of a block, for one question, is what the signal `content` sums over its heads:
token logits of un-rotated queries and keys, the largest in the block, standardised over the
blocks, the largest over the question's own tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.errors import ModelError
from kvws.eval.facts import FactSet, Planted, plant
from kvws.eval.head_choice import Probe
from kvws.eval.reader import KeyValues, Reading
from kvws.eval.synthetic import synthetic_messages

_DISTRACTORS = 1
_SINK_BLOCKS = 1
_RECENT_BLOCKS = 4  # in every view, as the sink is: nothing has to find them
_BASE_TOKENS = 2048
_LEAST_BASE_TOKENS = 768
_ROOM_TOKENS = 1024  # facts, distractors and a question
_ANSWER = "Ready when you are."


class Reads(Protocol):
    """A model that reads tokens: `Reader`, or a stand-in."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
    ) -> Reading: ...


def probe_history(
    reader: Reads,
    renderer: ChatRenderer,
    facts: FactSet,
    seed: int,
    history: int,
) -> Iterator[Probe]:
    """Plant one fact of each form in a synthetic history, and ask for them in all wordings.

    The first answer takes the time of reading the history.

    Args:
        facts: where facts are drawn from; distractors as well.
        history: its number; with the seed it decides everything.

    Raises:
        ModelError: the model's context is too short.
    """
    tokens, spans = _planted_history(reader, renderer, facts, f"{seed}.{history}")
    blocks = len(tokens) // BLOCK_TOKENS
    candidates = range(_SINK_BLOCKS, blocks - _RECENT_BLOCKS)
    read = reader.read(tokens[: blocks * BLOCK_TOKENS]).key_values
    keys = read.keys[:, :, candidates.start * BLOCK_TOKENS : candidates.stop * BLOCK_TOKENS]
    for span in spans:
        right = tuple(b - candidates.start for b in span.blocks if b in candidates)
        for question in span.fact.questions:
            asked, own = question_tokens(renderer, question.text)
            queries = reader.read(asked, read, with_queries=True).queries
            assert queries is not None and right  # asked for; depths keep clear of both ends
            scores = head_scores(queries[:, own], keys)
            yield Probe(history, span.fact.template.name, question.kind, right, scores)


def _planted_history(
    reader: Reads,
    renderer: ChatRenderer,
    facts: FactSet,
    seed: str,
) -> tuple[list[int], list[Planted]]:
    """A history's tokens, and where the facts to ask about stand."""
    base_tokens = min(_BASE_TOKENS, reader.window_tokens - _ROOM_TOKENS)
    if base_tokens < _LEAST_BASE_TOKENS:
        raise ModelError(
            f"the model's context of {reader.window_tokens} tokens is too short to calibrate it",
            hint=f"use a model with {_LEAST_BASE_TOKENS + _ROOM_TOKENS} positions or more",
        )
    asked, others = facts.draw(seed, len(facts.templates), distractors=_DISTRACTORS)
    everything = [*asked, *others]
    depths = [0.05 + 0.8 * place / len(everything) for place in range(len(everything))]
    random.Random(f"{facts.name} depths {seed}").shuffle(depths)  # noqa: S311 (not for secrets)
    names = sorted({fact.subject for fact in asked})
    base = _base(renderer, f"{facts.name} {seed}", names, base_tokens)
    history, planted = plant(
        base,
        list(zip(depths, everything, strict=True)),
        encode=renderer.pieces,
        decode=renderer.decode,
        avoid=mark_tokens(renderer),
    )
    return history, planted[: len(asked)]


def _base(renderer: ChatRenderer, seed: str, names: Sequence[str], base_tokens: int) -> list[int]:
    turns = 4
    while True:
        messages = synthetic_messages(seed, turns, names)
        tokens = renderer.tokens(messages, add_generation_prompt=False)
        if len(tokens) >= base_tokens:
            return tokens[:base_tokens]
        turns *= 2


def question_tokens(renderer: ChatRenderer, question: str) -> tuple[list[int], list[int]]:
    """What follows an assistant's answer when the user asks something.

    Returns:
        The tokens from the end of the answer to the beginning of the next one, and the places
        among them of the question's own: what the template writes around it asks nothing.
    """
    spoken = [
        Message("user", "Hello."),
        Message("assistant", _ANSWER),
        Message("user", question),
    ]
    text = renderer.text(spoken)
    text = text[text.rindex(_ANSWER) + len(_ANSWER) :]
    tokens = renderer.pieces(text)
    ends = [len(renderer.decode(tokens[: place + 1])) for place in range(len(tokens))]
    begin = text.index(question)
    end = begin + len(question)
    starts = [0, *ends]
    own = [i for i in range(len(tokens)) if ends[i] > begin and starts[i] < end]
    return tokens, own


def mark_tokens(renderer: ChatRenderer) -> frozenset[int]:
    """Tokens that the chat template opens and closes messages with, such as <|im_end|>."""
    spoken = [Message("user", "x"), Message("assistant", "x"), Message("user", "x")]
    return frozenset(
        token for token in renderer.tokens(spoken) if _is_mark(renderer.decode([token]))
    )


def _is_mark(text: str) -> bool:
    """Whether it reads like <|name|>, [NAME] or <name>, and not like a word or a sign."""
    shown = text.strip()
    letters = any(character.isalpha() for character in shown)
    return letters and not shown[0].isalnum() and not shown[-1].isalnum()


def head_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Each head's score of each block.

    Args:
        queries: [layers, tokens, query_heads, head_dim] float32, not rotated.
        keys: [layers, kv_heads, blocks * 32, head_dim] float32, not rotated.

    Returns:
        [layers, query_heads, blocks] float32.
    """
    layers, tokens, query_heads, head_dim = queries.shape
    kv_heads, blocks = keys.shape[1], keys.shape[2] // BLOCK_TOKENS
    scores = torch.empty(layers, query_heads, blocks)
    for layer in range(layers):
        # [kv_heads, group * tokens, head_dim]
        asked = queries[layer].transpose(0, 1).reshape(kv_heads, -1, head_dim)
        of_tokens = torch.matmul(asked, keys[layer].transpose(1, 2))
        by_block = of_tokens.view(*of_tokens.shape[:2], blocks, BLOCK_TOKENS)
        of_blocks = torch.amax(by_block, dim=3)
        deviation, mean = torch.std_mean(of_blocks, dim=2, correction=0, keepdim=True)
        standard = (of_blocks - mean) / deviation.clamp(min=1e-9)
        scores[layer] = torch.amax(standard.view(query_heads, tokens, blocks), dim=1)
    return scores
