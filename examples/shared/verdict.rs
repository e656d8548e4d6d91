//! The verdict for an example that checks itself.

use std::{fmt::Display, process::ExitCode, time::Duration};

use tokio::time::timeout;

/// Returns success if everything has happened within `limit`. Otherwise prints what is wrong.
pub(crate) async fn verdict<E: Display>(
    limit: Duration,
    play: impl Future<Output = Result<(), E>>,
) -> ExitCode {
    match timeout(limit, play).await {
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
