//! The options that apply to one kind of server only.

/// Options that do not apply to an upstream, and why.
pub(super) const COMMAND_ONLY: &[(&str, &str)] = &[
    (
        "max-sessions",
        "is for a command: an upstream limits its own sessions, and events of up to 4,096 are kept",
    ),
    (
        "session-timeout",
        "is for a command: an upstream ends its sessions itself",
    ),
    (
        "lost-timeout",
        "is for a command: an upstream ends its sessions itself",
    ),
    (
        "kill-after",
        "is for a command: with --upstream the proxy starts no process",
    ),
    (
        "env",
        "is for a command: with --upstream the proxy starts no process",
    ),
    (
        "cwd",
        "is for a command: with --upstream the proxy starts no process",
    ),
];

/// Options that do not apply to a command, and why.
pub(super) const UPSTREAM_ONLY: &[(&str, &str)] = &[
    ("header", "is for --upstream: a command receives no headers"),
    (
        "public-url",
        "is for --upstream: a command has no authorization and no redirects",
    ),
    (
        "trust-forwarded",
        "is for --upstream: a command receives no headers",
    ),
    (
        "ready-upstream",
        "is for --upstream: a command is started for each session",
    ),
    (
        "commit-after",
        "is for --upstream: the calls of a command have a stream at once",
    ),
    (
        "no-resumable",
        "is for --upstream: with a command, --grace immediate cancels every call at once",
    ),
];
