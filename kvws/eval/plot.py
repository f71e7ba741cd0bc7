"""Curves as an SVG picture: KL by budget, one line per arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[tuple[float, float]]
"""(budget in percent, KL) pairs."""

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 220, 50, 60
_LEGEND_STEP = 20
_COLOURS = (
    *("#1f4e9c", "#c0392b", "#2a8c4a", "#8e44ad", "#d68910", "#0e7c86", "#7f5539", "#d63384"),
    *("#5b6770", "#6b8e23", "#111111", "#3498db"),
)
_DASHES = ("", "7 4", "2 3")  # the next round of colours


def kl_chart(title: str, curves: Mapping[str, Curve]) -> str:
    """The picture; a KL of zero or below has no place on a logarithmic axis and is left out.

    Args:
        curves: by arm, the legend's order.
    """
    shown = {name: [(x, y) for x, y in curve if y > 0] for name, curve in curves.items()}
    shown = {name: sorted(curve) for name, curve in shown.items() if curve}
    budgets = sorted({x for curve in shown.values() for x, _ in curve})
    kls = [y for curve in shown.values() for _, y in curve]
    axes = _Axes(budgets, kls)
    height = max(_HEIGHT, _TOP + _BOTTOM + _LEGEND_STEP * len(shown))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 28, title, size=16),
        *_frame(axes, budgets),
    ]
    for number, (name, curve) in enumerate(shown.items()):
        parts += _curve(axes, number, name, curve)
    return "\n".join([*parts, "</svg>", ""])


class _Axes:
    """Linear budgets, logarithmic KL between whole powers of ten."""

    def __init__(self, budgets: Sequence[float], kls: Sequence[float]) -> None:
        least, most = (budgets[0], budgets[-1]) if budgets else (0.0, 100.0)
        margin = max(1.0, 0.05 * (most - least))
        self._first, self._last = least - margin, most + margin
        self.low = math.floor(math.log10(min(kls))) if kls else -2
        self.high = max(self.low + 1, math.ceil(math.log10(max(kls))) if kls else 0)

    def x(self, percent: float) -> float:
        share = (percent - self._first) / (self._last - self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, kl: float) -> float:
        share = (math.log10(kl) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _frame(axes: _Axes, budgets: Sequence[float]) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333333"/>',
        _text((_LEFT + right) / 2, bottom + 42, "view, % of the history", anchor="middle"),
        f'<text transform="translate(22 {(_TOP + bottom) / 2}) rotate(-90)" '
        'text-anchor="middle">KL to full context, nats per token</text>',
    ]
    for percent in budgets:
        x = axes.x(percent)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#333333"/>')
        parts.append(_text(x, bottom + 20, f"{percent:g}", anchor="middle"))
    for exponent in range(axes.low, axes.high + 1):
        for factor in (1, 2, 5):
            if exponent == axes.high and factor > 1:
                break
            kl = factor * 10.0**exponent
            y = axes.y(kl)
            shade = "#cccccc" if factor == 1 else "#eeeeee"
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{shade}"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{kl:g}", anchor="end"))
    return parts


def _curve(axes: _Axes, number: int, name: str, curve: Curve) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash or "none"}"'
    points = [(axes.x(x), axes.y(y)) for x, y in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    legend_x, legend_y = _WIDTH - _RIGHT + 20, _TOP + 10 + _LEGEND_STEP * number
    return [
        f'<polyline points="{line}" fill="none" {style}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points),
        f'<path d="M{legend_x} {legend_y}h26" {style}/>',
        _text(legend_x + 34, legend_y + 4, name),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
