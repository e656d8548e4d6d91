//! The streams of a call, one after the other.

/// The generation of a call's first stream, that of the POST.
pub(crate) const POST_GENERATION: Generation = Generation(1);

/// The generation of a stream without a client.
pub(crate) const NO_GENERATION: Generation = Generation(0);

/// Which stream of its call a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Generation(u32);

// === impl Generation ===

impl Generation {
    pub(super) fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}
