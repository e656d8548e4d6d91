//! Log lines written on a test's thread.

use std::{
    io::{self, Write},
    sync::{Arc, LazyLock, Mutex},
};

use tracing::{Dispatch, Level, level_filters::LevelFilter, subscriber::DefaultGuard};
use tracing_subscriber::layer::SubscriberExt as _;

/// Collects warnings until it is dropped.
pub(crate) struct Warnings {
    written: Written,
    _subscribed: DefaultGuard,
}

/// A second subscriber, which takes no lines and lives as long as the process.
///
/// With a single subscriber, `tracing` asks only the thread that first reaches a line whether the line is wanted, which might be another
/// test's, without a subscriber.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::registry().with(LevelFilter::OFF)));

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

// === impl Warnings ===

impl Warnings {
    /// Collects this thread's warnings. Needs a current-thread runtime.
    pub(crate) fn watch() -> Self {
        LazyLock::force(&SECOND_SUBSCRIBER);
        let written = Written::default();
        let lines = written.clone();
        let log = tracing_subscriber::fmt()
            .with_max_level(Level::WARN)
            .with_ansi(false)
            .with_writer(move || lines.clone())
            .finish();
        Self {
            written,
            _subscribed: tracing::subscriber::set_default(log),
        }
    }

    /// Returns the number of lines that contain `text`.
    pub(crate) fn count(&self, text: &str) -> usize {
        let written = String::from_utf8(self.written.0.lock().unwrap().clone()).unwrap();
        written.lines().filter(|line| line.contains(text)).count()
    }
}

// === impl Written ===

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
