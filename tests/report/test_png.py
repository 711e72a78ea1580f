"""Tests of the figures that are drawn as PNG."""

from matplotlib.text import Text

from rollalloc.report.charts import Chart, Line, Panel
from rollalloc.report.png import _drawn
from rollalloc.report.style import INK


def test_the_target_is_named_in_the_legend_where_no_curve_passes():
    line = Line("grpo", INK, [0, 500], [0.3, 0.6])
    figure = _drawn(Chart("accuracy", "", "", [Panel("rollouts", "accuracy", [line], level=(0.55, "target 0.55"))]))
    [legend], [axes] = figure.legends, figure.axes
    assert [text.get_text() for text in legend.get_texts()] == ["grpo", "target 0.55"]
    assert not [child for child in axes.get_children() if isinstance(child, Text) and child.get_text()]
    assert axes.lines[-1].get_ydata() == [0.55, 0.55]
