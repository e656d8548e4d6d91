//! Integration tests: real sockets, real rmcp servers. Each folder answers a question of the reader.
//!
//! | folder | question |
//! |---|---|
//! | `disconnect` | What does a hang-up do, at once, after a grace, and among many calls? |
//! | `resume` | What does a client get that resumes, and what may it do with several streams? |
//! | `end` | How does a call end that neither completes nor loses its client? |
//! | `sessions` | Whose call is it, in which session, and what does the wrapped session manager change? |
//! | `wire` | Are bytes read right, and do they pass unchanged? |
//! | `composition` | Does the layer keep its promises among other middleware, with any caller and on any runtime? |
//! | `observability` | What do observers learn of calls and of stalled clients? |
//! | `handlers` | What does a cancel do to a handler, and does its work stop? |
//! | `attacks` | What may one client try against the calls of another? |
//! | `steps` | What if something happens at step n, for every n? |
//! | `timelines` | What if calls, sessions and pauses last for hours? |
//! | `support` | The setups and clients that all folders share. `tests/support` (a crate) has what other test programs share, too |

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
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
