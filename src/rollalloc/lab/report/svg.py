"""Figures as inline SVG that use the page's colours, so that one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from rollalloc.lab.report.figures import look
from rollalloc.lab.report.style import COLOURS

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_VARIABLES: Mapping[str, str] = {colour.light: f"var(--{colour.name})" for colour in COLOURS}
_HEX = re.compile(r"#[0-9a-f]{6}\b")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: drawn under `look`.
        name: distinct for each figure on a page, so that ids of clip paths do not collide.
        description: for screen readers.
    """
    drawn = io.BytesIO()
    with look(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(drawn.getvalue())
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    used = set(re.findall(rb"#(\w+)[\")]", drawn.getvalue()))
    for element in root.iter():
        if (element_id := element.get("id")) and element_id.encode() not in used:
            del element.attrib["id"]
        if style := element.get("style"):
            element.set("style", _HEX.sub(lambda match: _VARIABLES.get(match[0], match[0]), style))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", description)
    return ElementTree.tostring(root, encoding="unicode")
