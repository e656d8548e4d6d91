//! What all targets share: choices, a clock, frames, an inner service, and the judge.

#![cfg(fuzzing)]

pub mod choices;
pub mod clock;
pub mod frames;
pub mod inner;
pub mod json;
pub mod judge;
#[path = "../../tests/it/wire/transparency/parsers.rs"]
pub mod parsers;
