//! What a cancel does to a handler, and whether its work stops.

mod abort;
mod client_requests;
mod late;
mod work;
