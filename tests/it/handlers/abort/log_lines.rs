//! Log lines about handlers that did not end on their own.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use mcp_cancel_on_disconnect::AbortOnCancel;
use serde_json::json;
use tracing::{Level, subscriber::DefaultGuard};
use tracing_subscriber::fmt::MakeWriter;

use super::wire::Wire;
use crate::{
    setup::{Plan, Server},
    support::*,
};

/// This crate's log lines from this thread. All clones share them.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

#[tokio::test]
async fn a_handler_that_had_to_be_stopped_is_named_at_info() {
    let (lines, _guard) = Lines::watch();
    let plan = Plan::of(Server::Wrapped).abort_after(Duration::ZERO);
    let (setup, mcp) = plan.client().await;

    setup.start_call(&mcp, "x", "stubborn", "a").await.fin();

    setup.witness.ended("a").await;
    let line = lines.line_with("handler").await;
    for part in [
        " INFO ",
        "mcp_cancel_on_disconnect: handler did not stop on its own and was dropped",
        "call=",
        r#"jsonrpc.request.id="x""#,
        r#"mcp.method.name="tools/call""#,
        r#"gen_ai.tool.name="stubborn""#,
    ] {
        assert!(line.contains(part), "no {part} in {line}");
    }
}

/// On another transport the line cannot name the call, but it names the tool.
#[tokio::test]
async fn a_handler_that_is_not_behind_the_layer_is_named_as_well() {
    let (lines, _guard) = Lines::watch();
    let witness = Witness::new();
    let wire = Wire::to(AbortOnCancel::new(Tools::new(&witness)).after(Duration::ZERO));
    wire.start_stubborn(&witness, "a").await;

    wire.cancel(1);

    witness.ended("a").await;
    let line = lines.line_with("handler").await;
    assert!(line.contains(r#"gen_ai.tool.name="stubborn""#), "{line}");
    assert!(!line.contains("call="), "{line}");
}

#[tokio::test]
async fn a_panic_is_logged_as_an_error() {
    let (lines, _guard) = Lines::watch();
    let setup = Plan::of(Server::StatelessSse).abort_after(Duration::ZERO);
    let setup = setup.start().await;

    let mut call = setup.mcp().await.call(1, "boom", json!({})).await;

    call.answer().await.expect("an answer");
    let line = lines.line_with("handler").await;
    assert!(line.contains("ERROR"), "{line}");
    assert!(line.contains(r#"handler panicked"#), "{line}");
    assert!(line.contains(r#"gen_ai.tool.name="boom""#), "{line}");
}

#[tokio::test]
async fn nothing_is_logged_about_a_handler_that_ends_by_itself() {
    let (lines, _guard) = Lines::watch();
    let plan = Plan::of(Server::Wrapped).abort_after(Duration::from_secs(3_600));
    let (setup, mcp) = plan.client().await;
    let mut done = setup.start_call(&mcp, 1, "hold", "done").await;
    setup.assert_completes("done", &mut done).await;

    setup.start_call(&mcp, 2, "hold", "cancelled").await.fin();

    setup.witness.ended("cancelled").await;
    setup.assert_usable(&mcp).await;
    assert_eq!(lines.with("handler"), [] as [String; 0]);
}

// === impl Lines ===

impl Lines {
    fn watch() -> (Self, DefaultGuard) {
        let lines = Self::default();
        let log = tracing_subscriber::fmt()
            .with_max_level(Level::INFO)
            .with_ansi(false)
            .with_writer(lines.clone())
            .finish();
        (lines, tracing::subscriber::set_default(log))
    }

    /// Returns this crate's lines that contain `part`.
    fn with(&self, part: &str) -> Vec<String> {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&bytes);
        let own = text
            .lines()
            .filter(|line| line.contains(" mcp_cancel_on_disconnect: "));
        own.filter(|line| line.contains(part))
            .map(str::to_owned)
            .collect()
    }

    /// Waits for the first line that contains `part`.
    async fn line_with(&self, part: &str) -> String {
        let line = async {
            loop {
                if let Some(line) = self.with(part).into_iter().next() {
                    return line;
                }
                tokio::task::yield_now().await;
            }
        };
        within(format!("a line with {part:?}"), line).await
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
