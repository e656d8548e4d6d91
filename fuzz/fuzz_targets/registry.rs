//! Compares the registry's core with a naive model, for any sequence of operations.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mcp_cancel_on_disconnect::fuzzing;

fuzz_target!(|bytes: &[u8]| fuzzing::registry(bytes));
