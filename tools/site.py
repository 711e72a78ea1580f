# pyright: reportMissingImports=false
"""Which pages the site has: a hook of MkDocs.

The site keeps the repository's folders, so that a link between two pages leads to the same place there as in a clone:
README.md is its front page, docs/ the guides, and api/ has a page for each public module, made of its docstrings. What is
in docs/ is in the site, in the order in which the README names it.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollalloc"
API = (
    "recipes", "core", "rules", "predict", "testing", "data", "rewards", "runs", "models", "generate", "train", "drivers",
    "lab", "files", "processes",
)  # fmt: skip
INTERNAL = {"cli"}  # packages that nobody imports
PROJECT = ("CONTRIBUTING.md", "PAPERS.md", "CHANGELOG.md", "dev/LOG.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: every page there is."""
    packages = {found.parent.name for found in PACKAGE.glob("*/__init__.py")} - INTERNAL
    if missing := packages - set(API):
        raise PluginError(f"tools/site.py: add {', '.join(sorted(missing))} to API, or to INTERNAL")
    config.nav = [
        {"Home": "README.md"},
        {"Guides": [*guides(), "recipes/verl/README.md"]},
        {"Reference": [{f"rollalloc.{name}": f"api/{name}.md"} for name in API]},
        {"Project": list(PROJECT)},
    ]
    return config


def guides() -> list[str]:
    """The pages of docs/, as the README names them; those that it does not name come last."""
    readme = (ROOT / "README.md").read_text("utf-8")
    found = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
    return sorted(found, key=lambda page: readme.find(f"({page})") % (len(readme) + 1))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's own files, and ours under the paths that they have in the repository."""
    theme = [each for each in files if each.src_dir != config.docs_dir]
    images = [f"docs/{image.name}" for image in (ROOT / "docs").glob("*.png")]
    paths = ["README.md", *guides(), *images, "recipes/verl/README.md", *PROJECT, "CITATION.cff"]
    ours = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    api = [File.generated(config, f"api/{name}.md", content=f"::: rollalloc.{name}\n") for name in API]
    return Files([*theme, *ours, *api])
