//! The sub-commands, which do not start the proxy.
//!
//! A sub-command is the first argument. The command of a server stands after `--`, so it may have the same name.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{Command, CommandFactory as _, Parser, Subcommand as _};
use clap_complete::Shell;

use super::{Config, ConfigError, value};

/// What the program can do besides standing in front of a server.
#[derive(Debug, Parser)]
#[command(name = "mcp-cancel-proxy", disable_help_subcommand = true)]
#[non_exhaustive]
pub enum Subcommand {
    /// Request /healthz of a running proxy from its --admin address; the exit code is 0 if the proxy is healthy, else 1
    Health {
        /// Address of the pages for operators; also from MCP_PROXY_ADMIN and the file
        #[arg(long, value_name = "ADDRESS", value_parser = value::address)]
        admin: Option<SocketAddr>,

        /// TOML file of the running proxy; also from MCP_PROXY_CONFIG
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Print the manual page, for man
    Man,
    /// Print the completions for a shell
    Completions {
        /// Shell that reads the completions
        shell: Shell,
    },
}

// === impl Subcommand ===

impl Subcommand {
    /// Reads the sub-command. Returns `None` if the first argument is not one.
    pub fn read(args: &[OsString]) -> Option<Result<Self, ConfigError>> {
        let first = args.get(1)?.to_str()?;
        // A sub-command counts as given even if its options are missing or invalid.
        Self::has_subcommand(first).then(|| Ok(Self::try_parse_from(args)?))
    }
}

/// Returns the options and the sub-commands, for the help, the manual page and completions.
pub fn documented_command() -> Command {
    let command = Config::command();
    let about = command.get_about().cloned().unwrap_or_default();
    // The enum of the sub-commands has its own description.
    Subcommand::augment_subcommands(command)
        .about(about)
        .disable_help_subcommand(true)
}
