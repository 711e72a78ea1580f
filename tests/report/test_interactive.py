"""What plotly.js is given: texts of a figure are text, never HTML."""

import json

import numpy as np

from rollalloc.report.charts import Cells
from rollalloc.report.interactive import _traces


def test_the_texts_of_a_figure_are_escaped():
    hostile = '<img src=x onerror="alert(1)">&'
    cells = Cells(edges=np.array([0.0, 1.0]), values=np.array([[0.5]]), labels=[hostile], name=hostile, most=1.0)
    drawn = json.dumps(_traces(cells))
    assert "<img" not in drawn
    assert drawn.count("&lt;img") == 2
