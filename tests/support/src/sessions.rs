//! Helpers for session managers that override a few of rmcp's methods.

#[doc(hidden)]
pub use rmcp::{
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager,
        session::{
            ServerSseMessage, SessionId,
            local::{LocalSessionManager, LocalSessionManagerError},
        },
    },
};

/// In an `impl SessionManager`, forwards these methods to another manager.
///
/// The other manager must have the same types as rmcp's own.
///
/// ```ignore
/// impl SessionManager for Slow {
///     forward_sessions!(|this| this.0 => create_session, initialize_session);
///     // The other methods.
/// }
/// ```
#[macro_export]
macro_rules! forward_sessions {
    (|$this:ident| $inner:expr => $($method:ident),+ $(,)?) => {
        type Error = $crate::sessions::LocalSessionManagerError;
        type Transport =
            <$crate::sessions::LocalSessionManager as $crate::sessions::SessionManager>::Transport;

        $($crate::forward_sessions! { @ $method |$this| $inner })+
    };
    (@ create_session $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, create_session()
            -> ($crate::sessions::SessionId, Self::Transport) }
    };
    (@ initialize_session $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, initialize_session(
            id: &$crate::sessions::SessionId,
            message: $crate::sessions::ClientJsonRpcMessage
        ) -> $crate::sessions::ServerJsonRpcMessage }
    };
    (@ has_session $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, has_session(id: &$crate::sessions::SessionId) -> bool }
    };
    (@ create_stream $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, create_stream(
            id: &$crate::sessions::SessionId,
            message: $crate::sessions::ClientJsonRpcMessage
        ) -> impl Stream<Item = $crate::sessions::ServerSseMessage> + Send + Sync + 'static }
    };
    (@ accept_message $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, accept_message(
            id: &$crate::sessions::SessionId,
            message: $crate::sessions::ClientJsonRpcMessage
        ) -> () }
    };
    (@ create_standalone_stream $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, create_standalone_stream(id: &$crate::sessions::SessionId)
            -> impl Stream<Item = $crate::sessions::ServerSseMessage> + Send + Sync + 'static }
    };
    (@ resume $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, resume(id: &$crate::sessions::SessionId, last: String)
            -> impl Stream<Item = $crate::sessions::ServerSseMessage> + Send + Sync + 'static }
    };
    (@ restore_session $($to:tt)+) => {
        $crate::forward_sessions! { @@ $($to)+, restore_session(id: $crate::sessions::SessionId)
            -> $crate::sessions::RestoreOutcome<Self::Transport> }
    };
    (@@ |$this:ident| $inner:expr, $method:ident($($arg:ident: $of:ty),*) -> $value:ty) => {
        async fn $method(&self, $($arg: $of),*) -> Result<$value, Self::Error> {
            let $this = self;
            $inner.$method($($arg),*).await
        }
    };
}
