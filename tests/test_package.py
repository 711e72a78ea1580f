"""What is said of the package beside its code: its citation, its pages and their links."""

import re
import tomllib
from pathlib import Path
from pydoc import locate

import pytest
import yaml

import rollalloc

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("dev/*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("lab/**/*.md"),
        *ROOT.glob("recipes/**/*.md"),
    ]
]


def test_the_citation_says_of_the_package_what_the_package_says():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == rollalloc.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == PROJECT["keywords"]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as GitHub writes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name):
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.is_file(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name} links to {target}"


@pytest.mark.parametrize("name", PAGES)
def test_a_list_after_a_paragraph_begins_after_an_empty_line(name):
    """GitHub shows such a list without one, the site shows a paragraph."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text("utf-8"), flags=re.DOTALL)
    paragraphs = [block for block in text.split("\n\n") if re.match(r"[\w*\[`]", block)]
    assert [block for block in paragraphs if re.search(r"^- ", block, re.MULTILINE)] == []


@pytest.mark.parametrize("name", [page for page in PAGES if page.startswith("docs/")])
def test_the_readme_leads_to_every_guide(name):
    assert f"({name})" in (ROOT / "README.md").read_text("utf-8")


def test_what_papers_md_names_is_there():
    """Names such as `recipes.grpo` or `core.lengths`, which begin with a package of ours."""
    packages = {path.parent.name for path in Path(rollalloc.__file__).parent.glob("*/__init__.py")}
    names = re.findall(r"`(\w+)((?:\.\w+)+)`", (ROOT / "PAPERS.md").read_text("utf-8"))
    ours = {f"rollalloc.{package}{rest}" for package, rest in names if package in packages}
    assert len(ours) > 20
    assert {name for name in ours if locate(name) is None} == set()


@pytest.mark.parametrize("extra", sorted(set(PROJECT["optional-dependencies"]) - {"dev", "docs"}))
def test_the_install_page_names_every_extra(extra):
    install = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert f"`{extra}`" in install or f"[{extra}]" in install
