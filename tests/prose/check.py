#!/usr/bin/env python3
"""Checks that documentation and comments name their actors, and that machines in them neither speak nor walk.

    tests/prose/check.py          fails if a page, or the Rust comments in a folder, have more of WORDS than they may
    tests/prose/check.py --list   prints every line that has one of them

Code, names in backticks and links do not count. The numbers in ALLOWED may fall and must not rise.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WORDS = re.compile(
    r"\b(nobody|somebody|anybody|whoever|told|tells|says|say|said|hears|heard|comes|come|goes|gone|leaves"
    r"|so many|so long|as much as|as many as)\b",
    re.IGNORECASE,
)

# How many of them a page, or the comments in the Rust files below a folder, may have.
ALLOWED = {
    "README.md": 0,
    "SECURITY.md": 1,
    "ARCHITECTURE.md": 2,
    "cluster/ARCHITECTURE.md": 0,
    "proxy/ARCHITECTURE.md": 0,
    "CONTRIBUTING.md": 1,
    "CHANGELOG.md": 0,
    "RELEASING.md": 0,
    "src/manual/defaults.md": 2,
    "src/manual/deploying.md": 2,
    "src/manual/disconnect.md": 2,
    "src/manual/operating.md": 1,
    "src/manual/several_servers.md": 0,
    "proxy/README.md": 1,
    "cluster/README.md": 0,
    "examples/README.md": 0,
    "benches/README.md": 0,
    "tests/README.md": 0,
    "deploy/README.md": 0,
    "packaging/README.md": 0,
    "packaging/npm/README.md": 0,
    "packaging/pypi/README.md": 0,
    "src": 16,
    "socket": 0,
    "proxy/src": 4,
    "cluster/src": 2,
    "tests": 1,
    "proxy/tests": 0,
    "cluster/tests": 0,
    "examples": 0,
    "benches": 0,
    "fuzz": 0,
}
NOT_OURS = {"target", "node_modules"}


def main():
    wrong = False
    for place, allowed in ALLOWED.items():
        found = list(lines(ROOT / place))
        count = sum(len(WORDS.findall(text)) for _, _, text in found)
        too_many = count > allowed
        wrong |= too_many
        if too_many:
            print(f"{place}: {count} of the words of tests/prose/check.py, and may have {allowed}")
        if "--list" in sys.argv or (too_many and place.endswith(".md")):
            for path, number, text in found:
                print(f"{path.relative_to(ROOT)}:{number}: {text.strip()}")
    return 1 if wrong else 0


def lines(place):
    """Yields the lines below `place` that have one of the words: path, number and text, leaving out what does not
    count."""
    for path in [place] if place.is_file() else sorted(place.rglob("*.rs")):
        if NOT_OURS & set(path.parts):
            continue
        read = page if path.suffix == ".md" else comments
        for number, text in read(path.read_text()):
            text = re.sub(r"`[^`]*`|\]\([^)]*\)|\]\[[^\]]*\]", "", text)
            if WORDS.search(text):
                yield path, number, text


def page(text):
    """Yields a page's lines that are not code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code:
            yield number, line


def comments(text):
    """Yields the comments in a Rust file that begin with `//`, with their line numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"(?:^|\s)//[/!]?\s(.*)", line)
        if found:
            yield number, found[1]


if __name__ == "__main__":
    sys.exit(main())
