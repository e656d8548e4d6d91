//! Routes each request to its session, on this instance or on the session's owner.

pub(crate) mod fields;
pub(crate) mod owner_cache;
pub(crate) mod plan;
pub(crate) mod request_context;
pub(crate) mod request_kind;
pub(crate) mod resume;
pub(crate) mod routed;
pub(crate) mod router;
mod running_restore;
pub(crate) mod serving;
