//! Servers other than exports: control sockets and metrics.

use isobath_export::frontend::Entrance;
use isobath_qmp::metrics;
use isobath_qmp::monitor::Monitor;
use isobath_qmp::server as qmp;
use isobath_ring::net::Listener;
use isobath_ring::{JoinHandle, spawn};
use isobath_storage::Host;
use std::rc::Rc;

/// Serves the control sockets, and forwards the jobs' events.
pub(super) fn serve_control<H: Host + Clone>(
    control: &Rc<qmp::Server<Monitor<H>>>,
    entrances: Vec<Entrance>,
) -> Vec<JoinHandle<()>> {
    let watching = control.clone();
    spawn(async move { watching.service().watch().await });
    let serve = |Entrance { listener, security, .. }| {
        let control = control.clone();
        spawn(async move {
            if let Err(error) = control.serve_secured(listener, security).await {
                tracing::error!(%error, "a control socket failed");
            }
        })
    };
    entrances.into_iter().map(serve).collect()
}

/// Serves metrics.
pub(super) fn serve_metrics<H: Host + Clone>(
    control: &Rc<qmp::Server<Monitor<H>>>,
    listeners: Vec<Listener>,
) {
    for listener in listeners {
        let control = control.clone();
        spawn(async move {
            if let Err(error) = metrics::serve(listener, control).await {
                tracing::error!(%error, "metrics are no longer served");
            }
        });
    }
}
