"""Facts to be planted in a history, and the questions that only they answer.

Three sets that share no template, subject or value: CALIBRATION to choose heads with, DEVELOPMENT
to choose rules by, TEST to report. Subjects come up more than once in a history, and templates
too: whoever finds the right block has read both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.fact_templates import (
    CALIBRATION_TEMPLATES,
    DEVELOPMENT_TEMPLATES,
    TEST_TEMPLATES,
    Template,
    ValueKind,
    Wording,
)

QuestionKind = Literal["verbatim", "paraphrased"]

_SETS = 3
_LINE_END_REACH_TOKENS = 256


@dataclass(frozen=True)
class Question:
    """What is asked about a fact.

    Attributes:
        kind: in the fact's words, or in others.
        text: the question.
        cue: how an answer begins; the value follows behind a blank.
        value: what is right.
    """

    kind: QuestionKind
    text: str
    cue: str
    value: str

    def as_order(self) -> Question:
        """The same, told instead of asked."""
        told = f"Tell me {self.text[0].lower()}{self.text[1:].removesuffix('?')}."
        return replace(self, text=told)


@dataclass(frozen=True)
class Fact:
    """A statement about a subject.

    Attributes:
        template: its form.
        subject: whom it is about.
        value: what it says.
        is_update: it replaces an earlier value.
    """

    template: Template
    subject: str
    value: str
    is_update: bool = False

    @property
    def text(self) -> str:
        """Whole lines; the last line end is not part of it."""
        form = self.template.update if self.is_update else self.template.text
        return _filled(form, self.subject, self.value)

    @property
    def questions(self) -> tuple[Question, ...]:
        """The verbatim one first."""
        verbatim = self._question("verbatim", self.template.verbatim)
        others = [self._question("paraphrased", wording) for wording in self.template.paraphrases]
        return (verbatim, *others)

    def changed_to(self, value: str) -> Fact:
        """The later statement that makes this one out of date."""
        return replace(self, value=value, is_update=True)

    def _question(self, kind: QuestionKind, wording: Wording) -> Question:
        text, cue = (_filled(part, self.subject, self.value) for part in wording)
        return Question(kind, text, cue, self.value)


def _filled(form: str, subject: str, value: str) -> str:
    return form.format(s=subject, S=subject.upper(), v=value)


@dataclass(frozen=True)
class FactSet:
    """Templates, subjects and values that no other set has.

    Attributes:
        name: of the set.
        number: numbers in values leave this remainder.
        templates: forms of facts.
        subjects: whom they are about: names of services or modules.
        words: that values are made of.
        people: first names; words serve as last names.
    """

    name: str
    number: int
    templates: tuple[Template, ...]
    subjects: tuple[str, ...]
    words: tuple[str, ...]
    people: tuple[str, ...]

    def draw(
        self,
        seed: int | str,
        count: int,
        *,
        distractors: int = 2,
        templates: Sequence[Template] | None = None,
    ) -> tuple[list[Fact], list[Fact]]:
        """Facts to ask about, and others that are easily taken for them.

        The facts take turns in the templates and share subjects by twos, so a subject's name
        alone does not find its fact; distractors say the same of other subjects. No two of all
        have the same value, or both subject and template.

        Args:
            count: facts to ask about.
            distractors: others for each of them.
            templates: instead of all of the set's.

        Returns:
            The facts, and the distractors.

        Raises:
            ValueError: too few subjects for so many facts.
        """
        chance = random.Random(f"{self.name} {seed}")  # noqa: S311 (not for secrets)
        forms = list(self.templates if templates is None else templates)
        chance.shuffle(forms)
        subjects = chance.sample(self.subjects, len(self.subjects))
        said: set[tuple[str, str]] = set()
        values: set[str] = set()

        def say(template: Template, own: Sequence[str]) -> Fact:
            free = [subject for subject in own if (template.name, subject) not in said]
            if not free:
                raise ValueError(f"too few subjects for {count} facts with {distractors} others")
            fact = Fact(template, free[0], self._new_value(template.kind, chance, values))
            said.add((template.name, fact.subject))
            return fact

        used = subjects[: max(2, (count + 1) // 2)]
        facts = [
            say(forms[i % len(forms)], used[i // 2 % len(used) :] + used) for i in range(count)
        ]
        others = [
            say(fact.template, chance.sample(subjects, len(subjects)))
            for fact in facts
            for _ in range(distractors)
        ]
        return facts, others

    def value(self, kind: ValueKind, seed: int | str) -> str:
        """Another value of a kind."""
        chance = random.Random(f"{self.name} value {seed}")  # noqa: S311 (not for secrets)
        return self._value(kind, chance)

    def _new_value(self, kind: ValueKind, chance: random.Random, taken: set[str]) -> str:
        while (value := self._value(kind, chance)) in taken:
            pass
        taken.add(value)
        return value

    def _value(self, kind: ValueKind, chance: random.Random) -> str:
        def number(low: int, high: int) -> int:
            """Of this set's remainder."""
            return chance.randrange(low // _SETS, high // _SETS) * _SETS + self.number

        def word() -> str:
            return chance.choice(self.words)

        match kind:
            case "code":
                return f"{word().upper()}-{number(1000, 9999)}"
            case "port":
                return str(number(2000, 60000))
            case "number":
                return str(number(11, 990))
            case "version":
                return f"{chance.randrange(1, 9)}.{number(10, 99)}.{chance.randrange(20)}"
            case "name":
                return f"{chance.choice(self.people)} {word().capitalize()}"
            case "hash":
                return f"{number(0x10000000, 0xFFFFFFFF):x}"
            case "path":
                return f"/{chance.choice(('srv', 'var', 'opt', 'data'))}/{word()}/{word()}"
            case "words":
                return f"{word()}-{word()}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CALIBRATION = FactSet(
    "calibration",
    0,
    CALIBRATION_TEMPLATES,
    _words(
        "billing search ledger courier telemetry scheduler gateway inventory notifier archive "
        "checkout profiles media reports quotas audit mailer sessions catalog pricing"
    ),
    _words(
        "amber falcon granite harbor juniper lantern meadow nickel orchid pepper quartz raven "
        "saffron timber umber velvet willow zephyr"
    ),
    _words(
        "Anselm Birgit Cosima Dario Elodie Fabian Greta Henrik Ilse Jonas Klara Leopold Mirela "
        "Nils Oda Pavel"
    ),
)

