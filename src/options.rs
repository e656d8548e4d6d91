//! A layer's options.

use std::{fmt, sync::Arc, time::Duration};

use http::{Extensions, HeaderMap, Request};

use crate::{
    call::CallInfo,
    catch_panic::catch_panic,
    confirm::Confirm,
    observe::Observers,
    policy::{EffectivePolicy, Policy},
};

/// Which answers are retained for clients that resume their calls.
///
/// This only has an effect with a [`CancellableSessionManager`](crate::CancellableSessionManager), which observes the answers. Retaining an
/// answer costs a reference-count increment, or a copy of up to 1 KiB of text. If the answer is not plain text, it is also serialized once
/// to measure its size.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, RetainAnswers};
///
/// assert_eq!(RetainAnswers::default(), RetainAnswers::All);
/// let frugal = CancelOnDisconnectLayer::new().retain(RetainAnswers::Detached);
/// assert!(format!("{frugal:?}").contains("retain: Detached"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RetainAnswers {
    /// All answers, including those that were in transit when the connection broke.
    ///
    /// They are retained for at least 60 s, unless they are evicted. Answers sent to a connected client are evicted first, and at most 64 of
    /// them are retained per session id: those that expire last.
    #[default]
    All,
    /// Only the answers to calls that were detached when they completed.
    Detached,
    /// No answers.
    ///
    /// A client that resumes a completed call receives what rmcp itself would send: an empty stream, unless the events are stored. Errors
    /// for cancelled calls are still retained.
    Off,
}

#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) observers: Observers,
    pub(crate) retain: RetainAnswers,
    pub(crate) keep_alive: Option<Duration>,
    pub(crate) commit_after: Option<Duration>,
    pub(crate) stall_timeout: Option<Duration>,
    /// The rules for anything that a policy leaves unset.
    pub(crate) rules: EffectivePolicy,
    pub(crate) policy: Option<Arc<PolicyByCall>>,
    pub(crate) exempt: Vec<Arc<IsExempt>>,
    /// Closures that each add an extension to a request's calls.
    pub(crate) extensions: Vec<Arc<AddExtension>>,
    /// Decides whether an orphan is cancelled.
    pub(crate) confirm: Option<Arc<Confirm>>,
}

type PolicyByCall = dyn Fn(&CallInfo) -> Policy + Send + Sync;
type IsExempt = dyn Fn(&CallInfo) -> bool + Send + Sync;
type AddExtension = dyn Fn(&HeaderMap, &Extensions, &mut Extensions) + Send + Sync;

// === impl Options ===

impl Options {
    /// Returns the extensions for a request's calls, or `None` if no closure adds one.
    ///
    /// A closure that panics adds none.
    pub(crate) fn extensions_for<B>(&self, request: &Request<B>) -> Option<Arc<Extensions>> {
        if self.extensions.is_empty() {
            return None;
        }
        let mut extensions = Extensions::new();
        for add_extension in &self.extensions {
            catch_panic(|| add_extension(request.headers(), request.extensions(), &mut extensions));
        }
        (!extensions.is_empty()).then(|| Arc::new(extensions))
    }

    /// Returns a call's rules.
    ///
    /// A policy closure that panics sets nothing, and an exemption closure that panics does not exempt the call.
    pub(crate) fn policy_for(&self, call: &CallInfo) -> EffectivePolicy {
        let policy = self.policy.as_ref();
        let policy = policy.and_then(|policy| catch_panic(|| policy(call)));
        let rules = policy.unwrap_or_default().or(self.rules);
        let mut exempt = self.exempt.iter();
        if exempt.any(|is_exempt| catch_panic(|| is_exempt(call)).unwrap_or(false)) {
            rules.exempt()
        } else {
            rules
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("grace", &self.rules.grace)
            .field("call_timeout", &self.rules.call_timeout)
            .field("policy", &self.policy.is_some())
            .field("exempt", &self.exempt.len())
            .field("extensions", &self.extensions.len())
            .field("confirm", &self.confirm.is_some())
            .field("retain", &self.retain)
            .field("keep_alive", &self.keep_alive)
            .field("commit_after", &self.commit_after)
            .field("stall_timeout", &self.stall_timeout)
            .field("observers", &self.observers)
            .finish()
    }
}
