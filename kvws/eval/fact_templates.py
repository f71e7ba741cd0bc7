"""Forms that a planted fact may take, in three disjoint sets.

A template says one fact in the way of one kind of text: a log line, a diff, a table row. It is
asked for verbatim, in the fact's own words, and in paraphrases that share no word with it but the
subject's name: only the first can be found by words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["code", "port", "number", "version", "name", "hash", "path", "words"]

Wording = tuple[str, str]
"""A question, and the cue that its answer begins with, in front of the value."""


@dataclass(frozen=True)
class Template:
    """One form of a fact. `{s}` stands for the subject, `{S}` for it in capitals.

    Attributes:
        name: of the form.
        kind: what its value looks like.
        text: the fact, whole lines without the last line end; `{v}` stands for the value.
        verbatim: asks in the fact's words.
        paraphrases: ask in other words; neither question nor cue shares one with the fact.
        update: how a later value `{v}` reads, likewise whole lines.
    """

    name: str
    kind: ValueKind
    text: str
    verbatim: Wording
    paraphrases: tuple[Wording, ...]
    update: str


CALIBRATION_TEMPLATES = (
    Template(
        "prose note",
        "code",
        "Note for later: the {s} access key is {v}.",
        ("What is the {s} access key?", "The {s} access key is"),
        (
            ("Which secret opens the door to {s}?", "It opens with"),
            ("How do I authenticate against {s}?", "Authenticate with"),
        ),
        "Note for later: the {s} access key was changed to {v}.",
    ),
    Template(
        "log line",
        "port",
        "2024-03-11 14:02:51 INFO {s}.server: listening on port {v}",
        ("On which port is {s}.server listening?", "{s}.server is listening on port"),
        (
            ("Where can a client connect to {s}?", "Connect to"),
            ("At what socket does {s} accept traffic?", "It accepts traffic at"),
        ),
        "2024-03-11 16:40:07 INFO {s}.server: listening on port {v} from now on",
    ),
    Template(
        "code comment",
        "number",
        "    # TODO({s}): retry limit raised to {v} by the owner, see review",
        ("What was the retry limit of {s} raised to?", "The retry limit was raised to"),
        (
            ("How many attempts may {s} make before giving up?", "It may make"),
            ("What is the maximum count of tries for {s}?", "At most"),
        ),
        "    # TODO({s}): retry limit changed to {v} by the owner, see review",
    ),
    Template(
        "config section",
        "path",
        '[{s}]\ncache_dir = "{v}"',
        ("What is cache_dir in the section [{s}]?", "cache_dir is"),
        (
            ("Where does {s} keep its temporary copies?", "They are kept in"),
            ("Which folder holds what {s} has fetched before?", "The folder"),
        ),
        '# changed\n[{s}]\ncache_dir = "{v}"',
    ),
    Template(
        "JSON field",
        "name",
        '{{"service": "{s}", "owner": "{v}", "tier": 2}}',
        ("Who is the owner of the service {s}?", "The owner of the service is"),
        (
            ("Which person looks after {s}?", "It is looked after by"),
            ("Whom should I call when {s} breaks?", "Call"),
        ),
        '{{"service": "{s}", "owner": "{v}", "tier": 2, "changed": true}}',
    ),
    Template(
        "shell output",
        "version",
        "$ {s} --version\n{s}, release {v} (stable)",
        ("Which release of {s} does --version print?", "{s}, release"),
        (
            ("How new is our installed {s}?", "Installed is"),
            ("What build of {s} runs here?", "The build"),
        ),
        "$ {s} --version   # after the upgrade\n{s}, release {v} (stable)",
    ),
    Template(
        "table row",
        "words",
        "| {s} | shard key | {v} | active |",
        ("What is the shard key of {s}?", "The shard key is"),
        (
            ("By what is the data of {s} partitioned?", "It is partitioned by"),
            ("How are rows in {s} spread over machines?", "They are spread by"),
        ),
        "| {s} | shard key | {v} | changed |",
    ),
    Template(
        "commit message",
        "hash",
        "    * Pin the {s} parser to revision {v}, later ones are broken",
        ("To which revision is the {s} parser pinned?", "It is pinned to revision"),
        (
            ("Which commit do we build {s} from?", "We build from commit"),
            ("What exact checkout of {s} has to stay fixed?", "The checkout"),
        ),
        "    * Move the {s} parser from its old revision to {v}",
    ),
    Template(
        "docstring",
        "words",
        '    """Open the {s} stream; the default codec is {v}."""',
        ("What is the default codec of the {s} stream?", "The default codec is"),
        (
            ("How is {s} encoded unless one says otherwise?", "It is encoded as"),
            ("Which format do {s} messages have normally?", "Normally"),
        ),
        '    """Open the {s} stream; the default codec changed to {v}."""',
    ),
    Template(
        "diff",
        "number",
        "-    {s}_timeout = None\n+    {s}_timeout = {v}",
        ("What is {s}_timeout now?", "{s}_timeout ="),
        (
            ("How long may {s} take before it is aborted?", "It may take"),
            ("After how many seconds do we stop waiting for {s}?", "We stop after"),
        ),
        "-    {s}_timeout = OLD\n+    {s}_timeout = {v}",
    ),
    Template(
        "decision",
        "words",
        "We agreed that the {s} rollout happens in the region {v} first.",
        ("In which region does the {s} rollout happen first?", "It happens in the region"),
        (
            ("Where on the map will {s} go live?", "It will go live at"),
            ("Which location gets {s} deployed to it?", "The location"),
        ),
        "We changed our mind: the {s} rollout happens in the region {v} first.",
    ),
    Template(
        "environment",
        "code",
        "export {S}_TOKEN={v}",
        ("What is {S}_TOKEN exported as?", "{S}_TOKEN is"),
        (
            ("What credential does {s} expect?", "It expects"),
            ("Which password unlocks {s}?", "The password"),
        ),
        "export {S}_TOKEN={v}   # changed",
    ),
)

DEVELOPMENT_TEMPLATES = (
    Template(
        "manifest",
        "number",
        "{s}:\n  replicas: {v}\n  strategy: rolling",
        ("How many replicas does {s} have?", "{s} has replicas:"),
        (
            ("How many copies of {s} run side by side?", "Side by side run"),
            ("To what size is {s} scaled out?", "It is scaled out to"),
        ),
        "{s}:\n  replicas: {v}   # changed\n  strategy: rolling",
    ),
    Template(
        "warning",
        "hash",
        "WARN [{s}] checksum mismatch, expected {v}, retrying once",
        ("Which checksum was expected by {s}?", "The checksum expected was"),
        (
            ("What digest should the download for {s} have had?", "The digest should be"),
            ("What fingerprint did {s} want to see?", "It wanted to see"),
        ),
        "WARN [{s}] checksum changed, expected {v} now",
    ),
    Template(
        "handbook",
        "name",
        "The maintainer of the {s} module is {v}, who reads every change.",
        ("Who is the maintainer of the {s} module?", "The maintainer is"),
        (
            ("Whose approval do patches for {s} need?", "They need approval by"),
            ("Which colleague is in charge of {s}?", "In charge is"),
        ),
        "The maintainer of the {s} module is now {v}, who reads every change.",
    ),
    Template(
        "statement",
        "words",
        "INSERT INTO flags (name, bucket) VALUES ('{s}', '{v}');",
        ("Which bucket does the flag {s} have in flags?", "The bucket is"),
        (
            ("For what group of users is {s} switched on?", "It is switched on for"),
            ("Where was the toggle {s} assigned?", "It was assigned to"),
        ),
        "UPDATE flags SET bucket = '{v}' WHERE name = '{s}';",
    ),
    Template(
        "listing",
        "path",
        "lrwxrwxrwx 1 root root 24 Mar  3 {s}.sock -> {v}",
        ("What does {s}.sock -> show?", "{s}.sock ->"),
        (
            ("Where does the symbolic link of {s} lead?", "It leads to"),
            ("Which location is behind the {s} shortcut?", "Behind it is"),
        ),
        "lrwxrwxrwx 1 root root 24 Mar  9 {s}.sock -> {v}",
    ),
    Template(
        "changelog",
        "version",
        "## {s} {v}\n- First version with streaming",
        ("What was the first version of {s} with streaming?", "The first version was"),
        (
            ("Since when can {s} deliver output piece by piece?", "Since"),
            ("From what release on does {s} send partial results?", "From release"),
        ),
        "## {s} {v}\n- Streaming is back; it was broken before this version",
    ),
)

TEST_TEMPLATES = (
    Template(
        "properties",
        "words",
        "{s}.queue={v}   ; set by ops",
        ("What is {s}.queue set to by ops?", "{s}.queue ="),
        (
            ("Where do jobs for {s} line up?", "They line up in"),
            ("In which waiting room are tasks of {s} put?", "They are put in"),
        ),
        "{s}.queue={v}   ; changed by ops",
    ),
    Template(
        "traceback",
        "number",
        "RuntimeError: {s} quota exhausted after {v} requests",
        ("After how many requests was the {s} quota exhausted?", "It was exhausted after"),
        (
            ("What is the ceiling on calls to {s}?", "The ceiling is"),
            ("How much use does {s} allow at most?", "At most"),
        ),
        "RuntimeError: {s} quota exhausted after {v} requests (limit changed)",
    ),
    Template(
        "minutes",
        "name",
        "Minutes: {v} takes over the {s} migration on Monday.",
        ("Who takes over the {s} migration on Monday?", "It is taken over on Monday by"),
        (
            ("Which colleague is going to move {s}?", "It will be moved by"),
            ("To whom was porting {s} handed?", "Porting was handed to"),
        ),
        "Minutes: changed, {v} takes over the {s} migration on Monday.",
    ),
    Template(
        "list item",
        "version",
        "- `{s}` ships in the image tag `{v}`",
        ("In which image tag does {s} ship?", "It ships in the image tag"),
        (
            ("Which container build has {s} inside?", "It is inside build"),
            ("What do I pull to get {s}?", "Pull"),
        ),
        "- `{s}` now ships in the image tag `{v}`",
    ),
    Template(
        "response",
        "path",
        "POST /api/{s} 201 Created, Location: {v}",
        ("Which Location did POST /api/{s} give?", "Location:"),
        (
            ("Where does the new {s} record live?", "It lives at"),
            ("Under what address can the fresh entry of {s} be found?", "It is found under"),
        ),
        "POST /api/{s} 201 Created, Location changed: {v}",
    ),
    Template(
        "assertion",
        "hash",
        '    assert shuffled({s}).digest == "{v}"  # the same in every run',
        ("What must shuffled({s}).digest be?", "shuffled({s}).digest =="),
        (
            ("What does mixing {s} up always give?", "It always gives"),
            ("Which checksum has {s} in random order?", "The checksum"),
        ),
        '    assert shuffled({s}).digest == "{v}"  # changed, the same in every run',
    ),
)
