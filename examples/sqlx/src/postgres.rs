//! PostgreSQL: if the call is cancelled, the query's connection is closed, and the server notices.
//!
//! Dropping a query does not stop it on the server. By default, closing the connection does not stop it either, because the server does not
//! notice until it has something to send. With `client_connection_check_interval`, PostgreSQL 14 and later do notice, unless there is a
//! pooler in between. With a pooler, call `pg_cancel_backend` on another connection instead, but only as long as the query's own connection
//! has not been returned to the pool. Otherwise you would cancel another call's query.

use std::{net::SocketAddr, str::FromStr as _, time::Duration};

use mcp_cancel_on_disconnect::CallToken;
use serde_json::json;
use sqlx::{PgPool, postgres::PgConnectOptions};
use tokio::time::sleep as pause;

use crate::{Failure, raw};

/// Counts this example's queries running on the server.
const RUNNING: &str = "
    SELECT count(*) FROM pg_stat_activity
    WHERE state = 'active' AND pid <> pg_backend_pid() AND query LIKE 'SELECT pg_sleep%'";

pub(crate) async fn pool(url: &str) -> Result<PgPool, Failure> {
    let options =
        PgConnectOptions::from_str(url)?.options([("client_connection_check_interval", "200ms")]);
    Ok(PgPool::connect_with(options).await?)
}

/// Sleeps on the server until the call is cancelled.
pub(crate) async fn sleep(
    pool: &PgPool,
    seconds: f64,
    token: &CallToken,
) -> Result<String, Failure> {
    let mut connection = pool.acquire().await?;
    let sleep = sqlx::query("SELECT pg_sleep($1)").bind(seconds);
    match token
        .run_until_cancelled(sleep.execute(&mut *connection))
        .await
    {
        Ok(slept) => {
            slept?;
            Ok("slept".to_owned())
        }
        Err(reason) => {
            connection.close_on_drop();
            Err(reason.to_string().into())
        }
    }
}

/// Checks that a ten-minute query runs on the server until its client disconnects.
pub(crate) async fn run(addr: SocketAddr, pool: &PgPool) -> Result<(), Failure> {
    let client = raw::call(addr, "sleep", json!({ "seconds": 600.0 })).await?;
    wait_for_running(pool, 1).await?;
    println!("PostgreSQL is sleeping; the client hangs up");
    client.hang_up();
    wait_for_running(pool, 0).await?;
    println!("PostgreSQL has ended the query");
    Ok(())
}

async fn wait_for_running(pool: &PgPool, expected: i64) -> Result<(), Failure> {
    loop {
        let running: i64 = sqlx::query_scalar(RUNNING).fetch_one(pool).await?;
        if running == expected {
            return Ok(());
        }
        pause(Duration::from_millis(20)).await;
    }
}
