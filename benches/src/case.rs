//! What is asked of a server, and who watches over it meanwhile.

use std::{fmt, str::FromStr, sync::Arc};

use axum::{Router, routing::get};
use bytes::Bytes;
use http_body_util::Full;
use mcp_cancel_on_disconnect::{AbortOnCancel, CancelOnDisconnectLayer};
use serde_json::json;
use tower_layer::Layer;

use crate::{
    Failure,
    client::{self, Client},
    setup::{Mode, Server, Setup, boxed},
    slow::SlowLayer,
    tools::Tools,
};

/// One thing to measure, in words that are also its command line: `wrapped session arguments 100`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub who: Who,
    pub what: What,
}

/// Who watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Setup(Setup),
    /// As [`Setup::Wrapped`], with the handler in `AbortOnCancel`.
    Abortable,
    /// As [`Setup::Wrapped`], and about 3 % slower than it has to be: what the gate must not let through.
    Slowed,
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// One tool call.
    Call(Mode, Load),
    /// A GET on a route without MCP.
    Plain,
}

/// What a call carries, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    Arguments(usize),
    Result(usize),
}

/// A case that can be asked again and again.
pub struct Running {
    client: Client,
    what: What,
    text: Arc<str>,
    asked: u64,
}

// === impl Case ===

impl Case {
    pub fn new(who: Who, what: What) -> Self {
        Self { who, what }
    }

    /// The same without anybody who watches.
    pub fn bare(self) -> Self {
        Self::new(Who::Setup(Setup::Bare), self.what)
    }

    pub async fn run(self) -> Result<Running, Failure> {
        let server = self.server();
        let client = match self.what {
            What::Call(Mode::Session, _) => Client::initialize(server).await?,
            What::Call(Mode::Stateless, _) | What::Plain => Client::stateless(server),
        };
        let text = match self.what {
            What::Call(_, Load::Arguments(bytes)) => "x".repeat(bytes),
            _ => String::new(),
        };
        Ok(Running {
            client,
            what: self.what,
            text: text.into(),
            asked: 0,
        })
    }

    fn server(self) -> Server<Full<Bytes>> {
        let layer = CancelOnDisconnectLayer::new();
        let tools = Tools::default();
        match (self.what, self.who) {
            (What::Call(mode, _), Who::Setup(setup)) => setup.serve(mode, tools, layer),
            (What::Call(mode, _), Who::Abortable) => {
                Setup::Wrapped.serve(mode, AbortOnCancel::new(tools), layer)
            }
            (What::Call(mode, _), Who::Slowed) => {
                boxed(SlowLayer.layer(Setup::Wrapped.serve(mode, tools, layer)))
            }
            (What::Plain, who) => {
                let route = Router::new().route("/", get(async || "hello"));
                let setup = match who {
                    Who::Setup(setup) => setup,
                    Who::Abortable | Who::Slowed => Setup::Wrapped,
                };
                setup.around(route, layer)
            }
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.who.name(), self.what)
    }
}

impl FromStr for Case {
    type Err = Failure;

    fn from_str(words: &str) -> Result<Self, Failure> {
        let unknown = || format!("no case {words:?}");
        let (who, what) = words.split_once(' ').ok_or_else(unknown)?;
        let who = Who::all().find(|each| each.name() == who);
        Ok(Self::new(who.ok_or_else(unknown)?, what.parse()?))
    }
}

// === impl Who ===

impl Who {
    pub fn name(self) -> &'static str {
        match self {
            Self::Setup(setup) => setup.name(),
            Self::Abortable => "abortable",
            Self::Slowed => "slowed",
        }
    }

    /// Whom the tables compare with [`Setup::Bare`].
    pub fn compared() -> impl Iterator<Item = Self> {
        Self::all().filter(|who| !matches!(who, Self::Setup(Setup::Bare) | Self::Slowed))
    }

    fn all() -> impl Iterator<Item = Self> {
        let setups = Setup::ALL.into_iter().map(Self::Setup);
        setups.chain([Self::Abortable, Self::Slowed])
    }
}

// === impl What ===

