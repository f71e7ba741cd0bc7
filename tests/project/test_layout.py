"""What the tree promises: import names, packaging, and who may import what."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvws
from kvws import errors

ROOT = Path(__file__).resolve().parents[2]
SHARED_FOLDERS = ("kernels", "harness_adapters")
CORE = ("session", "recall", "blocks", "tiers", "step", "prefill", "limits")
MAX_LINES = 400


def sources(*folders: str) -> Iterator[Path]:
    """Python files of the given folders, those behind a symlink only once."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_folders_behind_symlinks_are_no_packages_of_their_own() -> None:
    for folder in SHARED_FOLDERS:
        assert not (ROOT / folder / "__init__.py").exists()


def test_kernels_is_not_ours(tmp_path: Path) -> None:
    """SGLang depends on the package `kernels`: an installed kvws must not stand in for it."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin or '')"
    assert not run_python(code, tmp_path).startswith(str(ROOT))


@pytest.mark.parametrize("folder", SHARED_FOLDERS)
def test_symlink_is_committed(folder: str) -> None:
    assert git("ls-files", "-s", f"kvws/{folder}").startswith("120000 ")
    assert (ROOT / "kvws" / folder).resolve() == ROOT / folder


def test_kernels_import_through_kvws() -> None:
    spec = importlib.util.find_spec("kvws.kernels.rerope.api")
    assert spec is not None and importlib.util.find_spec("kvws.kernels.rerope") is not None


def test_wheel_holds_the_kernels_inside_kvws(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"kvws/kernels/rerope/api.py", "kvws/kernels/place/place.c"} <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "kvws",
        f"kvws-{kvws.__version__}.dist-info",
    }


def test_core_needs_neither_engine_nor_http(tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys
for name in {CORE!r}:
    module = importlib.import_module("kvws." + name)
    for part in pkgutil.iter_modules(getattr(module, "__path__", [])):
        importlib.import_module(f"kvws.{{name}}.{{part.name}}")
print(*sorted({{"sglang", "fastapi", "uvicorn"}} & set(sys.modules)))
"""
    assert run_python(code, tmp_path).strip() == ""


def test_only_the_seam_imports_sglang() -> None:
    seam = ROOT / "kvws" / "engine"
    outside = [
        str(path.relative_to(ROOT))
        for path in sources("kvws", *SHARED_FOLDERS)
        if seam not in path.parents
        and any(name.split(".")[0] == "sglang" for name in imported_modules(parsed(path)))
    ]
    assert outside == []


def test_files_are_short() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in sources("kvws", *SHARED_FOLDERS)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert too_long == {}


def _runs_data(node: ast.AST) -> bool:
    """Whether a node can turn bytes that someone sent into code that runs."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in modules for alias in names)
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in modules
        case ast.Call(func=ast.Name(id="eval" | "exec")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            return True
    return False


def test_nothing_deserialises_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in sources("kvws", *SHARED_FOLDERS)
        for node in ast.walk(parsed(path))
        if _runs_data(node)
    ]
    assert found == []


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvws.__version__)


def public_errors() -> list[type[BaseException]]:
    return [
        value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__ and name[0] != "_"
    ]


def documented_tree() -> dict[str, str | None]:
    """Error name to its parent's, as the module docstring draws it."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    drawing = re.compile(r"^(?P<branch>[ │├└─]*)(?P<name>[A-Z]\w+) {2,}\S")
    for line in (errors.__doc__ or "").splitlines():
        if match := drawing.match(line):
            depth = len(match["branch"]) // 4
            path[depth:] = [match["name"]]
            parents[match["name"]] = path[depth - 1] if depth else None
    return parents


def test_every_error_is_one_of_ours_and_documented() -> None:
    found = public_errors()
    assert found and all(issubclass(error, errors.KvwsError) for error in found)
    bases = {
        error.__name__: None if error is errors.KvwsError else error.__bases__[0].__name__
        for error in found
    }
    assert documented_tree() == bases
