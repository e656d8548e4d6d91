//! The program's log lines, as its README lists them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The macros that log at info and above.
const MACROS: [&str; 4] = ["info!(", "warn!(", "error!(", "log_call!("];

/// Returns the Rust files in a folder and its subfolders.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let files = paths.flat_map(|path| {
        if path.is_dir() {
            sources(&path)
        } else {
            vec![path]
        }
    });
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// Returns a file's code without its tests.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source");
    let code = text.split("\n#[cfg(test)]\nmod tests {").next();
    code.unwrap_or_default().to_owned()
}

/// Returns the arguments of the macros with which the layer logs at info and above.
///
/// The lines from `log_evicted` on are left out, because the program has no handlers and its layer retains no answers.
fn layer_calls() -> Vec<&'static str> {
    let (code, _) = include_str!("../../../src/observe/log.rs")
        .split_once("fn log_evicted")
        .expect("the function");
    let named_levels = ["log_call!(", "log_end!("].into_iter();
    let with_level = named_levels
        .flat_map(|name| code.split(name).skip(1))
        .filter(|arguments| {
            let level = arguments.trim_start().split(',').next().unwrap_or_default();
            ["info", "warn", "error"].contains(&level)
        });
    with_level.chain(code.split("warn!(").skip(1)).collect()
}

/// Returns the message of a macro whose arguments start with `arguments`.
///
/// Returns `None` if the message is not a literal.
fn message(arguments: &str) -> Option<String> {
    let end = arguments.find(";\n").unwrap_or(arguments.len());
    let mut parts = arguments[..end].split('"');
    let mut before = parts.next()?;
    loop {
        let literal = parts.next()?;
        if !before.ends_with("target: ") {
            return Some(without_values(literal));
        }
        before = parts.next()?;
    }
}

/// Replaces each `{…}` in a format string with `…`.
fn without_values(format: &str) -> String {
    let mut parts = format.split('{');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let rest = part.split_once('}').map_or("", |(_, rest)| rest);
        text + "…" + rest
    })
}

/// Returns the first column of the README's table of log lines.
fn rows() -> Vec<String> {
    let readme = include_str!("../../README.md");
    let (_, section) = readme.split_once("### Log lines\n").expect("the section");
    let rows = section.lines().skip_while(|line| !line.starts_with("|---"));
    rows.skip(1)
        .take_while(|line| line.starts_with('|'))
        .filter_map(|row| row.trim_start_matches("| ").split_once(" | "))
        .map(|(line, _)| line.trim_matches(['`', ' ']).to_owned())
        .collect()
}

#[test]
fn the_readme_lists_every_log_line_and_no_other() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let code: Vec<String> = sources(&src).iter().map(|path| code(path)).collect();
    let calls = code
        .iter()
        .flat_map(|code| MACROS.iter().flat_map(|name| code.split(name).skip(1)));
    let layer = layer_calls();
    assert_eq!(layer.len(), 5, "{layer:?}");
    let calls = calls.chain(layer);
    let logged: BTreeSet<String> = calls.filter_map(message).collect();
    let rows = rows();
    for line in logged.iter().filter(|line| *line != "…") {
        assert!(rows.contains(line), "the README has no row for: {line}");
    }
    for row in rows {
        let mut parts = row.split('…');
        let is_literal = parts.all(|part| code.iter().any(|code| code.contains(part)));
        assert!(
            logged.contains(&row) || is_literal,
            "no such log line: {row}"
        );
    }
}
