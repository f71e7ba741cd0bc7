"""Compile a C file into the user's cache, once per source, processor and compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import xxhash

from kvws.errors import ConfigError

FLAGS = (
    "-std=c99",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
"""None of them changes a result. Products and sums are fused where the source says so, never at
the compiler's discretion; floating-point exceptions go unread, and caring for them would keep
conversions from being vectorised."""

COMPILE_LIMIT_S = 120
DIGEST_BYTES = 16

Command = tuple[str, ...]


def cache_folder() -> Path:
    """Where libraries are kept, by the XDG rules."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "kvws" / "native"


def find_compiler() -> Command | None:
    """`$CC`, which may hold arguments, or `cc`; None where there is no such program."""
    try:
        command = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
    except ValueError:  # a quote that is never closed
        return None
    return command if shutil.which(command[0]) else None


def load_library(source: Path, folder: Path, compiler: Command | None) -> ctypes.CDLL:
    """The library of a C file: out of `folder`, or else compiled into it.

    A cached file that is damaged or cannot be loaded is built again. Several processes may build
    at once: each publishes a complete file, and the last one stays.

    Args:
        compiler: None to take what the cache has, whichever compiler it came from.

    Raises:
        ConfigError: the cache has no such library, and it cannot be built.
    """
    _make_private(folder)
    built_for = f"{source.stem}-{_digest(source.read_bytes(), _target()).hex()}"
    if compiler is None:
        for path in sorted(folder.glob(f"{built_for}-*.so")):
            if library := _opened(path):
                return library
        raise ConfigError(
            f"there is no C compiler: {os.environ.get('CC') or 'cc'} is not found",
            hint="install gcc or clang, or let CC name a C compiler",
        )
    path = folder / f"{built_for}-{_digest(_version(compiler)).hex()}.so"
    if library := _opened(path):
        return library
    _compile(source, path, compiler)
    if library := _opened(path):
        return library
    raise ConfigError(
        f"{path} was built but cannot be loaded",
        hint="is its file system mounted noexec? XDG_CACHE_HOME can name another folder",
    )


def _target() -> bytes:
    """What a library depends on beside its source: it holds instructions of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    named = ("vendor_id", "cpu family", "model", "flags", "CPU ", "Features")
    processor = sorted({line for line in lines if line.startswith(named)})
    return "\n".join([*FLAGS, platform.system(), platform.machine(), *processor]).encode()


def _version(compiler: Command) -> bytes:
    return _run([*compiler, "--version"])


def _make_private(folder: Path) -> None:
    """Code is loaded from here: nobody else may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error}",
            hint="let XDG_CACHE_HOME name a folder that you can write to",
        ) from error
    others_may_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or others_may_write:
        raise ConfigError(
            f"{folder} is not a folder that you alone can write to",
            hint=f"remove it, or chmod 700 {folder}",
        )


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library, or None where the file is missing, damaged or not for this system.

    The digest at its end is checked first: the loader trusts what a truncated file says.
    """
    try:
        content = path.read_bytes()
        if _digest(content[:-DIGEST_BYTES]) != content[-DIGEST_BYTES:]:
            return None
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compile(source: Path, path: Path, compiler: Command) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            _run([*compiler, *FLAGS, "-o", str(built), str(source), "-lm"])
            with built.open("rb+") as file:
                file.write(_digest(file.read()))
            built.replace(path)
    except OSError as error:
        raise ConfigError(
            f"a library cannot be built in {path.parent}: {error}",
            hint="free some space there, or let XDG_CACHE_HOME name another folder",
        ) from error


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 (the user's own compiler)
            command, capture_output=True, check=True, timeout=COMPILE_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        said: bytes = getattr(error, "stderr", None) or b""
        raise ConfigError(
            f"the C compiler failed: {shlex.join(command)}: "
            f"{said.decode(errors='replace').strip() or error}",
            hint="let CC name a C compiler that works here",
        ) from error
    return done.stdout


def _digest(*parts: bytes) -> bytes:
    """Against accidents: who can write to the folder can run code anyway."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