impl What {
    pub const ALL: [Self; 9] = {
        use Load::{Arguments, Result};
        use Mode::{Session, Stateless};
        [
            Self::Call(Session, Arguments(100)),
            Self::Call(Session, Arguments(10_000)),
            Self::Call(Session, Arguments(1_000_000)),
            Self::Call(Session, Result(1_000_000)),
            Self::Call(Stateless, Arguments(100)),
            Self::Call(Stateless, Arguments(10_000)),
            Self::Call(Stateless, Arguments(1_000_000)),
            Self::Call(Stateless, Result(1_000_000)),
            Self::Plain,
        ]
    };

    /// How often it is asked before anything is counted, so that what is kept of calls is as full as it gets, and how
    /// often after that.
    pub fn repetitions(self) -> (u32, u32) {
        match self {
            Self::Call(_, Load::Arguments(bytes) | Load::Result(bytes)) if bytes >= 1_000_000 => {
                (20, 20)
            }
            Self::Call(_, Load::Arguments(10_000..)) => (1_000, 500),
            Self::Call(..) | Self::Plain => (6_000, 1_000),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(mode, Load::Arguments(bytes)) => {
                write!(f, "{} arguments {bytes}", mode.name())
            }
            Self::Call(mode, Load::Result(bytes)) => write!(f, "{} result {bytes}", mode.name()),
            Self::Plain => f.write_str("plain"),
        }
    }
}

impl FromStr for What {
    type Err = Failure;

    fn from_str(words: &str) -> Result<Self, Failure> {
        let unknown = || format!("no load {words:?}");
        let words: Vec<&str> = words.split(' ').collect();
        let [mode, load, bytes] = *words.as_slice() else {
            return if words == ["plain"] {
                Ok(Self::Plain)
            } else {
                Err(unknown().into())
            };
        };
        let mode = Mode::ALL.into_iter().find(|each| each.name() == mode);
        let bytes = bytes.parse()?;
        let load = match load {
            "arguments" => Load::Arguments(bytes),
            "result" => Load::Result(bytes),
            _ => return Err(unknown().into()),
        };
        Ok(Self::Call(mode.ok_or_else(unknown)?, load))
    }
}

// === impl Running ===

impl Running {
    /// Asks once, and looks at the answer.
    pub async fn ask(&mut self) -> Result<(), Failure> {
        let id = self.asked;
        self.asked += 1;
        let (answer, expected) = match self.what {
            What::Plain => (self.client.plain().await?, "hello".to_owned()),
            What::Call(_, Load::Arguments(bytes)) => {
                let arguments = json!({ "text": &*self.text });
                let call = client::call(id, "measure", arguments);
                (
                    self.client.call(&call).await?,
                    format!("\"text\":\"{bytes}\""),
                )
            }
            What::Call(_, Load::Result(bytes)) => {
                let call = client::call(id, "produce", json!({ "length": bytes }));
                let answer = self.client.call(&call).await?;
                if answer.len() < bytes {
                    return Err(format!("only {} bytes", answer.len()).into());
                }
                (answer, "\"text\":\"xxx".to_owned())
            }
        };
        // The answer of a large result starts with it, so that nothing more has to be searched.
        let start = String::from_utf8_lossy(&answer[..answer.len().min(1_000)]);
        if start.contains(&expected) {
            Ok(())
        } else {
            Err(format!("wrong answer: {start}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_read_from_its_own_words() {
        for who in Who::all() {
            for what in What::ALL {
                let case = Case::new(who, what);
                assert_eq!(case.to_string().parse::<Case>().unwrap(), case);
            }
        }
    }

    #[test]
    fn words_that_name_no_case_are_refused() {
        for words in [
            "",
            "bare",
            "bare session arguments",
            "nobody session arguments 100",
        ] {
            assert!(words.parse::<Case>().is_err(), "{words:?}");
        }
    }

    #[tokio::test]
    async fn every_case_gets_right_answers() {
        for who in Who::all() {
            for what in What::ALL {
                let case = Case::new(who, what);
                let mut running = case.run().await.unwrap();
                running
                    .ask()
                    .await
                    .unwrap_or_else(|failure| panic!("{case}: {failure}"));
            }
        }
    }
}
