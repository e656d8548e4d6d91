//! The way from a handler's context to its token.

use http::request::Parts;
use rmcp::{RoleServer, model::Extensions, service::RequestContext};

use crate::token::CallToken;

impl CallToken {
    /// The token of the call that a handler of rmcp serves. It is `None` if there is no layer, as with a transport other than
    /// HTTP. [`CallToken`](Self#in-handlers-of-older-versions-of-rmcp) has the way for rmcp before 3.9.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CallToken;
    /// use rmcp::{RoleServer, service::RequestContext};
    ///
    /// async fn upload(context: RequestContext<RoleServer>) -> &'static str {
    ///     let Some(token) = CallToken::of(&context) else {
    ///         return "not over HTTP";
    ///     };
    ///     tokio::select! {
    ///         () = token.cancelled() => "stopped: nobody waits for it",
    ///         () = std::future::ready(()) => "uploaded",
    ///     }
    /// }
    /// # let _ = upload;
    /// ```
    pub fn of(context: &RequestContext<RoleServer>) -> Option<Self> {
        let token = Self::in_message(&context.extensions).cloned()?;
        token.exchange().hear();
        Some(token)
    }

    /// rmcp puts the head of the HTTP request into the message's extensions.
    pub(super) fn in_message(extensions: &Extensions) -> Option<&Self> {
        extensions.get::<Parts>()?.extensions.get()
    }
}
