//! A cursor over JSON text that finds where values end without parsing them.
//!
//! A tool argument can be a megabyte of text that the envelope does not need. Skipping a long string therefore costs only one `memchr` per
//! quote. Everything else is skipped byte by byte. The code that reads the envelope can rely on the following:
//!
//! 1. A skipped value has the structure that RFC 8259 requires: its commas, colons, brackets, literals and numbers are checked. The text
//!    between a string's quotes is not. Its escapes, control characters and UTF-8 are checked by the code that decodes the span.
//! 2. A string ends where a JSON parser would end it, even if it is malformed. Otherwise, text chosen by a client could be read as keys.
//! 3. Nothing recurses. The open containers are stored as the bits of an integer, up to the depth at which `serde_json` gives up.
//! 4. Reading takes time linear in the length of the text, even if the text is hostile.

use memchr::memchr_iter;

use super::ParseFailure;

/// Maximum number of open containers. `serde_json` rejects the 128th.
const MAX_DEPTH: u32 = 127;

/// A position in JSON text, along with the containers open at that point.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    body: &'a [u8],
    position: usize,
    depth: u32,
    /// One bit per open container, either [`OBJECT`] or [`ARRAY`]. The innermost container has the lowest bit.
    kinds: u128,
}

const OBJECT: u128 = 1;
const ARRAY: u128 = 0;

/// Masks for eight bytes at a time: each byte's lowest bit, and its highest.
const ONES: u64 = u64::from_le_bytes([1; 8]);
const HIGHEST: u64 = ONES << 7;

// === impl Cursor ===

impl<'a> Cursor<'a> {
    pub(super) fn new(body: &'a [u8]) -> Self {
        Self {
            body,
            position: 0,
            depth: 0,
            kinds: 0,
        }
    }

    /// Skips white space and returns the next byte without consuming it, or `None` at the end.
    pub(super) fn next_byte(&mut self) -> Option<u8> {
        match self.peek() {
            Some(..=b' ') => self.after_space(),
            first => first,
        }
    }

