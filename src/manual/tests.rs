//! Tests that compare the pages with the source.

use std::{fs, path::Path};

mod defaults;
mod disconnect;
mod numbers;

const OPERATING: &str = include_str!("operating.md");

/// The target of all log lines.
const TARGET: &str = "target: \"mcp_cancel_on_disconnect\"";

const LEVELS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];

/// A log line that the source writes.
#[derive(Debug)]
struct Line {
    level: String,
    message: String,
    /// The arguments of the macro that writes it.
    arguments: String,
    /// `true` if the macro is one of `tracing`'s. Such a macro must name the target.
    is_bare: bool,
}

#[test]
fn every_row_of_a_page_is_in_a_table_with_a_head() {
    let mut pages = vec![];
    for folder in ["", "src/manual", "examples"].map(|folder| root().join(folder)) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            pages.extend(
                path.extension()
                    .is_some_and(|extension| extension == "md")
                    .then_some(path),
            );
        }
    }
    assert!(pages.len() > 8, "the pages were not found");
    for page in pages {
        for table in tables(&read(&page)) {
            let columns = cells(table[0]).len();
            let place = format!("{}: {}", page.display(), table[0]);
            let rule = table.get(1).map(|rule| cells(rule)).unwrap_or_default();
            let is_rule = |cell: &&str| !cell.is_empty() && cell.chars().all(|c| "-:".contains(c));
            assert!(!rule.is_empty() && rule.iter().all(is_rule), "{place}");
            for row in table {
                assert_eq!(cells(row).len(), columns, "{place}, {row}");
            }
        }
    }
}

#[test]
fn the_manual_documents_exactly_the_lines_that_are_logged() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let lines: Vec<Line> = files
        .iter()
        .flat_map(|file| Line::all(&read(file)))
        .collect();
    assert!(lines.len() > 15, "the source was not read: {lines:#?}");
    for line in lines.iter().filter(|line| line.is_bare) {
        assert!(line.arguments.contains(TARGET), "another target: {line:?}");
    }
    let page = tables(OPERATING).into_iter();
    let mut page = page.filter(|table| cells(table[0]) == ["level", "line", "when"]);
    let rows = page.next().expect("the table of the lines");
    let documented = rows[2..].iter().flat_map(|row| {
        let [level, texts, _] = cells(row)[..] else {
            panic!("three columns: {row}");
        };
        let texts = texts.split('`').skip(1).step_by(2);
        texts.map(move |text| (level, text))
    });
    let documented: Vec<(&str, &str)> = documented.collect();
    let documents = |(level, text): (&str, &str), line: &Line| {
        let is_same_text = match text.strip_suffix(" …") {
            Some(start) => line.message.starts_with(start),
            None => line.message == text,
        };
        is_same_text && line.level == level
    };
    for row in &documented {
        let is_logged = lines.iter().any(|line| documents(*row, line));
        assert!(is_logged, "documented, and never logged: {row:?}");
    }
    for line in &lines {
        let is_documented = documented.iter().any(|row| documents(*row, line));
        assert!(is_documented, "logged, and not documented: {line:?}");
    }
}

#[test]
fn every_threat_is_shown_by_a_test_that_exists() {
    let page = read(&root().join("SECURITY.md"));
    let mut files = Vec::new();
    for folder in [
        "src",
        "tests",
        "socket/tests",
        "proxy/src",
        "proxy/tests",
        "cluster/src",
    ] {
        all_files(&root().join(folder), &mut files);
    }
    let tests: String = files.iter().map(|file| read(file)).collect();
    let mut column = None;
    let mut shown = 0;
    for line in page.lines() {
        let cells = cells(line);
        match cells.last() {
            _ if !line.starts_with('|') => column = None,
            Some(&"test") => column = Some(cells.len()),
            Some(name) if column == Some(cells.len()) && !name.starts_with("---") => {
                let name = name.trim_matches('`');
                assert!(
                    tests.contains(&format!("fn {name}(")),
                    "no test {name:?}: {line}"
                );
                shown += 1;
            }
            _ => assert!(
                column.is_none() || line.starts_with("|---"),
                "no row: {line}"
            ),
        }
    }
    assert!(shown > 50, "the page was not read");
}

