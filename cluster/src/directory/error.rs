//! The error returned by directory requests.

use std::{
    error::Error,
    fmt::{self, Display, Formatter},
};

/// Why a request to the directory failed.
#[derive(Debug)]
pub(crate) struct DirectoryError {
    message: &'static str,
    source: Option<Box<dyn Error + Send + Sync>>,
}

// === impl DirectoryError ===

impl DirectoryError {
    /// Creates the error for a directory that did not answer in time.
    pub(crate) fn timed_out() -> Self {
        Self {
            message: "the directory did not respond in time",
            source: None,
        }
    }

    /// Creates the error for an unusable backend or configuration.
    ///
    /// The backend cannot serve as a directory, or cannot be reached with this configuration.
    pub(crate) fn unusable(message: &'static str) -> Self {
        Self {
            message,
            source: None,
        }
    }

    /// Creates the error for a backend that could not be reached or that refused the request.
    pub(crate) fn failed(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            message: "the directory failed",
            source: Some(source.into()),
        }
    }

    /// Creates the error for an answer longer than [`MAX_ANSWER`](super::MAX_ANSWER).
    pub(crate) fn too_large() -> Self {
        Self {
            message: "the answer is too large to store",
            source: None,
        }
    }

    /// Creates the error for a stored value that no instance can have written.
    pub(crate) fn unreadable(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            message: "the directory contains a value not written by any instance",
            source: Some(source.into()),
        }
    }
}

impl Display for DirectoryError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl Error for DirectoryError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source
            .as_deref()
            .map(|source| source as &(dyn Error + 'static))
    }
}
