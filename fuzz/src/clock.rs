//! A paused clock that advances while the runtime is idle.

use tokio::runtime::{Builder, Runtime};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
}

/// Runs a future on this thread's runtime. All inputs share it, because creating one costs more than they do.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.with(|runtime| runtime.block_on(future))
}
