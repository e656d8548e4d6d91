//! Standard output and standard error that cannot be written to.
//!
//! This must have no effect other than missing lines.

use std::{
    io::{Write as _, pipe},
    net::TcpListener,
};

use tokio::process::Command;

use crate::{
    started::{Reader, Setup, Started},
    support::within,
    table::{Phase, run},
};

#[derive(Debug, Clone, Copy)]
enum Fault {
    StderrPipeClosed,
    StderrFull,
    StderrNotRead,
    StderrClosed,
    StdoutClosed,
    StdoutFull,
    BothFull,
}

// === impl Fault ===

impl Fault {
    const ALL: [Self; 7] = [
        Self::StderrPipeClosed,
        Self::StderrFull,
        Self::StderrNotRead,
        Self::StderrClosed,
        Self::StdoutClosed,
        Self::StdoutFull,
        Self::BothFull,
    ];

    fn setup(self) -> Setup {
        let redirections = match self {
            Self::StderrPipeClosed | Self::StderrNotRead => "",
            Self::StderrFull => "2>/dev/full",
            Self::StderrClosed => "2>&-",
            Self::StdoutClosed => ">&-",
            Self::StdoutFull => ">/dev/full",
            Self::BothFull => ">/dev/full 2>&1",
        };
        let stderr = match self {
            Self::StderrPipeClosed => Reader::Closes,
            Self::StderrNotRead => Reader::NeverReads,
            _ => Reader::Reads,
        };
        Setup {
            redirections,
            stderr,
            options: &["--grace=3s"],
            // A pipe that is not read fills up after 64 KiB.
            variables: &[("RUST_LOG", "trace")],
            ..Setup::default()
        }
    }

    /// Returns `true` if writing a line fails, so that it counts as dropped.
    fn drops_lines(self) -> bool {
        matches!(
            self,
            Self::StderrPipeClosed | Self::StderrFull | Self::BothFull
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_or_full_output_affects_only_the_log() {
    run(&Fault::ALL, async |fault, phase| {
        let mut started = Started::in_phase(fault.setup(), phase).await;
        started.client_is_served(phase).await;
        if phase == Phase::Draining {
            return started.drains().await;
        }
        started.abandoned_call_is_cancelled().await;
        let metrics = started.metrics().await;
        let counted = "\nmcp_proxy_log_lines_dropped_total ";
        let (_, dropped) = metrics.split_once(counted).expect("the metric");
        assert_eq!(
            !dropped.starts_with("0\n"),
            fault.drops_lines(),
            "{dropped}"
        );
        started.session_leaves_no_state().await;
        started.ends_by_sigterm().await;
    })
    .await;
}

/// How much fits into a pipe that is not read: 64 KiB on Linux.
const PIPE: usize = 64 * 1024;

#[tokio::test]
async fn a_program_that_cannot_start_ends_although_nothing_reads_its_error() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let addr = taken.local_addr().expect("bound");
    let (unread, mut stderr) = pipe().expect("a pipe");
    stderr.write_all(&[b'x'; PIPE]).expect("room");

    let mut program = Command::new(env!("CARGO_BIN_EXE_mcp-cancel-proxy"));
    program.args(["--listen", &addr.to_string(), "--", "true"]);
    program.stderr(stderr).kill_on_drop(true);
    let mut program = program.spawn().expect("the program");

    let status = within("the program to exit", program.wait()).await;
    assert_eq!(status.expect("a child").code(), Some(1));
    drop(unread);
}
