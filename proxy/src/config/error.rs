//! Errors of the configuration.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// An error of the configuration, as a message for the user.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// An error of the command line, or a request for the help or the version.
    Options(clap::Error),
    /// An error in a variable of the environment.
    Environment {
        /// The name of the variable.
        variable: String,
        /// The error.
        message: String,
    },
    /// An error in the configuration file.
    File {
        /// The path of the file.
        path: PathBuf,
        /// The line of the error, counted from 1, if it has one.
        line: Option<usize>,
        /// The error.
        message: String,
    },
    /// Options that conflict, or lack one that they need.
    Conflict(String),
}

// === impl ConfigError ===

impl ConfigError {
    pub(super) fn in_file(path: &Path, line: Option<usize>, message: impl Into<String>) -> Self {
        Self::File {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl From<clap::Error> for ConfigError {
    fn from(error: clap::Error) -> Self {
        Self::Options(error)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Options(error) => write!(f, "{error}"),
            Self::Environment { variable, message } => {
                write!(f, "error: {variable} in the environment: {message}")
            }
            Self::File {
                path,
                line,
                message,
            } => {
                write!(f, "error: {}", path.display())?;
                if let Some(line) = line {
                    write!(f, ":{line}")?;
                }
                write!(f, ": {message}")
            }
            Self::Conflict(message) => write!(f, "error: {message}"),
        }
    }
}

impl std::error::Error for ConfigError {}
