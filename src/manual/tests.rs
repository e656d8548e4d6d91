//! The pages say what the source says.

use std::{fs, path::Path};

const DEFAULTS: &str = include_str!("defaults.md");
const OPERATING: &str = include_str!("operating.md");

/// The target of all log lines.
const TARGET: &str = "target: \"mcp_cancel_on_disconnect\"";

const LEVELS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];

/// Codes and marks. Everything else that is a number is a limit, and has its reason on the page.
const NO_LIMITS: [&str; 4] = ["ARRAY", "CLIENT_CLOSED_REQUEST", "OBJECT", "USES_BITS"];

/// One line of the page: a value, the text that makes it, and the file with that text.
#[derive(Debug)]
struct Row<'a> {
    value: &'a str,
    source: &'a str,
    file: &'a str,
}

/// A line that is written to the log somewhere.
#[derive(Debug)]
struct Line {
    level: String,
    message: String,
    /// The arguments of the macro that writes it.
    arguments: String,
    /// Whether the macro is one of `tracing`'s, which all name their target here.
    is_bare: bool,
}

/// A time in milliseconds, or a number of things or bytes.
#[derive(Debug, PartialEq, Eq)]
enum Number {
    Time(u64),
    Count(u64),
}

#[test]
fn the_numbers_of_the_defaults_page_are_those_of_the_source() {
    for row in defaults() {
        let source = read(&root().join(row.file));
        let is_name = row.source.chars().all(|c| c == '_' || c.is_uppercase());
        let said = if is_name {
            constants(&source).find_map(|(name, value)| (name == row.source).then_some(value))
        } else {
            source.contains(row.source).then_some(row.source)
        };
        let said = said.unwrap_or_else(|| panic!("not in the file any more: {row:?}"));
        match Number::of_page(row.value) {
            Some(value) => assert_eq!(Number::of_source(said), Some(value), "{row:?}"),
            None => assert!(!is_name, "no number: {row:?}"),
        }
    }
}

#[test]
fn no_limit_is_missing_on_the_defaults_page() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    assert!(files.len() > 50, "the source was not found");
    let rows = defaults();
    for file in files {
        let path = file.strip_prefix(root()).expect("below the root");
        let path = path.to_str().expect("text").replace('\\', "/");
        for (name, value) in constants(&read(&file)) {
            let mut rows = rows.iter();
            let named = rows.any(|row| row.source == name && row.file == path);
            let is_limit = Number::of_source(value).is_some() && !NO_LIMITS.contains(&name);
            assert!(named || !is_limit, "{name} = {value} of {path} has no row");
        }
    }
}

#[test]
fn every_row_of_a_page_is_in_a_table_with_a_head() {
    let mut pages = vec![];
    for folder in [root().to_owned(), root().join("src/manual")] {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            pages.extend(
                path.extension()
                    .is_some_and(|it| it == "md")
                    .then_some(path),
            );
        }
    }
    assert!(pages.len() > 6, "the pages were not found");
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
fn the_lines_that_the_manual_documents_are_those_that_are_logged() {
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
        let [level, said, _] = cells(row)[..] else {
            panic!("three columns: {row}");
        };
        let said = said.split('`').skip(1).step_by(2);
        said.map(move |said| (level, said))
    });
    let documented: Vec<(&str, &str)> = documented.collect();
    let is_meant = |(level, said): (&str, &str), line: &Line| {
        let same = match said.strip_suffix(" …") {
            Some(start) => line.message.starts_with(start),
            None => line.message == said,
        };
        same && line.level == level
    };
    for said in &documented {
        let is_logged = lines.iter().any(|line| is_meant(*said, line));
        assert!(is_logged, "documented, and never logged: {said:?}");
    }
    for line in &lines {
        let is_documented = documented.iter().any(|said| is_meant(*said, line));
        assert!(is_documented, "logged, and not documented: {line:?}");
    }
}

