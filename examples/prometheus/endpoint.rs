//! The endpoint that Prometheus scrapes.

use std::time::Duration;

use axum::{Router, http::header, routing::get};
use mcp_cancel_on_disconnect::observe::Metrics;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Interval at which samples are drained from their buffers, even without a scrape.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Installs this process's recorder. Must be called before any metrics are described.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let seconds = Matcher::Suffix("_seconds".to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(seconds, &Metrics::BUCKETS)?
        .install_recorder()
}

/// Serves `/metrics`.
pub(crate) fn router(prometheus: PrometheusHandle) -> Router {
    let text = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    Router::new().route("/metrics", get(async move || (text, prometheus.render())))
}

/// Drains the recorder's buffers periodically. Never returns.
pub(crate) async fn run_upkeep(prometheus: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        prometheus.run_upkeep();
    }
}
