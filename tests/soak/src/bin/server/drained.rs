//! A server that keeps being drained and restarted, as in deployments. The others run on.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use soak::{
    fact::{Fact, Log},
    setup::DRAIN,
};
use tokio::{
    net::TcpListener,
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::{app::App, fault::Fault, gauges::Gauges};

/// The time from a start to the next drain.
const DRAIN_INTERVAL: Duration = Duration::from_secs(9);
/// How long axum may take to finish after a drain. Once all calls are cancelled, it has nothing left to wait for.
const END: Duration = Duration::from_secs(3);

/// Serves, drains and restarts, always at the same address.
pub(crate) async fn serve_repeatedly(
    listener: TcpListener,
    log: Log,
    fault: Option<Fault>,
    gauges: Arc<Gauges>,
) {
    let address = listener.local_addr().expect("it is bound");
    let mut listener = Some(listener);
    loop {
        let app = App::new(&log, fault, |setup| setup.is_drained);
        gauges.replace(&app);
        let calls = app.calls.clone();
        let (end, ended) = oneshot::channel::<()>();
        let listener = match listener.take() {
            Some(listener) => listener,
            None => bind(address).await,
        };
        let server = axum::serve(listener, app.router).with_graceful_shutdown(async {
            let _dropped = ended.await;
        });
        let mut server = tokio::spawn(server.into_future());
        log.write(Fact::Serving);
        sleep(DRAIN_INTERVAL).await;

        log.write(Fact::Draining);
        let _sent = end.send(());
        let report = calls.drain(DRAIN).await;
        let in_time = timeout(END, &mut server).await.is_ok();
        if !in_time {
            server.abort();
        }
        log.write(Fact::Drained {
            ended: report.ended,
            cancelled: report.cancelled,
            in_time,
        });
    }
}

/// Binds an address, retrying until that succeeds.
async fn bind(address: SocketAddr) -> TcpListener {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}
