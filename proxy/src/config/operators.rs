//! The options for operators, except for the address of the operator pages.

use std::fmt;

use clap::Args;
use subtle::ConstantTimeEq as _;

/// Options that have no effect without `--admin`.
pub(super) const NEED_ADMIN: [&str; 2] = ["admin-token", "ready-upstream"];

/// Minimum length of a token. A shorter one could be guessed.
const MIN_TOKEN: usize = 16;

/// The options for operators.
#[derive(Debug, Clone, Args)]
#[non_exhaustive]
pub struct Operators {
    /// Bearer token that lets scripts see and cancel calls; set it in the environment or the file (requires --admin)
    #[arg(
        long,
        env = "MCP_PROXY_ADMIN_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN",
        value_parser = AdminToken::new
    )]
    pub admin_token: Option<AdminToken>,

    /// Make /readyz return 503 while the upstream is not accepting connections (requires --admin and --upstream)
    #[arg(long, env = "MCP_PROXY_READY_UPSTREAM")]
    pub ready_upstream: bool,
}

/// The operators' bearer token. It never appears in output.
#[derive(Clone)]
pub struct AdminToken(Box<str>);

// === impl AdminToken ===

impl AdminToken {
    /// Creates a token from text that can be sent as a bearer token (RFC 6750, section 2.1).
    ///
    /// The text must be at least 16 characters long. The error does not repeat it.
    pub fn new(token: &str) -> Result<Self, String> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte);
        if !token.trim_end_matches('=').bytes().all(is_valid) {
            return Err(
                "a token may only contain letters, digits and -._~+/, and may end with ="
                    .to_owned(),
            );
        }
        if token.len() < MIN_TOKEN {
            return Err(format!(
                "a token must have at least {MIN_TOKEN} characters (for example, the output of `openssl rand -hex 32`)"
            ));
        }
        Ok(Self(token.into()))
    }

    /// Compares `given` to the token. How long this takes does not depend on which characters match.
    pub fn is(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(_)")
    }
}
