//! Starts a process, and signals it and its descendants as one process group.
//!
//! 1. **No signal reaches an unrelated process.** A group is only signalled until its leader is reaped. Up to that point, the
//!    leader's id, which is also the group's, can't be reused, because the zombie still holds it. This is why we detect that the
//!    leader has exited without reaping it, and why [`Group::reap`] kills the rest of the group before it reaps the leader.
//! 2. **A dropped group is killed**, no matter how its task or the runtime ends.
//! 3. **A process counts as ended once the leader has exited**, even if a grandchild keeps the pipes open.
//!
//! A group has two limitations. A process that moves to another group (`setsid`) is not signalled. And if the proxy itself is
//! killed by a signal that it can't handle, its children are not killed; they only get EOF on stdin. Tying them to the proxy
//! (`PR_SET_PDEATHSIG`) would require `unsafe` code between fork and exec, and the kernel would also kill them when the
//! *thread* that started them ends.

use std::{
    ffi::OsString, fmt, io, os::unix::process::ExitStatusExt as _, path::PathBuf,
    process::ExitStatus, process::Stdio,
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid},
};
use tokio::{
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    signal::unix::{self, SignalKind},
};

use crate::message::sanitize;

/// The variable for `--admin-token`.
///
/// Commands do not inherit it, because some servers show their environment to clients.
const ADMIN_TOKEN: &str = "MCP_PROXY_ADMIN_TOKEN";

/// The program to start for each session. It is never run by a shell.
#[derive(Debug, Clone)]
pub struct Program {
    /// A path, or a name to look up in `PATH`.
    pub name: OsString,
    /// The program's arguments.
    pub arguments: Vec<OsString>,
    /// Additional environment variables. They override the proxy's own variables of the same name.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory, or `None` to use the proxy's.
    pub directory: Option<PathBuf>,
}

/// A process's pipes.
#[derive(Debug)]
pub(crate) struct Pipes {
    pub(crate) stdin: ChildStdin,
    pub(crate) stdout: ChildStdout,
    pub(crate) stderr: ChildStderr,
}

/// A process and its descendants.
#[derive(Debug)]
pub(crate) struct Group {
    leader: Child,
    /// The id of both the leader and the group, until the leader has been reaped.
    id: Option<Pid>,
    /// Notified when any of the proxy's child processes exits.
    child_ended: unix::Signal,
}

// === impl Program ===

impl Program {
    /// Creates a program with the given arguments.
    pub fn new(name: impl Into<OsString>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self {
            name: name.into(),
            arguments: arguments.into_iter().collect(),
            environment: Vec::new(),
            directory: None,
        }
    }

    /// Checks that the program and its working directory exist.
    ///
    /// # Errors
    ///
    /// Returns an error that describes what is missing and is meant to be shown to the user.
    pub fn check(&self) -> io::Result<()> {
        if let Some(directory) = &self.directory
            && !directory.is_dir()
        {
            let text = format!("directory not found: {}", directory.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        // Relative paths are resolved against the program's working directory.
        let name = PathBuf::from(&self.name);
        let base = self.directory.clone().unwrap_or_default();
        if name.components().count() > 1 {
            return if base.join(&name).is_file() {
                Ok(())
            } else {
                Err(self.not_found(""))
            };
        }
        let configured = self
            .environment
            .iter()
            .rev()
            .find(|(name, _)| name == "PATH");
        let path = configured
            .map(|(_, value)| value.clone())
            .or_else(|| std::env::var_os("PATH"));
        let mut directories = std::env::split_paths(path.as_deref().unwrap_or_default());
        if directories.any(|directory| base.join(directory).join(&name).is_file()) {
            Ok(())
        } else {
            Err(self.not_found(" in PATH"))
        }
    }

    fn not_found(&self, suffix: &str) -> io::Error {
        let text = format!("command not found{suffix}: `{}`", self.name.display());
        io::Error::new(io::ErrorKind::NotFound, text)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.name);
        command
            .args(&self.arguments)
            .env_remove(ADMIN_TOKEN)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        command
    }
}

/// Formats the command on a single line, for people to read. A shell might not be able to parse it.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |word: &OsString| sanitize(word.as_encoded_bytes(), usize::MAX);
        f.write_str(&word(&self.name))?;
        self.arguments
            .iter()
            .try_for_each(|argument| write!(f, " {}", word(argument)))
    }
}

// === impl Group ===

