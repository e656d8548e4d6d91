//! Reads options from the environment. The variable `MCP_PROXY_<NAME>` sets the option of that name.

use std::ffi::{OsStr, OsString};

use clap::CommandFactory as _;

use super::{
    Config, ConfigError,
    entry::{Entry, Value, nearest},
};

const PREFIX: &str = "MCP_PROXY_";

/// The entries read from environment variables.
#[derive(Debug, Default)]
pub(super) struct Environment {
    pub(super) entries: Vec<Entry>,
    /// Warnings about variables that are not options.
    pub(super) warnings: Vec<String>,
}

// === impl Environment ===

impl Environment {
    /// Reads the variables with the prefix.
    ///
    /// Returns an error if an option does not accept its variable's value.
    pub(super) fn read(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let command = Config::command();
        let mut environment = Self::default();
        for (name, value) in variables {
            let Some(variable) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
                continue;
            };
            let mut options = command.get_arguments();
            let option = options.find(|arg| arg.get_env() == Some(&name));
            let Some((option, flag)) = option.and_then(|arg| Some((arg, arg.get_long()?))) else {
                environment
                    .warnings
                    .extend(unknown_warning(variable, &value));
                continue;
            };
            let value = if option.get_action().takes_values() {
                Ok(Value::Text(value))
            } else {
                parse_switch(&value).map(Value::Switch)
            };
            let entry = value.and_then(|value| Entry::new(flag, vec![value]));
            environment
                .entries
                .push(entry.map_err(|message| ConfigError::Environment {
                    variable: variable.to_owned(),
                    message,
                })?);
        }
        environment.warnings.sort();
        Ok(environment)
    }
}

fn parse_switch(value: &OsStr) -> Result<bool, String> {
    match value.to_str() {
        Some("true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}

/// Returns the warning for an unknown variable, or `None` if Kubernetes sets the variable.
///
/// An unknown variable is not an error, because other programs' variables may have the same prefix.
fn unknown_warning(variable: &str, value: &OsStr) -> Option<String> {
    let name = variable.strip_prefix(PREFIX)?;
    if is_set_by_kubernetes(name, value) {
        return None;
    }
    let option = name.to_lowercase().replace('_', "-");
    let nearest = match name {
        // These flags are hidden. Each only sets part of another option.
        "HOST" | "PORT" => Some("listen".to_owned()),
        _ => nearest(&option),
    };
    let nearest = nearest
        .map(|option| option.to_uppercase().replace('-', "_"))
        .map(|name| format!(", did you mean {PREFIX}{name}?"))
        .unwrap_or_default();
    Some(format!(
        "the environment variable {variable} does not match any option{nearest}"
    ))
}

/// Returns `true` if Kubernetes sets the variable for a service named `mcp-proxy`.
///
/// For example, Kubernetes sets `MCP_PROXY_PORT` to a URL such as `tcp://10.0.0.1:8000`. `name` does not include the prefix.
fn is_set_by_kubernetes(name: &str, value: &OsStr) -> bool {
    let is_url = || value.to_str().is_some_and(|value| value.contains("://"));
    (name == "PORT" && is_url()) || name.starts_with("PORT_") || name.starts_with("SERVICE_")
}
