//! Integration tests: real sockets, real rmcp servers. Each folder answers a question of the reader.
//!
//! | folder | question |
//! |---|---|
//! | `disconnect` | What does a hang-up do, at once, after a grace, and among many calls? |
//! | `resume` | What does a client get that comes back, and what may it do with several streams? |
//! | `end` | How does a call end that neither completes nor loses its client? |
//! | `sessions` | Whose call is it, in which session, and what does the wrapped session manager change? |
//! | `wire` | Are bytes read right, and do they pass unchanged? |
//! | `around` | Does it hold whatever the layer stands in: other middleware, any caller, any runtime? |
//! | `watch` | What is noticed of calls and of silent clients, and who is told? |
//! | `handlers` | What does a handler feel of a cancel, and does its work stop? |
//! | `attacks` | What may one client try against the calls of another? |
//! | `steps` | What if something happens at step n, for every n? |
//! | `timelines` | What if all of this lasts for hours? |
//! | `support` | What do all of these share? |

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod around;
mod attacks;
mod disconnect;
mod end;
mod handlers;
mod resume;
mod sessions;
mod steps;
mod support;
mod timelines;
mod watch;
mod wire;

use self::support::{foreign, log, setup, stack};
