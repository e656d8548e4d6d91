//! Uses the layer on routes without MCP. A handler passes its `CallToken` to a task it spawns, and registers a
//! clean-up.
//!
//! ```sh
//! cargo run --example plain_axum --features axum
//! ```

use std::{
    error::Error,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::State, routing::get};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};
use tokio::{
    net::TcpListener,
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::JoinSet,
    time::sleep,
};

#[path = "shared/raw.rs"]
mod raw;
#[path = "shared/verdict.rs"]
mod verdict;

type Failure = Box<dyn Error>;

/// Timeout for this example, which takes far less.
const LIMIT: Duration = Duration::from_secs(10);

const PAGES: u64 = 3;

/// The server's state.
#[derive(Clone)]
struct Press {
    /// Number of pages printed, whether or not the reader stayed.
    printed: Arc<AtomicU64>,
    messages: UnboundedSender<&'static str>,
}

#[tokio::main]
async fn main() -> ExitCode {
    verdict::verdict(LIMIT, run()).await
}

async fn run() -> Result<(), Failure> {
    let (messages, mut received) = unbounded_channel();
    let press = Press {
        printed: Arc::default(),
        messages,
    };
    let app = Router::new()
        .route("/book", get(book))
        .with_state(press.clone())
        .layer(CancelOnDisconnectLayer::new());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let mut servers = JoinSet::new();
    servers.spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            eprintln!("{error}");
        }
    });

    println!("a reader waits for a book");
    let book = raw::request(addr, "GET", "/book", &[], "").await?;
    let book = book.read_to_end().await?;
    if !book.ends_with("3 pages") {
        return Err(format!("unexpected response: {book:?}").into());
    }
    println!("and gets it");

    // Discard the messages about the first book.
    while received.try_recv().is_ok() {}
    let book = raw::request(addr, "GET", "/book", &[], "").await?;
    println!("{}; another reader hangs up", next(&mut received).await?);
    book.hang_up();
    let mut missing = vec!["the bill is cancelled", "the press stops"];
    while !missing.is_empty() {
        let next_message = next(&mut received).await?;
        println!("{next_message}");
        missing.retain(|text| *text != next_message);
    }
    let printed = press.printed.load(Ordering::Relaxed);
    println!("{printed} pages were printed, {PAGES} of them for a reader who stayed");
    Ok(())
}

/// Prints a book in a task, which dropping the handler would not stop.
async fn book(State(press): State<Press>, call: CallToken) -> String {
    let (done, printed) = oneshot::channel();
    let messages = press.messages.clone();
    call.on_cancel(async move |reason| {
        println!("clean-up: {reason}");
        let _ = messages.send("the bill is cancelled");
    });
    print(press, call, done);
    match printed.await {
        Ok(pages) => format!("{pages} pages"),
        Err(_) => "the press broke".to_owned(),
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "this server does its work in tasks"
)]
fn print(press: Press, call: CallToken, done: oneshot::Sender<u64>) {
    tokio::spawn(async move {
        let mut pages = 0;
        while pages < PAGES {
            tokio::select! {
                () = call.cancelled() => {
                    let _ = press.messages.send("the press stops");
                    return;
                }
                () = sleep(Duration::from_millis(50)) => {}
            }
            pages += 1;
            press.printed.fetch_add(1, Ordering::Relaxed);
            let _ = press.messages.send("a page is printed");
        }
        // This fails if the reader has only just disconnected.
        let _ = done.send(pages);
    });
}

async fn next(received: &mut UnboundedReceiver<&'static str>) -> Result<&'static str, Failure> {
    Ok(received.recv().await.ok_or("the server has ended")?)
}
