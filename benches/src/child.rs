//! Runs part of a bench in a child process: the same program in another [`role`](crate::role).
//!
//! The child reads one command per line, answers each with one line, and exits when its input is closed. A child
//! that needs no commands writes a single line and exits.

use std::{env, process::Stdio};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
};

use crate::is_quick;

/// A child process running this program.
#[derive(Debug)]
pub struct Child {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// Killed on drop unless it has already exited.
    _process: tokio::process::Child,
}

// === impl Child ===

impl Child {
    pub fn start(role: &str) -> Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .args(role.split(' '))
            .args(is_quick().then_some("--quick"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = process.stdout.take().context("a child without pipes")?;
        Ok(Self {
            input: process.stdin.take().context("a child without pipes")?,
            output: BufReader::new(output).lines(),
            _process: process,
        })
    }

    /// Returns the result from a child that needs no commands.
    pub async fn result<T: DeserializeOwned>(role: &str) -> Result<T> {
        let answer = Self::start(role)?.answer().await?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Sends a command and waits for the reply.
    pub async fn ask(&mut self, command: &str) -> Result<String> {
        let line = format!("{command}\n");
        self.input.write_all(line.as_bytes()).await?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<String> {
        let answer = self.output.next_line().await?;
        answer.context("a child ended before its answer")
    }
}

/// Runs in the child: executes each command with `act` until one fails or the input ends.
pub async fn run_commands(mut act: impl AsyncFnMut(&[&str]) -> Result<String>) -> Result<()> {
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await? {
        let words: Vec<&str> = command.split(' ').collect();
        println!("{}", act(&words).await?);
    }
    Ok(())
}