#[test]
fn the_glue_for_other_frameworks_is_that_of_the_support_table() {
    let page = read(&root().join("src/manual/deploying.md"));
    for framework in ["poem", "actix"] {
        let glue = read(&root().join(format!("tests/compat/{framework}/src/glue.rs")));
        let block = format!("```rust,ignore\n{glue}```\n");
        assert!(page.contains(&block), "{framework}");
    }
}

/// Returns the tables of a page as a renderer finds them.
///
/// A table is a group of adjacent rows outside of code blocks.
fn tables(page: &str) -> Vec<Vec<&str>> {
    let mut tables: Vec<Vec<&str>> = Vec::new();
    let mut is_code = false;
    let mut is_in_table = false;
    for line in page.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let is_row = !is_code && line.starts_with('|');
        match tables.last_mut().filter(|_| is_in_table) {
            Some(table) if is_row => table.push(line),
            _ if is_row => tables.push(vec![line]),
            _ => {}
        }
        is_in_table = is_row;
    }
    tables
}

fn cells(row: &str) -> Vec<&str> {
    let row = row.trim();
    let row = row.strip_prefix('|').unwrap_or(row);
    let row = row.strip_suffix('|').unwrap_or(row);
    row.split('|').map(str::trim).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Adds all Rust files of a folder, including those of other crates in it.
fn all_files(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("target") && !path.ends_with("node_modules") {
            all_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Adds the Rust files of a folder, except for tests and models.
fn sources(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().expect("a name");
        if stem == "tests" || stem == "model" {
            continue;
        }
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns the names and values of the constants that a file declares on one line.
///
/// The constants of its tests are left out.
fn constants(source: &str) -> impl Iterator<Item = (&str, &str)> {
    let code = source.split("mod tests {").next();
    code.unwrap_or_default().lines().filter_map(|line| {
        let (before, rest) = line.split_once("const ")?;
        let (name, value) = rest.strip_suffix(';')?.split_once(": ")?;
        let is_item = before.trim().is_empty() || before.trim().starts_with("pub");
        is_item.then_some((name, value.split_once(" = ")?.1))
    })
}

// === impl Line ===

impl Line {
    /// Returns the lines that a source file logs.
    ///
    /// It logs them by `tracing`'s macros, or by this crate's macros `log_…`, which take the level.
    fn all(source: &str) -> Vec<Self> {
        let code = source.split("mod tests {").next().unwrap_or_default();
        let code = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let code = code.collect::<Vec<_>>().join("\n");
        let calls = code.match_indices("!(");
        calls
            .filter_map(|(at, _)| Self::read(&code[..at], &code[at + 2..]))
            .collect()
    }

    /// Reads a macro call. `before` ends with the name of the macro, and `after` starts with its arguments. Returns `None` if the
    /// macro does not log.
    fn read(before: &str, after: &str) -> Option<Self> {
        let is_word = |c: char| c == '_' || c.is_alphanumeric();
        let outside = before.trim_end_matches(is_word);
        let name = &before[outside.len()..];
        let is_bare = LEVELS.contains(&name) && !outside.ends_with('$');
        if !is_bare && !name.starts_with("log_") {
            return None;
        }
        let arguments = arguments(after);
        let level = if is_bare {
            name
        } else {
            arguments.split(',').next()?.trim()
        };
        // In the definition of a macro `log_…`, the level is a parameter.
        if !LEVELS.contains(&level) {
            return None;
        }
        let texts = arguments.split('"').skip(1).step_by(2);
        let message = texts.last()?.split("\\\n").map(str::trim_start);
        Some(Self {
            level: level.to_owned(),
            message: message.collect(),
            arguments: arguments.to_owned(),
            is_bare,
        })
    }
}

/// Returns the arguments of a macro call: `text` up to the closing parenthesis.
fn arguments(text: &str) -> &str {
    let mut open = 1;
    let mut is_text = false;
    let end = text.find(|c| {
        is_text ^= c == '"';
        open += match c {
            '(' if !is_text => 1,
            ')' if !is_text => -1,
            _ => 0,
        };
        open == 0
    });
    &text[..end.expect("a macro that ends")]
}
