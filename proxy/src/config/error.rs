//! What is wrong with what the program was told.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// What is wrong with what the program was told. As text it is what a person should read.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// An option, or that help or the version is asked for.
    Options(clap::Error),
    /// A variable of the environment.
    Environment {
        /// Which one.
        variable: String,
        /// What about it.
        message: String,
    },
    /// The file.
    File {
        /// Which one.
        path: PathBuf,
        /// On which line, counted from 1, if on one.
        line: Option<usize>,
        /// What about it.
        message: String,
    },
    /// Options that do not go together.
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
