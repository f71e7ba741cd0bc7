"""What shortlists lose, in figures, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rich.table import Table

from kvws.eval.shortlisting import Compared
from kvws.eval.shortlisting_session import AskedKind

KINDS: tuple[AskedKind, ...] = get_args(AskedKind)
FACT_KINDS: tuple[AskedKind, ...] = ("verbatim", "paraphrased")

_FIRST = 8


@dataclass(frozen=True)
class ShortlistFigures:
    """Questions of one kind, with shortlists of one size. NaN where there is none.

    Attributes:
        score_kept, blocks_kept: means over questions.
        first_8: share of questions whose fact is among the first eight chosen; NaN for turns.
        exact_first_8: the same, chosen from all blocks.
        on_list: share of questions whose fact is on the shortlist; NaN for turns.
        look_ms, exact_ms: CPU time of the close look, means over questions.
    """

    questions: int
    score_kept: float
    blocks_kept: float
    first_8: float
    exact_first_8: float
    on_list: float
    look_ms: float
    exact_ms: float


def shortlist_figures(
    compared: Sequence[Compared], share: int, kinds: Sequence[AskedKind]
) -> ShortlistFigures:
    """Of the questions of some kinds."""
    own = [(each, each.by_share[share]) for each in compared if each.kind in kinds]
    of_facts = [(each, few) for each, few in own if few.on_list is not None]
    return ShortlistFigures(
        questions=len(own),
        score_kept=_mean(few.score_kept for _, few in own),
        blocks_kept=_mean(few.blocks_kept for _, few in own),
        first_8=_mean(_is_early(few.rank) for _, few in of_facts),
        exact_first_8=_mean(_is_early(each.exact_rank) for each, _ in of_facts),
        on_list=_mean(bool(few.on_list) for _, few in of_facts),
        look_ms=_mean(few.look_ms for _, few in own),
        exact_ms=_mean(each.exact_ms for each, _ in own),
    )


def shortlist_table(compared: Sequence[Compared], shares: Sequence[int]) -> Table:
    """A row for the exact choice, and one for each size of shortlist."""
    counts = {kind: sum(each.kind == kind for each in compared) for kind in KINDS}
    asked = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    table = Table(
        title=f"What a shortlist loses (questions: {asked})",
        header_style="bold",
        padding=(0, 1),
        box=None,
    )
    table.add_column("looked at closely", no_wrap=True)
    columns = ("score kept", "blocks kept", "first 8", "on the list", "CPU ms", "of exact")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    exact = shortlist_figures(compared, shares[0], KINDS)
    found = (shortlist_figures(compared, shares[0], [kind]) for kind in FACT_KINDS)
    early = _cell(of.exact_first_8 for of in found)
    table.add_row("all", "", "", early, "", f"{exact.exact_ms:.0f}", "1.00")
    for share in shares:
        whole = shortlist_figures(compared, share, KINDS)
        by_kind = [shortlist_figures(compared, share, [kind]) for kind in KINDS]
        of_facts = [shortlist_figures(compared, share, [kind]) for kind in FACT_KINDS]
        table.add_row(
            f"{share} %",
            _cell(of.score_kept for of in by_kind),
            _cell(of.blocks_kept for of in by_kind),
            _cell(of.first_8 for of in of_facts),
            _cell(of.on_list for of in of_facts),
            f"{whole.look_ms:.0f}",
            f"{whole.look_ms / whole.exact_ms:.2f}" if whole.exact_ms else "–",
        )
    table.caption = (
        "by kind: verbatim / paraphrased / turn, or the first two. Score kept: of the exact "
        "choice's fused score, the share whose blocks are on the shortlist; blocks kept: its "
        "blocks that are chosen still; first 8, on the list: questions whose fact is there"
    )
    return table


def shortlist_json(compared: Sequence[Compared], shares: Sequence[int]) -> dict[str, Any]:
    """Everything that was measured, by share and kind, and per question."""
    return {
        "figures": {
            str(share): {
                **{kind: asdict(shortlist_figures(compared, share, [kind])) for kind in KINDS},
                "all": asdict(shortlist_figures(compared, share, KINDS)),
            }
            for share in shares
        },
        "questions": [asdict(each) for each in compared],
    }


def _is_early(rank: int | None) -> bool:
    return rank is not None and rank < _FIRST


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def _cell(values: Iterable[float]) -> str:
    return " / ".join("–" if math.isnan(value) else f"{value:.2f}" for value in values)
