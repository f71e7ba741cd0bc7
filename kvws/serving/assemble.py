"""The parts of a service put together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvws.chat.format import AnswerFormat
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.engine.protocol import Engine
from kvws.limits import Limits
from kvws.recall.recipe import Recipe
from kvws.recall.selector import Selector
from kvws.serving.placing import Placer
from kvws.serving.prompts import PromptBuilder
from kvws.serving.session_service import SessionService
from kvws.serving.sessions import Sessions
from kvws.serving.turn import Model
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity


def assemble_service(
    engine: Engine,
    limits: Limits,
    recipe: Recipe,
    *,
    answer_format: AnswerFormat,
    model_path: str | Path,
    name: str,
    window_tokens: int,
    store: StoreDirectory | None,
    identity: ModelIdentity,
) -> SessionService:
    """A service over a running engine.

    Args:
        recipe: that the views of all sessions are chosen by.
        model_path: of the tokenizer and its chat template.
        name: of the model, as clients see it.

    Raises:
        ModelError: there is no tokenizer, or it has no chat template.
    """
    rendering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvws-render")
    renderer = ChatRenderer(model_path)
    placer = Placer(PromptBuilder(renderer), rendering)
    model = Model(engine, limits, answer_format, placer)
    selector = partial(Selector, recipe, spelling_of(renderer))
    sessions = Sessions(engine, store, identity, selector)
    return SessionService(name, window_tokens, model=model, sessions=sessions)
