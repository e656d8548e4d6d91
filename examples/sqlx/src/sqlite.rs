//! SQLite, in memory: a progress handler checks the token while a query is running.
//!
//! Dropping a query does not interrupt it. Its thread keeps running until the query has produced a row, and the connection remains in use
//! until then.

use std::net::SocketAddr;

use mcp_cancel_on_disconnect::CallToken;
use serde_json::json;
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use tokio::sync::Notify;

use crate::{Failure, raw};

/// Number of instructions that SQLite's virtual machine runs between two checks of the token.
const CHECK_EVERY: i32 = 1_000;

/// Notified while a query is running, so that the client hangs up mid-query.
static RUNNING: Notify = Notify::const_new();

const COUNT: &str = "
    WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?)
    SELECT count(*) FROM number";

/// Returns a pool with one connection.
pub(crate) async fn pool() -> Result<SqlitePool, Failure> {
    let options = SqlitePoolOptions::new()
        .max_connections(1)
        // This runs even if the tool has been dropped. `lock_handle` waits until the connection's thread has stopped.
        .after_release(|connection, _| {
            Box::pin(async {
                connection.lock_handle().await?.remove_progress_handler();
                Ok(true)
            })
        });
    let in_memory = SqliteConnectOptions::new().in_memory(true);
    Ok(options.connect_with(in_memory).await?)
}

/// Counts until the call is cancelled.
pub(crate) async fn count(
    pool: &SqlitePool,
    up_to: i64,
    token: &CallToken,
) -> Result<String, Failure> {
    let count = async {
        let mut connection = pool.acquire().await?;
        let cancelled = token.child_token();
        connection
            .lock_handle()
            .await?
            .set_progress_handler(CHECK_EVERY, move || {
                RUNNING.notify_one();
                !cancelled.is_cancelled()
            });
        let count = sqlx::query_scalar(COUNT).bind(up_to);
        count.fetch_one(&mut *connection).await
    };
    let count: Result<i64, sqlx::Error> = match token.run_until_cancelled(count).await {
        Ok(count) => count,
        Err(reason) => return Err(reason.to_string().into()),
    };
    Ok(format!("counted to {}", count?))
}

/// Checks that a disconnect interrupts a query that would take many years.
///
/// Only then can the next query get the pool's only connection.
pub(crate) async fn run(addr: SocketAddr) -> Result<(), Failure> {
    let client = raw::call(addr, "count", json!({ "up_to": i64::MAX })).await?;
    RUNNING.notified().await;
    println!("SQLite is counting; the client hangs up");
    client.hang_up();
    let next = raw::call(addr, "count", json!({ "up_to": 100_000 })).await?;
    let answer = next.read_to_end().await?;
    if !answer.contains("counted to 100000") {
        return Err(format!("unexpected answer: {answer:?}").into());
    }
    println!("SQLite was interrupted: the only connection has served the next query");
    Ok(())
}
