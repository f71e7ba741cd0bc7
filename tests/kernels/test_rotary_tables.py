"""Rotary tables on another device: one table stays one table."""

from __future__ import annotations

import torch

from kvws.kernels.rotary import RotaryTable, tables_on


def test_tables_that_were_one_still_are_on_another_device() -> None:
    shared = RotaryTable(torch.ones(4, 2), torch.zeros(4, 2), interleaved=True)
    other = RotaryTable(torch.ones(4, 3), torch.zeros(4, 3), interleaved=False)
    moved = tables_on([shared, other, shared], torch.device("meta"))
    assert moved[0] is moved[2] and moved[0] is not moved[1]
    assert [table.cos.device.type for table in moved] == ["meta"] * 3
    assert moved[0].interleaved and moved[1].sin.shape == (4, 3)


def test_a_table_that_is_there_already_is_itself() -> None:
    table = RotaryTable(torch.ones(4, 2), torch.zeros(4, 2), interleaved=False)
    assert tables_on([table], torch.device("cpu")) == [table]
    assert table.on(torch.device("cpu")) is table