#[test]
fn every_threat_is_shown_by_a_test_that_exists() {
    let page = read(&root().join("SECURITY.md"));
    let mut files = Vec::new();
    for folder in ["src", "tests", "proxy/src", "proxy/tests"] {
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
fn the_pages_numbers_are_read_as_people_read_them() {
    assert_eq!(Number::of_page("1,024"), Some(Number::Count(1024)));
    assert_eq!(Number::of_page("16 KiB"), Some(Number::Count(16384)));
    assert_eq!(Number::of_page("10 min"), Some(Number::Time(600_000)));
    assert_eq!(Number::of_page("5 × `retry` + 5 s"), None);
    let source = "idle: Duration::from_secs(60 * 60)";
    assert_eq!(Number::of_source(source), Some(Number::Time(3_600_000)));
    assert_eq!(Number::of_source("1_024"), Some(Number::Count(1024)));
    assert_eq!(Number::of_source("Bytes::from_static(b\":\")"), None);
}

/// The rows of the defaults page that have a number of the source.
fn defaults() -> Vec<Row<'static>> {
    let rows = tables(DEFAULTS).into_iter().flatten();
    let rows: Vec<Row<'_>> = rows.filter_map(Row::read).collect();
    assert!(rows.len() > 30, "the page was not read: {rows:#?}");
    rows
}

/// The tables of a page as a renderer finds them: lines that follow each other, outside of code.
fn tables(page: &str) -> Vec<Vec<&str>> {
    let mut tables: Vec<Vec<&str>> = Vec::new();
    let mut is_code = false;
    let mut goes_on = false;
    for line in page.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let is_row = !is_code && line.starts_with('|');
        match tables.last_mut().filter(|_| goes_on) {
            Some(table) if is_row => table.push(line),
            _ if is_row => tables.push(vec![line]),
            _ => {}
        }
        goes_on = is_row;
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

/// All files of Rust, those of other crates below it too.
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

/// All files but those of tests.
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

/// Names and values of the constants of a file, without its tests.
fn constants(source: &str) -> impl Iterator<Item = (&str, &str)> {
    let code = source.split("mod tests {").next();
    code.unwrap_or_default().lines().filter_map(|line| {
        let (before, rest) = line.split_once("const ")?;
        let (name, value) = rest.strip_suffix(';')?.split_once(": ")?;
        let is_item = before.trim().is_empty() || before.trim().starts_with("pub");
        is_item.then_some((name, value.split_once(" = ")?.1))
    })
}

// === impl Row ===

impl<'a> Row<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let [_, value, _, place] = cells(line)[..] else {
            return None;
        };
        let place = place.strip_prefix('`')?.strip_suffix('`')?;
        let (source, file) = place.split_once("` in `")?;
        Some(Self {
            value,
            source,
            file,
        })
    }
}

// === impl Line ===

impl Line {
    /// The lines that a source file logs: by `tracing`'s macros, or by macros of ours named `log_…`, which take the level.
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

    /// `before` ends with the name of a macro, `after` begins with its arguments.
    fn read(before: &str, after: &str) -> Option<Self> {
        let is_word = |c: char| c == '_' || c.is_alphanumeric();
        let outside = before.trim_end_matches(is_word);
        let name = &before[outside.len()..];
        let is_bare = LEVELS.contains(&name) && !outside.ends_with('$');
        if !is_bare && !name.starts_with("log_") {
            return None;
        }
        let arguments = arguments(after);
        let level = match is_bare {
            true => name,
            false => arguments.split(',').next()?.trim(),
        };
        // Inside of a macro the level is still to come.
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

/// What stands before the parenthesis that closes the one before `text`.
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

// === impl Number ===

impl Number {
    fn of_page(text: &str) -> Option<Self> {
        let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
        let number: u64 = number.replace(',', "").parse().ok()?;
        Some(match unit {
            "" => Self::Count(number),
            "KiB" => Self::Count(number << 10),
            "MiB" => Self::Count(number << 20),
            "ms" => Self::Time(number),
            "s" => Self::Time(number * 1000),
            "min" => Self::Time(number * 60_000),
            "h" => Self::Time(number * 3_600_000),
            _ => return None,
        })
    }

    /// Of an expression, or of a field and its expression.
    fn of_source(text: &str) -> Option<Self> {
        let text = text.rsplit(": ").next()?;
        if let Some(seconds) = argument(text, "Duration::from_secs(") {
            return Some(Self::Time(product(seconds)? * 1000));
        }
        if let Some(millis) = argument(text, "Duration::from_millis(") {
            return Some(Self::Time(product(millis)?));
        }
        product(text).map(Self::Count)
    }
}

fn argument<'a>(text: &'a str, function: &str) -> Option<&'a str> {
    text.strip_prefix(function)?.strip_suffix(')')
}

fn product(text: &str) -> Option<u64> {
    let factors = text.split(" * ").map(|factor| {
        let digits = factor.replace('_', "");
        digits.parse::<u64>().ok()
    });
    factors.product()
}
