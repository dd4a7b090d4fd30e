"""The site is complete: navigation, links, anchors and pictures, and the names on its API pages. Needs no MkDocs."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WRITE_PAGES = runpy.run_path(str(ROOT / "docs" / "site.py"))["write_pages"]
IDENTIFIERS = [
    name for page in (ROOT / "docs" / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
]


def nav_pages(entries):
    """The pages of a nav, in order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else nav_pages(value)


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(page):
    """The anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The folder that MkDocs reads."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    WRITE_PAGES(folder)
    return folder


def test_every_page_is_in_the_navigation(pages):
    listed = list(nav_pages(CONFIG["nav"]))
    assert sorted(listed) == sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))


def test_every_link_of_the_site_leads_somewhere(pages):
    count = 0
    for page in pages.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.is_file(), f"{page.name}: {target}"
            assert pages in file.resolve().parents, f"{page.name}: {target} is not part of the site"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"
            count += 1
    assert count > 50


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_every_name_of_the_api_exists_and_is_described(identifier):
    module, names = identifier, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        value = getattr(value, name)
    assert value.__doc__


def test_public_names_are_on_the_api_pages():
    import deepmrf

    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in deepmrf.__all__:
        assert re.search(rf"\b{name}\b", text), name


def test_nothing_comes_from_other_hosts(pages):
    """Neither fonts nor scripts nor pictures."""
    assert CONFIG["theme"]["font"] is False
    for name in ("extra_css", "extra_javascript"):
        for file in CONFIG.get(name, []):
            assert (pages / file).is_file(), file
    for page in pages.rglob("*.md"):
        assert not re.findall(r"!\[[^\]]*\]\(\w+://", page.read_text()), page.name
    for drawing in pages.rglob("*.svg"):
        assert set(re.findall(r"(?:href|src|url)\W+(\w+://\S+)", drawing.read_text())) == set(), drawing.name
