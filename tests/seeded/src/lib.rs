//! Makes the operating system's random numbers repeatable in a test.
//!
//! A program that links this crate gets a `getrandom` of its own. On a thread within [`seeded`] its numbers follow from the
//! seed; on all other threads they are the kernel's. The hash maps in `std`, the ids from `uuid` and tokio's `select!` all
//! use it, so a simulation on one thread is repeatable. On systems other than Linux, nothing changes.

use std::cell::Cell;

thread_local! {
    /// The generator's state (splitmix64), if this thread is seeded.
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Runs `work` with random numbers that follow from `seed`.
///
/// `std` draws the keys of its hash maps once per thread, so a run is only repeatable on a new thread. If `work` panics, the
/// thread stays seeded.
pub fn seeded<T>(seed: u64, work: impl FnOnce() -> T) -> T {
    STATE.set(Some(seed));
    let done = work();
    STATE.set(None);
    done
}

/// Returns the next number, or `None` if this thread is not seeded.
#[cfg(target_os = "linux")]
fn next() -> Option<u64> {
    // While the thread is exiting, its thread-local is unavailable. The kernel's numbers are used then.
    let state = STATE.try_with(Cell::get).ok()??;
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    STATE.set(Some(state));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    Some(mixed ^ (mixed >> 31))
}

/// Replaces libc's `getrandom`.
#[cfg(target_os = "linux")]
mod replaced {
    #![allow(unsafe_code, reason = "replaces a libc function")]

    use std::{ffi::c_void, slice};

    use rustix::rand::{GetRandomFlags, getrandom as kernel};

    /// # Safety
    ///
    /// As with libc's: `buffer` points to `length` bytes.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, flags: u32) -> isize {
        if length == 0 {
            return 0;
        }
        // SAFETY: The caller promises this.
        let bytes = unsafe { slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
        if super::next().is_none() {
            let read = kernel(bytes, GetRandomFlags::from_bits_retain(flags));
            return read.map_or(-1, |read| isize::try_from(read).unwrap_or(-1));
        }
        for chunk in bytes.chunks_mut(8) {
            let number = super::next().unwrap_or_default().to_le_bytes();
            chunk.copy_from_slice(&number[..chunk.len()]);
        }
        isize::try_from(length).unwrap_or(-1)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{collections::hash_map::RandomState, hash::BuildHasher, thread};

    use super::seeded;

    fn draw(seed: u64) -> u64 {
        let drawn = thread::spawn(move || seeded(seed, || RandomState::new().hash_one(0)));
        drawn.join().unwrap()
    }

    #[test]
    fn the_same_seed_repeats_the_numbers_std_draws() {
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
