//! The fuzzer's bytes as decisions: each byte one, and zeros when they are used up.

/// Takes decisions from the front, so that what comes later does not change what came before.
pub struct Choices<'a>(&'a [u8]);

// === impl Choices ===

impl<'a> Choices<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn are_left(&self) -> bool {
        !self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub fn one_of(&mut self, count: u8) -> u8 {
        self.byte() % count
    }

    pub fn coin(&mut self) -> bool {
        self.one_of(2) == 1
    }

    /// True once in `count`.
    pub fn rarely(&mut self, count: u8) -> bool {
        self.one_of(count) == 1
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }
}
