//! Reports events in the span in which the request was served.
//!
//! Many of a call's events occur where no span is entered: in a destructor, or on the timer's task. The current span is therefore stored
//! when the call becomes known, and stays open until the call has ended. If no subscriber records spans, no span is stored.

use tracing::{Span, level_filters::LevelFilter};

use super::state::Exchange;
use crate::{
    call::{CallInfo, Outcome},
    observe::{Event, SessionIds},
};

// === impl Exchange ===

impl Exchange {
    /// Stores the current span as the call's span, unless the call already has one.
    pub(super) fn capture_span(&self) {
        if is_subscribed() {
            let current = Span::current();
            let mut state = self.state();
            if !current.is_none() {
                state.span.get_or_insert_with(|| Box::new(current));
            }
        }
    }

    /// Returns how session ids appear in the log.
    pub(crate) fn session_ids(&self) -> SessionIds {
        self.shared.options.observers.session_ids
    }

    /// Drops the span, because the call has ended.
    pub(super) fn release_span(&self) {
        if is_subscribed() {
            // A subscriber can run any code when a span closes, so drop the span without holding a lock.
            let span = self.state().span.take();
            drop(span);
        }
    }

    pub(super) fn span(&self) -> Span {
        let span = is_subscribed().then(|| self.state().span.as_deref().cloned());
        span.flatten().unwrap_or_else(Span::none)
    }

    /// Reports one of the call's events in the call's span.
    pub(super) fn report(&self, event: &Event<'_>) {
        let report = || self.shared.report(event);
        if is_subscribed() {
            self.span().in_scope(report)
        } else {
            report()
        }
    }

    /// Reports a call as started and completed, because it was answered before it became known.
    pub(super) fn report_completed_at_once(&self, call: &CallInfo) {
        self.report(&Event::Started { call });
        self.report(&Event::Ended {
            call,
            outcome: Outcome::Completed,
            detachment: None,
        });
        self.release_span();
    }
}

fn is_subscribed() -> bool {
    LevelFilter::current() != LevelFilter::OFF
}
