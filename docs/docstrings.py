"""Show the package's docstrings well on the site: an extension of griffe, which reads them for mkdocstrings.

In the source, "window: pixels along each axis. gate: the factor q." is one paragraph, which is short to read and to
write. On a page it becomes a list, one item per parameter. Tables of names ("distance    b12 with ...") and the titles
of equations keep their lines.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Docstring, Extension, Function, Module


class Parameters(Extension):
    """Turn paragraphs of parameters into lists, and tables of names into blocks."""

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        if func.docstring:
            _as_list(func.docstring, [parameter.name for parameter in func.parameters])

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        if cls.docstring and isinstance(init, Function):
            _as_list(cls.docstring, [parameter.name for parameter in init.parameters])

    def on_module_members(self, *, mod: Module, **_: Any) -> None:
        if mod.docstring:
            mod.docstring.value = re.sub(r"^(?=[\w.]+ {2,}\S)", "    ", mod.docstring.value, flags=re.M)


def _as_list(docstring: Docstring, names: list[str]) -> None:
    if not names:
        return
    name = "|".join(map(re.escape, names))
    start = re.compile(rf"(?:^|(?<=[.;)] )|(?<=\n))((?:{name})(?:, (?:{name}))*): ", re.M)
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", docstring.value):
        first = start.search(paragraph)
        if first is None or paragraph.startswith("    "):
            paragraphs.append(paragraph)
            continue
        text = paragraph[first.start() :].replace("\n", " ")
        items = start.sub(lambda match: f"\n- **{match[1]}**: ", text).strip()
        paragraphs += [part for part in (paragraph[: first.start()].strip(), items) if part]
    docstring.value = "\n\n".join(paragraphs)
