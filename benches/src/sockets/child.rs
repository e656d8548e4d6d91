//! A part of a bench in a process of its own: the program, started once more with other arguments.
//!
//! It gets a command a line and answers each with a line. It ends when nobody can give it commands.

use std::{env, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
};

use crate::Failure;

#[derive(Debug)]
pub struct Child {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// Killed when it is dropped, unless it has ended.
    _process: tokio::process::Child,
}

// === impl Child ===

impl Child {
    pub fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let mut process = Command::new(env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("a child without pipes".into());
        };
        Ok(Self {
            input,
            output: BufReader::new(output).lines(),
            _process: process,
        })
    }

    /// Gives a command, and waits until it is done.
    pub async fn ask(&mut self, command: &str) -> Result<String, Failure> {
        self.input
            .write_all(format!("{command}\n").as_bytes())
            .await?;
        self.answer().await
    }

    /// The next answer.
    pub async fn answer(&mut self) -> Result<String, Failure> {
        let answer = self.output.next_line().await?;
        answer.ok_or_else(|| "a child ended before its answer".into())
    }
}

/// In the child: does what it is told.
pub async fn obey(
    mut act: impl AsyncFnMut(&[&str]) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await? {
        let words: Vec<&str> = command.split(' ').collect();
        println!("{}", act(&words).await?);
    }
    Ok(())
}
