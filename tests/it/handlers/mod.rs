//! What does a handler feel of a cancel, and does its work stop?

mod abort;
mod asked;
mod late;
mod work;
