//! The verdict for an example that checks itself.

use std::{fmt::Display, process::ExitCode, time::Duration};

use tokio::time::timeout;

/// Runs the example. Returns success if it succeeds within `limit`, and prints what is wrong if it does not.
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
