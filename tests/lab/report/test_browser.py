"""The page in a real browser: it renders, asks for nothing, and what a model wrote stays text. Needs Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollalloc.lab.report.page import write_page

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = (
    "<script>document.title = 'owned'; alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>",
    "</pre></article><style>body { display: none }</style><iframe src='https://example.org'></iframe>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; ]]> --> <!--",
    "\u202e\u2067right to left\u2066 \u200b\u0000\u001b[31m",
    "שלום " * 20,
    "x" * 1_000_000,
    "Z͑ͫ̓ͪ̂ͫ̽͏" * 40,
)

# The contrast of WCAG 2 between an element's colour and the page's ground; `stroke` for a line.
CONTRAST = """([element, property]) => {
  const light = (colour) => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = light(getComputedStyle(element)[property]);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(found, ground) + 0.05) / (Math.min(found, ground) + 0.05);
}"""


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """(address, dark?, width) → an opened page, and what it did that it must not."""
    contexts = []

    def opened(address, *, dark=False, width=1200):
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
        )
        contexts.append(context)
        page, wrong = context.new_page(), []
        page.on("request", lambda request: request.url == address or wrong.append(f"request of {request.url[:200]}"))
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        page.goto(address)
        page.wait_for_timeout(200)
        return page, wrong

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def report(run_into, tmp_path_factory):
    """The address of a report on two methods with hostile labels and reasons."""
    compare = tmp_path_factory.mktemp("compare")
    for seed in range(2):
        run_into(compare / f"grpo-{seed}", "grpo", seed, unscored=dict.fromkeys(HOSTILE, 1))
        run_into(compare / f"ours-{seed}", f"ours {HOSTILE[1]}", seed, speed=1.2)
    return write_page(compare).as_uri()


def test_hostile_text_is_text_and_nothing_is_asked_for(visit, report):
    page, wrong = visit(report)
    assert wrong == []
    assert page.locator("script, img, iframe, object, embed, link:not([href='data:,'])").count() == 0
    assert page.locator("style").count() == 1
    assert page.title().startswith("What the rollouts bought")
    assert page.get_by_text("<script>document.title = 'owned'; alert(1)</script>").count() > 0
    assert page.get_by_text("⟨U+202E⟩").count() > 0
    assert len(page.content()) < 1_500_000


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_are_legible(visit, report, dark):
    page, _ = visit(report, dark=dark)
    for selector, attribute, least in (
        ("h1", "color", 7),
        (".findings li", "color", 7),
        ("figcaption", "color", 4.5),
        ("thead th", "color", 4.5),
        ("figure svg text", "fill", 4.5),
        ("figure svg g path[style*='stroke: var(--ink)']", "stroke", 3),
        ("figure svg g path[style*='stroke: var(--blue)']", "stroke", 3),
    ):
        element = page.locator(selector).first.element_handle()
        assert page.evaluate(CONTRAST, [element, attribute]) >= least, selector


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_the_page_never_scrolls_sideways(visit, report, width):
    page, _ = visit(report, width=width)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figure = page.locator("figure svg").first.bounding_box()
    assert figure["width"] > 0.7 * min(width, 500)
    assert figure["x"] + figure["width"] <= width


def test_figures_letters_can_be_read_on_a_phone(visit, report):
    page, _ = visit(report, width=375)
    heights = page.locator("figure svg text").evaluate_all(
        """texts => texts.map((text) => {
            const { a, b } = text.getScreenCTM();
            return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b);
        })"""
    )
    assert min(heights) >= 9.5  # CSS pixels
