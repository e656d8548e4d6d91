//! Options set in the environment or in a file, which are parsed like flags.

use std::ffi::OsString;

use clap::{
    Arg,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::{bare_command, check_option, value_is_secret};

/// The key for the arguments after `--`.
pub(super) const COMMAND: &str = "command";

/// An option and its values.
#[derive(Debug)]
pub(super) struct Entry {
    option: String,
    values: Vec<Value>,
}

/// A value as text, or whether a switch is turned on.
#[derive(Debug)]
pub(super) enum Value {
    Text(OsString),
    Switch(bool),
}

// === impl Entry ===

impl Entry {
    /// Creates an entry, if the option exists and accepts `values`. Errors are messages for the user.
    pub(super) fn new(option: &str, values: Vec<Value>) -> Result<Self, String> {
        let option = option.to_owned();
        let entry = Self { option, values };
        entry.check().map(|()| entry)
    }

    fn check(&self) -> Result<(), String> {
        let option = &self.option;
        let command = bare_command();
        let mut options = command.get_arguments();
        let is_this = |arg: &&Arg| arg.get_long().unwrap_or(COMMAND) == option;
        let Some(arg) = options.find(is_this) else {
            let nearest = nearest(option)
                .map(|nearest| format!(", did you mean `{nearest}`?"))
                .unwrap_or_default();
            return Err(format!("unknown option `{option}`{nearest}"));
        };
        // Check this here, because a `false` adds no argument for clap to reject.
        let has_switch = || {
            let mut values = self.values.iter();
            values.any(|value| matches!(value, Value::Switch(_)))
        };
        if arg.get_action().takes_values() && has_switch() {
            return Err(format!(
                "`{option}` takes a value other than true or false (to turn a time off, write \"off\")"
            ));
        }
        check_option(self.args()).map_err(|error| {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            first.trim_start_matches("error: ").to_owned()
        })
    }

    pub(super) fn option(&self) -> &str {
        &self.option
    }

    pub(super) fn is_command(&self) -> bool {
        self.option == COMMAND
    }

    /// Returns the arguments that set the option. There are none for a switch that is turned off.
    pub(super) fn args(&self) -> Vec<OsString> {
        let mut args = Vec::new();
        if self.is_command() {
            args.push("--".into());
        }
        for value in &self.values {
            match value {
                Value::Text(text) if self.is_command() => args.push(text.clone()),
                Value::Text(text) => {
                    let mut arg = OsString::from(format!("--{}=", self.option));
                    arg.push(text);
                    args.push(arg);
                }
                Value::Switch(true) => args.push(format!("--{}", self.option).into()),
                Value::Switch(false) => {}
            }
        }
        args
    }
}

// === impl Value ===

impl Value {
    pub(super) fn into_text(self) -> OsString {
        match self {
            Self::Text(text) => text,
            Self::Switch(switch) => switch.to_string().into(),
        }
    }
}

/// Returns the option most similar to an unknown one, or `None` if none is similar.
pub(super) fn nearest(option: &str) -> Option<String> {
    let error = check_option([format!("--{option}").into()]).err()?;
    suggestion(&error)
}

fn suggestion(error: &clap::Error) -> Option<String> {
    match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(flag)) => Some(flag.trim_start_matches('-').to_owned()),
        _ => None,
    }
}

/// Hides the value in an error if the option's values are secret.
pub(super) fn redact_secrets(mut error: clap::Error) -> clap::Error {
    let is_secret = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) => {
            let name = arg.split([' ', '=']).next().unwrap_or_default();
            value_is_secret(name.trim_start_matches('-'))
        }
        _ => false,
    };
    if is_secret {
        let hidden = ContextValue::String("(not shown)".to_owned());
        let _ = error.insert(ContextKind::InvalidValue, hidden);
    }
    error
}

/// Returns a hint for an argument that is not an option, or `None` for any other error.
///
/// The hint does not repeat the argument, which may be part of a secret.
pub(super) fn hint(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    if error.kind() != ErrorKind::UnknownArgument || arg.starts_with('-') {
        return None;
    }
    Some(if arg.contains("://") {
        "a URL must follow --upstream: mcp-cancel-proxy [OPTIONS] --upstream <URL>"
    } else {
        "a command must follow `--`: mcp-cancel-proxy [OPTIONS] -- <COMMAND>... (values that contain spaces must be quoted)"
    })
}
