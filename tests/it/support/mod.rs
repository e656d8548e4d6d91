//! Servers with the layer in place, and everything that a test may observe of them.
//!
//! | module | job |
//! |---|---|
//! | [`setup`] | a server with the layer in place, in each way it may be used |
//! | [`stack`], [`foreign`] | other servers behind the layer |
//! | [`example`] | an example as a process of its own |
//! | [`log`] | the layer's events as data |
//! | [`test_support`] | a crate of its own that knows nothing of the layer: clients, server and witness |

pub(crate) mod example;
pub(crate) mod foreign;
pub(crate) mod log;
pub(crate) mod setup;
pub(crate) mod stack;

pub(crate) use test_support::*;
