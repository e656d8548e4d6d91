//! The options that only apply to one kind of server.

/// Options that do not apply to an upstream, and why.
pub(super) const COMMAND_ONLY: &[(&str, &str)] = &[
    (
        "max-sessions",
        "requires a command: an upstream limits its own sessions, and events are kept for up to 4,096 of them",
    ),
    (
        "session-timeout",
        "requires a command: an upstream ends its own sessions",
    ),
    (
        "lost-timeout",
        "requires a command: an upstream ends its own sessions",
    ),
    (
        "kill-after",
        "requires a command: with --upstream, the proxy does not start a process",
    ),
    (
        "env",
        "requires a command: with --upstream, the proxy does not start a process",
    ),
    (
        "cwd",
        "requires a command: with --upstream, the proxy does not start a process",
    ),
];

/// Options that do not apply to a command, and why.
pub(super) const UPSTREAM_ONLY: &[(&str, &str)] = &[
    (
        "header",
        "requires --upstream: a command receives no headers",
    ),
    (
        "public-url",
        "requires --upstream: a command has neither authorization nor redirects",
    ),
    (
        "trust-forwarded",
        "requires --upstream: a command receives no headers",
    ),
    (
        "ready-upstream",
        "requires --upstream: a command is started for each session",
    ),
    (
        "commit-after",
        "requires --upstream: a command's calls get a stream immediately",
    ),
    (
        "no-resumable",
        "requires --upstream: with a command, --grace immediate cancels every call at once",
    ),
];
