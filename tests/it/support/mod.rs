//! Servers with the layer in place, and everything that a test can observe about them.
//!
//! | module | contents |
//! |---|---|
//! | [`setup`] | a server with the layer in place, in each way in which it can be used |
//! | [`stack`], [`foreign`] | other servers behind the layer |
//! | [`example`] | an example that runs in its own process |
//! | [`log`] | what the layer reports, as data |
//! | [`test_support`] | a separate crate that knows nothing about the layer: clients, server and witness |

pub(crate) mod example;
pub(crate) mod foreign;
pub(crate) mod log;
pub(crate) mod setup;
pub(crate) mod stack;

pub(crate) use test_support::*;
