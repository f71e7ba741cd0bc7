# pyright: basic
"""Starting the stock engine with the kvws plugin, checking it, and stopping it again."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.chat_format import ChatFormat
from kvws.engine.client import SglangEngine
from kvws.engine.control_client import Ranks
from kvws.engine.liveness import Liveness
from kvws.engine.platform_entry import activate
from kvws.engine.plugin import CONTROL_DIR_VARIABLE, LOG_NAME
from kvws.engine.processes import EngineProcesses
from kvws.engine.self_check import self_check
from kvws.engine.settings import EngineSettings, default_disk_bytes, default_host_bytes
from kvws.engine.startup_report import read_startup_error
from kvws.engine.tiers import TierSettings
from kvws.errors import EngineError, EngineStartError, ProfileError
from kvws.recall.profile import Profile
from kvws.store.directory import StoreDirectory
from kvws.store.identity import ModelIdentity
from kvws.store.posix import PosixStorage
from kvws.store.storage import Backend

T = TypeVar("T")

_MOST_BLANKS = 32
"""Between two parts of a JSON answer that must follow a schema: room to indent. Without a bound a
small model goes on in blanks, which the grammar allows, until its tokens run out."""


class RunningEngine:
    """A started engine and the event loop that its front half lives on.

    Attributes:
        store: the directory of the disk tier, which this process owns; None without one.
        identity: what stored blocks must agree with to be of use to it.
        answer_format: how its model writes reasoning and tool calls.
        disk: how blocks are kept on disk, for people; "" without a disk tier.
        scoring: where blocks are scored, for people; "" where only the CPU can.
        host_bytes: capacity of the host tier of each rank.
    """

    def __init__(
        self,
        engine: SglangEngine,
        loop: asyncio.AbstractEventLoop,
        store: StoreDirectory | None,
        identity: ModelIdentity,
        answer_format: ChatFormat,
        disk: str,
        scoring: str,
        liveness: Liveness,
        host_bytes: int,
    ) -> None:
        self.host_bytes = host_bytes
        self.engine = engine
        self.answer_format = answer_format
        self._liveness = liveness
        self.disk = disk
        self.scoring = scoring
        self.store = store
        self.identity = identity
        self._loop = loop

    def require_alive(self) -> None:
        """Raises EngineDied when one of its processes is gone."""
        self._liveness.require_alive()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop."""
        return self._loop.run_until_complete(main)


@contextlib.contextmanager
def running_engine(settings: EngineSettings) -> Generator[RunningEngine]:
    """Start an engine in processes of its own; stop them at the end.

    The engine's log is kept, and named in the error, when kvws fails; otherwise it goes.

    Raises:
        EngineStartError, UnsupportedModel, SelfCheckFailed: it cannot serve; why, and what to do.
        StoreError, ConfigError: the disk tier cannot be used.
    """
    if settings.host_bytes is None:
        settings = dataclasses.replace(settings, host_bytes=default_host_bytes())
    with contextlib.ExitStack() as on_leaving:
        store: StoreDirectory | None = None
        if settings.disk_dir is not None:
            store = on_leaving.enter_context(
                StoreDirectory.open(settings.disk_dir, PosixStorage(settings.disk_dir))
            )
            if settings.disk_bytes is None:
                disk_bytes = default_disk_bytes(settings.disk_dir)
                settings = dataclasses.replace(settings, disk_bytes=disk_bytes)
        yield on_leaving.enter_context(_engine_processes(settings, store))


@contextlib.contextmanager
def _engine_processes(
    settings: EngineSettings, store: StoreDirectory | None
) -> Generator[RunningEngine]:
    assert settings.host_bytes is not None
    control_dir = Path(tempfile.mkdtemp(prefix="kvws-"))  # mode 0700
    keep_log = False
    processes = EngineProcesses()
    try:
        llm = _start(settings, control_dir)
        ranks = Ranks(sorted(control_dir.glob("rank-*.sock")))
        liveness = Liveness(processes.pids(), control_dir / LOG_NAME)
        engine, shapes = llm.loop.run_until_complete(_connect(llm, ranks, liveness, settings))
        try:
            llm.loop.run_until_complete(self_check(engine, shapes))
            identity, disk = _identity(settings, shapes), shapes[0]["disk"]
            scoring = shapes[0]["scoring"]
            answer_format = ChatFormat.of_engine(llm.tokenizer_manager)
            yield RunningEngine(
                engine,
                llm.loop,
                store,
                identity,
                answer_format,
                disk,
                scoring,
                liveness,
                settings.host_bytes,
            )
        finally:
            llm.loop.run_until_complete(ranks.close())
            # The watchdog would take the end for a crash; shutdown kills every child we have.
            llm.tokenizer_manager._subprocess_watchdog.stop()
            atexit.unregister(llm.shutdown)
    except EngineError:
        keep_log = True
        raise
    finally:
        processes.stop()
        if not keep_log:
            shutil.rmtree(control_dir, ignore_errors=True)


