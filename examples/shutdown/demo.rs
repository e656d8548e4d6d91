//! Clients that watch the server shut down.

use std::{error::Error, process::ExitCode, time::Duration};

use mcp_cancel_on_disconnect::DrainReport;
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::oneshot,
    time::{Instant, timeout},
};

use self::raw::Client;
use super::{CALLS_TIMEOUT, CONNECTIONS_TIMEOUT, app, serve_until};

#[path = "../shared/raw.rs"]
mod raw;

/// Extra time for cancelling the last calls, and for a busy machine.
const MARGIN: Duration = Duration::from_secs(5);

/// How many seconds each client's call takes. Half of the calls finish before the others are cancelled.
const WORK: [u64; 4] = [1, 1, 600, 600];

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The demo's result.
struct DemoResult {
    report: DrainReport,
    elapsed: Duration,
    answers: Vec<Answer>,
    closed_streams: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Result,
    Cancelled,
    Other,
}

pub(super) async fn run() -> Result<ExitCode> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let (app, calls) = app();
    let (shut_down, shutting_down) = oneshot::channel();
    let shutdown = async {
        shutting_down.await.ok();
    };
    let server = serve_until(shutdown, listener, app, calls);
    let clients = async {
        let mut streams = Vec::new();
        let mut calls = Vec::new();
        for seconds in WORK {
            let client = Client::connect(addr).await?;
            streams.push(client.listen().await?.expect_accepted().await?);
            let arguments = json!({ "seconds": seconds });
            let call = client.call(7, "work", arguments).await?;
            calls.push(call.expect_accepted().await?);
        }
        println!("{0} calls and {0} standalone streams are open", WORK.len());
        let started = Instant::now();
        shut_down.send(()).ok();
        let mut answers = Vec::new();
        for call in calls {
            answers.push(Answer::read(&call.read_to_end().await?));
        }
        let mut closed_streams = 0;
        for stream in streams {
            stream.read_to_end().await?;
            closed_streams += 1;
        }
        Ok::<_, Box<dyn Error>>((started, answers, closed_streams))
    };
    let together = async { tokio::join!(server, clients) };
    let limit = CALLS_TIMEOUT + CONNECTIONS_TIMEOUT + MARGIN;
    let (report, clients) = timeout(2 * limit, together).await?;
    let (started, answers, closed_streams) = clients?;
    let result = DemoResult {
        report: report?,
        elapsed: started.elapsed(),
        answers,
        closed_streams,
    };
    Ok(result.judge(limit))
}

// === impl DemoResult ===

impl DemoResult {
    /// Prints the result, and returns success if it is as expected.
    fn judge(&self, limit: Duration) -> ExitCode {
        let Self {
            report,
            elapsed,
            answers,
            closed_streams,
        } = self;
        println!(
            "{} calls ended, {} were cancelled; the server ended after {:.1} s",
            report.ended,
            report.cancelled,
            elapsed.as_secs_f64()
        );
        println!("the clients got: {answers:?}, and {closed_streams} standalone streams ended");
        let expected = WORK.map(|seconds| match seconds {
            0..=1 => Answer::Result,
            _ => Answer::Cancelled,
        });
        let as_expected = (report.ended, report.cancelled) == (2, 2)
            && *answers == expected
            && *closed_streams == WORK.len()
            && *elapsed <= limit;
        if as_expected {
            println!("all as expected");
            ExitCode::SUCCESS
        } else {
            println!("expected: 2 and 2, {expected:?}, 4 streams, at most {limit:?}");
            ExitCode::FAILURE
        }
    }
}

impl Answer {
    fn read(response: &str) -> Self {
        if response.contains(r#""result":"#) {
            Self::Result
        } else if response.contains(r#""code":-32800"#) {
            Self::Cancelled
        } else {
            Self::Other
        }
    }
}
