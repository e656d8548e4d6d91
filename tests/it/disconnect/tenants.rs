//! Policies by caller. An outer middleware adds the tenant, and each tenant has its own grace period.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{extract::Request, middleware::map_request};
use mcp_cancel_on_disconnect::{Event, Grace, Policy};

use crate::setup::{Plan, Server};

#[derive(Debug, Clone, PartialEq, Eq)]
struct Tenant(String);

/// Batch jobs often lose their connections, so they get an hour to resume.
const BATCH_GRACE: Duration = Duration::from_secs(60 * 60);

/// Stands in for the authentication, which knows the tenant.
async fn authenticate(mut request: Request) -> Request {
    let tenant = request.headers().get("x-tenant");
    let tenant = tenant.and_then(|tenant| tenant.to_str().ok());
    if let Some(tenant) = tenant.map(|tenant| Tenant(tenant.to_owned())) {
        request.extensions_mut().insert(tenant);
    }
    request
}

#[tokio::test]
async fn each_tenant_has_its_own_grace_and_its_name_in_the_events() {
    for server in [Server::Wrapped, Server::LayerOnly] {
        let started = Arc::new(Mutex::new(Vec::new()));
        let events = started.clone();
        let plan = Plan::of(server)
            .outside(|router| router.layer(map_request(authenticate)))
            .layer(|layer| {
                layer
                    .call_extension(|_, extensions| extensions.get::<Tenant>().cloned())
                    .policy(|call| match call.extension() {
                        Some(Tenant(name)) if name == "batch" => {
                            Policy::new().grace(Grace::After(BATCH_GRACE))
                        }
                        _ => Policy::new().grace(Grace::Immediate),
                    })
                    .observe_fn(move |event| {
                        if let Event::Started { call, .. } = event {
                            let tenant = call.extension::<Tenant>().cloned();
                            events.lock().unwrap().push(tenant);
                        }
                    })
            });
        let setup = plan.start().await;
        let batch = setup.mcp().await.header("x-tenant", "batch");
        let other = setup.mcp().await.header("x-tenant", "web");
        let anonymous = setup.mcp().await;

        for (label, mcp) in [
            ("batch", &batch),
            ("other", &other),
            ("anonymous", &anonymous),
        ] {
            let mut call = setup.start_call(mcp, 1, "hold", label).await;
            call.head().await;
            call.fin();
        }

        assert_eq!(setup.events.detached(&batch, 1).await.0, Some(BATCH_GRACE));
        setup.events.ended(&other, 1).await;
        setup.events.ended(&anonymous, 1).await;
        assert!(setup.witness.is_running("batch"));
        let tenants = started.lock().unwrap();
        assert_eq!(tenants.len(), 3);
        for tenant in [
            Some(Tenant("batch".into())),
            Some(Tenant("web".into())),
            None,
        ] {
            assert!(tenants.contains(&tenant), "{tenants:?}");
        }
    }
}
