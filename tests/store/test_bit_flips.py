"""Damaged files are noticed, whatever the damage."""

from __future__ import annotations

import pytest

from kvws.store import record, transfer
from tests.store.campaigns.bit_flips import BitFlips


class AnyDigest(bytes):
    """Equal to every other digest."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def test_every_kind_of_bit_flip_is_harmless_or_detected() -> None:
    campaign = BitFlips(seed=1)
    campaign.flip_every_bit(stride=5)
    campaign.flip_random_bits(10_000)
    print(campaign.report)
    assert not campaign.report.violations, str(campaign.report)
    assert campaign.report.counts["detected"] > 9_500


def test_files_cut_at_any_length() -> None:
    campaign = BitFlips(seed=1)
    campaign.truncate_everywhere(stride=97)
    print(campaign.report)
    assert not campaign.report.violations, str(campaign.report)


def test_control_payloads_and_rows_without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "xxh3_128_digest", lambda _: AnyDigest(16))
    campaign = BitFlips(seed=1)
    campaign.flip_random_bits(2000)
    found = {text.split()[0].split(".")[-1] for text in campaign.report.violations}
    assert found == {"kv", "mk"}, str(campaign.report)


def test_control_records_without_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_digest", lambda *_: AnyDigest(16))
    campaign = BitFlips(seed=1)
    campaign.flip_every_bit(stride=5)
    assert any(text.startswith("index.log") for text in campaign.report.violations)
