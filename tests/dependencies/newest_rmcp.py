#!/usr/bin/env python3
"""Whether all methods of rmcp's traits that the crate wraps are handed on, in the newest rmcp that users may get.

    tests/dependencies/newest_rmcp.py [SOURCE]

A method that a new version adds has a default body: a wrapper without it compiles, and turns a feature off. Cargo.lock
hides new versions, so cargo resolves `rmcp = "3"` anew in a crate of its own. SOURCE is a folder with another rmcp.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Each trait, and where the crate implements it for what others pass in.
WRAPPED = {
    "ServerHandler": ("src/mcp/abort/forward.rs", "AbortOnCancel"),
    "SessionManager": ("src/mcp/session_manager.rs", "CancellableSessionManager"),
    "EventStore": ("src/mcp/event_ids.rs", "Sessionless"),
    "Transport": ("src/mcp/transport.rs", "CancellableTransport"),
}
MANIFEST = """
[package]
name = "newest"
version = "0.0.0"
edition = "2024"

[lib]
path = "lib.rs"

[dependencies]
rmcp = { version = "3", default-features = false }
"""


def newest():
    """Version and folder of the newest rmcp."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "Cargo.toml").write_text(MANIFEST)
        Path(folder, "lib.rs").touch()
        run = ["cargo", "metadata", "--quiet", "--format-version=1"]
        # Also one that needs a newer compiler: somebody has it.
        env = os.environ | {"CARGO_RESOLVER_INCOMPATIBLE_RUST_VERSIONS": "allow"}
        metadata = json.loads(subprocess.run(run, cwd=folder, env=env, check=True, stdout=subprocess.PIPE).stdout)
    [rmcp] = [package for package in metadata["packages"] if package["name"] == "rmcp"]
    return rmcp["version"], Path(rmcp["manifest_path"]).parent


def text_of(file):
    """A source file without its comments."""
    lines = file.read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))


def block(text, start):
    """What is between the braces that open next after this pattern. `None` without it."""
    found = re.search(start + r"[^{;]*\{", text)
    if not found:
        return None
    depth, end = 1, found.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[found.end() : end - 1]


def functions(block):
    """The functions of a block, but not those inside of them."""
    names, depth = {}, 0
    for token in re.finditer(r"[{}]|\bfn\s+(\w+)", block):
        if token[1]:
            names.setdefault(depth, set()).add(token[1])
        depth += {"{": 1, "}": -1}.get(token[0], 0)
    return names[min(names)] if names else set()


def of_trait(source, trait):
    """The methods of a trait, those that a macro makes as well."""
    for file in sorted(source.rglob("*.rs")):
        text = text_of(file)
        found = block(text, rf"\bpub trait {trait}\b")
        if found is not None:
            made = [functions(block(text, rf"macro_rules! {name}\b")) for name in re.findall(r"\b(\w+)!\(\);", found)]
            return functions(found).union(*made)
    raise SystemExit(f"{source}: no trait {trait}")


def handed_on(trait, file, wrapper):
    """The methods in an implementation. In its macros there is one an entry, before the first parenthesis."""
    found = block(text_of(ROOT / file), rf"\bimpl\b.*\b{trait}\b.* for {wrapper}\b")
    if found is None:
        raise SystemExit(f"{file}: no {trait} for {wrapper}")
    names = functions(found)
    for name in re.findall(r"\b(\w+)! \{", found):
        for entry in block(found, rf"\b{name}! ").split(";"):
            names.update(re.findall(r"^[^(]*?(\w+)\s*\(", entry)[:1])
    return names


def main():
    version, folder = ("given", Path(sys.argv[1])) if sys.argv[1:] else newest()
    said, missing = [], []
    for trait, (file, wrapper) in WRAPPED.items():
        methods = of_trait(folder / "src", trait)
        said.append(f"{trait} {len(methods)}")
        missing += [f"{file}: {wrapper} does not hand on `{name}`" for name in sorted(methods - handed_on(trait, file, wrapper))]
    print(f"rmcp {version}: {', '.join(said)} methods")
    for fault in missing:
        print(fault, file=sys.stderr)
    sys.exit(bool(missing))


main()
