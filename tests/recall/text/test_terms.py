"""Terms: what a searcher of code, logs and prose would type."""

from __future__ import annotations

import pytest

from kvws.recall.text.terms import names, terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("load_user_config", {"load_user_config", "load", "user", "config"}),
        ("parseHTTPResponse", {"parsehttpresponse", "parse", "http", "response"}),
        ("XMLReader", {"xmlreader", "xml", "reader"}),
        ("__init__", {"__init__", "init"}),
        ("MAX_RETRIES", {"max_retries", "max", "retries", "retry"}),
        ("sha256", {"sha256"}),
    ],
)
def test_identifiers_are_found_whole_and_in_parts(text: str, expected: set[str]) -> None:
    assert set(terms(text)) == expected


def test_paths_are_found_whole_by_file_and_by_folder() -> None:
    found = set(terms("see src/app/loadConfig.py:12"))
    assert {"src/app/loadconfig.py", "loadconfig.py", "src", "app", "load", "config"} <= found
    assert "12" in found


def test_dotted_names_are_found_whole_and_in_parts() -> None:
    assert set(terms("os.path.join(x)")) == {"os.path.join", "os", "path", "join", "x"}


@pytest.mark.parametrize(
    "name", ["8080", "3.14.2", "10.0.0.17", "ABC-123", "2024-05-01", "9f86d081884c7d65", "0x1F"]
)
def test_numbers_versions_dates_ids_and_hashes_are_found_whole(name: str) -> None:
    assert name.lower() in terms(f"it was {name}, then")


def test_a_hash_is_not_taken_apart() -> None:
    assert terms("commit 9f86d081884c7d65") == ["commit", "9f86d081884c7d65"]


def test_a_plural_is_found_by_its_singular_and_stays_what_it_is() -> None:
    assert terms("services") == ["services", "service"]
    assert terms("entries") == ["entries", "entry"]
    for word in ("class", "status", "analysis", "bus", "sha256s"):
        assert terms(word) == [word]


def test_sentences_end_without_joining_words() -> None:
    assert terms("It failed. Then, again: no.") == ["it", "failed", "then", "again", "no"]


def test_escaped_line_breaks_are_no_letters() -> None:
    assert terms(r'"import os\nimport sys\tdone"') == ["import", "os", "import", "sys", "done"]


def test_what_the_chat_template_writes_says_nothing() -> None:
    assert terms("<|im_end|>\n<|im_start|>assistant\nthe assistant") == ["the", "assistant"]
    assert terms("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>") == ["hi"]


def test_scripts_without_blanks_are_found_by_pairs() -> None:
    assert terms("读取文件a.py的") == ["读取", "取文", "文件", "a.py", "a", "py", "的"]


def test_data_has_no_parts() -> None:
    data = "aB" * 50
    assert terms(data) == [data.lower()]


def test_names_are_where_they_are_said_to_be() -> None:
    text = "a.b, c_d"
    assert [text[begin:end] for begin, end in names(text)] == ["a.b", "c_d"]
