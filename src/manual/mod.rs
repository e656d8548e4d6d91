//! The manual, for people who run a server with the layer: what the layer does, and why.

#[cfg(test)]
mod tests;

#[doc = include_str!("disconnect.md")]
pub mod disconnect {}

#[doc = include_str!("deploying.md")]
pub mod deploying {}

#[doc = include_str!("several_servers.md")]
pub mod several_servers {}

#[doc = include_str!("operating.md")]
pub mod operating {}

#[doc = include_str!("defaults.md")]
pub mod defaults {}
