//! The program's version, along with what distinguishes this build from others.

use std::{env::consts, sync::LazyLock};

/// The commit that this release was built from. The variable is set in release builds.
///
/// A build from crates.io does not need it, because its version identifies it.
const COMMIT: Option<&str> = option_env!("MCP_CANCEL_PROXY_COMMIT");

/// Returns the version along with this build's commit, platform and features.
pub(super) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let commit = COMMIT.filter(|commit| !commit.is_empty());
        let commit = commit.map(|commit| format!("commit {commit}, "));
        let libc = if cfg!(target_env = "musl") {
            "-musl"
        } else if cfg!(target_env = "gnu") {
            "-gnu"
        } else {
            ""
        };
        format!(
            "{} ({}{}-{}{libc}, features: program{})",
            env!("CARGO_PKG_VERSION"),
            commit.unwrap_or_default(),
            consts::ARCH,
            consts::OS,
            if cfg!(feature = "otel") { ", otel" } else { "" },
        )
    });
    &VERSION
}
