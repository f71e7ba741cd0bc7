"""Nothing is fitted to the embedded model: other families pass the same equivalence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.families import FAMILIES

TOLERANCE = 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_alike_from_text_from_its_workspace_and_from_a_sparse_view(
    family: str, smollm2: Path, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.families", family, str(smollm2), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    print("measured: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    assert found["stock"] <= TOLERANCE, "the oracle is not the same model"
    assert found["same_tokens"]
    assert found["workspace"] <= TOLERANCE
    assert found["restored_pages"] >= 8
    assert found["restored"] <= TOLERANCE
    assert found["sparse_same_tokens"]
    assert found["sparse"] <= TOLERANCE
    assert found["control"] > 10 * TOLERANCE, "the comparison would not notice a misplaced block"
