//! Decides what can be concluded from the leases in the directory.

use tokio::time::Instant;

use super::Heartbeat;
use crate::directory::{Directory as _, Leases};

// === impl Heartbeat ===

impl Heartbeat {
    /// Returns `true` if a record missing when `leases` were read provably does not exist.
    pub(crate) fn proves_absence(&self, leases: &Leases) -> bool {
        let now = Instant::now();
        let is_settled = {
            let health = self.health();
            health.is_settled(now) || health.consistent_since(now).is_some() && leases.has_settled()
        };
        is_settled && leases.get(self.owner.incarnation).is_some() && self.all_have_written(leases)
    }

    /// Returns `true` if everything the directory may have lost has been rewritten.
    ///
    /// The owner specified in a record is then the latest owner, as far as this instance knows. Returns `false` if the directory does not
    /// answer.
    pub(crate) async fn is_up_to_date(&self) -> bool {
        let leases = self.directory.leases().await;
        leases.is_ok_and(|leases| self.proves_absence(&leases))
    }

    /// Returns `true` if an answer missing before `leases` were read provably does not exist.
    ///
    /// By then, live instances have rewritten every answer that the directory lost.
    pub(crate) fn has_all_answers(&self, leases: &Leases) -> bool {
        self.proves_absence(leases) && !leases.have_late_answers() && !self.has_late_answers()
    }

    /// Returns `true` if answers to this instance's calls are late, or may turn out to be late.
    ///
    /// They may turn out to be late while there are sessions this instance must close, because their calls may still be running.
    pub(super) fn has_late_answers(&self) -> bool {
        self.sessions.has_unclosed() || self.answers.has_late_answers()
    }

    /// Returns `true` if `leases` were read in the run that answered the last heartbeat.
    pub(crate) fn is_in_run(&self, leases: &Leases) -> bool {
        self.health().run() == Some(&leases.run)
    }

    /// Returns `true` if all other live instances have written their sessions in this run.
    fn all_have_written(&self, leases: &Leases) -> bool {
        self.is_in_run(leases) && leases.all_have_written(self.owner.incarnation)
    }
}
