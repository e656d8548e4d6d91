//! The methods of rmcp's traits, read from the source that this build uses.
//!
//! `tests/upstream` has this module, too.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Returns the names of all `ServerHandler` methods, required or not.
pub(super) fn names() -> BTreeSet<String> {
    names_of("src/handler/server.rs", "pub trait ServerHandler")
}

/// Returns the names of all of a trait's methods, required or not.
///
/// The trait is the one in `file` whose declaration starts with `declaration`.
pub(super) fn names_of(file: &str, declaration: &str) -> BTreeSet<String> {
    let source = source(file);
    let handler = block_after(&source, declaration).expect("the trait");
    let mut names = names_in(handler);
    // A macro in the trait generates some of the methods.
    for call in handler.split_inclusive("!();") {
        if let Some(call) = call.strip_suffix("!();") {
            let name = call.rsplit(|c: char| !is_name_char(c)).next();
            let made_by = format!("macro_rules! {}", name.expect("a name"));
            names.extend(names_in(block_after(&source, &made_by).expect("the macro")));
        }
    }
    names
}

/// Returns a file without its comment lines.
fn source(file: &str) -> String {
    let file = directory().join(file);
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Returns the directory of the rmcp version that cargo has resolved.
fn directory() -> PathBuf {
    let version = cargo(&["-vV"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    // Without a platform filter, cargo asks for other platforms' packages, which have not been downloaded.
    let metadata = cargo(&[
        "metadata",
        "--format-version=1",
        "--offline",
        "--filter-platform",
        host.expect("a host"),
        "--manifest-path",
        concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
    ]);
    let metadata: Value = serde_json::from_str(&metadata).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let manifests = packages.iter().filter(|package| package["name"] == "rmcp");
    let manifests: Vec<_> = manifests.map(|package| &package["manifest_path"]).collect();
    let [Value::String(manifest)] = &manifests[..] else {
        panic!("exactly one rmcp expected, found {manifests:?}");
    };
    let directory = Path::new(manifest).parent().expect("a directory");
    directory.to_owned()
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO")).args(arguments).output();
    let output = output.expect("cargo runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// Returns the text between the next pair of braces after `start`.
fn block_after<'a>(source: &'a str, start: &str) -> Option<&'a str> {
    let (_, rest) = source.split_once(start)?;
    let (_, block) = rest.split_once('{')?;
    let mut open = 1;
    let end = block.find(|c| {
        open += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        open == 0
    })?;
    block.get(..end)
}

fn names_in(block: &str) -> BTreeSet<String> {
    let after_fn = block.split("fn ").skip(1);
    let names = after_fn.filter_map(|rest| rest.split(|c: char| !is_name_char(c)).next());
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
