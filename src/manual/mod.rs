//! The manual: what the layer does and why, for whoever runs it.

#[doc = include_str!("disconnect.md")]
pub mod disconnect {}
