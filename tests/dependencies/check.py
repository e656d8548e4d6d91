#!/usr/bin/env python3
"""Checks all dependencies against deny.toml the way cargo-deny would: licences, bans and sources. Also checks that no
feature adds a dependency that belongs to another feature."""

import collections
import json
import re
import subprocess
import sys
import tomllib


def allowed(expression, allow):
    """Returns `True` if these licences satisfy an SPDX expression. An exception (`WITH`) is part of the name."""
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def either():
        met = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = both() or met
        return met

    def both():
        met = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = one() and met
        return met

    def one():
        name = tokens.pop(0)
        if name == "(":
            met = either()
            tokens.pop(0)
            return met
        if tokens and tokens[0] == "WITH":
            tokens.pop(0)
            name = f"{name} WITH {tokens.pop(0)}"
        return name in allow

    met = either()
    if tokens:
        raise SystemExit(f"not understood: {expression}")
    return met


def published(metadata):
    """Returns the workspace's published members."""
    members = set(metadata["workspace_members"])
    return [package for package in metadata["packages"] if package["id"] in members and package["publish"] != []]


def without_dev(metadata, roots):
    """Returns the ids of these packages and of the dependencies that their users get."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    reached, open_ = set(), [package["id"] for package in roots]
    while open_:
        id = open_.pop()
        if id not in reached:
            reached.add(id)
            for dep in nodes[id]["deps"]:
                if any(kind["kind"] != "dev" for kind in dep["dep_kinds"]):
                    open_.append(dep["pkg"])
    return reached


# The dependencies that users of the library must not get with only these features enabled.
NOT_WITH = {
    "": {"axum", "axum-core", "hyper", "metrics", "rmcp", "serde_derive", "socket2", "watched-socket"},
    "socket": {"axum", "axum-core", "hyper", "rmcp"},
    "axum": {"hyper", "rmcp", "socket2", "watched-socket"},
}


LIBRARY = "mcp-cancel-on-disconnect"


def brought_by(features):
    """Returns the crates that users of the library get with only these features, leaving out build dependencies."""
    run = ["cargo", "tree", "--locked", f"--package={LIBRARY}", "--edges=normal", "--prefix=none", "--format={p}"]
    run += ["--no-default-features", f"--features={features}"]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def main():
    with open("deny.toml", "rb") as file:
        rules = tomllib.load(file)
    run = ["cargo", "metadata", "--format-version=1", "--locked", "--all-features"]
    metadata = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    members = metadata["workspace_members"]
    faults = []
    for package in packages.values():
        what = f"{package['name']} {package['version']}"
        if not package["license"] or not allowed(package["license"], rules["licenses"]["allow"]):
            faults.append(f"{what}: licence {package['license']}")
        registries = [f"registry+{url}" for url in rules["sources"]["allow-registry"]]
        if package["id"] not in members and package["source"] not in registries:
            faults.append(f"{what}: source {package['source']}")
    banned = {rule["crate"]: rule["reason"] for rule in rules["bans"]["deny"]}
    for package in packages.values():
        if package["name"] in banned:
            faults.append(f"{package['name']}: {banned[package['name']]}")
    for dep in (dep for package in published(metadata) for dep in package["dependencies"]):
        # A dependency by path alone is only allowed for tests, because cargo does not package dependencies without a version.
        if dep["req"] == "*" and not (dep.get("path") and dep["kind"] == "dev"):
            faults.append(f"any version of {dep['name']}")
    programs = {rule["crate"] for rule in rules["bans"]["skip-tree"]}
    libraries = [package for package in published(metadata) if package["name"] not in programs]
    versions = collections.defaultdict(set)
    for id in without_dev(metadata, libraries):
        versions[packages[id]["name"]].add(packages[id]["version"])
    skipped = {rule["crate"] for rule in rules["bans"]["skip"]}
    for name, several in versions.items():
        if len([version for version in several if f"{name}@{version}" not in skipped]) > 1:
            faults.append(f"{name} in versions {', '.join(sorted(several))}")
    for features, unwanted in NOT_WITH.items():
        for name in unwanted & brought_by(features):
            faults.append(f"{name} comes with {features or 'no feature'}")
    for fault in sorted(set(faults)):
        print(fault, file=sys.stderr)
    used = without_dev(metadata, published(metadata))
    print(f"{len(packages)} packages, {len(used)} of them not only for tests, {len(versions)} of these for libraries")
    sys.exit(bool(faults))


main()
