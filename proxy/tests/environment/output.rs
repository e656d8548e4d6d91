//! Standard output and standard error that cannot be written: nothing changes but that lines are missing.

use crate::{
    started::{Reader, Setup, Started},
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
            // A pipe that is not read is full after 64 KiB.
            variables: &[("RUST_LOG", "trace")],
            ..Setup::default()
        }
    }

    /// Lines are dropped, and not merely written to where they vanish.
    fn drops(self) -> bool {
        matches!(
            self,
            Self::StderrPipeClosed | Self::StderrFull | Self::BothFull
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_depends_on_what_becomes_of_the_output() {
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
        assert_eq!(!dropped.starts_with("0\n"), fault.drops(), "{dropped}");
        started.nothing_is_left_of_the_session().await;
        started.ends_by_sigterm().await;
    })
    .await;
}
