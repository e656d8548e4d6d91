//! The server for self-checking examples.

use std::{io, net::SocketAddr};

use axum::Router;
use tokio::{net::TcpListener, task::JoinSet};

/// Serves an application on a free port, in a task added to `servers`.
pub(crate) async fn serve(app: Router, servers: &mut JoinSet<()>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    servers.spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            eprintln!("{error}");
        }
    });
    Ok(addr)
}
