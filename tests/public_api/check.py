#!/usr/bin/env python3
"""Checks the public API by rustdoc's JSON: its items, the crates its types are from, and missing examples.

check.py DOC.json API.txt            compares the API with the list, and the crates of its types with CRATES below; each item
                                     must have an example with an assertion, or be named in its type's
check.py DOC.json API.txt --write    rewrites the list; the other checks are still made
"""

import difflib
import json
import pathlib
import re
import sys

# A new major version of any of these requires a new major version of this crate. Types from other crates must not
# be in the API.
CRATES = {
    "std", "core", "alloc",
    "axum", "axum_core", "bytes", "http", "http_body",
    "rmcp", "serde_core", "socket2", "tokio", "tokio_util", "tower_layer", "tower_service", "watched_socket",
}

# Cannot be constructed outside the crate, and a correct server never returns one.
ASSERTS_NOTHING = {"mcp_cancel_on_disconnect::transport::TransportError"}


class Api:
    def __init__(self, doc):
        self.doc = doc
        self.index = doc["index"]
        self.lines = set()
        self.seen = {}  # crate -> where
        self.without_example = []

    # --- Types, as they are written ---

    def note(self, id, where):
        """Records which crate a type from another crate is from."""
        summary = self.doc["paths"].get(str(id))
        # Users cannot write the names that macros put into impls.
        if summary and summary["crate_id"] != 0 and "__private" not in summary["path"]:
            name = self.doc["external_crates"][str(summary["crate_id"])]["name"]
            self.seen.setdefault(name, f"{'::'.join(summary['path'])} in {where}")

    def path(self, path, where):
        self.note(path["id"], where)
        # A bound such as `S::Error` refers to the trait by its id only.
        name = path.get("path") or self.doc["paths"][str(path["id"])]["path"][-1]
        return name.split("::")[-1] + self.args(path.get("args"), where)

    def args(self, args, where):
        if not args:
            return ""
        if "parenthesized" in args:
            inputs = ", ".join(self.type(t, where) for t in args["parenthesized"]["inputs"])
            output = args["parenthesized"]["output"]
            return f"({inputs})" + (f" -> {self.type(output, where)}" if output else "")
        args = args["angle_bracketed"]
        parts = []
        for arg in args["args"]:
            if arg == "infer":
                parts.append("_")
            elif "type" in arg:
                parts.append(self.type(arg["type"], where))
            elif "lifetime" in arg:
                parts.append(arg["lifetime"])
            else:
                parts.append(arg["const"]["expr"])
        for constraint in args["constraints"]:
            binding = constraint["binding"]
            if "equality" in binding:
                term = binding["equality"]
                value = self.type(term["type"], where) if "type" in term else term["constant"]["expr"]
                parts.append(f"{constraint['name']} = {value}")
            else:
                parts.append(f"{constraint['name']}: {self.bounds(binding['constraint'], where)}")
        return f"<{', '.join(parts)}>" if parts else ""

    def bounds(self, bounds, where):
        parts = []
        for bound in bounds:
            if "trait_bound" in bound:
                mark = "?" if bound["trait_bound"]["modifier"] == "maybe" else ""
                parts.append(mark + self.path(bound["trait_bound"]["trait"], where))
            elif "outlives" in bound:
                parts.append(bound["outlives"])
            else:
                parts.append("use<..>")
        return " + ".join(parts)

    def type(self, t, where):
        (kind, inner), = t.items() if isinstance(t, dict) else ((t, None),)
        match kind:
            case "resolved_path":
                return self.path(inner, where)
            case "dyn_trait":
                return "dyn " + " + ".join(self.path(p["trait"], where) for p in inner["traits"])
            case "generic" | "primitive":
                return inner
            case "function_pointer":
                return "fn" + self.signature(inner["sig"], where)
            case "tuple":
                return "(" + ", ".join(self.type(each, where) for each in inner) + ")"
            case "slice":
                return f"[{self.type(inner, where)}]"
            case "array":
                return f"[{self.type(inner['type'], where)}; {inner['len']}]"
            case "impl_trait":
                return "impl " + self.bounds(inner, where)
            case "borrowed_ref":
                life = f"{inner['lifetime']} " if inner["lifetime"] else ""
                mut = "mut " if inner["is_mutable"] else ""
                return f"&{life}{mut}{self.type(inner['type'], where)}"
            case "qualified_path":
                trait = inner["trait"]
                of = self.path(trait, where) if trait else ""
                return f"<{self.type(inner['self_type'], where)} as {of}>::{inner['name']}"
        raise SystemExit(f"a type that this script does not know: {kind}")

    def signature(self, sig, where):
        inputs = ", ".join(f"{name}: {self.type(t, where)}" for name, t in sig["inputs"])
        output = f" -> {self.type(sig['output'], where)}" if sig["output"] else ""
        return f"({inputs}){output}"

    def generics(self, generics, where):
        """Returns the parameters and the `where` clause, both as text."""
        parts = []
        for param in generics["params"]:
            kind = param["kind"]
            if "type" in kind and not kind["type"]["is_synthetic"]:
                bounds = self.bounds(kind["type"]["bounds"], where)
                parts.append(param["name"] + (f": {bounds}" if bounds else ""))
            elif "const" in kind:
                parts.append("const " + param["name"])
        wheres = []
        for predicate in generics["where_predicates"]:
            if "bound_predicate" in predicate:
                bound = predicate["bound_predicate"]
                bounds = self.bounds(bound["bounds"], where)
                wheres.append(f"{self.type(bound['type'], where)}: {bounds}")
        text = f"<{', '.join(parts)}>" if parts else ""
        return text, (f" where {', '.join(wheres)}" if wheres else "")

    # --- Examples ---

    def exampled(self, item, here, of_type=""):
        """Returns an item's examples that have an assertion. Records the item if there are none and its type's examples
        do not name it."""
        own = [code for code in examples(item["docs"] or "") if "assert" in code or here in ASSERTS_NOTHING]
        if not own and not re.search(rf"\b{item['name']}\b", of_type):
            self.without_example.append(here)
        return "\n".join(own)

    # --- Items ---

    def item(self, id, path, name=None, of_type=""):
        """Adds the lines for an item and the items in it. `of_type` is its type's examples."""
        item = self.index.get(str(id))
        if item is None:
            self.note(id, path)
            self.lines.add(f"use {path}::{name}")
            return
        (kind, inner), = item["inner"].items()
        name = name or item["name"]
        here = f"{path}::{name}" if path else name
        match kind:
            case "module":
                self.lines.add(f"mod {here}")
                for child in inner["items"]:
                    self.item(child, here)
            case "use":
                self.item(inner["id"], path, inner["name"])
            case "struct":
                generics, wheres = self.generics(inner["generics"], here)
                self.lines.add(f"struct {here}{generics}{wheres}{self.exhaustive(item)}")
                shown = self.exampled(item, here)
                fields = inner["kind"]
                if isinstance(fields, dict) and "plain" in fields:
                    for field in fields["plain"]["fields"]:
                        self.item(field, here)
                self.impls(inner["impls"], here, shown)
            case "enum":
                self.lines.add(f"enum {here}{self.exhaustive(item)}")
                for variant in inner["variants"]:
                    self.item(variant, here)
                self.impls(inner["impls"], here, self.exampled(item, here))
            case "variant":
                fields = []
                if isinstance(inner["kind"], dict):
                    (shape, of), = inner["kind"].items()
                    ids = of["fields"] if shape == "struct" else of
                    for field in ids:
                        field = self.index[str(field)]
                        fields.append(f"{field['name']}: {self.type(field['inner']['struct_field'], here)}")
                self.lines.add(f"variant {here}({', '.join(fields)}){self.exhaustive(item)}")
            case "struct_field":
                self.lines.add(f"field {here}: {self.type(inner, here)}")
            case "function":
                generics, wheres = self.generics(inner["generics"], here)
                self.exampled(item, here, of_type)
                header = "async fn" if inner["header"]["is_async"] else "fn"
                self.lines.add(f"{header} {here}{generics}{self.signature(inner['sig'], here)}{wheres}")
            case "trait":
                self.lines.add(f"trait {here}: {self.bounds(inner['bounds'], here)}")
                shown = self.exampled(item, here)
                for child in inner["items"]:
                    self.item(child, here, of_type=shown)
            case "constant":
                self.exampled(item, here, of_type)
                self.lines.add(f"const {here}: {self.type(inner['type'], here)}")
            case "assoc_const":
                self.exampled(item, here, of_type)
                self.lines.add(f"const {here}: {self.type(inner['type'], here)}")
            case "assoc_type":
                value = f" = {self.type(inner['type'], here)}" if inner["type"] else ""
                self.lines.add(f"type {here}{value}")
            case _:
                raise SystemExit(f"an item that this script does not know: {kind} {here}")

    def exhaustive(self, item):
        return " #[non_exhaustive]" if "non_exhaustive" in str(item["attrs"]) else ""

    def impls(self, ids, here, shown):
        """Adds the lines for a type's implementations, except blanket and automatic ones."""
        for id in ids:
            impl = self.index[str(id)]["inner"]["impl"]
            if impl["is_synthetic"] or impl["blanket_impl"]:
                continue
            if impl["trait"] is None:
                for child in impl["items"]:
                    self.item(child, here, of_type=shown)
                continue
            where = f"an impl for {here}"
            generics, wheres = self.generics(impl["generics"], where)
            trait = self.path(impl["trait"], where)
            self.lines.add(f"impl{generics} {trait} for {here}{wheres}")
            for child in impl["items"]:
                if "assoc_type" in self.index[str(child)]["inner"]:
                    self.item(child, f"<{here} as {trait}>")


