//! Instances over real sockets, all in one process and on one directory in memory.

#![allow(
    clippy::disallowed_methods,
    reason = "servers and concurrent clients of a test need tasks of their own"
)]

mod elsewhere;
mod fake;
mod gone;
mod knocks;
mod leaving;
mod lines;
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

#[allow(unused_imports, reason = "for what has a wall clock")]
pub(crate) use self::simulation::wall_clock as simulated_clock;
