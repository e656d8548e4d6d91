//! Reads options from the command line, the environment and a file.
//!
//! Each option is declared once, in [`Config`]. In the environment its name is prefixed with `MCP_PROXY_`, and in the file it has
//! no prefix. Flags override the environment, which in turn overrides the file.

use std::{
    ffi::OsString,
    fmt, iter,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::{
    ArgMatches, Command, CommandFactory as _, FromArgMatches as _, Parser, error::ErrorKind,
    parser::ValueSource,
};
use http::{HeaderName, HeaderValue, Uri};
use mcp_cancel_on_disconnect::Grace;

mod entry;
mod environment;
mod error;
mod file;
mod inapplicable;
mod operators;
mod public;
mod subcommand;
mod value;
mod version;

pub(crate) use self::value::normal_origin;
pub use self::{
    error::ConfigError,
    operators::{AdminToken, Operators},
    public::{Network, PublicOptions},
    subcommand::{Subcommand, documented_command},
    value::{Limit, LogFormat},
};

/// The longest reconnect delay to send to clients.
const MAX_RETRY: Duration = Duration::from_secs(3);

/// Ratio of the grace period to the reconnect delay.
///
/// This allows time for two attempts to resume, including the requests themselves.
const RETRY_DIVISOR: u32 = 4;

/// The shortest grace period accepted without a warning.
///
/// SDKs that have not received a `retry` resume after 1 s, and may need two attempts.
const MIN_REACHABLE_GRACE: Duration = Duration::from_secs(4);

/// The program's options.
#[derive(Clone, Parser)]
#[command(
    name = "mcp-cancel-proxy",
    version = version::version(),
    about = "Runs in front of an MCP server, cancels orphaned calls, and delivers answers to clients that resume",
    override_usage = "mcp-cancel-proxy [OPTIONS] --upstream <URL>\n       mcp-cancel-proxy [OPTIONS] -- <COMMAND>...\n       mcp-cancel-proxy --demo"
)]
#[non_exhaustive]
pub struct Config {
    /// URL of the server's MCP endpoint, http or https
    #[arg(long, env = "MCP_PROXY_UPSTREAM", hide_env_values = true, value_name = "URL", value_parser = value::upstream)]
    pub upstream: Option<Uri>,

    /// Command of a server that speaks MCP on stdin and stdout, started once per session
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,

