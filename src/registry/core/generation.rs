//! Stream numbering within a call.

/// The generation of a call's first stream, the response to its POST.
pub(crate) const POST_GENERATION: Generation = Generation(1);

/// The generation of a stream read only in the background.
pub(crate) const NO_GENERATION: Generation = Generation(0);

/// A stream's number within its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Generation(u32);

// === impl Generation ===

impl Generation {
    pub(super) fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}
