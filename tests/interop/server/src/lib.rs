//! Lines of JSON on standard input and output: how `run` talks to the server and to the client.

use std::{
    io::{self, Write as _},
    time::{Duration, SystemTime},
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin};

/// Orders from `run`, until it closes the pipe.
pub struct Orders(Lines<BufReader<Stdin>>);

/// Tells `run` that `event` happened, and when.
///
/// # Panics
///
/// If `more` is not an object, or `run` does not listen any more.
pub fn tell(event: &str, more: Value) {
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
    /// What comes on standard input.
    #[must_use]
    pub fn stdin() -> Self {
        Self(BufReader::new(tokio::io::stdin()).lines())
    }

    /// The next order, or `None` after the last.
    ///
    /// # Panics
    ///
    /// If it is not what this program understands.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        let line = self.0.next_line().await.ok()??;
        Some(serde_json::from_str(&line).expect("an order that this program knows"))
    }
}
