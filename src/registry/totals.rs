//! Counters across all of a registry's sessions.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::core::{DeliveryState, PerDeliveryState};
use crate::limits::{Limit, Limits};

/// The total space is divided by this to get the space for delivered calls.
///
/// Delivered calls get less space, because few of them are ever resumed.
const DELIVERED_DIVISOR: usize = 4;

/// Counters shared by all sessions. They are atomic because each session updates them under its own lock.
#[derive(Debug)]
pub(crate) struct Totals {
    limits: [AtomicUsize; Limit::ALL.len()],
    retained: AtomicUsize,
    retained_per_session: AtomicUsize,
    in_flight: AtomicUsize,
    detached: AtomicUsize,
    /// Bytes taken up by retained calls.
    bytes: PerDeliveryState<AtomicUsize>,
    /// Whether calls ending without a cancellation are being counted.
    is_tracking_completions: AtomicBool,
    completions: AtomicUsize,
}

// === impl Totals ===

impl Default for Totals {
    fn default() -> Self {
        let limits = Limits::default();
        Self {
            limits: Limit::ALL.map(|limit| limits.get(limit).into()),
            retained: limits.retained.into(),
            retained_per_session: limits.retained_per_session.into(),
            in_flight: AtomicUsize::default(),
            detached: AtomicUsize::default(),
            bytes: PerDeliveryState::default(),
            is_tracking_completions: AtomicBool::default(),
            completions: AtomicUsize::default(),
        }
    }
}

impl Totals {
    pub(super) fn set_limits(&self, limits: Limits) {
        for (max, limit) in self.limits.iter().zip(Limit::ALL) {
            max.store(limits.get(limit), Ordering::Relaxed);
        }
        self.retained.store(limits.retained, Ordering::Relaxed);
        self.retained_per_session
            .store(limits.retained_per_session, Ordering::Relaxed);
    }

    pub(super) fn max(&self, limit: Limit) -> usize {
        let mut limits = self.limits.iter().zip(Limit::ALL);
        let max = limits.find(|(_, other)| *other == limit);
        max.map_or(0, |(max, _)| max.load(Ordering::Relaxed))
    }

    /// Returns how many bytes the retained calls in a delivery state may take up.
    fn max_bytes(&self, delivery: DeliveryState) -> usize {
        let max_retained = self.retained.load(Ordering::Relaxed);
        let max_delivered = max_retained / DELIVERED_DIVISOR;
        match delivery {
            DeliveryState::Delivered => max_delivered,
            DeliveryState::Undelivered => max_retained - max_delivered,
        }
    }

    /// Returns how many bytes one session's retained calls may take up.
    pub(super) fn max_session_bytes(&self) -> usize {
        self.retained_per_session.load(Ordering::Relaxed)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn add_call(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_call(&self, is_cancelled: bool) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !is_cancelled && self.is_tracking_completions() {
            self.completions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Starts counting the calls that end without a cancellation.
    pub(super) fn track_completions(&self) {
        self.is_tracking_completions.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_tracking_completions(&self) -> bool {
        self.is_tracking_completions.load(Ordering::Relaxed)
    }

    pub(super) fn completions(&self) -> usize {
        self.completions.load(Ordering::Relaxed)
    }

    pub(super) fn detached(&self) -> usize {
        self.detached.load(Ordering::Relaxed)
    }

    /// Adds a detached call. Returns `false` if that would exceed the limit.
    pub(super) fn try_add_detached(&self) -> bool {
        let max = self.max(Limit::Detached);
        let increment = |detached| (detached < max).then_some(detached + 1);
        let added = self
            .detached
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment);
        added.is_ok()
    }

    pub(super) fn add_detached(&self) {
        self.detached.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_detached(&self) {
        self.detached.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn bytes_in(&self, delivery: DeliveryState) -> usize {
        self.bytes.get(delivery).load(Ordering::Relaxed)
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn bytes(&self) -> usize {
        DeliveryState::ALL
            .map(|delivery| self.bytes_in(delivery))
            .iter()
            .sum()
    }

    /// Adds a retained call's bytes. Returns `false` if its session would then take up too much space.
    ///
    /// The session's retained calls already take up `session_bytes`. Including this call, the session must not take up more bytes than
    /// remain for all others.
    pub(super) fn try_add_bytes(
        &self,
        delivery: DeliveryState,
        session_bytes: usize,
        bytes: usize,
    ) -> bool {
        let max = self.max_bytes(delivery);
        let with_bytes = |total: usize| {
            let total = total.saturating_add(bytes);
            let needed = total.saturating_add(session_bytes).saturating_add(bytes);
            (needed <= max).then_some(total)
        };
        let counter = self.bytes.get(delivery);
        let added = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_bytes);
        added.is_ok()
    }

    /// Returns `true` if a call would fit once its session's `session_bytes` have been freed.
    pub(super) fn could_add_bytes(
        &self,
        delivery: DeliveryState,
        session_bytes: usize,
        bytes: usize,
    ) -> bool {
        let others = self.bytes_in(delivery).saturating_sub(session_bytes);
        // Add the bytes twice: for the call, and for the space that must remain for the other sessions.
        let needed = others.saturating_add(bytes).saturating_add(bytes);
        needed <= self.max_bytes(delivery)
    }

    pub(super) fn remove_bytes(&self, delivery: DeliveryState, bytes: usize) {
        self.bytes.get(delivery).fetch_sub(bytes, Ordering::Relaxed);
    }
}
