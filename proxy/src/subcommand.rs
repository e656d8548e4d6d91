//! Runs the sub-commands: health check, manual page and completions.

use std::{
    ffi::OsString,
    fmt,
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;

use crate::{
    config::{Config, ConfigError, Subcommand, documented_command},
    forward::root_cause,
};

/// How long a health check may take. Container engines allow 30 s by default, and Kubernetes probes 1 s.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs the sub-command given in the arguments, or returns `None` if there is none.
pub async fn run_if_requested(args: &[OsString]) -> Option<Result<ExitCode, ConfigError>> {
    match Subcommand::read(args)? {
        Ok(subcommand) => Some(run(subcommand).await),
        Err(error) => Some(Err(error)),
    }
}

async fn run(subcommand: Subcommand) -> Result<ExitCode, ConfigError> {
    match subcommand {
        Subcommand::Health { admin, config } => {
            let mut args = vec![OsString::from("mcp-cancel-proxy")];
            args.extend(admin.map(|admin| format!("--admin={admin}").into()));
            if let Some(config) = config {
                args.extend(["--config".into(), config.into_os_string()]);
            }
            let Some(admin) = Config::read_admin(args)? else {
                return Err(ConfigError::Usage(
                    "health needs the proxy's admin address: set --admin, MCP_PROXY_ADMIN, or admin in the configuration file".to_owned(),
                ));
            };
            Ok(health(admin).await)
        }
        Subcommand::Man => {
            let mut page = Vec::new();
            let written = clap_mangen::Man::new(documented_command()).render(&mut page);
            Ok(print(written.map(|()| page)))
        }
        Subcommand::Completions { shell } => {
            let mut script = Vec::new();
            let mut command = documented_command();
            clap_complete::generate(shell, &mut command, "mcp-cancel-proxy", &mut script);
            Ok(print(Ok(script)))
        }
    }
}

/// Prints the proxy's answer, or why there was none. Returns success if the proxy is healthy.
async fn health(admin: SocketAddr) -> ExitCode {
    let url = format!("http://{}/healthz", connect_address(admin));
    match timeout(HEALTH_TIMEOUT, status(&url)).await {
        Ok(Ok(status)) if status.is_success() => print(Ok(format!("{url}: {status}\n").into())),
        Ok(Ok(status)) => fail(format_args!("{url}: {status}")),
        Ok(Err(error)) => fail(format_args!("{url}: {error}")),
        Err(_) => fail(format_args!("{url}: no response within {HEALTH_TIMEOUT:?}")),
    }
}

async fn status(url: &str) -> Result<StatusCode, String> {
    let request = Request::get(url).body(Empty::<Bytes>::new());
    let request = request.map_err(|error| error.to_string())?;
    let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
    let response = client.request(request).await;
    Ok(response.map_err(|error| root_cause(&error))?.status())
}

/// Returns the address to connect to. If the proxy listens on all addresses, this is loopback.
fn connect_address(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// Prints a line to standard error and returns failure.
fn fail(line: fmt::Arguments<'_>) -> ExitCode {
    let _ = writeln!(io::stderr(), "{line}");
    ExitCode::FAILURE
}

/// Prints the text and returns success. Returns failure if it can't be created or printed.
fn print(text: io::Result<Vec<u8>>) -> ExitCode {
    match text.and_then(|text| io::stdout().write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(format_args!("error: {error}")),
    }
}
