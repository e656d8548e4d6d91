//! The server on a pipe without a proxy, as a baseline for bridges.

use std::{
    env,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use memchr::memmem;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::{INITIALIZED, initialize};

pub(super) struct Pipe {
    /// Killed on drop.
    _child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    line: Vec<u8>,
}

// === impl Pipe ===

impl Pipe {
    pub(super) async fn begin() -> Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .arg("serve-stdio")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut pipe = Self {
            stdin: child.stdin.take().context("no stdin")?,
            stdout: BufReader::new(child.stdout.take().context("no stdout")?),
            _child: child,
            line: Vec::new(),
        };
        pipe.call(&initialize(), br#""protocolVersion""#).await?;
        pipe.send(INITIALIZED).await?;
        Ok(pipe)
    }

    /// Sends a request and reads the next line, which must contain `awaited`.
    ///
    /// Returns how long that took.
    pub(super) async fn call(&mut self, message: &str, awaited: &[u8]) -> Result<Duration> {
        let started = Instant::now();
        self.send(message).await?;
        self.line.clear();
        self.stdout.read_until(b'\n', &mut self.line).await?;
        let position = memmem::find(&self.line, awaited);
        ensure!(position.is_some(), "{}", self.line.escape_ascii());
        Ok(started.elapsed())
    }

    async fn send(&mut self, message: &str) -> Result<()> {
        let line = format!("{message}\n");
        Ok(self.stdin.write_all(line.as_bytes()).await?)
    }
}
