//! Any operations on the registry's core, one after the other, against a model that is too simple to be wrong.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mcp_cancel_on_disconnect::fuzzing;

fuzz_target!(|bytes: &[u8]| fuzzing::registry(bytes));
