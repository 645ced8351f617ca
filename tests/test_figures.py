"""Figures: one look for a name in every panel, lines in their place, too many curves refused."""

import matplotlib.pyplot as plt
import pytest

from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction import figures

GROUPS = {
    "one": {"a": ([1, 2], [0.1, 0.2]), "b": ([1, 2], [0.3, 0.4])},
    "other": {"b": ([1, 2], [0.5, 0.6])},
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def levels(axes):
    """Return the heights of the lines that run from edge to edge."""
    return [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]


def test_a_name_looks_the_same_in_every_panel():
    left, right = figures.panels(GROUPS, "x", "y").axes
    assert [line.get_label() for line in left.lines] == ["a", "b"]
    look = [
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in (*left.lines, *right.lines)
    ]
    assert look[1] == look[2] != look[0]


@pytest.mark.parametrize(
    ("height", "one", "other"),
    [
        (0.5, [0.5], [0.5]),
        ({"one": 0.5, "other": 0.7}, [0.5], [0.7]),
        ({"other": 0.7}, [], [0.7]),
        ({"one": None, "other": 0.7}, [], [0.7]),
        ({"one": None}, [], []),
        ({}, [], []),
    ],
)
def test_a_line_stands_in_the_panels_that_have_one_and_in_the_legend(height, one, other):
    figure = figures.panels(GROUPS, "x", "y", reference=("a guess", height))
    assert [levels(axes) for axes in figure.axes] == [one, other]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["a", "b"] + ["a guess"] * bool(one + other)


def test_points_are_all_marked_without_a_line_in_the_panel_and_in_the_legend():
    many = list(range(40))
    (axes,) = figures.curves({"a": (many, many), "b": (many, many)}, "x", "y", points={"b"}).axes
    for lines in (axes.lines, axes.get_legend().legend_handles):
        assert [line.get_linestyle() for line in lines] == ["-", "None"]
        assert [line.get_marker() for line in lines] == ["o", "s"]
    assert [line.get_markevery() for line in axes.lines] == [3, 1]


@pytest.mark.parametrize("groups", [GROUPS, {"": GROUPS["one"]}])
def test_a_legend_with_columns_stands_above_the_panels_and_has_as_many(groups):
    figure = figures.panels(groups, "x", "y", legend_columns=1)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    figure.draw_without_rendering()
    left, right = (text.get_window_extent().x0 for text in legend.get_texts())
    assert left == right
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_more_curves_than_can_be_told_apart_are_refused():
    series = {str(i): ([1], [1]) for i in range(8)}
    with pytest.raises(ValueError, match="8 curves, but only 7 can be told apart"):
        figures.curves(series, "x", "y")


def test_without_a_record_the_figure_says_so():
    (axes,) = figures.curves({}, "x", "y").axes
    assert [text.get_text() for text in axes.texts] == ["not recorded yet"]


def test_a_spread_is_drawn_as_error_bars_of_its_curve():
    series = {"a": ([1, 2], [0.1, 0.2], [0.01, 0.02]), "b": ([1, 2], [0.3, 0.4])}
    (axes,) = figures.curves(series, "x", "y").axes
    (container,) = axes.containers
    ends = [segment.ravel().tolist() for segment in container.lines[2][0].get_segments()]
    assert ends == [pytest.approx([1, 0.09, 1, 0.11]), pytest.approx([2, 0.18, 2, 0.22])]


def test_a_value_chart_puts_equal_names_in_a_row_and_draws_their_spread():
    rows = [("a", 2.0, "one", 0.5), ("a", 3.0, "other", 0.1), ("b", 5.0, "one", [[1.0], [2.0]])]
    axes = figures.value_chart(rows, "x").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    spans = [c.get_segments()[0][:, 0].tolist() for c in axes.collections]
    assert spans == [[1.5, 2.5], [2.9, 3.1], [4.0, 7.0]]
    assert not axes.texts
    one_a_row = figures.value_chart([("a", 2.0, "one"), ("b", 3.0, "other")], "x").axes[0]
    assert [text.get_text() for text in one_a_row.texts] == ["2", "3"]


def test_a_success_chart_has_a_mark_and_a_wilson_interval_for_each_attacker():
    both = {"name": "a", "naive": (3, 16), "clip_aware": (16, 16)}
    cells = [both, {"name": "b", "naive": (0, 4)}]
    (axes,) = figures.success_chart(cells).axes
    spans = [c.get_segments()[0][:, 0].tolist() for c in axes.collections]
    assert spans == [pytest.approx(wilson_interval(*n)) for n in ((3, 16), (16, 16), (0, 4))]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_a_name_keeps_its_style_in_every_figure_where_an_order_is_given():
    order = ("none", "printed", "code")
    some = figures.line_styles({"": {"code": ([], []), "other": ([], [])}}, order)
    others = figures.line_styles({"a": {"none": ([], [])}, "b": {"code": ([], [])}}, order)
    assert some["code"] == others["code"] == figures.SERIES[2]
    assert list(some) == ["code", "other"] and some["other"] == figures.SERIES[3]
    assert figures.line_styles({"": {"code": ([], [])}})["code"] == figures.SERIES[0]


def test_two_ticks_too_close_for_two_labels_share_one():
    """Chapter 7's accuracy over ε, and a grid of bounds that has room for all of its labels."""
    for x, labels in (((0.8, 12.8, 16.8), ["0.8", "12.8", ""]),
                      ((1, 2, 4, 8), ["1", "2", "4", "8"])):  # fmt: skip
        drawn = figures.curves({"a": (x, [0.0] * len(x))}, "x", "y", xscale="log")
        axes = drawn.axes[0]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == labels
        assert list(axes.get_xticks()) == list(x)
