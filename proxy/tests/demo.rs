//! The demo checks its own outcomes.
#![cfg(unix)]

use std::process::Command;

#[test]
fn the_demo_ends_as_expected() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_mcp-cancel-proxy"));
    let output = demo.arg("--demo").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("All 12 calls ended as expected"), "{text}");
}
