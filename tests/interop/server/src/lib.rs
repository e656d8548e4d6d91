//! Lines of JSON on stdin and stdout, which connect the server or the client to `run`.

use std::{
    io::{self, Write as _},
    time::{Duration, SystemTime},
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};

/// Orders from `run`, until it closes the pipe.
pub struct Orders(Lines<BufReader<Stdin>>);

/// Reports to `run` that `event` has happened, with the time.
///
/// # Panics
///
/// Panics if `more` is not an object, or if `run` has closed the pipe.
pub fn emit(event: &str, more: Value) {
    let at = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let mut line = Map::new();
    line.insert("event".to_owned(), event.into());
    line.insert("at".to_owned(), at.as_secs_f64().into());
    let Value::Object(more) = more else {
        panic!("not an object: {more}");
    };
    line.extend(more);
    writeln!(io::stdout().lock(), "{}", Value::Object(line)).expect("`run` listens");
}

// === impl Orders ===

impl Orders {
    /// Reads from stdin.
    #[must_use]
    pub fn stdin() -> Self {
        Self(BufReader::new(tokio::io::stdin()).lines())
    }

    /// Returns the next order, or `None` after the last one or if stdin cannot be read.
    ///
    /// # Panics
    ///
    /// Panics if the line is not one of this program's orders.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        let line = self.0.next_line().await.ok()??;
        Some(serde_json::from_str(&line).expect("an order that this program knows"))
    }
}
