#!/usr/bin/env python3
"""Checks that the modules in `src` import only downwards and without cycles, that none is too long, and that no two
types have the same name. For the program in `proxy/src` and the cluster in `cluster/src`, checks that no modules import
each other in cycles, that none is too long, and that the modules directly in their `src`, including their submodules,
import only downwards.

    tests/layers/check.py          fails, naming every arrow that is wrong
    tests/layers/check.py --list   prints every arrow

An arrow points from the module that has the `use` (or a path in its code) to the module that defines the name.
Re-exports of children are followed. Tests, and code under `cfg(test)` or `cfg(fuzzing)`, are ignored. The layers are
listed in the crate's ARCHITECTURE.md, in the block that begins with the line `lib`, or with `bin` for the program and
`builder` for the cluster. Each line names a layer's modules, and a module may only import from lines below its own.
Modules in the same line do not import each other. An alias may have the name of the type it stands for.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
# The workspace's other crates, and the first lines of their blocks.
OTHERS = {ROOT / "proxy/src": "bin", ROOT / "cluster/src": "builder"}
LEFT_OUT = {"tests", "model", "fuzzing", "manual"}
MOST_LINES = 450


def main():
    modules, arrows = read(SRC)
    if "--list" in sys.argv:
        for source, target in sorted(arrows):
            print(f"{text(source)} > {text(target)}")
        return 0
    wrong = [f"circle: {circle}" for circle in circles(arrows)]
    wrong += upwards(arrows, layers(ROOT, "lib"))
    wrong += names(modules)
    wrong += long(modules)
    for root, first in OTHERS.items():
        modules, arrows = read(root)
        wrong += [f"circle: {circle}" for circle in circles(arrows)]
        wrong += upwards(between(arrows), layers(root.parent, first))
        wrong += long(modules)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def between(arrows):
    """Returns the arrows between the modules directly in `src`."""
    return {(source[:1], target[:1]) for source, target in arrows if source[:1] != target[:1]}


def read(root):
    """Returns a crate's modules and the arrows between them."""
    modules = {module_of(path, root): Source(path) for path in sorted(root.rglob("*.rs"))}
    modules = {name: source for name, source in modules.items() if not LEFT_OUT & set(name)}
    arrows = set()
    for name, source in modules.items():
        for path in source.paths:
            target = resolve(modules, name, path)
            if target is not None and target != name and target in modules:
                arrows.add((name, target))
    return modules, arrows


def module_of(path, root):
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] in ("mod", "lib"):
        parts.pop()
    return tuple(parts)


def text(module):
    return "::".join(module) or "lib"


