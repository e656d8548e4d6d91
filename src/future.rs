//! The response future: from the request to the head.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{Response, StatusCode, header};
use http_body::Body;
use pin_project_lite::pin_project;

use crate::{
    body::ResponseBody,
    exchange::{BodyPlan, Guard, Head},
};

pin_project! {
    /// The future of [`CancelOnDisconnect`](crate::CancelOnDisconnect). Dropped before it is ready, it
    /// abandons its calls.
    #[derive(Debug)]
    pub struct ResponseFuture<F> {
        // First, so that the token fires before the inner future's destructors run.
        guard: Guard,
        #[pin]
        inner: F,
        head_only: bool,
    }
}

// === impl ResponseFuture ===

impl<F> ResponseFuture<F> {
    pub(crate) fn new(guard: Guard, inner: F, head_only: bool) -> Self {
        Self {
            guard,
            inner,
            head_only,
        }
    }
}

impl<F, RB, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<RB>, E>>,
    RB: Body,
{
    type Output = Result<Response<ResponseBody<RB>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let polled = {
            let _polling = this.guard.polling();
            this.inner.poll(cx)
        };
        if let Some(exchange) = this.guard.exchange() {
            exchange.settle();
        }
        let response = match ready!(polled) {
            Ok(response) => response,
            Err(error) => {
                this.guard.fail();
                return Poll::Ready(Err(error));
            }
        };
        let mut guard = mem::replace(this.guard, Guard::inert());
        let plan = match guard.exchange() {
            Some(exchange) => exchange.head(read_head(&response)),
            None => BodyPlan::Pass,
        };
        if *this.head_only || has_no_content(response.status()) {
            // hyper drops these bodies unpolled.
            guard.complete();
        }
        let (mut head, body) = response.into_parts();
        let body = match plan {
            BodyPlan::Pass => ResponseBody::new(guard, body),
            BodyPlan::Tap(tap) => {
                guard.set_tap(tap);
                ResponseBody::new(guard, body)
            }
            BodyPlan::Replace(event) => {
                guard.complete();
                head.headers.remove(header::CONTENT_LENGTH);
                head.headers.remove(header::CONTENT_ENCODING);
                ResponseBody::event(event)
            }
        };
        Poll::Ready(Ok(Response::from_parts(head, body)))
    }
}

fn read_head<RB>(response: &Response<RB>) -> Head {
    if !response.status().is_success() {
        return Head::Refusal;
    }
    let content_type = response.headers().get(header::CONTENT_TYPE);
    let is_stream = content_type.is_some_and(|value| {
        let essence = value.as_bytes().split(|byte| *byte == b';').next();
        essence.is_some_and(|essence| {
            essence
                .trim_ascii()
                .eq_ignore_ascii_case(b"text/event-stream")
        })
    });
    match is_stream {
        true => Head::Stream {
            readable: !response.headers().contains_key(header::CONTENT_ENCODING),
        },
        false => Head::Answer,
    }
}

/// RFC 9110, section 6.4.1.
fn has_no_content(status: StatusCode) -> bool {
    status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}