    /// Address to listen on; a port alone listens on 127.0.0.1
    #[arg(
        long,
        env = "MCP_PROXY_LISTEN",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:8000",
        value_parser = value::address
    )]
    pub listen: SocketAddr,

    /// The port in `listen`. Hidden, but accepted because other bridges have this flag.
    #[arg(long, hide = true)]
    port: Option<u16>,

    /// The host in `listen`. Hidden, but accepted because other bridges have this flag.
    #[arg(long, hide = true, value_parser = value::ip)]
    host: Option<IpAddr>,

    /// How long a call waits for a disconnected client: auto, immediate, never, a time such as 20s (auto, with this time), or
    /// always=20s (for every call)
    #[arg(long, env = "MCP_PROXY_GRACE", default_value = "auto", value_parser = value::grace)]
    pub grace: Grace,

    /// Maximum duration of a call
    #[arg(long, env = "MCP_PROXY_CALL_TIMEOUT", value_name = "TIME", value_parser = value::time)]
    pub call_timeout: Option<Duration>,

    /// Tool whose calls are not cancelled by a disconnect
    #[arg(
        long,
        env = "MCP_PROXY_EXEMPT",
        value_name = "TOOL",
        value_delimiter = ',',
        value_parser = value::tool
    )]
    pub exempt: Vec<String>,

    /// Grace period for a single tool, such as report=1h
    #[arg(long, env = "MCP_PROXY_TOOL_GRACE", value_name = "TOOL=GRACE", value_delimiter = ',', value_parser = value::tool_grace)]
    pub tool_grace: Vec<(String, Grace)>,

    /// Do not store events; clients can then resume only if the upstream stores them (requires --upstream)
    #[arg(long, env = "MCP_PROXY_NO_RESUMABLE")]
    pub no_resumable: bool,

    /// How long the server may be silent before its client gets an event stream (only with --upstream)
    #[arg(long, env = "MCP_PROXY_COMMIT_AFTER", value_name = "TIME", default_value = "1s", value_parser = value::commit_after)]
    pub commit_after: Duration,

    /// Maximum total size of the events stored for clients that resume
    #[arg(long, env = "MCP_PROXY_BUFFER", value_name = "SIZE", default_value = "64MiB", value_parser = value::buffer)]
    pub buffer: usize,

    /// Interval between probes on a quiet stream, or off
    #[arg(long, env = "MCP_PROXY_KEEP_ALIVE", value_name = "TIME", default_value = "15s", value_parser = value::limit)]
    pub keep_alive: Limit,

    /// How long a client may leave a stream unread, or off
    #[arg(long, env = "MCP_PROXY_STALL_TIMEOUT", value_name = "TIME", default_value = "60s", value_parser = value::limit)]
    pub stall_timeout: Limit,

    /// How long a session may be idle before its process is stopped, or off (only with a command; an upstream ends its own sessions)
    #[arg(long, env = "MCP_PROXY_SESSION_TIMEOUT", value_name = "TIME", default_value = "30m", value_parser = value::limit)]
    pub session_timeout: Limit,

    /// How long a session may stay unused after its client has disconnected, or off (only with a command)
    #[arg(long, env = "MCP_PROXY_LOST_TIMEOUT", value_name = "TIME", default_value = "off", value_parser = value::limit)]
    pub lost_timeout: Limit,

    /// Maximum number of sessions, each with a process (only with a command; an upstream limits its own)
    #[arg(
        long,
        env = "MCP_PROXY_MAX_SESSIONS",
        value_name = "NUMBER",
        default_value = "256",
        value_parser = value::sessions
    )]
    pub max_sessions: usize,

    /// Kill a command's process if it has not answered a cancelled call within this time
    #[arg(long, env = "MCP_PROXY_KILL_AFTER", value_name = "TIME", value_parser = value::time)]
    pub kill_after: Option<Duration>,

    /// Environment variable for the command, as NAME=VALUE
    #[arg(long, env = "MCP_PROXY_ENV", hide_env_values = true, value_name = "NAME=VALUE", value_parser = value::variable)]
    pub env: Vec<(String, String)>,

    /// Directory to run the command in
    #[arg(long, env = "MCP_PROXY_CWD", value_name = "DIRECTORY")]
    pub cwd: Option<PathBuf>,

    /// Host name that clients use, with or without a port; required to listen on addresses other than loopback
    #[arg(long, env = "MCP_PROXY_ALLOW_HOST", value_name = "HOST", value_delimiter = ',', value_parser = value::host)]
    pub allow_host: Vec<String>,

    #[allow(
        rustdoc::bare_urls,
        reason = "the doc is the text of `--help`, where angle brackets would be shown"
    )]
    /// Origin whose pages may call the server, such as https://app.example.com
    #[arg(long, env = "MCP_PROXY_ALLOW_ORIGIN", value_name = "ORIGIN", value_delimiter = ',', value_parser = value::origin)]
    pub allow_origin: Vec<String>,

    /// Header to send with every request to the upstream, as NAME: VALUE, in place of the client's own
    #[arg(long, env = "MCP_PROXY_HEADER", hide_env_values = true, value_name = "NAME: VALUE", value_parser = value::header)]
    pub header: Vec<(HeaderName, HeaderValue)>,

    /// The options for reverse proxies in front of this one.
    #[command(flatten)]
    pub public: PublicOptions,

    /// Address for the operator pages: health, metrics and calls
    #[arg(long, env = "MCP_PROXY_ADMIN", value_name = "ADDRESS", value_parser = value::address)]
    pub admin: Option<SocketAddr>,

    /// More options for operators.
    #[command(flatten)]
    pub operators: Operators,

    /// How long calls may continue after a signal; the entire shutdown takes at most 10 s, or this time plus 2 s if that is longer
    #[arg(long, env = "MCP_PROXY_DRAIN", value_name = "TIME", default_value = "8s", value_parser = value::time)]
    pub drain: Duration,

    /// Format of log lines
    #[arg(
        long,
        env = "MCP_PROXY_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,

    /// TOML file that sets any of these options by name
    #[arg(long, env = "MCP_PROXY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Show what a disconnect does, using a built-in server (cannot be combined with other options)
    #[arg(long, exclusive = true)]
    pub demo: bool,

    /// Warnings to log at startup.
    #[arg(skip)]
    warnings: Vec<String>,
}

