"""Reads the project's pages: fenced blocks, command lines, links."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"^ *(?:[A-Z_]+=\S+ )*(unisono (?:run|bench|draw|demo|doctor|calibrate|simulate|network|plan)(?= |$).*)$",
    re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block: its language, the number of lines before its first one, its text."""

    language: str
    line: int
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in FENCE.finditer(page):
        yield Block(found[1], page.count("\n", 0, found.start(2)), found[2])


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command of ours on a line of its own, without "..."."""
    for found in COMMAND.finditer(page):
        words = shlex.split(found[1], comments=True)
        yield [word for word in words if word != "..."]


def links(page: str) -> Iterator[tuple[str, str]]:
    """(path, anchor) of every link within the project."""
    for target in LINK.findall(page):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: str) -> set[str]:
    """The anchors of its headings."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