    fn after_space(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.position += 1;
        }
        self.peek()
    }

    /// Opens the next object and returns its first key. If the object is empty, closes it and returns `None`.
    ///
    /// The key is the undecoded text between the quotes.
    pub(super) fn enter_object(&mut self) -> Result<Option<&'a [u8]>, ParseFailure> {
        if self.next_byte() != Some(b'{') {
            return Err(self.unexpected());
        }
        if self.open(OBJECT)? {
            self.key().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Returns the object's next key after a value, or closes the object and returns `None`.
    pub(super) fn next_key(&mut self) -> Result<Option<&'a [u8]>, ParseFailure> {
        if self.comma_or_close()? {
            self.key().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Skips the next value. Returns its text, without the white space around it.
    pub(super) fn value(&mut self) -> Result<&'a [u8], ParseFailure> {
        let first = self.next_byte();
        let start = self.position;
        match first {
            Some(b'{' | b'[') => self.skip_container()?,
            first => self.skip_scalar(first)?,
        }
        Ok(self.body.get(start..self.position).unwrap_or_default())
    }

    /// Checks that nothing but white space is left.
    pub(super) fn expect_end(&mut self) -> Result<(), ParseFailure> {
        match self.next_byte() {
            None => Ok(()),
            Some(_) => Err(ParseFailure::NotJson),
        }
    }

    /// Skips the next container.
    fn skip_container(&mut self) -> Result<(), ParseFailure> {
        let outer_depth = self.depth;
        loop {
            let opened = match self.next_byte() {
                Some(b'{') => self.open(OBJECT)?,
                Some(b'[') => self.open(ARRAY)?,
                first => {
                    self.skip_scalar(first)?;
                    false
                }
            };
            if !opened {
                // A value has ended, and some of the containers around it may end here too.
                while self.depth != outer_depth && !self.comma_or_close()? {}
                if self.depth == outer_depth {
                    return Ok(());
                }
            }
            if self.kinds & 1 == OBJECT {
                self.key()?;
            }
        }
    }

    /// Consumes an opening bracket. If the container is empty, also consumes the closing bracket and returns `false`.
    fn open(&mut self, kind: u128) -> Result<bool, ParseFailure> {
        if self.depth == MAX_DEPTH {
            return Err(ParseFailure::TooDeep);
        }
        self.position += 1;
        self.depth += 1;
        self.kinds = self.kinds << 1 | kind;
        let empty = self.next_byte() == Some(self.closing());
        if empty {
            self.close();
        }
        Ok(!empty)
    }

    /// Consumes a comma or the innermost container's closing bracket. Returns `true` if it was a comma.
    fn comma_or_close(&mut self) -> Result<bool, ParseFailure> {
        match self.next_byte() {
            Some(b',') => {
                self.position += 1;
                Ok(true)
            }
            Some(byte) if byte == self.closing() => {
                self.close();
                Ok(false)
            }
            _ => Err(self.unexpected()),
        }
    }

    fn close(&mut self) {
        self.position += 1;
        self.depth -= 1;
        self.kinds >>= 1;
    }

    /// Returns the bracket that closes the innermost container.
    fn closing(&self) -> u8 {
        if self.kinds & 1 == OBJECT { b'}' } else { b']' }
    }

    // Inlining `key` and `skip_scalar` makes text with many keys a quarter cheaper.

    #[inline(always)]
    fn key(&mut self) -> Result<&'a [u8], ParseFailure> {
        self.expect(b'"')?;
        let key = self.rest_of_string()?;
        self.expect(b':')?;
        Ok(key)
    }

    /// Skips a value that starts with this byte and is not a container.
    #[inline(always)]
    fn skip_scalar(&mut self, first: Option<u8>) -> Result<(), ParseFailure> {
        match first {
            Some(b'"') => {
                self.position += 1;
                self.rest_of_string().map(|_| ())
            }
            Some(b'-' | b'0'..=b'9') => self.skip_number(),
            Some(b't') => self.skip_literal(b"true"),
            Some(b'f') => self.skip_literal(b"false"),
            Some(b'n') => self.skip_literal(b"null"),
            _ => Err(self.unexpected()),
        }
    }

    /// Skips the rest of a string after its opening quote. Returns the text up to the closing quote.
    fn rest_of_string(&mut self) -> Result<&'a [u8], ParseFailure> {
        let text = self
            .body
            .get(self.position..)
            .ok_or(ParseFailure::Truncated)?;
        let quote = match find_near_quote(text) {
            // No backslash directly precedes this quote.
            Some(quote) if text.get(quote.wrapping_sub(1)) != Some(&b'\\') => quote,
            _ => find_closing_quote(text).ok_or(ParseFailure::Truncated)?,
        };
        self.position += quote + 1;
        text.get(..quote).ok_or(ParseFailure::Truncated)
    }

    fn skip_number(&mut self) -> Result<(), ParseFailure> {
        self.eat(b'-');
        // No digit may follow a leading zero. If one does, parsing fails later, where the number should have ended.
        if !self.eat(b'0') {
            self.skip_digits()?;
        }
        if self.eat(b'.') {
            self.skip_digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.position += 1;
            let _ = self.eat(b'+') || self.eat(b'-');
            self.skip_digits()?;
        }
        Ok(())
    }

    fn skip_digits(&mut self) -> Result<(), ParseFailure> {
        let start = self.position;
        while let Some(b'0'..=b'9') = self.peek() {
            self.position += 1;
        }
        if self.position == start {
            return Err(self.unexpected());
        }
        Ok(())
    }

    fn skip_literal(&mut self, word: &[u8]) -> Result<(), ParseFailure> {
        if !word.iter().all(|byte| self.eat(*byte)) {
            return Err(self.unexpected());
        }
        Ok(())
    }

    /// Consumes this byte and any white space before it.
    fn expect(&mut self, byte: u8) -> Result<(), ParseFailure> {
        if self.next_byte() != Some(byte) {
            return Err(self.unexpected());
        }
        self.position += 1;
        Ok(())
    }

    /// Consumes this byte if it is next, and returns whether it was.
    fn eat(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        if is_next {
            self.position += 1;
        }
        is_next
    }

    fn peek(&self) -> Option<u8> {
        self.body.get(self.position).copied()
    }

    /// Returns why the text is invalid at this point: either it has ended, or it continues with the wrong byte.
    #[cold]
    fn unexpected(&self) -> ParseFailure {
        match self.peek() {
            None => ParseFailure::Truncated,
            Some(_) => ParseFailure::NotJson,
        }
    }
}

