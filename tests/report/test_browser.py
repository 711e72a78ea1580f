"""The page in a real browser: it renders, asks for nothing, and what a model wrote stays text. Needs Chromium."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rollalloc.report.page import Page, sections, write_page, write_sections
from rollalloc.runs.discovery import comparisons

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

DRAWN = "html[data-ready]:not(:has(figure:not([data-drawn])))"

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
    """(address, dark?, width) → an opened page, with its figures drawn unless `drawn` is false, and what it did wrong."""
    contexts = []

    def opened(address, *, dark=False, width=1200, drawn=True):
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
        )
        contexts.append(context)
        page, wrong = context.new_page(), []
        page.on(
            "request", lambda request: _is_own(request.url, address) or wrong.append(f"request {request.url[:200]}")
        )
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        page.goto(address)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=300_000)
        if drawn:
            page.wait_for_selector(DRAWN, state="attached", timeout=300_000)
        return page, wrong

    yield opened
    for context in contexts:
        context.close()


def _is_own(url, address):
    return url == address or url.startswith("data:,")


@pytest.fixture(scope="module")
def report(run_into, rollouts_into, tmp_path_factory):
    """The address of a report on two methods with hostile labels, reasons, prompts and completions."""
    compare = tmp_path_factory.mktemp("compare")
    for seed in range(2):
        run_into(compare / f"grpo-{seed}", "grpo", seed, unscored=dict.fromkeys(HOSTILE, 1))
        run_into(compare / f"ours-{seed}", f"ours {HOSTILE[1]}", seed, speed=1.2)
    rollouts_into(compare / "grpo-0", 16, HOSTILE)
    return write_page(compare).as_uri()


def test_hostile_text_is_text_and_nothing_is_asked_for(visit, report):
    page, wrong = visit(report)
    for _ in range(2):
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.wait_for_selector(".rollout pre", state="attached")
        page.get_by_role("button", name="Next").click()
    assert wrong == []
    assert page.locator("img, iframe, object, embed, link:not([href='data:,'])").count() == 0
    assert page.locator("main script, main style, .rollout pre *, svg a").count() == 0
    assert page.locator("script").count() == 4  # the data, the library as data and as a script, and the page's own
    assert page.title().startswith("What the rollouts bought")
    assert page.locator(".notes").get_by_text("<script>document.title = 'owned'; alert(1)</script>").count() > 0
    assert page.get_by_text("⟨U+202E⟩").count() > 0
    assert "ours </pre></article><s…" in page.locator(".legendtext").all_text_contents()


def test_completions_of_hostile_models_are_shown_as_they_are(visit, report):
    page, wrong = visit(report)
    search = page.get_by_role("searchbox")
    search.fill("<script>document.title")
    page.locator("details.rollout summary").first.click()
    completion = page.locator(".rollout pre").last.text_content()
    assert completion == HOSTILE[0]
    assert page.locator(".rollout mark").first.text_content() == "<script>document.title"
    search.fill("characters …]")
    page.locator("details.rollout summary").first.click()
    assert "[… 996,000 characters …]" in page.locator(".rollout pre").last.text_content()
    assert wrong == []


def test_rollouts_are_found_by_text_result_and_what_became_of_them(visit, report):
    page, _ = visit(report)
    count = page.locator(".count")
    assert count.text_content() == "1 to 20 of 64 of the 64 rollouts on this page"
    page.locator("select[name=became]").select_option("left out: all alike")
    assert count.text_content().endswith("of 16 of the 64 rollouts on this page")
    page.locator("select[name=became]").select_option("stopped early")
    page.locator("select[name=outcome]").select_option("no score")
    assert count.text_content().endswith("of 4 of the 64 rollouts on this page")
    page.locator("select[name=outcome]").select_option("right")
    assert count.text_content() == "0 of the 64 rollouts on this page"
    page.locator("select[name=outcome]").select_option("")
    page.locator("select[name=became]").select_option("")
    page.get_by_role("searchbox").fill("what is 7?")
    assert count.text_content() == "1 to 4 of 4 of the 64 rollouts on this page"


def test_values_of_a_figure_are_read_by_keyboard_by_table_and_as_csv(visit, report):
    page, _ = visit(report)
    figure = page.locator("figure[data-chart='accuracy']")
    figure.locator(".plot").focus()
    page.keyboard.press("ArrowRight")
    assert figure.locator(".said").text_content().startswith("At 0: grpo 0.1")
    figure.get_by_text("Values").click()
    first = figure.locator(".values tr").nth(1).locator("td").all_text_contents()
    with page.expect_download() as downloaded:
        figure.get_by_role("button", name="Save as CSV").click()
    saved = Path(downloaded.value.path()).read_text()
    beside = Path(report.removeprefix("file://")).with_name("accuracy.csv").read_text()
    assert saved == beside
    assert list(csv.reader(saved.splitlines()))[1][1:] == first


def test_a_page_that_follows_a_run_reloads_itself_but_not_under_a_reader(visit, run_into, rollouts_into, tmp_path):
    folder = rollouts_into(run_into(tmp_path / "run", "grpo", 0, why=None), 8)
    page_file = tmp_path / "page.html"
    drawn = sections(comparisons(folder), folder)
    write_sections(drawn, page_file, Page([folder], follow_s=2), figures_too=False)
    page, wrong = visit(page_file.as_uri(), drawn=False)
    page.get_by_role("searchbox").fill("it is")
    write_sections(drawn, page_file, Page([folder]), figures_too=False)
    page.wait_for_timeout(4000)
    assert page.locator(".following").count() == 1
    page.locator("h1").click()  # the reader has left the search
    page.wait_for_selector("html[data-ready]:not(:has(.following))", state="attached")
    assert page.get_by_role("searchbox").input_value() == "it is"
    assert wrong == []


def test_figures_outside_of_the_window_are_drawn_without_scrolling(visit, report):
    page, wrong = visit(report)  # waits until every figure is drawn
    assert page.evaluate("scrollY") == 0
    below = page.locator("figure[data-chart]").last
    assert below.bounding_box()["y"] > 1600  # two windows further down
    assert below.locator(".plot svg .xtick text").count() > 1
    assert wrong == []


def test_a_page_that_is_printed_at_once_has_its_figures_in_the_light_theme(visit, report):
    page, wrong = visit(report, dark=True, drawn=False)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("figure[data-chart]:not([data-drawn])").count() == 0
    assert page.locator("figure .plot").evaluate_all("all => all.every((each) => each.querySelector('svg'))")
    page.emulate_media(media="print", color_scheme="dark")
    letters = page.locator("figure .xtick text").first.element_handle()
    assert page.evaluate(CONTRAST, [letters, "fill"]) >= 4.5
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert wrong == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_are_legible(visit, report, dark):
    page, _ = visit(report, dark=dark)
    for selector, attribute, least in (
        ("h1", "color", 7),
        (".findings li", "color", 7),
        ("figcaption", "color", 4.5),
        ("thead th", "color", 4.5),
        (".rollout .facts", "color", 4.5),
        (".rollout .outcome", "color", 7),
        ("figure .xtick text", "fill", 4.5),
        ("figure .legendtext", "fill", 4.5),
        ("figure[data-chart=accuracy] .js-line >> nth=-1", "stroke", 3),
    ):
        element = page.locator(selector).first.element_handle()
        assert page.evaluate(CONTRAST, [element, attribute]) >= least, selector


CUT = """() => [...document.querySelectorAll('table.costs, table.costs *, table.equal, table.equal *, .plot svg, .runs *')]
    .filter((each) => each.getBoundingClientRect().right > innerWidth || each.scrollWidth > each.clientWidth + 1
        && each.clientWidth && getComputedStyle(each).display !== 'inline')
    .map((each) => `${each.tagName} ${each.textContent.slice(0, 40)}`)"""


@pytest.mark.parametrize("width", [400, 700, 1300])
def test_nothing_is_cut_and_the_page_never_scrolls_sideways(visit, report, width):
    page, _ = visit(report, width=width)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    letters = page.locator("figure .xtick text").evaluate_all(
        "texts => texts.map((text) => parseFloat(getComputedStyle(text).fontSize))"
    )
    assert min(letters) >= 9.5  # CSS pixels


def test_intervals_of_five_seeds_fit_a_telephone(visit, run_into, tmp_path):
    for seed in range(5):
        for label in ("grpo", "a longer label"):
            run_into(tmp_path / f"{label}-{seed}", label, seed, batches=10)
    drawn = sections(comparisons(tmp_path), tmp_path)
    written = write_sections(drawn, tmp_path / "page.html", Page([tmp_path]), figures_too=False)
    page, _ = visit(written.as_uri(), width=400, drawn=False)
    assert page.locator("table.equal small").count() > 10
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(CUT) == []
