//! Restores a session while serving the request that needs it.
//!
//! 1. A restore ends as soon as its session is restored, even if the response head is not ready yet, because an inner layer may hold back
//!    the head until the call has ended.
//! 2. Otherwise, it ends when the response head is ready. If an inner layer sends the head early, as `commit_after` does, the restore keeps
//!    running while the body is read, until the session is restored or the body ends.
//! 3. The session's other requests wait for the restore to end, but for no longer than [`RESTORE_TIMEOUT`].

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use crate::{
    ids::SessionHash,
    routing::{request_context::poll_restore, router::Router},
    sessions::{
        RESTORE_TIMEOUT,
        pending_restores::{PendingRestore, RestoreTurn},
    },
};

/// A running restore. Dropping this ends it, even if the client has disconnected or the handler panics.
pub(crate) struct RunningRestore {
    router: Arc<Router>,
    id: String,
    pending: Option<(PendingRestore, RestoreTurn)>,
}

/// A response body that keeps a restore running while it is read.
struct RestoringBody {
    body: Body,
    restore: Option<RunningRestore>,
    /// When this expires, the restore ends if it has not loaded any parameters.
    ///
    /// In that case, an inner layer has responded instead of rmcp.
    timeout: Pin<Box<Sleep>>,
}

// === impl RunningRestore ===

impl RunningRestore {
    pub(crate) fn new(
        router: &Arc<Router>,
        id: String,
        pending: PendingRestore,
        turn: RestoreTurn,
    ) -> Self {
        Self {
            router: router.clone(),
            id,
            pending: Some((pending, turn)),
        }
    }

    /// Ends the restore when the response head is ready, or lets it run while the body is read.
    ///
    /// It keeps running only if the session has yet to be restored and the response is successful and has a body.
    pub(crate) fn finish_with_response(self, response: Response<Body>) -> Response<Body> {
        let has_ended = !response.status().is_success() || response.body().is_end_stream();
        if has_ended || self.is_restored() {
            return response;
        }
        response.map(|body| {
            Body::new(RestoringBody {
                body,
                restore: Some(self),
                timeout: Box::pin(sleep(RESTORE_TIMEOUT)),
            })
        })
    }

    /// Waits until the session is restored.
    pub(crate) async fn wait_until_restored(&self) {
        self.router.sessions.wait_until(|| self.is_restored()).await;
    }

    fn session(&self) -> SessionHash {
        SessionHash::of(&self.id)
    }

    fn is_restored(&self) -> bool {
        self.router.sessions.is_restored(self.session())
    }
}

impl Drop for RunningRestore {
    fn drop(&mut self) {
        self.router.sessions.on_restore_ended(&self.id);
        drop(self.pending.take());
        self.router.on_request_done(&self.id);
    }
}

// === impl RestoringBody ===

impl RestoringBody {
    /// Ends the restore. An unrestorable session is abandoned without a 404, because the response has already started.
    fn end(&mut self) {
        if let Some(restore) = self.restore.take()
            && !restore.is_restored()
        {
            restore.router.abandon_if_unrestorable(&restore.id);
        }
    }
}

impl http_body::Body for RestoringBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let Some(restore) = &this.restore else {
            return Pin::new(&mut this.body).poll_frame(cx);
        };
        let frame = poll_restore(|| Pin::new(&mut this.body).poll_frame(cx));
        let has_ended = matches!(frame, Poll::Ready(None | Some(Err(_))));
        let is_not_loaded = || !restore.router.sessions.is_local(restore.session());
        if has_ended
            || restore.is_restored()
            || this.timeout.as_mut().poll(cx).is_ready() && is_not_loaded()
        {
            this.end();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RestoringBody {
    fn drop(&mut self) {
        // Drop the body first, because that makes rmcp end its part of the restore.
        drop(mem::take(&mut self.body));
        self.end();
    }
}