def engine_arguments(settings: EngineSettings, control_dir: Path) -> dict[str, Any]:
    """SGLang's server arguments."""
    tiers = TierSettings(
        host_bytes=settings.host_bytes or default_host_bytes(),
        host_format=settings.host_format,
        disk_dir=str(settings.disk_dir or ""),
        disk_bytes=settings.disk_bytes or 0,
        disk_format=settings.disk_format,
        disk_backend=cast(Backend, settings.disk_backend),
    )
    arguments: dict[str, Any] = {
        "model_path": str(settings.model),
        "dtype": settings.dtype,
        "page_size": BLOCK_TOKENS,
        "context_length": settings.context_tokens,
        "max_running_requests": settings.max_running_requests,
        "tool_call_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser,
        "grammar_backend": "xgrammar",
        "constrained_json_max_whitespace_cnt": _MOST_BLANKS,
        "chunked_prefill_size": 1024,
        "disable_prefill_cuda_graph": True,  # its static batches do not say whose rows are whose
        "disable_overlap_schedule": True,  # the scheduler would run ahead of what steps have read
        "skip_server_warmup": True,
        "sleep_on_idle": True,
        "log_level": "warning",  # of the engine processes, which log to a file
        "custom_sigquit_handler": _leave_it_to_liveness,
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "WorkspaceLinker",
            "linker_module_path": "kvws.engine.linker",
            "linker_extra_config": {
                "control_dir": str(control_dir),
                "tiers": dataclasses.asdict(tiers),
                "signals": list(settings.signals),
                "profile": _profile_text(settings.profile),
                "index_bytes": settings.index_bytes,
            },
        },
    }
    device_tokens = settings.device_tokens
    if activate() is not None:
        device_tokens = device_tokens or settings.max_running_requests * settings.context_tokens
        arguments |= {
            "device": "cpu",
            "dtype": "float32" if settings.dtype == "auto" else settings.dtype,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_custom_all_reduce": True,
            "mem_fraction_static": 0.3,
        }
    if device_tokens is not None:
        arguments["max_total_tokens"] = -(-device_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    return arguments


def _profile_text(path: Path | None) -> str:
    """A retrieval profile as it travels to the engine processes; "" without one.

    Raises:
        ProfileError: it cannot be read.
    """
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"the profile {path} cannot be read: {error}",
            hint="make it with kvws calibrate",
        ) from error
    return Profile.from_json(text).to_json()


def _prepare_environment(settings: EngineSettings, control_dir: Path) -> None:
    """Engine processes are spawned: what they need to know early goes through the environment."""
    os.environ[CONTROL_DIR_VARIABLE] = str(control_dir)
    # SGLang compiles its page hashing with ninja, which lies beside this interpreter.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ["SGLANG_PLUGINS"] = "kvws"
    os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # of what is not installed
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(settings.cache_dir / "torch_extensions"))
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if activate() is not None:
        os.environ["SGLANG_PLATFORM"] = "kvws_cpu"


def _require_compiler() -> None:
    """SGLang compiles its page hashing when it starts, and has no other way to do it."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise EngineStartError(
            f"there is no C++ compiler ({compiler}), and the engine needs one to start",
            hint="on Debian: apt-get install g++ libssl-dev python3-dev",
        )


def _start(settings: EngineSettings, control_dir: Path) -> Any:
    _require_compiler()
    _prepare_environment(settings, control_dir)
    logging.getLogger("sglang").setLevel(logging.CRITICAL)  # the engine's log says it
    try:
        import sglang

        llm = sglang.Engine(**engine_arguments(settings, control_dir))
    except (Exception, SystemExit) as error:
        reported = read_startup_error(control_dir)
        if reported is not None:
            raise reported from error
        raise EngineStartError(
            f"the engine did not start: {error}", hint=f"its log is {control_dir / LOG_NAME}"
        ) from error
    llm.tokenizer_manager.signal_handler_class = _QuietSignals
    return llm


async def _connect(
    llm: Any, ranks: Ranks, liveness: Liveness, settings: EngineSettings
) -> tuple[SglangEngine, list[dict[str, Any]]]:
    shapes = await ranks.call("describe")
    if not shapes:
        raise EngineStartError(
            "the engine runs without the kvws linker", hint="check SGLANG_PLUGINS"
        )
    engine = SglangEngine(
        llm.tokenizer_manager,
        ranks,
        liveness,
        context_tokens=settings.context_tokens,
        block_bytes=sum(shape["block_bytes"] for shape in shapes),
        scored_at_once_blocks=_least([shape["scored_at_once_blocks"] for shape in shapes]),
    )
    return engine, shapes


def _least(bounds: list[int | None]) -> int | None:
    """The smallest bound of all ranks; None where none has one."""
    return min((bound for bound in bounds if bound is not None), default=None)


def _identity(settings: EngineSettings, shapes: list[dict[str, Any]]) -> ModelIdentity:
    """What the ranks' descriptions say together."""
    weights = hashlib.blake2b(
        "".join(shape["weights"] for shape in shapes).encode(), digest_size=16
    )
    return ModelIdentity(
        model=settings.name or Path(settings.model).name,
        weights=weights.hexdigest(),
        rotary=shapes[0]["rotary"],
        dtype=shapes[0]["dtype"],
        layers=shapes[0]["layers"],
        kv_heads=sum(shape["kv_heads"] for shape in shapes),
        head_dim=shapes[0]["head_dim"],
        ranks=len(shapes),
        block_tokens=BLOCK_TOKENS,
    )


def _leave_it_to_liveness(signum: int, frame: Any) -> None:
    """SGLang's children signal their parent when they fail; waiters learn it from `Liveness`."""


class _QuietSignals:
    """Replaces SGLang's signal handlers, which kill this process where it should say why."""

    def __init__(self, tokenizer_manager: Any) -> None:
        pass

    def sigterm_handler(self, signum: int | None = None, frame: Any = None) -> None:
        raise KeyboardInterrupt

    def running_phase_sigquit_handler(
        self, signum: int | None = None, frame: Any = None
    ) -> None:
        """A child failed: see `_leave_it_to_liveness`."""
