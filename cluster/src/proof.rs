//! The proof before an orphan is cancelled: that its client cannot have come back to another instance.
//!
//! | the directory | the orphan |
//! |---|---|
//! | was not sound for the whole grace | waits until it was |
//! | does not answer | waits for another grace |
//! | says that its session is this instance's | is cancelled |
//! | says so, and that a client of it is at the door of an instance that cannot reach this one | waits until that is over |
//! | says that it is another's | ends as its session closed |
//! | does not know the session | waits for another grace, and the session is written again |

use std::time::Duration;

use mcp_cancel_on_disconnect::Confirmation;
use tokio::time::Instant;
use tracing::info;

use crate::{
    directory::{Directory as _, Found, Standing},
    ids::{Ownership, SessionHash},
    meter,
    router::Router,
};

/// Whether a call of a session may be cancelled that waited for its client for a grace.
pub(crate) async fn prove(router: &Router, session: SessionHash, grace: Duration) -> Confirmation {
    let confirmation = judge(router, session, grace).await;
    if let Confirmation::PutOff(_) = confirmation {
        meter::put_off();
    }
    confirmation
}

async fn judge(router: &Router, session: SessionHash, grace: Duration) -> Confirmation {
    let Some(since) = router.heart.sound_since() else {
        return Confirmation::PutOff(grace);
    };
    let missing = grace.saturating_sub(Instant::now() - since);
    if !missing.is_zero() {
        return Confirmation::PutOff(missing);
    }
    // Not what was learned lately: that may be older than a claim.
    let standing = router.directory.standing(session, router.me.incarnation);
    let standing = standing.await;
    if router.heart.sound_since() != Some(since) {
        return Confirmation::PutOff(grace);
    }
    let Ok(Standing { found, at_the_door }) = standing else {
        return Confirmation::PutOff(grace);
    };
    let may_go = at_the_door.map_or(Confirmation::Cancel, Confirmation::PutOff);
    match found {
        Found::Owner(Ownership { owner, .. }) if owner == router.me => may_go,
        Found::Owner(Ownership { owner, .. }) => {
            info!(target: "mcp_cancel_cluster", %session, owner = %owner.address, "session is another's now");
            router.sessions.lose(session, owner);
            Confirmation::SessionClosed
        }
        // It is not one of the cluster's, so it can be nobody else's.
        Found::Nobody(absence) if !router.sessions.is_here(session) => {
            if router.heart.proves(&absence) {
                may_go
            } else {
                Confirmation::PutOff(grace)
            }
        }
        Found::Nobody(_) => {
            router.sessions.write_again(session);
            Confirmation::PutOff(grace)
        }
    }
}
