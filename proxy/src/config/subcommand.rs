//! Sub-commands, which do something other than start the proxy.
//!
//! A sub-command is always the first argument. A server's command follows `--`, so it may have the same name.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{Command, CommandFactory as _, Parser, Subcommand as _};
use clap_complete::Shell;

use super::{Config, ConfigError, value};

/// What the program can do besides standing in front of a server.
#[derive(Debug, Parser)]
#[command(name = "mcp-cancel-proxy", disable_help_subcommand = true)]
#[non_exhaustive]
pub enum Subcommand {
    /// Request /healthz from a running proxy's --admin address; the exit code is 0 if the proxy is healthy, and 1 if not
    Health {
        /// Address of the operator pages; also read from MCP_PROXY_ADMIN and the file
        #[arg(long, value_name = "ADDRESS", value_parser = value::address)]
        admin: Option<SocketAddr>,

        /// The running proxy's TOML file; also read from MCP_PROXY_CONFIG
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Print the manual page, for man
    Man,
    /// Print the completions for a shell
    Completions {
        /// Shell to print the completions for
        shell: Shell,
    },
}

// === impl Subcommand ===

impl Subcommand {
    /// Reads the sub-command, or returns `None` if the first argument is not one.
    pub fn read(args: &[OsString]) -> Option<Result<Self, ConfigError>> {
        let first = args.get(1)?.to_str()?;
        // Treat this as a sub-command even if its options are missing or invalid.
        Self::has_subcommand(first).then(|| Ok(Self::try_parse_from(args)?))
    }
}

/// Returns all options and sub-commands, for the help, the manual page and the completions.
pub fn documented_command() -> Command {
    let command = Config::command();
    let about = command.get_about().cloned().unwrap_or_default();
    // `augment_subcommands` would replace the description with the enum's own.
    Subcommand::augment_subcommands(command)
        .about(about)
        .disable_help_subcommand(true)
}
