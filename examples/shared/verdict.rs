//! The verdict of a self-checking example.

use std::{fmt::Display, process::ExitCode, time::Duration};

use tokio::time::timeout;

/// Runs the example, and prints what went wrong unless it succeeds within `limit`.
pub(crate) async fn verdict<E: Display>(
    limit: Duration,
    run: impl Future<Output = Result<(), E>>,
) -> ExitCode {
    match timeout(limit, run).await {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            println!("{error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            println!("An expected event did not happen within {limit:?}.");
            ExitCode::FAILURE
        }
    }
}