/// Returns `true` if the text between two quotes needs no decoding.
///
/// That is, it is ASCII without backslashes or control characters.
pub(super) fn is_plain(text: &[u8]) -> bool {
    let (words, rest) = text.as_chunks();
    let plain = |word: &[u8; 8]| {
        let word = u64::from_le_bytes(*word);
        // This sets the highest bit of each byte that already has it set or is below a space, in which case the subtraction borrows.
        let not_printable = word | word.wrapping_sub(ONES * u64::from(b' '));
        (not_printable | marks(word, b'\\')) & HIGHEST == 0
    };
    let plain_byte = |byte: &u8| matches!(byte, b' '..=b'\x7f') && *byte != b'\\';
    words.iter().all(plain) && rest.iter().all(plain_byte)
}

/// Returns the position of the first quote, if it is within the first two words of 8 bytes.
///
/// Most strings are short, and for them this loop is cheaper than a call to `memchr`.
fn find_near_quote(text: &[u8]) -> Option<usize> {
    let (words, _) = text.as_chunks();
    let mut before = 0;
    for word in words.iter().take(2) {
        let quotes = marks(u64::from_le_bytes(*word), b'"');
        if quotes != 0 {
            return Some(before + quotes.trailing_zeros() as usize / 8);
        }
        before += 8;
    }
    None
}

/// Returns a word in which the highest bit of each byte equal to `wanted` is set.
///
/// The lowest byte is the first one in the text. Bytes after the first hit may be marked by mistake, because the subtraction borrows, but
/// bytes before it never are.
fn marks(word: u64, wanted: u8) -> u64 {
    let zero_if_wanted = word ^ (ONES * u64::from(wanted));
    zero_if_wanted.wrapping_sub(ONES) & !zero_if_wanted & HIGHEST
}

/// Returns the position of the closing quote, however far away it is.
///
/// A quote is escaped if it is directly preceded by an odd number of backslashes. Looking back from each quote avoids stopping at every
/// `\n`, and never reads a backslash twice.
// If inlined, it would take registers from the search for a near quote.
#[inline(never)]
fn find_closing_quote(text: &[u8]) -> Option<usize> {
    memchr_iter(b'"', text).find(|quote| {
        let before = text.get(..*quote).unwrap_or_default().iter().rev();
        before.take_while(|byte| **byte == b'\\').count() % 2 == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_of_any_length_ends_at_its_closing_quote() {
        for length in 0..40 {
            for after in ["", ":", ":\"x\\\"\"", "                        \""] {
                let text = "x".repeat(length);
                let body = format!("{text}\"{after}");
                let mut cursor = Cursor::new(body.as_bytes());
                assert_eq!(cursor.rest_of_string(), Ok(text.as_bytes()), "{body}");
                assert_eq!(cursor.position, length + 1, "{body}");
            }
        }
    }

    #[test]
    fn a_quote_after_a_backslash_is_found_at_any_position() {
        for length in 0..40 {
            for escape in [r#"\""#, r"\\", r#"\\\""#] {
                let text = format!("{}{escape}", "x".repeat(length));
                for after in ["", "x", "                        \""] {
                    let body = format!("{text}\"{after}");
                    let mut cursor = Cursor::new(body.as_bytes());
                    assert_eq!(cursor.rest_of_string(), Ok(text.as_bytes()), "{body}");
                }
                let mut cut = Cursor::new(text.as_bytes());
                assert_eq!(cut.rest_of_string(), Err(ParseFailure::Truncated), "{text}");
            }
        }
    }

    #[test]
    fn text_is_plain_if_each_of_its_bytes_is() {
        assert!(is_plain(b""));
        for byte in 0..=u8::MAX {
            let plain = matches!(byte, b' '..=b'\x7f') && byte != b'\\';
            for others in [b' ', b'~', b'\x7f', b'['] {
                for at in 0..20 {
                    let mut text = [others; 20];
                    text[at] = byte;
                    assert_eq!(is_plain(&text), plain, "{}", text.escape_ascii());
                    let short = &text[..=at];
                    assert_eq!(is_plain(short), plain, "{}", short.escape_ascii());
                }
            }
        }
    }
}
