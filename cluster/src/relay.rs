//! The single hop from the instance receiving a request to the session's owner.

pub(crate) mod body_idle;
pub(crate) mod client;
pub(crate) mod continue_body;
pub(crate) mod failure;
pub(crate) mod filter;
pub(crate) mod network;
pub(crate) mod replayable_request;
pub(crate) mod server;
pub(crate) mod wire;
