//! The manual: what the layer does and why, for whoever runs it.

#[doc = include_str!("disconnect.md")]
pub mod disconnect {}

#[doc = include_str!("deploying.md")]
pub mod deploying {}