class Source:
    """One file's imports, re-exports and definitions."""

    def __init__(self, path):
        text = path.read_text()
        code = without_tests(strip(text))
        self.lines = without_tests(text).count("\n")
        self.types = set(re.findall(r"^(?:pub(?:\([^)]*\))? )?(?:struct|enum|trait|union) (\w+)", code, re.M))
        aliases = re.findall(r"^(?:pub(?:\([^)]*\))? )?type (\w+)(?:<[^=]*>)? =([^;]*);", code, re.M)
        self.types |= {name for name, of in aliases if not re.search(rf"\b{name}\b", of)}
        self.exports = {}
        self.paths = []
        for visible, tree in re.findall(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", code):
            for path_, name in flatten(tree):
                if visible:
                    self.exports[name] = path_
                else:
                    self.paths.append(path_)
        body = re.sub(r"\buse\s+[^;]+;", "", code)
        for found in re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", body):
            self.paths.append(tuple(found.split("::")))


def strip(code):
    """Removes comments and the text in string literals."""
    code = re.sub(r"//[^\n]*", "", code)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', code)


def without_tests(code):
    """Removes items under `cfg(test)` or `cfg(fuzzing)`."""
    kept, rest = [], code
    pattern = re.compile(r"#\[cfg\((?:test|fuzzing|doctest|all\(test[^\n]*)\)\]")
    while found := pattern.search(rest):
        kept.append(rest[: found.start()])
        rest = rest[end_of_item(rest, found.end()) :]
    return "".join(kept) + rest


def end_of_item(code, start):
    """Returns the position after the item that begins at `start`, which ends with its `;` or its block."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        is_block = code[at] == "}" and not code[start:at].lstrip().startswith(("use", "pub use", "pub(crate) use"))
        if depth == 0 and (code[at] == ";" or is_block):
            return at + 1
    return len(code)


def flatten(tree):
    """Returns the paths in a use tree, each with its imported name."""
    tree = " ".join(tree.split())
    found = re.match(r"^(.*?)\{(.*)\}$", tree)
    if not found:
        path, _, alias = tree.partition(" as ")
        parts = tuple(part for part in path.strip().split("::") if part)
        if parts and parts[-1] == "self":
            parts = parts[:-1]
        return [(parts, alias.strip() or (parts[-1] if parts else ""))]
    prefix, inner = found.groups()
    head = tuple(part for part in prefix.split("::") if part.strip())
    flat = []
    for branch in split(inner):
        for path, name in flatten(branch):
            flat.append((head + path, name if path else head[-1]))
    return flat


def split(inner):
    depth, start = 0, 0
    for at, char in enumerate(inner):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            yield inner[start:at].strip()
            start = at + 1
    if inner[start:].strip():
        yield inner[start:].strip()


def resolve(modules, here, path, depth=0):
    """Returns the module that defines a path's target, or `None` if that is in another crate or too deep in
    re-exports."""
    if not path or depth > 8:
        return None
    first, rest = path[0], path[1:]
    if first == "crate":
        at = ()
    elif first == "self":
        at = here
    elif first == "super":
        at = here[:-1]
        while rest and rest[0] == "super":
            at, rest = at[:-1], rest[1:]
    elif here + (first,) in modules:
        at, rest = here + (first,), rest
    else:
        return None
    while rest and at + (rest[0],) in modules:
        at, rest = at + (rest[0],), rest[1:]
    if rest and at in modules and rest[0] in modules[at].exports:
        found = resolve(modules, at, modules[at].exports[rest[0]], depth + 1)
        return found if found is not None else at
    return at


def long(modules):
    """Yields the modules that are too long, as text."""
    for module, source in sorted(modules.items()):
        if source.lines > MOST_LINES:
            yield f"long: {text(module)} has {source.lines} lines without its tests, {MOST_LINES} at most"


def names(modules):
    """Yields the types that have the same name, as text."""
    places = {}
    for module, source in sorted(modules.items()):
        for name in source.types:
            places.setdefault(name, []).append(text(module))
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"name: {name} is a type of {' and of '.join(found)}"


def circles(arrows):
    """Yields each cycle once, as text: the strongly connected components of the graph."""
    graph = {}
    for source, target in arrows:
        graph.setdefault(source, set()).add(target)
        graph.setdefault(target, set())

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for target in graph[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        return seen

    reach = {module: reached(module) for module in graph}
    reported = set()
    for module in sorted(graph):
        if module in reach[module] and module not in reported:
            part = {other for other in reach[module] if module in reach[other]}
            reported |= part
            inside = sorted((a, b) for a, b in arrows if a in part and b in part)
            yield "; ".join(f"{text(a)} > {text(b)}" for a, b in inside)


def layers(crate, first):
    """Returns each module's level, from the block in the crate's ARCHITECTURE.md that begins with this line."""
    page = (crate / "ARCHITECTURE.md").read_text()
    block = re.search(rf"^```\n({first}\b.*?)^```", page, re.M | re.S)
    if not block:
        raise SystemExit(f"{crate / 'ARCHITECTURE.md'} has no block of layers that begins with `{first}`")
    level = {}
    lines = [line for line in block.group(1).splitlines() if line.strip()]
    for height, line in enumerate(reversed(lines)):
        for name in re.findall(r"[\w:]+", line):
            level[tuple(name.split("::")) if name != "lib" else ()] = height
    return level


def upwards(arrows, level):
    """Yields the arrows that do not point to a lower layer, and the modules without a layer, as text."""
    def place(module):
        """Returns the module, or its closest parent that has a layer."""
        for length in range(len(module), 0, -1):
            if module[:length] in level:
                return module[:length]
        return () if not module else None

    for source, target in sorted(arrows):
        a, b = place(source), place(target)
        if a is None or b is None:
            yield f"no layer: {text(source if a is None else target)}"
        elif a != b and level[b] >= level[a]:
            yield f"upwards: {text(source)} > {text(target)}"


if __name__ == "__main__":
    sys.exit(main())
