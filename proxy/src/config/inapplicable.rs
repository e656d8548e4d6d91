//! The options that only apply to one kind of server.

/// Options that do not apply to an upstream, and why.
pub(super) const COMMAND_ONLY: &[(&str, &str)] = &[
    (
        "max-sessions",
        "is for a command: an upstream limits its own sessions, and events are kept for up to 4,096 of them",
    ),
    (
        "session-timeout",
        "is for a command: an upstream ends its own sessions",
    ),
    (
        "lost-timeout",
        "is for a command: an upstream ends its own sessions",
    ),
    (
        "kill-after",
        "is for a command: with --upstream, the proxy does not start a process",
    ),
    (
        "env",
        "is for a command: with --upstream, the proxy does not start a process",
    ),
    (
        "cwd",
        "is for a command: with --upstream, the proxy does not start a process",
    ),
];

/// Options that do not apply to a command, and why.
pub(super) const UPSTREAM_ONLY: &[(&str, &str)] = &[
    ("header", "is for --upstream: a command receives no headers"),
    (
        "public-url",
        "is for --upstream: a command has neither authorization nor redirects",
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
        "is for --upstream: a command's calls get a stream at once",
    ),
    (
        "no-resumable",
        "is for --upstream: with a command, --grace immediate cancels every call at once",
    ),
];
