//! The lines logged on the test's thread.

use std::{
    fmt, io,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use tracing::{Dispatch, Level, level_filters::LevelFilter, subscriber::DefaultGuard};
use tracing_subscriber::{
    fmt::{MakeWriter, format::FmtSpan},
    layer::SubscriberExt as _,
};

/// Captures the layer's log lines and the request spans until it is dropped.
pub(crate) struct Lines {
    written: Written,
    _subscribed: DefaultGuard,
}

/// A second subscriber, which accepts nothing and is never dropped.
///
/// With only one subscriber, `tracing` decides whether a log line is enabled by asking the subscriber of the first
/// thread that reaches it. That thread might belong to another test, which has no subscriber.
static SECOND: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::registry().with(LevelFilter::OFF)));

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

// === impl Lines ===

impl Lines {
    /// Captures the layer's log at all levels. This needs a single-threaded runtime.
    pub(crate) fn all() -> Self {
        Self::up_to(Level::TRACE)
    }

    /// Captures the layer's log up to `level`. This needs a single-threaded runtime.
    pub(crate) fn up_to(level: Level) -> Self {
        LazyLock::force(&SECOND);
        let written = Written::default();
        let filter = format!("mcp_cancel_on_disconnect={level},{REQUEST}=info");
        let lines = tracing_subscriber::fmt::layer()
            .without_time()
            .with_ansi(false)
            .with_span_events(FmtSpan::CLOSE)
            .with_writer(written.clone());
        let subscriber = tracing_subscriber::registry()
            .with(tracing_subscriber::EnvFilter::new(filter))
            .with(lines);
        Self {
            written,
            _subscribed: tracing::subscriber::set_default(subscriber),
        }
    }

    /// Returns the text so far, unchanged.
    pub(crate) fn text(&self) -> String {
        let written = self
            .written
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        String::from_utf8(written.clone()).expect("a log is text")
    }

    /// Returns the layer's lines so far.
    pub(crate) fn of_layer(&self) -> Vec<String> {
        self.matching(|line| {
            line.contains("mcp_cancel_on_disconnect:")
                || line.contains("mcp_cancel_on_disconnect::setup:")
        })
    }

    /// Returns the matching lines so far.
    pub(crate) fn matching(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let text = self.text();
        let lines = text.lines().filter(|line| is_wanted(line));
        lines.map(|line| line.trim_start().to_owned()).collect()
    }
}

/// The target of [`request_span`].
const REQUEST: &str = "request";

/// Returns a span like those that servers put around each request.
pub(crate) fn request_span(number: u64) -> tracing::Span {
    tracing::info_span!(target: REQUEST, "request", number)
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

// === impl Written ===

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Written {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
