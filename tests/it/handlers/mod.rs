//! What a cancellation does to a handler, and whether its work stops.

mod abort;
mod forwarded;
mod late;
mod requests_to_client;
mod work;
