//! Configuration errors.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// A configuration error, displayed as a message for the user.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// An error on the command line, or a request for help or the version.
    Options(clap::Error),
    /// An error in an environment variable.
    Environment {
        /// The variable's name.
        variable: String,
        /// The error.
        message: String,
    },
    /// An error in the configuration file.
    File {
        /// The file's path.
        path: PathBuf,
        /// The error's line number, starting at 1, if known.
        line: Option<usize>,
        /// The error.
        message: String,
    },
    /// Conflicting options, a missing required option, or a misplaced argument.
    Usage(String),
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
                write!(f, "error: environment variable {variable}: {message}")
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
            Self::Usage(message) => write!(f, "error: {message}"),
        }
    }
}

impl std::error::Error for ConfigError {}
