//! The file: each of its entries is the option of that name, and is read as if it were given as a flag.

use std::{ffi::OsString, fs, ops::Range, path::Path};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use toml::de::{DeTable, DeValue};

use super::{ConfigError, check_alone};

/// Options that are for the command line alone.
const NOT_IN_FILES: [&str; 3] = ["config", "help", "version"];

/// The key of what is given after `--` on the command line.
const COMMAND: &str = "command";

/// An option with its values.
#[derive(Debug)]
pub(super) struct Entry {
    option: String,
    values: Vec<Value>,
}

#[derive(Debug)]
enum Value {
    Text(String),
    Switch(bool),
}

/// Reads a file, and checks each of its entries.
pub(super) fn read(path: &Path) -> Result<Vec<Entry>, ConfigError> {
    let text = fs::read_to_string(path)
        .map_err(|error| ConfigError::in_file(path, None, format!("cannot be read: {error}")))?;
    let line_of = |span: Range<usize>| {
        let before = text.get(..span.start).unwrap_or(&text);
        Some(before.matches('\n').count() + 1)
    };
    let table = DeTable::parse(&text).map_err(|error| {
        let line = error.span().and_then(line_of);
        ConfigError::in_file(path, line, error.message())
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.get_ref() {
        let entry = Entry::new(key.get_ref(), value.get_ref());
        let entry = entry.and_then(Entry::checked);
        entries.push(
            entry.map_err(|message| ConfigError::in_file(path, line_of(key.span()), message))?,
        );
    }
    Ok(entries)
}

// === impl Entry ===

impl Entry {
    fn new(option: &str, value: &DeValue<'_>) -> Result<Self, String> {
        let values = match value {
            DeValue::Array(values) => {
                let values = values.iter().map(|value| Value::new(value.get_ref()));
                values.collect::<Option<_>>()
            }
            one => Value::new(one).map(|value| vec![value]),
        };
        let values = values.ok_or_else(|| {
            format!("`{option}` must be a text, a number, true or false, or a list of them")
        })?;
        let option = option.to_owned();
        Ok(Self { option, values })
    }

    /// The same, if there is such an option and it takes these values. The error is for a person.
    fn checked(self) -> Result<Self, String> {
        if NOT_IN_FILES.contains(&&*self.option) {
            return Err(format!("`{}` is for the command line alone", self.option));
        }
        match check_alone(self.args()) {
            Ok(()) => Ok(self),
            Err(error) if error.kind() == ErrorKind::UnknownArgument => {
                let nearest = match error.get(ContextKind::SuggestedArg) {
                    Some(ContextValue::String(flag)) => {
                        format!(", did you mean `{}`?", flag.trim_start_matches('-'))
                    }
                    _ => String::new(),
                };
                Err(format!("there is no `{}`{nearest}", self.option))
            }
            Err(error) => {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                Err(first.trim_start_matches("error: ").to_owned())
            }
        }
    }

    pub(super) fn option(&self) -> &str {
        &self.option
    }

    pub(super) fn is_command(&self) -> bool {
        self.option == COMMAND
    }

    pub(super) fn into_args(self) -> Vec<OsString> {
        self.args()
    }

    fn args(&self) -> Vec<OsString> {
        let mut args = Vec::new();
        if self.is_command() {
            args.push("--".into());
        }
        for value in &self.values {
            match value {
                Value::Text(text) if self.is_command() => args.push(text.into()),
                Value::Text(text) => args.push(format!("--{}={text}", self.option).into()),
                Value::Switch(true) => args.push(format!("--{}", self.option).into()),
                Value::Switch(false) => {}
            }
        }
        args
    }
}

// === impl Value ===

impl Value {
    fn new(value: &DeValue<'_>) -> Option<Self> {
        match value {
            DeValue::String(text) => Some(Self::Text(text.to_string())),
            DeValue::Integer(number) if number.radix() == 10 => {
                Some(Self::Text(number.as_str().to_owned()))
            }
            DeValue::Integer(number) => {
                let number = u64::from_str_radix(number.as_str(), number.radix()).ok()?;
                Some(Self::Text(number.to_string()))
            }
            DeValue::Float(number) => Some(Self::Text(number.as_str().to_owned())),
            DeValue::Boolean(switch) => Some(Self::Switch(*switch)),
            _ => None,
        }
    }
}