impl Group {
    /// Starts a process as the leader of a new group.
    pub(crate) fn spawn(program: &Program) -> io::Result<(Self, Pipes)> {
        // Register this before spawning the process, so that its exit can't be missed. The handler also keeps the kernel from
        // reaping the process itself, as it would if the proxy had been started with SIGCHLD ignored.
        let child_ended = unix::signal(SignalKind::child())?;
        let mut leader = program.command().spawn()?;
        let id = leader
            .id()
            .and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let pipes = (
            leader.stdin.take(),
            leader.stdout.take(),
            leader.stderr.take(),
        );
        let group = Self {
            leader,
            id,
            child_ended,
        };
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(io::Error::other("a pipe of the process is missing"));
        };
        Ok((
            group,
            Pipes {
                stdin,
                stdout,
                stderr,
            },
        ))
    }

    /// Returns the leader's id, or `None` once the leader has been reaped.
    pub(super) fn pid(&self) -> Option<i32> {
        self.id.map(Pid::as_raw_pid)
    }

    /// Waits for the leader to exit, without reaping it.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: dropping the future loses nothing.
    pub(super) async fn wait_for_exit(&mut self) {
        while !self.has_exited() {
            self.child_ended.recv().await;
        }
    }

    /// Returns `true` if the leader has exited.
    pub(super) fn has_exited(&mut self) -> bool {
        let Some(id) = self.id else {
            return true;
        };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(id), options) {
            Ok(exit) => exit.is_some(),
            Err(Errno::INTR) => false,
            Err(_) => {
                // The leader is no longer a child, so its id may belong to another process.
                self.id = None;
                true
            }
        }
    }

    /// Sends a signal to the group. Does nothing once the leader has been reaped.
    pub(super) fn signal(&self, signal: Signal) {
        if let Some(id) = self.id {
            // Fails if the group is empty.
            let _ = kill_process_group(id, signal);
        }
    }

    /// Kills the rest of the group, then reaps the leader.
    pub(super) async fn reap(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL);
        self.id = None;
        self.leader.wait().await
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // tokio will reap the leader.
        self.signal(Signal::KILL);
    }
}

/// Describes an exit status.
pub(super) fn exit_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};

    use super::*;

    fn shell(script: &str) -> Program {
        Program::new("sh", ["-c".into(), script.into()])
    }

    fn exists(pid: i32) -> bool {
        rustix::process::test_kill_process(Pid::from_raw(pid).unwrap()).is_ok()
    }

    #[tokio::test]
    async fn the_exit_of_the_leader_is_detected_while_a_grandchild_holds_its_pipes() {
        let (mut group, pipes) = Group::spawn(&shell("sleep 600 & echo $!; exit 3")).unwrap();
        let mut lines = BufReader::new(pipes.stdout).lines();
        let grandchild: i32 = lines.next_line().await.unwrap().unwrap().parse().unwrap();
        let leader = group.pid().unwrap();
        group.wait_for_exit().await;
        assert!(exists(leader), "the leader has not been reaped yet");
        assert!(exists(grandchild));
        assert_eq!(exit_text(group.reap().await.unwrap()), "exit code 3");
        // The pipe ends when the last process that has it open exits.
        assert_eq!(lines.next_line().await.unwrap(), None);
        assert!(!exists(leader));
        assert_eq!(
            group.pid(),
            None,
            "no process can be signalled from here on"
        );
    }

    #[tokio::test]
    async fn a_group_that_is_dropped_is_killed() {
        let (group, mut pipes) = Group::spawn(&shell("sleep 600 & sleep 600")).unwrap();
        drop(group);
        let mut rest = Vec::new();
        pipes.stdout.read_to_end(&mut rest).await.unwrap();
    }

    #[tokio::test]
    async fn a_program_gets_its_arguments_environment_and_directory_and_no_shell() {
        let mut program = shell("printf '%s|%s|%s' \"$0\" \"$ADDED\" \"$PWD\"");
        program.arguments.push("$(false) `x`; *".into());
        program.environment.push(("ADDED".into(), "$HOME".into()));
        program.directory = Some("/".into());
        let (mut group, mut pipes) = Group::spawn(&program).unwrap();
        let mut text = String::new();
        pipes.stdout.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "$(false) `x`; *|$HOME|/");
        group.wait_for_exit().await;
        assert!(group.reap().await.unwrap().success());
    }

    #[test]
    fn a_missing_command_is_distinguished_from_an_existing_one() {
        assert!(shell("").check().is_ok());
        assert!(Program::new("/bin/sh", []).check().is_ok());
        for name in ["no-such-command-at-all", "/no/such/command", "./no-such"] {
            let error = Program::new(name, []).check().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let mut elsewhere = shell("");
        elsewhere
            .environment
            .push(("PATH".into(), "/no/such/place".into()));
        assert!(elsewhere.check().is_err());
        let mut nowhere = shell("");
        nowhere.directory = Some("/no/such/directory".into());
        assert!(
            nowhere
                .check()
                .unwrap_err()
                .to_string()
                .contains("/no/such/directory")
        );
    }
}
