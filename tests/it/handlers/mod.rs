//! Handlers: what they feel of a cancel, and whether their work stops.

mod abort;
mod asked;
mod late;
mod work;
