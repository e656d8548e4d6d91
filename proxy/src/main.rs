//! Puts [`mcp_cancel_on_disconnect`] in front of any MCP server.

use std::process::ExitCode;

use mcp_cancel_proxy::{
    Proxy,
    config::{Config, ConfigError},
    drain::Signals,
    log,
};

/// What is wrong is what the program was told.
const USAGE: u8 = 2;

#[tokio::main]
async fn main() -> ExitCode {
    #[cfg(unix)]
    if let Some(code) = mcp_cancel_proxy::demo::instead(std::env::args_os().skip(1)).await {
        return code;
    }
    let config = match Config::read(std::env::args_os()) {
        Ok(config) => config,
        Err(ConfigError::Options(error)) => error.exit(),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(USAGE);
        }
    };
    log::init(config.log_format);
    let served = async {
        let signals = Signals::listen()?;
        let proxy = Proxy::bind(config).await?;
        signals.serve(proxy).await;
        Ok::<_, mcp_cancel_proxy::StartError>(())
    };
    match served.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
