//! Instances over real sockets, all in one process and on one directory in memory.

#![allow(
    clippy::disallowed_methods,
    reason = "servers and concurrent clients of a test need tasks of their own"
)]

mod elsewhere;
mod fake;
mod faults;
mod gone;
mod last_moment;
mod leaving;
pub(crate) mod lines;
mod meeting;
mod node;
mod orphans;
mod races;
mod resumes;
mod services;
mod simulation;
mod steps;
mod strangers;
mod taking;
mod turned_away;
mod unconfirmed;

pub(crate) use self::simulation::wall_clock as simulated_clock;
