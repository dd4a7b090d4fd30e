"""What commands print is the text itself: no brackets or colons of labels and files are taken for markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from deepmrf.cli.console import say, table, warn

HOSTILE = ("runs/[old]/data", "[/b]", "a [link=x]b", ":cat:.jpg", "[red]")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200, highlight=False)


@pytest.mark.parametrize("text", HOSTILE)
def test_titles_headings_and_cells_are_text(console, text):
    console.print(table((text, f"two {text}"), [(text, Text(text))], f"title {text}"))
    title, headings, row = (line.split() for line in console.file.getvalue().splitlines())
    words = text.split()
    assert (title, headings, row) == (["title", *words], [*words, "two", *words], [*words, *words])


def test_lines_of_titles_and_headings_are_joined(console):
    console.print(table(("a\nb",), [("x",)], "c\nd"))
    assert [line.strip() for line in console.file.getvalue().splitlines()] == ["c?d", "a?b", "x"]


@pytest.mark.parametrize("text", HOSTILE)
def test_sentences_are_text(console, text):
    say(text, console)
    warn([text], console)
    assert console.file.getvalue() == f"{text}\n{text}\n"
