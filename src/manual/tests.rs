//! The pages say what the source says.

use std::{fs, path::Path};

const DEFAULTS: &str = include_str!("defaults.md");

/// Codes and marks. Everything else that is a number is a limit, and has its reason on the page.
const NO_LIMITS: [&str; 4] = ["ARRAY", "CLIENT_CLOSED_REQUEST", "OBJECT", "USES_BITS"];

/// One line of the page: a value, the text that makes it, and the file with that text.
#[derive(Debug)]
struct Row<'a> {
    value: &'a str,
    source: &'a str,
    file: &'a str,
}

/// A time in milliseconds, or a number of things or bytes.
#[derive(Debug, PartialEq, Eq)]
enum Number {
    Time(u64),
    Count(u64),
}

#[test]
fn the_numbers_of_the_defaults_page_are_those_of_the_source() {
    let rows: Vec<Row<'_>> = DEFAULTS.lines().filter_map(Row::read).collect();
    assert!(rows.len() > 30, "the page was not read: {rows:#?}");
    for row in rows {
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
    for file in files {
        let path = file.strip_prefix(root()).expect("below the root");
        let path = path.to_str().expect("text").replace('\\', "/");
        for (name, value) in constants(&read(&file)) {
            let named = DEFAULTS.contains(&format!("`{name}` in `{path}`"));
            let is_limit = Number::of_source(value).is_some() && !NO_LIMITS.contains(&name);
            assert!(named || !is_limit, "{name} = {value} of {path} has no row");
        }
    }
}

#[test]
fn every_threat_is_shown_by_a_test_that_exists() {
    let page = read(&root().join("SECURITY.md"));
    let mut files = Vec::new();
    for folder in ["src", "tests"] {
        all_files(&root().join(folder), &mut files);
    }
    let tests: String = files.iter().map(|file| read(file)).collect();
    let mut column = None;
    let mut shown = 0;
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
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
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [_, value, _, place] = cells[..] else {
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
