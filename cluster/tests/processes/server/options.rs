//! The command-line options.

use std::{error::Error, net::SocketAddr, time::Duration};

use crate::fault::Fault;

pub(crate) struct Options {
    pub(crate) name: String,
    pub(crate) public: SocketAddr,
    pub(crate) peers: SocketAddr,
    /// The address at which the other instances reach `peers`, or `None` if that is `peers` itself.
    pub(crate) advertise: Option<String>,
    pub(crate) redis: String,
    pub(crate) grace: Duration,
    /// How long calls may take to complete after SIGTERM.
    pub(crate) drain: Duration,
    pub(crate) secret: Option<String>,
    /// How long clients that get a 503 may wait before they return.
    pub(crate) backoff: Duration,
    pub(crate) fault: Option<Fault>,
}

// === impl Options ===

impl Options {
    /// Parses the arguments, which are pairs of an option and its value.
    ///
    /// A repeated option replaces the earlier one.
    pub(crate) fn parse(
        mut arguments: impl Iterator<Item = String>,
    ) -> Result<Self, Box<dyn Error>> {
        let unset = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut options = Self {
            name: String::new(),
            public: unset,
            peers: unset,
            advertise: None,
            redis: String::new(),
            grace: Duration::from_secs(2),
            drain: Duration::from_secs(5),
            secret: None,
            backoff: Duration::from_secs(40),
            fault: None,
        };
        while let Some(option) = arguments.next() {
            let value = arguments.next().ok_or("an option without a value")?;
            match &*option {
                "--name" => options.name = value,
                "--public" => options.public = value.parse()?,
                "--peers" => options.peers = value.parse()?,
                "--advertise" => options.advertise = Some(value),
                "--redis" => options.redis = value,
                "--grace" => options.grace = Duration::try_from_secs_f64(value.parse()?)?,
                "--drain" => options.drain = Duration::try_from_secs_f64(value.parse()?)?,
                "--backoff" => options.backoff = Duration::try_from_secs_f64(value.parse()?)?,
                "--secret" => options.secret = Some(value),
                "--fault" => options.fault = Some(Fault::parse(&value)?),
                _ => return Err(format!("no such option: {option}").into()),
            }
        }
        Ok(options)
    }
}
