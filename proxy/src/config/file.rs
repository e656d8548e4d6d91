//! The configuration file. Each entry sets the option of the same name.

use std::{ffi::OsString, fs, ops::Range, path::Path};

use toml::de::{DeTable, DeValue};

use super::{
    ConfigError,
    entry::{COMMAND, Entry, Value},
};

/// Options only allowed on the command line.
const NOT_IN_FILES: [&str; 4] = ["config", "demo", "help", "version"];

/// Options that may be tables, each with the separator between name and value in a list.
const TABLES: [(&str, &str); 3] = [("env", "="), ("header", ": "), ("tool-grace", "=")];

/// Characters with a special meaning in shells.
const SHELL_CHARACTERS: &[char] = &[
    '\'', '"', '\\', '$', '`', '|', '&', ';', '<', '>', '(', ')', '*', '?', '~',
];

/// The entries read from a configuration file.
#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) entries: Vec<Entry>,
    /// Warnings about accepted entries.
    pub(super) warnings: Vec<String>,
}

// === impl File ===

impl File {
    /// Reads a file and checks each of its entries.
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| {
            ConfigError::in_file(path, None, format!("cannot be read: {error}"))
        })?;
        let line_of = |span: Range<usize>| {
            let before = text.get(..span.start).unwrap_or(&text);
            Some(before.matches('\n').count() + 1)
        };
        let table = DeTable::parse(&text).map_err(|error| {
            let line = error.span().and_then(line_of);
            ConfigError::in_file(path, line, error.message())
        })?;
        let mut file = Self::default();
        for (key, value) in table.get_ref() {
            file.add(key.get_ref(), value.get_ref())
                .map_err(|message| ConfigError::in_file(path, line_of(key.span()), message))?;
        }
        Ok(file)
    }

    fn add(&mut self, option: &str, value: &DeValue<'_>) -> Result<(), String> {
        if NOT_IN_FILES.contains(&option) {
            return Err(format!("`{option}` is only allowed on the command line"));
        }
        let values = match value {
            DeValue::String(text) if option == COMMAND && text.contains(char::is_whitespace) => {
                let words = split_command(text)?;
                self.warnings
                    .push(format!("`command` in the file was split into {words:?}"));
                words
                    .into_iter()
                    .map(|word| Value::Text(word.into()))
                    .collect()
            }
            DeValue::Table(table) => table_values(option, table).ok_or_else(|| {
                format!("`{option}` is not a table of strings, numbers or booleans")
            })?,
            value => list_values(value).ok_or_else(|| {
                format!("`{option}` must be a string, a number, a boolean, or a list of them")
            })?,
        };
        self.entries.push(Entry::new(option, values)?);
        Ok(())
    }
}

/// Splits a command at white space. Returns an error if it might be meant for a shell.
fn split_command(text: &str) -> Result<Vec<&str>, String> {
    if text.contains(SHELL_CHARACTERS) {
        return Err(
            "`command` is not run by a shell: use a list, for example command = [\"npx\", \"-y\", \"some-server\"]"
                .to_owned(),
        );
    }
    Ok(text.split_whitespace().collect())
}

/// Returns a table's entries in the form they would have in a list.
///
/// Returns `None` if the option can't be a table, or if one of the values is not a [scalar].
fn table_values(option: &str, table: &DeTable<'_>) -> Option<Vec<Value>> {
    let (_, separator) = TABLES.iter().find(|(name, _)| *name == option)?;
    let entries = table.iter().map(|(name, value)| {
        let mut text = OsString::from(format!("{}{separator}", name.get_ref()));
        text.push(scalar(value.get_ref())?.into_text());
        Some(Value::Text(text))
    });
    entries.collect()
}

/// Returns a list's values, or a single value. Returns `None` if one of them is not a [scalar].
fn list_values(value: &DeValue<'_>) -> Option<Vec<Value>> {
    match value {
        DeValue::Array(values) => values.iter().map(|value| scalar(value.get_ref())).collect(),
        value => scalar(value).map(|value| vec![value]),
    }
}

/// Returns a string, a number or a boolean, or `None` for any other value.
fn scalar(value: &DeValue<'_>) -> Option<Value> {
    match value {
        DeValue::String(text) => Some(Value::Text(text.to_string().into())),
        DeValue::Integer(number) if number.radix() == 10 => {
            Some(Value::Text(number.as_str().into()))
        }
        DeValue::Integer(number) => {
            let number = u64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(Value::Text(number.to_string().into()))
        }
        DeValue::Float(number) => Some(Value::Text(number.as_str().into())),
        DeValue::Boolean(switch) => Some(Value::Switch(*switch)),
        _ => None,
    }
}
