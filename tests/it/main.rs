//! Integration tests with real sockets and real rmcp servers. Each folder answers one question.
//!
//! | folder | question |
//! |---|---|
//! | `disconnect` | What does a disconnect do, at once, after a grace period, and among many calls? |
//! | `resume` | What does a client receive when it resumes, and what can it do with several streams? |
//! | `end` | How does a call end if it neither completes nor loses its client? |
//! | `sessions` | Whom does a call belong to, in which session, and what does the wrapped session manager change? |
//! | `wire` | Are bytes read correctly and passed on unchanged? |
//! | `composition` | Does the layer keep its promises among other middleware, with any caller and on any runtime? |
//! | `observability` | What are observers notified of? |
//! | `handlers` | What does a cancellation do to a handler, and does its work stop? |
//! | `attacks` | What can one client try against another's calls? |
//! | `steps` | What if something happens at step n, for every n? |
//! | `timelines` | What if calls, sessions and pauses last for hours? |
//! | `support` | The setups and clients that all folders share. `tests/support` (a crate) has what other test programs share, too |

#![allow(
    clippy::restriction,
    reason = "a failed expectation should end the test, but clippy only exempts functions marked #[test]"
)]

mod attacks;
mod composition;
mod disconnect;
mod end;
mod handlers;
mod observability;
mod resume;
mod sessions;
mod steps;
mod support;
mod timelines;
mod wire;

use self::support::{foreign, log, setup, stack};
