//! Probe: what are the pCPUs like, and may VMs use them alike?

use super::{Notes, Patient};
use crate::observe::Observer;

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let mut observer = Observer::new(patient.root.clone());
    let scan = observer.topology();
    for message in &scan.degraded {
        notes.warn(message.clone(), "make /sys visible");
    }
    let Some(topology) = &scan.topology else {
        return;
    };
    notes.good(format!(
        "{} pCPUs online, {} isolated, {} cores, {} NUMA nodes",
        topology.online.len(),
        topology.isolated.len(),
        topology.cores.len(),
        topology.nodes.len().max(1)
    ));
    let speeds = topology.capacity.values();
    if speeds.clone().min() != speeds.max() {
        notes.warn(
            "pCPUs have different speeds, and the broker counts them alike",
            "keep each VM on pCPUs of one kind",
        );
    }
}
