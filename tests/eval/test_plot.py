"""Pictures: readable as XML, with every arm, and with axes that tell the truth."""

from __future__ import annotations

from xml.etree import ElementTree

from kvws.eval.plot import kl_chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(
    curves: dict[str, list[tuple[float, float]]], title: str = "a title"
) -> ElementTree.Element:
    return ElementTree.fromstring(kl_chart(title, curves))


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def heights(picture: ElementTree.Element) -> dict[str | None, float]:
    """Where upright texts stand."""
    upright = (text for text in picture.iter(f"{SVG}text") if "y" in text.attrib)
    return {text.text: float(text.attrib["y"]) for text in upright}


def lines(picture: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in picture.iter(f"{SVG}polyline")
    ]


def test_every_arm_is_a_labelled_line_and_axes_say_what_they_show() -> None:
    picture = drawn({"one": [(12, 0.5), (25, 0.2)], "two": [(12, 0.4), (25, 0.1)]})
    shown = texts(picture)
    for label in ("a title", "one", "two", "12", "25", "view, % of the history"):
        assert label in shown
    assert any("KL" in text and "nats" in text for text in shown)
    assert len(lines(picture)) == 2


def test_the_kl_axis_is_logarithmic_and_falls_downwards() -> None:
    (line,) = lines(drawn({"one": [(10, 1.0), (20, 0.1), (30, 0.01)]}))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2 and y0 < y1 < y2
    assert abs((y1 - y0) - (y2 - y1)) < 0.2


def test_ticks_stand_where_values_are_drawn() -> None:
    picture = drawn({"one": [(10, 0.1), (20, 1.0)]})
    (line,) = lines(picture)
    place_of = heights(picture)
    assert abs(place_of["0.1"] - 4 - line[0][1]) < 0.2
    assert abs(place_of["1"] - 4 - line[1][1]) < 0.2


def test_a_curve_is_drawn_by_budget_whatever_its_order() -> None:
    (line,) = lines(drawn({"one": [(50, 0.1), (12, 0.4)]}))
    assert line[0][0] < line[1][0]


def test_zero_has_no_place_on_the_axis_and_one_point_or_none_is_no_failure() -> None:
    assert lines(drawn({"nothing": [(25, 0.0)], "one": [(25, 0.3)]})) != []
    assert "nothing" not in texts(drawn({"nothing": [(25, 0.0)]}))
    assert lines(drawn({})) == []


def test_all_legends_fit_and_names_are_escaped() -> None:
    curves = {f"arm <{number}> & co": [(12, 0.1), (25, 0.2)] for number in range(30)}
    picture = drawn(curves, title="<b>")
    height = float(picture.attrib["viewBox"].split()[3])
    assert max(heights(picture).values()) < height
    assert "arm <29> & co" in texts(picture) and "<b>" in texts(picture)
