//! The only place that sleeps or spawns.
//!
//! `Drop` code may run anywhere: on a thread without a runtime, or while a runtime shuts down. So the
//! driver keeps a handle to the runtime that last served a request, and everything that has to wait
//! runs there. If that runtime has ended, the next request or hang-up on another one brings that.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicBool, Ordering},
};

use tokio::{runtime::Handle, sync::Notify, time::Instant};

/// What the driver wakes for deadlines.
pub(super) trait Expire: Send + Sync + 'static {
    /// Cancels what is due and tells when to come back.
    fn expire(self: Arc<Self>, now: Instant) -> Option<Instant>;
}

#[derive(Debug, Default)]
pub(super) struct Driver {
    running: Arc<AtomicBool>,
    runtime: Mutex<Option<Handle>>,
    wake: Arc<Notify>,
}

/// Marks the driver as ended when its task goes, also when its runtime drops it.
struct Running(Arc<AtomicBool>);

// === impl Driver ===

impl Driver {
    /// Starts the timer on the current runtime, unless it runs already or there is no runtime.
    pub(super) fn start(&self, target: impl FnOnce() -> Weak<dyn Expire>) {
        if self.running.load(Ordering::Relaxed) {
            return;
        }
        let Ok(handle) = Handle::try_current() else {
            return;
        };
        {
            let mut runtime = self.runtime();
            if self.running.swap(true, Ordering::AcqRel) {
                return;
            }
            *runtime = Some(handle.clone());
        }
        let running = Running(self.running.clone());
        handle.spawn(run(target(), self.wake.clone(), running));
    }

    /// Has the timer look at the deadlines again.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Runs `task` on the timer's runtime, or on the current one if that has ended. Without one, or when it
    /// ends, the task is dropped.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let captured = {
            // Under the lock, a timer that runs does so on the runtime that is captured.
            let runtime = self.runtime();
            runtime
                .clone()
                .filter(|_| self.running.load(Ordering::Acquire))
        };
        if let Some(handle) = captured.or_else(|| Handle::try_current().ok()) {
            drop(handle.spawn(task));
        }
    }

    fn runtime(&self) -> std::sync::MutexGuard<'_, Option<Handle>> {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Driver {
    /// The task holds no strong reference to its target; it must wake once more to see that it is gone.
    fn drop(&mut self) {
        self.wake();
    }
}

// === impl Running ===

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

async fn run(target: Weak<dyn Expire>, wake: Arc<Notify>, _running: Running) {
    loop {
        let Some(strong) = target.upgrade() else {
            return;
        };
        match strong.expire(Instant::now()) {
            // The time-out is the deadline: both ways the loop looks again.
            Some(at) => drop(tokio::time::timeout_at(at, wake.notified()).await),
            None => wake.notified().await,
        }
    }
}
