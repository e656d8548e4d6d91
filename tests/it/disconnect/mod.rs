//! Disconnects and what they do: at once, after a grace period, and among many calls.

mod abandoned;
mod answered;
mod auto;
mod concurrency;
mod grace;
mod handed_over;
mod hang_up;
mod read_on;
mod readme;
mod tenants;
