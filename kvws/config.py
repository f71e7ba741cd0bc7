"""Settings and where each value came from.

Order, first present wins: flags, environment (`KVWS_*`), `./kvws.toml`, the user's
`kvws/config.toml`, defaults. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvws.errors import ConfigError
from kvws.limits import Limits

_SIZE_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class Settings:
    """What a user can set.

    Attributes:
        model: alias (`smollm2`), Hugging Face folder or hub name.
        budget: tokens of the execution view.
        reserve: tokens kept for query and generation beside it.
        sink: first tokens of a thread, in every view.
        recent: newest tokens of a thread, in every view; 0 for a quarter of the budget.
        query: most new tokens a selection is asked with; earlier ones are ingested ahead.
        probe: tokens of the window that a selection is probed behind, unless the last one kept
            the view: then it is probed behind the whole view, and may already be the answer.
        scored: most tokens of a session whose blocks are looked at closely in a step; of longer
            ones they are shortlisted first.
        host_gb: GiB of the host tier, or "auto": half of the free memory.
        index_gb: GiB of a GPU's memory for index rows that are scored there; 0 scores on the CPU;
            "auto": a fourth of what the engine leaves free, at most 4.
        host_format: how blocks lie there: exact, int8, fp8 or int4.
        disk_dir: folder of the disk tier; "" keeps workspaces in memory only.
        disk_gb: GiB of the disk tier, or "auto": what it holds and 80 % of what is free.
        disk_format: how blocks lie on disk, the same formats.
        disk_backend: what moves them: posix, kvikio, or auto.
        threads: compute threads of the engine on a CPU; 0 for all cores.
        running: requests that the engine computes at once; others wait. On a CPU each adds a
            whole context to the KV pool.
        window: tokens of prompt and answer together, as clients see them.
        host: address that the endpoint listens on.
        port: of the endpoint; 0 for any that is free.
        tool_parser: how the model writes tool calls, as SGLang names it, or "auto".
        reasoning_parser: how it writes its reasoning, likewise.
        signals: what blocks are chosen by: "auto", or names with commas between them.
        profile: file of the model's retrieval profile, or "auto" to look for it.
    """

    model: str = "smollm2"
    budget: int = 2048
    reserve: int = 1024
    sink: int = 32
    recent: int = 0
    query: int = 128
    probe: int = 512
    scored: int = 1_000_000
    host_gb: str = "auto"
    index_gb: str = "auto"
    host_format: str = "exact"
    disk_dir: str = ""
    disk_gb: str = "auto"
    disk_format: str = "exact"
    disk_backend: str = "auto"
    threads: int = 0
    running: int = 4
    window: int = 1_000_000
    host: str = "127.0.0.1"
    port: int = 7788
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    signals: str = "auto"
    profile: str = "auto"

    @property
    def host_bytes(self) -> int | None:
        """Capacity of the host tier; None for the default.

        Raises:
            ConfigError: it is no positive size.
        """
        return parse_gibibytes("host_gb", self.host_gb)

    @property
    def index_bytes(self) -> int | None:
        """Memory of a GPU for index rows, 0 for none; None for the default.

        Raises:
            ConfigError: it is no size.
        """
        if self.index_gb.strip() in ("0", "0.0"):
            return 0
        return parse_gibibytes("index_gb", self.index_gb)

    @property
    def store_directory(self) -> Path | None:
        """The folder of the disk tier, absolute; None without one."""
        if not self.disk_dir:
            return None
        return Path(os.path.abspath(Path(self.disk_dir).expanduser()))

    @property
    def disk_bytes(self) -> int | None:
        """Capacity of the disk tier; None for the default.

        Raises:
            ConfigError: it is no positive size.
        """
        return parse_gibibytes("disk_gb", self.disk_gb)

    def limits(self) -> Limits:
        """The step limits these settings describe.

        Raises:
            ConfigError: they contradict each other.
        """
        return Limits(
            budget_tokens=self.budget,
            reserve_tokens=self.reserve,
            sink_tokens=self.sink,
            recent_tokens=self.recent or self.budget // 4,
            query_tokens=self.query,
            probe_tokens=self.probe,
            scored_tokens=self.scored,
        )


@dataclass(frozen=True)
class Resolved:
    """Settings, and per field the place its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def resolve_settings(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    user_config: Path | None = None,
) -> Resolved:
    """Merge all places.

    Args:
        flags: values given on the command line; None means not given.
        environment: the process environment by default.
        directory: where `kvws.toml` is looked for; the working directory by default.
        user_config: the user's file; `$XDG_CONFIG_HOME/kvws/config.toml` by default.

    Raises:
        ConfigError: an unknown key, an unreadable file or a value of the wrong kind.
    """
    environment = os.environ if environment is None else environment
    local = (directory or Path.cwd()) / "kvws.toml"
    user = user_config or _user_config(environment)
    places: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", {name: value for name, value in flags.items() if value is not None}),
        ("environment", _from_environment(environment)),
        (str(local), _from_file(local)),
        (str(user), _from_file(user)),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in fields(Settings):
        name = field.name
        found = next(((place, v[name]) for place, v in places if name in v), None)
        place, value = found if found is not None else ("default", field.default)
        values[name] = _typed(name, value, place, is_text=isinstance(field.default, str))
        sources[name] = place
    return Resolved(Settings(**values), sources)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = [field.name for field in fields(Settings)]
    variables = {name: f"KVWS_{name.upper()}" for name in names}
    return {name: environment[v] for name, v in variables.items() if v in environment}


def _from_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="it must be TOML") from error
    known = [field.name for field in fields(Settings)]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {key!r}", hint=hint)
    return content


def _user_config(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CONFIG_HOME")
    base = Path(home) if home else Path.home() / ".config"
    return base / "kvws" / "config.toml"


def _typed(name: str, value: Any, place: str, *, is_text: bool) -> Any:
    if is_text:
        if isinstance(value, str):
            return value
        if name.endswith("_gb") and isinstance(value, int | float):
            return str(value)  # TOML has numbers
        raise ConfigError(f"{name} ({place}) must be text, got {value!r}")
    number = parse_size(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(
            f"{name} ({place}) must be a whole number, got {value!r}",
            hint="sizes may carry a unit: 512MiB, 8GiB",
        )
    return number


def parse_size(text: str) -> int | None:
    """'8GiB' → bytes, '2048' → 2048; None when it is neither."""
    digits = text.strip().rstrip("BbIiKkMmGgTt")
    unit = text.strip()[len(digits) :].lower()
    unit = unit if unit.endswith("ib") or not unit else f"{unit.rstrip('b')}ib"
    if not digits.strip().isdigit() or unit not in _SIZE_UNITS:
        return None
    return int(digits) * _SIZE_UNITS[unit]


def parse_gibibytes(name: str, text: str) -> int | None:
    """'1.5' → bytes of 1.5 GiB, '512MiB' → its bytes, 'auto' → None.

    Raises:
        ConfigError: it is no positive size.
    """
    if text == "auto":
        return None
    try:
        size_bytes = int(float(text) * (1 << 30))
    except (ValueError, OverflowError):
        size_bytes = parse_size(text)
    if size_bytes is None or size_bytes <= 0:
        raise ConfigError(
            f"{name} must be a size above zero, got {text!r}",
            hint="give GiB such as 8 or 0.5, or leave it out",
        )
    return size_bytes
