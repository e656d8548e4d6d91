//! A part of a bench in a process of its own: the program, started once more to play another [`role`](crate::role).
//!
//! It gets a command a line and answers each with a line. It ends when nobody can give it commands.

use std::{env, process::Stdio};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
};

use crate::is_quick;

#[derive(Debug)]
pub struct Child {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// Killed when it is dropped, unless it has ended.
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

    /// What a child that gets no commands has found.
    pub async fn found<T: DeserializeOwned>(role: &str) -> Result<T> {
        let answer = Self::start(role)?.answer().await?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Gives a command, and waits until it is done.
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

/// In the child: does what it is told.
pub async fn obey(mut act: impl AsyncFnMut(&[&str]) -> Result<String>) -> Result<()> {
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await? {
        let words: Vec<&str> = command.split(' ').collect();
        println!("{}", act(&words).await?);
    }
    Ok(())
}
