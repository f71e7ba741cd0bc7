"""The choice of a backend: said in the log, and never another one than was asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kvws.errors import ConfigError
from kvws.store import backend
from kvws.store.backend import open_storage
from kvws.store.posix import PosixStorage


class KvikioThatLoads(PosixStorage):
    @property
    def description(self) -> str:
        return "kvikio, compatibility mode"


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvws.store")


def the_machine(
    monkeypatch: pytest.MonkeyPatch, *, cuda: bool, kvikio_refusal: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(backend, "unusable_reason", lambda directory: kvikio_refusal)
    monkeypatch.setattr(backend, "KvikioStorage", KvikioThatLoads)


@pytest.mark.parametrize(
    ("asked", "cuda", "refusal", "chosen", "level", "reason"),
    [
        ("auto", False, None, "posix", "INFO", "there is no CUDA"),
        ("auto", True, None, "kvikio", "INFO", "its check passed"),
        ("auto", True, "no libcufile", "posix", "WARNING", "no libcufile"),
        ("posix", True, None, "posix", "INFO", "as configured"),
        ("kvikio", True, None, "kvikio", "INFO", "as configured"),
        ("kvikio", False, None, "kvikio", "INFO", "as configured"),
    ],
)
def test_the_choice_and_its_reason_are_one_line_of_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: backend.Backend,
    cuda: bool,
    refusal: str | None,
    chosen: str,
    level: str,
    reason: str,
) -> None:
    the_machine(monkeypatch, cuda=cuda, kvikio_refusal=refusal)
    storage = open_storage(tmp_path, asked)
    assert storage.description.startswith(chosen)
    [line] = caplog.records
    assert line.name == "kvws.store" and line.levelname == level
    assert storage.description in line.getMessage() and reason in line.getMessage()


@pytest.mark.parametrize("cuda", [True, False])
def test_kvikio_asked_for_by_name_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    the_machine(monkeypatch, cuda=cuda, kvikio_refusal="RuntimeError: no libcuda.so.1")
    with pytest.raises(ConfigError, match=r"no libcuda\.so\.1") as refused:
        open_storage(tmp_path, "kvikio")
    assert "install kvikio-cu13" in refused.value.hint
    assert "--disk-backend posix" in refused.value.hint


def test_without_cuda_kvikio_is_not_even_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_machine(monkeypatch, cuda=False, kvikio_refusal=None)

    def loaded(directory: Path) -> None:
        raise AssertionError("kvikio was asked")

    monkeypatch.setattr(backend, "unusable_reason", loaded)
    assert open_storage(tmp_path, "auto").description.startswith("posix")
    assert open_storage(tmp_path, "posix").description.startswith("posix")
