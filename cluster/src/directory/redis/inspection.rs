//! Checks whether the backend can serve as a directory, and whether it may lose data.

use std::sync::{Mutex, MutexGuard};

use redis::{RedisError, aio::ConnectionLike, pipe};
use tracing::warn;

use super::reply::parse_run;
use crate::{
    directory::{BackendRunId, DirectoryError},
    lock::lock,
    log::log,
    rate_limited_warning::RateLimitedWarning,
};

/// The error for a Redis Cluster, each of whose nodes serves only some of the keys.
const IS_A_CLUSTER: &str = "a Redis Cluster (cluster_enabled:1) cannot serve as the directory, which must be a single Redis or Valkey without cluster mode (replicas are fine)";

/// Inspects a backend until it has been found usable.
pub(super) struct Inspection {
    /// Whether Sentinels may replace the backend with one of its replicas.
    has_sentinels: bool,
    /// The run in which the backend was found usable.
    usable: Mutex<Option<BackendRunId>>,
    cluster_warning: RateLimitedWarning,
}

/// The properties that a backend reports.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BackendProperties {
    run: BackendRunId,
    is_cluster: bool,
    /// How the backend evicts keys when its memory is full, or `None` if it never evicts any.
    eviction: Option<String>,
    /// Whether the backend refuses writes without its replicas (`min-replicas-to-write`).
    needs_replicas: bool,
}

// === impl Inspection ===

impl Inspection {
    pub(super) fn new(has_sentinels: bool) -> Self {
        Self {
            has_sentinels,
            usable: Mutex::default(),
            cluster_warning: RateLimitedWarning::default(),
        }
    }

    /// Inspects the backend on this connection, unless it has already been found usable.
    ///
    /// If it is unusable, this logs an error, at most once a minute.
    ///
    /// # Errors
    ///
    /// Returns an error if the backend cannot serve as a directory, but not if it does not answer.
    pub(super) async fn inspect(
        &self,
        connection: &mut impl ConnectionLike,
    ) -> Result<(), DirectoryError> {
        if self.usable().is_some() {
            return Ok(());
        }
        match BackendProperties::read(connection).await {
            Ok(properties) => {
                let result = self.evaluate(properties);
                result.inspect_err(|error| self.cluster_warning.error(error))
            }
            Err(_) => Ok(()),
        }
    }

    /// Decides whether a backend can serve as a directory, and warns if it may lose data.
    pub(super) fn evaluate(&self, properties: BackendProperties) -> Result<(), DirectoryError> {
        if properties.is_cluster {
            return Err(DirectoryError::unusable(IS_A_CLUSTER));
        }
        if let Some(policy) = &properties.eviction {
            log(|| {
                warn!(
                    target: "mcp_cancel_cluster",
                    "the directory evicts keys when its memory is full (maxmemory-policy {policy}): if it evicts a session's record, clients get 404 until the owner writes it again, within 70 s; an evicted answer is lost. Set noeviction"
                )
            });
        }
        if self.has_sentinels && !properties.needs_replicas {
            log(|| {
                warn!(
                    target: "mcp_cancel_cluster",
                    "the directory accepts writes without its replicas: after a failover, clients may get 404 for sessions that have just started. Set min-replicas-to-write 1, and min-replicas-max-lag to less than 6 s"
                )
            });
        }
        *self.usable() = Some(properties.run);
        Ok(())
    }

    /// Discards the result of the inspection if a different backend has answered.
    ///
    /// The next heartbeat then inspects the new backend.
    pub(super) fn on_answered(&self, run: &BackendRunId) {
        let mut usable = self.usable();
        if usable.as_ref() != Some(run) {
            *usable = None;
        }
    }

    fn usable(&self) -> MutexGuard<'_, Option<BackendRunId>> {
        lock(&self.usable)
    }
}

// === impl BackendProperties ===

impl BackendProperties {
    pub(super) async fn read(connection: &mut impl ConnectionLike) -> Result<Self, RedisError> {
        let mut pipeline = pipe();
        for section in ["server", "cluster", "memory", "replication"] {
            pipeline.cmd("INFO").arg(section);
        }
        let sections: Vec<String> = pipeline.query_async(connection).await?;
        Ok(Self::parse(&sections.concat()))
    }

    fn parse(info: &str) -> Self {
        let field = |name| {
            let mut lines = info.lines().filter_map(|line| line.split_once(':'));
            lines.find_map(|(key, value)| (key == name).then(|| value.trim()))
        };
        let has_limit = field("maxmemory").is_some_and(|bytes| bytes != "0");
        let policy = field("maxmemory_policy").filter(|policy| *policy != "noeviction");
        Self {
            run: parse_run(info).unwrap_or_else(|_| BackendRunId::new("")),
            is_cluster: field("cluster_enabled") == Some("1"),
            eviction: policy.filter(|_| has_limit).map(str::to_owned),
            // The backend reports this only if both options are set.
            needs_replicas: field("min_slaves_good_slaves").is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_properties_of_a_backend_are_read_from_its_info() {
        let properties =
            |info: &str| BackendProperties::parse(&format!("# Server\r\nrun_id:1\r\n{info}"));
        let limited = "maxmemory:104857600\r\nmaxmemory_policy:";
        let usual =
            properties("cluster_enabled:0\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n");
        assert!(!usual.is_cluster && usual.eviction.is_none());
        assert_eq!(usual.run, BackendRunId::new("1"));
        assert!(properties("cluster_enabled:1\r\n").is_cluster);
        assert_eq!(
            properties(&format!("{limited}noeviction\r\n")).eviction,
            None
        );
        assert_eq!(
            properties("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n").eviction,
            None
        );
        let evicts = properties(&format!("{limited}volatile-ttl\r\n"));
        assert_eq!(evicts.eviction.as_deref(), Some("volatile-ttl"));
        assert!(!usual.needs_replicas);
        assert!(properties("role:master\r\nmin_slaves_good_slaves:1\r\n").needs_replicas);
    }

    #[test]
    fn each_backend_is_evaluated_once_and_a_cluster_each_time() {
        let inspection = Inspection::new(false);
        let properties =
            |run: &str, rest: &str| BackendProperties::parse(&format!("run_id:{run}\r\n{rest}"));
        for _ in 0..2 {
            let error = inspection
                .evaluate(properties("1", "cluster_enabled:1"))
                .unwrap_err();
            assert!(error.to_string().contains("cluster_enabled:1"));
            assert!(inspection.usable().is_none());
        }
        inspection.evaluate(properties("1", "")).unwrap();
        inspection.on_answered(&BackendRunId::new("1"));
        assert!(inspection.usable().is_some());
        inspection.on_answered(&BackendRunId::new("2"));
        assert!(inspection.usable().is_none());
    }
}
