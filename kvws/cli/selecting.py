"""How views are chosen: from the settings, and from what is known of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvws.config import Settings
from kvws.errors import ConfigError, ModelError
from kvws.models.profiles import find_profile, load_profile
from kvws.recall.recipe import AUTO, Recipe, SignalName, recipe_named


@dataclass(frozen=True)
class Selecting:
    """A recipe that can be followed with this model.

    Attributes:
        profile: file of the model's retrieval profile, if there is one.
        notice: what the user should know, in one sentence; "" for nothing.
    """

    recipe: Recipe
    profile: Path | None
    notice: str


def selecting(settings: Settings, model: str | Path) -> Selecting:
    """The recipe of `--signals`, with the profile of `--profile`.

    Without a profile, the default goes on without content heads, and says so; whoever asks for
    them by name is refused.

    Raises:
        ConfigError: unknown signals, or `content` without a profile.
        ProfileError: the profile is damaged or of another model.
        ModelError: the model's folder cannot be read.
    """
    recipe = recipe_named(settings.signals)
    profile = _profile_file(settings, model)
    if profile is not None or SignalName.CONTENT not in recipe.weights:
        return Selecting(recipe, profile, "")
    calibrate = f"kvws calibrate --model {settings.model}"
    if settings.signals != AUTO:
        raise ConfigError(
            f"{settings.model} has no retrieval profile, which the signal content needs",
            hint=f"make one with: {calibrate}",
        )
    rest = recipe.without([SignalName.CONTENT])
    notice = (
        f"{settings.model} is not calibrated: blocks are chosen by "
        f"{', '.join(rest.weights)}, without content heads ({calibrate} finds them)"
    )
    return Selecting(rest, None, notice)


def _profile_file(settings: Settings, model: str | Path) -> Path | None:
    if not isinstance(model, Path):  # its weights are not here to be identified
        if settings.profile == AUTO:
            return None
        raise ModelError(
            f"the profile {settings.profile} cannot be compared with {model}",
            hint="give the model as a folder",
        )
    if settings.profile == AUTO:
        found = find_profile(model)
        return found[1] if found is not None else None
    path = Path(settings.profile).expanduser()
    load_profile(path, model)
    return path
