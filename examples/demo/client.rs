//! A client that disconnects.

use std::net::SocketAddr;

use serde_json::json;

use crate::{
    Result,
    raw::{self, Connection},
    server::Mode,
};

/// The JSON-RPC id of every call. The server must distinguish the calls.
pub(crate) const CALL_ID: u32 = 7;

pub(crate) struct Client(raw::Client);

// === impl Client ===

impl Client {
    /// Opens a session, if the server has sessions.
    pub(crate) async fn connect(addr: SocketAddr, mode: Mode) -> Result<Self> {
        Ok(Self(match mode {
            Mode::Session => raw::Client::connect(addr).await?,
            Mode::StatelessSse | Mode::StatelessJson => raw::Client::without_session(addr),
        }))
    }

    pub(crate) async fn call(&self, caller: usize) -> Result<Connection> {
        let arguments = json!({ "caller": caller });
        Ok(self.0.call(CALL_ID, "work", arguments).await?)
    }

    /// Resumes the call after the first event of its stream.
    pub(crate) async fn resume(&self) -> Result<Connection> {
        Ok(self.0.resume("0/0").await?)
    }
}
