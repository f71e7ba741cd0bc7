"""KvikIO as the way of payloads: the real library where it is installed, and its contract."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvws.store.block import NewBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.kvikio import POOL_THREADS, KvikioFile, KvikioStorage, unusable_reason
from kvws.store.posix import PosixStorage, open_nameless
from kvws.store.storage import SECTOR_BYTES

DRIVER_SOURCE = Path(__file__).with_name("stub_cuda_driver.c")


def aligned(sectors: int, content: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, sectors * SECTOR_BYTES))
    memory[: len(content)] = content
    return memory


def has_cuda_driver() -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> None:
    """KvikIO with a CUDA driver: the machine's, or one without a device."""
    pytest.importorskip("kvikio", exc_type=ImportError)
    if has_cuda_driver():
        return
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is neither a CUDA driver nor gcc to build the stub of one")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, DRIVER_SOURCE],
        check=True,
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # found from now on by its name


@pytest.fixture
def storage(driver: None, tmp_path: Path) -> KvikioStorage:
    return KvikioStorage(tmp_path)


def test_without_the_library_or_a_driver_the_reason_is_told(tmp_path: Path) -> None:
    if has_cuda_driver():
        pytest.skip("there is a CUDA driver")
    question = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path; from kvws.store.kvikio import unusable_reason\n"
        f"print(unusable_reason(Path({str(tmp_path)!r})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "No module named 'kvikio'" in answer or "libcuda.so.1" in answer
    assert list(tmp_path.iterdir()) == []


def test_it_is_usable_with_a_driver(storage: KvikioStorage, tmp_path: Path) -> None:
    assert unusable_reason(tmp_path / "not yet") is None
    assert list(tmp_path.iterdir()) == []
    assert storage.description in ("kvikio, GPUDirect", "kvikio, compatibility mode")


def test_it_brings_threads_and_direct_reads(storage: KvikioStorage) -> None:
    import kvikio.defaults

    assert kvikio.defaults.get("num_threads") >= POOL_THREADS
    assert kvikio.defaults.get("auto_direct_io_read")


def test_what_it_writes_posix_reads_and_the_other_way(
    storage: KvikioStorage, tmp_path: Path
) -> None:
    rng = random.Random(3)
    path = tmp_path / "segment"
    content = rng.randbytes(300 * SECTOR_BYTES)
    file = storage.open_segment(path, create_bytes=len(content))
    pieces = [aligned(200, content[: 200 * SECTOR_BYTES]), aligned(100, content[-409600:])]
    file.write(pieces, 0)
    file.sync()
    plain = PosixStorage(tmp_path).open_segment(path)
    back = aligned(300)
    plain.read([back], 0)
    assert bytes(back) == content
    changed = rng.randbytes(SECTOR_BYTES)
    plain.write([aligned(1, changed)], 7 * SECTOR_BYTES)
    parts = [aligned(7), aligned(1), aligned(2)]
    file.read(parts, 0)
    assert bytes(parts[0]) == content[: 7 * SECTOR_BYTES]
    assert bytes(parts[1]) == changed
    assert bytes(parts[2]) == content[8 * SECTOR_BYTES : 10 * SECTOR_BYTES]
    file.close()
    plain.close()


def test_reading_past_the_end_and_missing_files_are_told_apart(
    storage: KvikioStorage, tmp_path: Path
) -> None:
    file = storage.open_segment(tmp_path / "segment", create_bytes=SECTOR_BYTES)
    with pytest.raises(EOFError):
        file.read([aligned(1), aligned(1)], 0)
    file.close()
    with pytest.raises(FileNotFoundError):
        storage.open_segment(tmp_path / "other")
    with pytest.raises(FileExistsError):
        storage.open_segment(tmp_path / "segment", create_bytes=SECTOR_BYTES)


def test_a_block_store_works_on_it(storage: KvikioStorage, tmp_path: Path) -> None:
    class Unlimited:
        def take(self, size_bytes: int) -> None: ...

        def give_back(self, size_bytes: int) -> None: ...

    rng = random.Random(4)
    shape = StoreShape(4 * SECTOR_BYTES, 64, "exact", "any/v1")
    payloads = [rng.randbytes(shape.payload_bytes) for _ in range(9)]
    store = BlockStore.open(storage, tmp_path / "rank-0", shape, Unlimited(), segment_blocks=4)
    store.put(
        [
            NewBlock(n, bytes([n]) * 32, 0, aligned(4, payload), memoryview(bytes(64)))
            for n, payload in enumerate(payloads)
        ]
    )
    store.close()
    again = BlockStore.open(storage, tmp_path / "rank-0", shape, Unlimited(), segment_blocks=4)
    for run in again.plan_reads(range(9), 4):
        buffers = [aligned(4) for _ in run]
        again.read(run, buffers)
        assert [bytes(buffer) for buffer in buffers] == [payloads[n] for n in run]
    again.close()


class Future:
    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome
        self.waited = False

    def get(self) -> int:
        self.waited = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class ScriptedCuFile:
    """Answers requests as told: bytes moved, an error of the future, or of the submission."""

    def __init__(self, outcomes: list[int | Exception], refused_at: int | None = None) -> None:
        self._outcomes = outcomes
        self._refused_at = refused_at
        self.futures: list[Future] = []
        self.offsets: list[int] = []

    def pwrite(self, buffer: np.ndarray, file_offset: int) -> Future:
        if self._refused_at == len(self.futures):
            raise RuntimeError("refused")
        self.offsets.append(file_offset)
        self.futures.append(Future(self._outcomes[len(self.futures)]))
        return self.futures[-1]

    pread = pwrite

    def close(self) -> None: ...


FULL = SECTOR_BYTES


@pytest.mark.parametrize(
    ("cufile", "told"),
    [
        (ScriptedCuFile([FULL, RuntimeError("first"), RuntimeError("second")]), "first"),
        (ScriptedCuFile([FULL, 512, FULL]), "512 of 4096 bytes"),
        (ScriptedCuFile([FULL, FULL, FULL], refused_at=2), "refused"),
    ],
)
@pytest.mark.parametrize("name", ["read", "write"])
def test_an_error_is_eio_and_every_request_is_waited_for(
    tmp_path: Path, cufile: ScriptedCuFile, told: str, name: str
) -> None:
    cufile.futures, cufile.offsets = [], []
    file = scripted_file(tmp_path, lambda *_: cufile)
    file.truncate(8 * SECTOR_BYTES)
    with pytest.raises(OSError, match=told) as raised:
        getattr(file, name)([aligned(1), aligned(1), aligned(1)], SECTOR_BYTES)
    assert raised.value.errno == errno.EIO
    assert len(cufile.futures) >= 2 and all(future.waited for future in cufile.futures)
    assert cufile.offsets == [4096, 8192, 12288][: len(cufile.offsets)]
    file.close()


def test_a_file_that_it_refuses_is_an_os_error_and_closed(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such device")

    descriptor = open_nameless(tmp_path)
    with pytest.raises(OSError, match="no such device"):
        KvikioFile(descriptor, SimpleNamespace(CuFile=refuse))
    assert not Path(f"/proc/self/fd/{descriptor}").exists()


def scripted_file(directory: Path, cufile: Callable[..., object]) -> KvikioFile:
    return KvikioFile(open_nameless(directory), SimpleNamespace(CuFile=cufile))