def examples(docs):
    """Yields the code in a doc comment that rustdoc compiles."""
    for info, code in re.findall(r"^```([^\n]*)\n(.*?)^```", docs, re.MULTILINE | re.DOTALL):
        if not {"text", "ignore"} & set(info.split(",")):
            yield code


def main():
    doc_file, list_file, *options = sys.argv[1:]
    doc = json.loads(pathlib.Path(doc_file).read_text())
    api = Api(doc)
    api.item(doc["root"], "")
    text = "\n".join(sorted(api.lines)) + "\n"
    wrong = sorted(set(api.seen) - CRATES)
    for crate in wrong:
        print(f"not meant to be in the public API: {crate}, {api.seen[crate]}", file=sys.stderr)
    for here in api.without_example:
        print(f"in no example that asserts: {here}", file=sys.stderr)
    wrong += api.without_example
    listed = pathlib.Path(list_file)
    if options == ["--write"]:
        listed.write_text(text)
    elif listed.read_text() != text:
        before, now = listed.read_text().splitlines(), text.splitlines()
        print("\n".join(difflib.unified_diff(before, now, list_file, "now", lineterm="", n=0)), file=sys.stderr)
        print("The public API has changed. If it should: see the head of this script.", file=sys.stderr)
        wrong.append(list_file)
    print(f"{len(api.lines)} public items, types of {', '.join(sorted(api.seen))}")
    sys.exit(bool(wrong))


main()