DEVELOPMENT = FactSet(
    "development",
    1,
    DEVELOPMENT_TEMPLATES,
    _words(
        "tracker renderer importer tagger watcher balancer resolver compactor uploader planner "
        "crawler exporter bouncer digester packer streamer"
    ),
    _words(
        "copper drift ember fjord glacier hazel indigo jasper kelp lava maple nectar onyx prairie "
        "quill ripple"
    ),
    _words(
        "Rosa Stefan Tilda Ulrich Vera Walter Xenia Yusuf Zora Albin Bettina Corin Doris Emil "
        "Frida Gustav"
    ),
)

TEST = FactSet(
    "test",
    2,
    TEST_TEMPLATES,
    _words(
        "payments identity geocoder transcoder firewall recommender translator warehouse "
        "thumbnails webhooks vouchers subscriptions journal beacon moderation printing"
    ),
    _words(
        "basil cobalt dune ebony fern garnet heron iris jade koala lilac marble nutmeg opal "
        "pebble sparrow"
    ),
    _words(
        "Agnes Bruno Celia Dimitri Edda Florian Gilda Hugo Ines Jakob Karin Lorenz Marta Norbert "
        "Olga Piet"
    ),
)


@dataclass(frozen=True)
class Planted:
    """A fact and where it stands: tokens [first_token, end_token)."""

    fact: Fact
    first_token: int
    end_token: int

    @property
    def blocks(self) -> range:
        """The blocks that hold a part of it."""
        return range(self.first_token // BLOCK_TOKENS, -(-self.end_token // BLOCK_TOKENS))


def plant(
    base_tokens: Sequence[int],
    facts: Sequence[tuple[float, Fact]],
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    avoid: Collection[int] = (),
) -> tuple[list[int], list[Planted]]:
    """Put facts into a history, each on lines of its own.

    A fact goes to the line end nearest to its depth; where there is none for 256 tokens either
    way, behind the token at its depth, with a line end of its own. Facts that meet at one place
    keep their order.

    Args:
        base_tokens: the history.
        facts: each with its depth: 0 is the beginning of the history, 1 its end.
        encode: token ids of a text.
        decode: text of token ids.
        avoid: tokens, such as those that open and close messages, that no fact follows or
            precedes within three tokens.

    Returns:
        The longer history, and the facts in the order they were given.

    Raises:
        ValueError: a depth is outside of 0 to 1.
    """
    if not all(0 <= depth <= 1 for depth, _ in facts):
        raise ValueError("a depth lies between 0 and 1")
    base = list(base_tokens)
    near_avoided = {
        place + offset
        for place, token in enumerate(base)
        if token in avoid
        for offset in range(-2, 4)
    }
    line_ends = [
        place
        for place in range(1, len(base) + 1)
        if place not in near_avoided and decode(base[place - 1 : place]).endswith("\n")
    ]
    order = sorted(range(len(facts)), key=lambda i: facts[i][0])
    tokens: list[int] = []
    planted: dict[int, Planted] = {}
    copied = 0
    for number in order:
        depth, fact = facts[number]
        wanted = round(depth * len(base))
        place = min(line_ends, key=lambda end: abs(end - wanted), default=-1)
        begins_line = place >= 0 and abs(place - wanted) <= _LINE_END_REACH_TOKENS
        place = place if begins_line else wanted
        tokens += base[copied:place]
        copied = place
        if not begins_line and not (tokens and decode(tokens[-1:]).endswith("\n")):
            tokens += encode("\n")
        first = len(tokens)
        tokens += encode(fact.text)
        planted[number] = Planted(fact, first, len(tokens))
        tokens += encode("\n")
    return tokens + base[copied:], [planted[number] for number in range(len(facts))]
