//! A client that comes back for its call.
