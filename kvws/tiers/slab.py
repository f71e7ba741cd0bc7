"""Host memory for the payloads of blocks: fixed slots that a disk and a GPU can move directly.

Slots begin at multiples of SECTOR_BYTES, so that O_DIRECT reads and writes them without a bounce
buffer, and on a machine with CUDA the memory is registered with the driver, so that copies to
and from the device run asynchronously at full speed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from kvws.errors import ConfigError, HostTierFull
from kvws.store.storage import SECTOR_BYTES

log = logging.getLogger(__name__)


class PinnedSlab:
    """Fixed-size byte slots in one anonymous mapping, with a free list.

    Without CUDA the operating system commits the memory as slots are first written, so an empty
    slab costs nothing. It is asked for huge pages: the first write of a slot then takes a fault
    for every 2 MiB in place of every 4 KiB (0.13 s a GiB against 0.42). Registering with CUDA
    commits everything at once. Memory starts as zeros, and the padding behind a slot's payload
    stays so unless somebody writes to it through `tensor`. Slots are reused last in, first out.
    Not thread-safe: the owner holds a lock.

    Attributes:
        slot_bytes: payload of one slot.
        stride_bytes: distance between slots, `slot_bytes` rounded up to whole sectors.
        capacity_blocks: number of slots.
        pinned: whether CUDA may copy from and to it asynchronously.
        tensor: [capacity_blocks, stride_bytes] uint8 over the memory itself.
    """

    def __init__(self, slot_bytes: int, capacity_bytes: int) -> None:
        """Reserve the memory, and pin it where there is a CUDA device.

        Raises:
            ConfigError: the capacity holds not even one slot, or the machine refuses it.
        """
        self.slot_bytes = slot_bytes
        self.stride_bytes = -(-slot_bytes // SECTOR_BYTES) * SECTOR_BYTES
        self.capacity_blocks = capacity_bytes // self.stride_bytes
        if self.capacity_blocks < 1:
            raise ConfigError(
                f"a host tier of {capacity_bytes} bytes holds no block of "
                f"{self.stride_bytes} bytes",
                hint="raise --host-gb",
            )
        # A tensor keeps the mapping alive but does not stop `mmap.close` from pulling it away:
        # the mapping is never closed, only let go.
        self._memory = _reserve(self.capacity_blocks * self.stride_bytes)
        self._bytes = memoryview(self._memory)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(
            self.capacity_blocks, self.stride_bytes
        )
        self.pinned = torch.cuda.is_available()
        if self.pinned:
            address = self.tensor.data_ptr()
            _pin(address, self.tensor.nbytes)
            self._unpin = weakref.finalize(self, _unpin, address)
            self._unpin.atexit = False  # the end of the process unpins
        self._freed: list[int] = []
        self._never_used = 0
        self._in_use = bytearray(self.capacity_blocks)

    @property
    def used_blocks(self) -> int:
        return self._never_used - len(self._freed)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, all or none. What they hold is undefined.

        Raises:
            HostTierFull: fewer are free.
        """
        available = self.capacity_blocks - self.used_blocks
        if count > available:
            raise HostTierFull(
                f"the host tier of {self.capacity_blocks} blocks has {available} free, "
                f"{count} are needed",
                hint="raise --host-gb",
            )
        from_freed = min(count, len(self._freed))
        slots = [self._freed.pop() for _ in range(from_freed)]
        fresh = count - from_freed
        slots += range(self._never_used, self._never_used + fresh)
        self._never_used += fresh
        for slot in slots:
            self._in_use[slot] = True
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. The owner guarantees that nobody reads them any more."""
        for slot in slots:
            assert self._in_use[slot], f"host slot {slot} is freed but not in use"
            self._in_use[slot] = False
            self._freed.append(slot)

    def view(self, slot: int) -> memoryview:
        """The payload of one slot, [slot_bytes] writable bytes that begin on a sector."""
        start = slot * self.stride_bytes
        return self._bytes[start : start + self.slot_bytes]

    def payloads(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """All slots as tensors of one shape: [capacity_blocks, *shape], a view.

        Each slot is contiguous; from slot to slot the stride includes the padding.

        Args:
            dtype: of the elements.
            shape: of one payload; it fills `slot_bytes` exactly.
        """
        elements = math.prod(shape)
        assert elements * dtype.itemsize == self.slot_bytes, (
            f"{tuple(shape)} of {dtype} is not {self.slot_bytes} bytes"
        )
        return self.tensor.view(dtype)[:, :elements].view(-1, *shape)

    def free_slots(self) -> set[int]:
        """Slots that were used and are free again (for the integrity check)."""
        return set(self._freed)

    def close(self) -> None:
        """Unpin the memory and give it back to the operating system; repeatable.

        What still views it must not be used: it reads zeros. The addresses stay mapped until the
        slab and the last view of it are gone, so that a straggler cannot hit foreign memory.
        """
        if self.pinned:
            self._unpin()
            self.pinned = False
        self._memory.madvise(mmap.MADV_DONTNEED)


def _reserve(size_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the machine refuses a host tier of {size_bytes} bytes: {error}",
            hint="lower --host-gb",
        ) from error
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _pin(address: int, size_bytes: int) -> None:
    """Register memory with CUDA.

    Raises:
        ConfigError: the driver refuses. Going on with pageable memory would turn every
            asynchronous copy into a blocking one unnoticed.
    """
    runtime = cast(Any, torch.cuda.cudart())
    result = runtime.cudaHostRegister(address, size_bytes, 0)
    if int(result) != 0:
        raise ConfigError(
            f"CUDA cannot pin a host tier of {size_bytes} bytes: "
            f"{runtime.cudaGetErrorString(result)}",
            hint="lower --host-gb, or raise the limit of locked memory (ulimit -l)",
        )


def _unpin(address: int) -> None:
    runtime = cast(Any, torch.cuda.cudart())
    result = runtime.cudaHostUnregister(address)
    if int(result) != 0:
        log.warning("CUDA cannot unpin the host tier: %s", runtime.cudaGetErrorString(result))