/// The server that the proxy stands in front of.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Target<'a> {
    /// A server that speaks HTTP.
    Http(&'a Uri),
    /// A program to start, with its arguments.
    Command(&'a [OsString]),
}

// === impl Config ===

impl Config {
    /// Reads the command line, the environment, and the configuration file.
    ///
    /// # Errors
    ///
    /// Returns an error for invalid, conflicting or missing options. For `--help` and `--version`, the error contains the text to
    /// print.
    pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<Self, ConfigError> {
        let (config, matches) = Self::parse(args)?;
        config.check(&matches)?;
        Ok(config)
    }

    /// Reads the same sources, but returns only the address for operators, if any.
    ///
    /// Each option must be valid on its own, but the server may be missing and options may conflict.
    pub fn read_admin(
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Option<SocketAddr>, ConfigError> {
        Ok(Self::parse(args)?.0.admin)
    }

    fn parse(args: impl IntoIterator<Item = OsString>) -> Result<(Self, ArgMatches), ConfigError> {
        let args = args.into_iter().collect();
        // Report errors on the command line first.
        let _ = parse_args(&args)?;
        let environment = environment::Environment::read(std::env::vars_os())?;
        let args = add_defaults(args, &environment.entries)?;
        let path = parse_args(&args)?.get_one::<PathBuf>("config").cloned();
        let file = path.as_deref().map(file::File::read).transpose()?;
        let file = file.unwrap_or_default();
        let matches = parse_args(&add_defaults(args, &file.entries)?)?;

        let mut config = Self::from_arg_matches(&matches)?;
        let ip = config.host.unwrap_or_else(|| config.listen.ip());
        let port = config.port.unwrap_or_else(|| config.listen.port());
        config.listen = SocketAddr::new(ip, port);
        config.warnings = [environment.warnings, file.warnings].concat();
        config.warnings.extend(config.short_grace_warnings());
        Ok((config, matches))
    }

    /// Returns the reconnect delay for clients: a quarter of the shortest grace period.
    ///
    /// A client uses the same delay for all of its streams, so the shortest grace period determines it. The delay is at most
    /// [`MAX_RETRY`].
    pub(crate) fn retry(&self) -> Duration {
        let graces = self.timed_graces().map(|(_, grace)| grace / RETRY_DIVISOR);
        graces.fold(MAX_RETRY, Duration::min)
    }

    /// Returns the timed grace periods, each with its tool (`None` for the default).
    fn timed_graces(&self) -> impl Iterator<Item = (Option<&str>, Duration)> {
        let tool_graces = self.tool_grace.iter();
        let tool_graces = tool_graces.map(|(tool, grace)| (Some(&**tool), *grace));
        let graces = iter::once((None, self.grace)).chain(tool_graces);
        graces.filter_map(|(tool, grace)| match grace {
            Grace::After(grace) | Grace::AutoAfter(grace) => Some((tool, grace)),
            _ => None,
        })
    }

    fn short_grace_warnings(&self) -> Vec<String> {
        let graces = self.timed_graces();
        let short = graces.filter(|(_, grace)| *grace < MIN_REACHABLE_GRACE);
        let warnings = short.map(|(tool, grace)| {
            let scope = tool.map_or_else(String::new, |tool| format!(" for the tool {tool:?}"));
            format!(
                "the grace period of {grace:?}{scope} is shorter than {MIN_REACHABLE_GRACE:?}: many clients will resume too late (--grace, --tool-grace)"
            )
        });
        warnings.collect()
    }

    /// Returns the warnings to log at startup.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the server that the proxy stands in front of.
    pub fn target(&self) -> Target<'_> {
        match &self.upstream {
            Some(upstream) => Target::Http(upstream),
            None => Target::Command(&self.command),
        }
    }

    /// Checks for conflicting options and for options that require another option.
    fn check(&self, matches: &ArgMatches) -> Result<(), ConfigError> {
        let usage_error = |message: &str| Err(ConfigError::Usage(message.to_owned()));
        if let Some(admin) = self.admin.filter(|admin| overlap(self.listen, *admin)) {
            return usage_error(&format!(
                "--listen {} and --admin {admin} have the same port: choose another one for --admin",
                self.listen
            ));
        }
        let options = match (&self.upstream, self.command.is_empty()) {
            (None, true) => {
                return usage_error(
                    "no MCP server: pass its URL with --upstream, or its command after --",
                );
            }
            (Some(_), false) => {
                return usage_error(
                    "--upstream and a command are mutually exclusive: pass only one of them",
                );
            }
            (Some(_), true) => inapplicable::COMMAND_ONLY,
            (None, false) => inapplicable::UPSTREAM_ONLY,
        };
        let is_given = |option: &str| is_set(matches, option) && !is_off(matches, option);
        if let Some((option, reason)) = options.iter().find(|(option, _)| is_given(option)) {
            return usage_error(&format!("--{option} {reason}"));
        }
        self.public.check(self.upstream.as_ref())?;
        let need_admin = operators::NEED_ADMIN.iter();
        if self.admin.is_none()
            && let Some(option) = need_admin.copied().find(|option| is_given(option))
        {
            return usage_error(&format!(
                "--{option} requires the operator pages: set --admin as well"
            ));
        }
        if !self.listen.ip().is_loopback() && self.allow_host.is_empty() {
            return usage_error(&format!(
                "--listen {} is reachable from other machines: add the host names that clients use, for example --allow-host mcp.example.com",
                self.listen
            ));
        }
        Ok(())
    }
}

/// Returns `true` if the proxy can't listen on both addresses at the same time.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let is_any = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && (a.ip() == b.ip() || is_any)
}

