//! Turns the fuzzer's bytes into choices, one byte each. Once the bytes run out, all choices are zero.

/// Takes choices from the front, so that later choices do not affect earlier ones.
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

    /// Returns `true` for one out of `count` values.
    pub fn rarely(&mut self, count: u8) -> bool {
        self.one_of(count) == 1
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }
}
