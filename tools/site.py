# pyright: reportMissingImports=false
"""Which pages the site has: a hook of MkDocs.

The site keeps the repository's folders, so that a link between two pages leads to the same place there as in a clone:
README.md is its front page, docs/ the guides, lab/docs/ the pages of measurements, and api/ has a page for each public
module, made of its docstrings. The menu is the README's list of guides, section by section. The log and the changelog name
everything, so that a search would find them before the guides: they are left out of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE, FOLDERS = ROOT / "src" / "rollalloc", (ROOT / "docs", ROOT / "lab" / "docs")
API = (
    "recipes", "core", "rules", "predict", "testing", "data", "rewards", "runs", "models", "generate", "train", "drivers",
    "tasks", "compare", "waste", "report", "advise", "files", "processes",
)  # fmt: skip
INTERNAL = {"cli"}  # packages that nobody imports
# On a telephone, a cell of the theme's tables has more margin than words.
NARROW = """@media screen and (max-width: 44.9375em) {
  .md-typeset table:not([class]) :is(th, td) { padding: .4em .55em; min-width: 0; }
  .md-typeset table:not([class]) code { word-break: normal; overflow-wrap: anywhere; }
  .md-typeset table:not([class]) { font-size: .62rem; }
}
"""
LINKED = ("examples/trl_sums.py", "examples/unsloth_reinforce.py", "src/rollalloc/core/__init__.py", "CITATION.cff")
LINKED += tuple(f"examples/other_trainers/{file.name}" for file in (ROOT / "examples" / "other_trainers").glob("*.py"))
LOG = ROOT / "lab" / "log"
UNSEARCHED = {"CHANGELOG.md", *(str(page.relative_to(ROOT)) for page in LOG.glob("*.md"))}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: every page there is."""
    packages = {found.parent.name for found in PACKAGE.glob("*/__init__.py")} - INTERNAL
    if missing := packages - set(API):
        raise PluginError(f"tools/site.py: add {', '.join(sorted(missing))} to API, or to INTERNAL")
    sections = guides()
    pages = {str(page.relative_to(ROOT)) for folder in FOLDERS for page in folder.glob("*.md")}
    if unnamed := pages.difference(*sections.values()):
        raise PluginError(f"README's list of guides does not name {', '.join(sorted(unnamed))}")
    config.nav = [
        {"Home": "README.md"},
        *({section: pages} for section, pages in sections.items()),
        {"Log": [*log_pages()]},
        {"API": [{f"rollalloc.{name}": f"api/{name}.md"} for name in API]},
    ]
    config.extra_css = ["narrow.css"]
    return config


def log_pages() -> list[str]:
    """The pages of the log that its index, which README names, links to."""
    return sorted(str(page.relative_to(ROOT)) for page in LOG.glob("*.md") if page.name != "README.md")


def guides() -> dict[str, list[str]]:
    """The sections of the README's list of guides, each with its pages."""
    _, _, listed = (ROOT / "README.md").read_text("utf-8").partition("\n## Guides\n")
    sections = re.findall(r"^- \*\*(.+?)\*\*:(.*)$", listed, re.MULTILINE)
    return {name: re.findall(r"\]\(([^)]+\.md)\)", links) for name, links in sections}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the log and the changelog out of the search."""
    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's own files, and ours under the paths that they have in the repository."""
    theme = [each for each in files if each.src_dir != config.docs_dir]
    images = [str(image.relative_to(ROOT)) for folder in FOLDERS for image in folder.glob("*.png")]
    pages = [page for section in guides().values() for page in section]
    paths = ["README.md", *pages, *log_pages(), *images, *LINKED]
    ours = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    api = [File.generated(config, f"api/{name}.md", content=f"::: rollalloc.{name}\n") for name in API]
    return Files([*theme, *ours, *api, File.generated(config, "narrow.css", content=NARROW)])