fn parse_args(args: &Vec<OsString>) -> Result<ArgMatches, ConfigError> {
    let error = match bare_command().try_get_matches_from(args) {
        Ok(matches) => return Ok(matches),
        Err(error) => error,
    };
    match (error.kind(), entry::hint(&error)) {
        // Include the environment variables and the sub-commands in the help.
        (ErrorKind::DisplayHelp, _) => Ok(documented_command().try_get_matches_from(args)?),
        (_, Some(hint)) => Err(ConfigError::Usage(hint.to_owned())),
        (_, None) => Err(entry::redact_secrets(error).into()),
    }
}

/// Shows only the addresses. The upstream, the command, its environment and the headers can contain secrets.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("listen", &self.listen)
            .field("admin", &self.admin)
            .finish_non_exhaustive()
    }
}

/// Adds another source's entries for options that the arguments do not set.
fn add_defaults(
    args: Vec<OsString>,
    entries: &[entry::Entry],
) -> Result<Vec<OsString>, ConfigError> {
    let matches = parse_args(&args)?;
    let unset = entries
        .iter()
        .filter(|entry| !is_set(&matches, entry.option()));
    let (commands, options): (Vec<&entry::Entry>, Vec<_>) =
        unset.partition(|entry| entry.is_command());
    let mut args = args.into_iter();
    let mut merged: Vec<OsString> = args.next().into_iter().collect();
    merged.extend(options.into_iter().flat_map(entry::Entry::args));
    merged.extend(args);
    merged.extend(commands.into_iter().flat_map(entry::Entry::args));
    Ok(merged)
}

/// Returns `true` if the arguments set the option, or another option that replaces it.
fn is_set(matches: &ArgMatches, option: &str) -> bool {
    let is_given = |option: &str| {
        let source = matches.value_source(&option.replace('-', "_"));
        source.is_some_and(|source| source != ValueSource::DefaultValue)
    };
    match option {
        "upstream" | "command" => is_given("upstream") || is_given("command"),
        "port" | "host" => is_given(option) || is_given("listen"),
        other => is_given(other),
    }
}

/// Returns `true` if the option is a switch that is turned off.
fn is_off(matches: &ArgMatches, option: &str) -> bool {
    let value = matches.try_get_one::<bool>(&option.replace('-', "_"));
    matches!(value, Ok(Some(false)))
}

/// Returns the clap command, without support for environment variables.
fn bare_command() -> Command {
    Config::command().mut_args(|arg| arg.env(None))
}

/// Checks a single option on its own.
fn check_option(args: impl IntoIterator<Item = OsString>) -> Result<(), clap::Error> {
    let name = iter::once(OsString::from("mcp-cancel-proxy"));
    bare_command()
        .try_get_matches_from(name.chain(args))
        .map(drop)
        .map_err(entry::redact_secrets)
}

/// Returns `true` if an option's values must be kept secret.
fn value_is_secret(option: &str) -> bool {
    let command = Config::command();
    let mut arguments = command.get_arguments();
    arguments.any(|arg| arg.get_long() == Some(option) && arg.is_hide_env_values_set())
}

#[cfg(test)]
mod tests;
