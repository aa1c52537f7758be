//! The metrics page, made afresh from a view: no series outlives its VM, and what is not known has no series.
//!
//! VM series carry the VM's id only, because names are not unique; `hint_broker_vm_info` leads from ids to names.
//! The totals are counted by the daemon and never fall while a VM lives.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};

use crate::control::convert::applied;
use crate::model::{Accelerator, Agent, Contention, Cpus, HostView, Mode, Outcome, Vcpus, VmView};
use crate::text::printable;

/// Content type of the page.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// The page.
///
/// # Errors
/// When the encoder refuses a series, which would be a fault of this program.
pub fn page(view: &HostView) -> Result<Vec<u8>, prometheus::Error> {
    let mut page = Vec::new();
    let mut families = host(view);
    families.extend(vms(view));
    families.retain(|family| !family.get_metric().is_empty());
    TextEncoder::new().encode(&families, &mut page)?;
    Ok(page)
}

fn host(view: &HostView) -> Vec<MetricFamily> {
    let contended = match view.contention {
        Contention::Unknown => None,
        Contention::None => Some(0.0),
        Contention::Contended => Some(1.0),
    };
    vec![
        gauge(
            "hint_broker_info",
            "The broker: its version and the mode of the whole of it.",
            [series(
                &[
                    ("version", env!("CARGO_PKG_VERSION")),
                    ("mode", &view.mode.to_string()),
                ],
                1.0,
            )],
        ),
        gauge(
            "hint_broker_mode",
            "Mode of the whole broker: 0 observe, 1 advise, 2 enforce.",
            [series(&[], level(view.mode))],
        ),
        counter(
            "hint_broker_ticks_total",
            "Times that the broker has looked at the host.",
            [series(&[], float(view.ticks))],
        ),
        counter(
            "hint_broker_rejected_samples_total",
            "Samples thrown away because a counter fell or a read failed.",
            [series(&[], float(view.rejected_samples))],
        ),
        gauge(
            "hint_broker_degraded_sources",
            "Sources that can't be read now; hintctl list tells which.",
            [series(&[], float(view.degraded.len() as u64))],
        ),
        gauge(
            "hint_broker_record_bytes",
            "Length of the file that is recorded to; no series when nothing is recorded.",
            view.record.map(|record| series(&[], float(record.bytes))),
        ),
        gauge(
            "hint_broker_record_failing",
            "1 while the recording can't be written, else 0; no series when nothing is recorded.",
            view.record
                .map(|record| series(&[], f64::from(u8::from(record.failing)))),
        ),
        counter(
            "hint_broker_record_lost_ticks_total",
            "Ticks that were not recorded; no series when nothing is recorded.",
            view.record
                .map(|record| series(&[], float(record.lost_ticks))),
        ),
        gauge(
            "hint_broker_pool_pcpus",
            "pCPUs of the pool.",
            [series(&[], float(view.pcpus.len() as u64))],
        ),
        gauge(
            "hint_broker_pool_supply_cpus",
            "What the pool can give, in pCPUs' worth of time.",
            view.supply.map(|supply| series(&[], supply.0)),
        ),
        gauge(
            "hint_broker_pool_used_cpus",
            "How busy the pool is, in pCPUs' worth of time.",
            view.used.map(|used| series(&[], used.0)),
        ),
        gauge(
            "hint_broker_pool_contended",
            "1 while VMs want more pCPU time than the pool has, else 0.",
            contended.map(|contended| series(&[], contended)),
        ),
        gauge(
            "hint_broker_vms",
            "VMs on the host.",
            [series(&[], float(view.vms.len() as u64))],
        ),
    ]
}

fn vms(view: &HostView) -> Vec<MetricFamily> {
    let of = |value: &dyn Fn(&VmView) -> Option<f64>| -> Vec<Metric> {
        view.vms
            .iter()
            .filter_map(|vm| Some(series(&[("vm", &vm.vm.id.to_string())], value(vm)?)))
            .collect()
    };
    let agent_of =
        |value: &dyn Fn(&Agent) -> Option<f64>| of(&|vm| vm.agent.as_ref().and_then(value));
    let cpus = |cpus: Option<Cpus>| cpus.map(|cpus| cpus.0);
    vec![
        gauge(
            "hint_broker_vm_info",
            "The VM behind an id.",
            view.vms.iter().map(info),
        ),
        gauge(
            "hint_broker_vm_agent_info",
            "The VM's agent, by its own word; no series without one.",
            view.vms.iter().filter_map(agent_info),
        ),
        gauge(
            "hint_broker_vm_reason_info",
            "Why usable is what it is; one series for each VM, for the reason of now.",
            view.vms.iter().map(|vm| {
                series(
                    &[
                        ("vm", &vm.vm.id.to_string()),
                        ("reason", &vm.reason.to_string()),
                    ],
                    1.0,
                )
            }),
        ),
        gauge(
            "hint_broker_vm_mode",
            "Mode of the VM: 0 observe, 1 advise, 2 enforce.",
            of(&|vm| Some(level(vm.mode))),
        ),
        gauge(
            "hint_broker_vm_weight",
            "Weight of the VM among those of its pool.",
            of(&|vm| Some(f64::from(vm.weight))),
        ),
        gauge(
            "hint_broker_vm_vcpus",
            "vCPUs of the VM.",
            of(&|vm| match &vm.vm.vcpus {
                Vcpus::Known(threads) => Some(float(threads.len() as u64)),
                Vcpus::Unclassified(_) => None,
            }),
        ),
        gauge(
            "hint_broker_vm_usable_vcpus",
            "vCPUs that the VM should use now.",
            of(&|vm| vm.usable.map(f64::from)),
        ),
        gauge(
            "hint_broker_vm_applied_cpus",
            "CPUs that the guest has in use, by its agent's word.",
            agent_of(&|agent| applied(agent).map(f64::from)),
        ),
        gauge(
            "hint_broker_vm_demand_cpus",
            "Demand estimate of the VM, in pCPUs' worth of time.",
            of(&|vm| cpus(vm.demand)),
        ),
        gauge(
            "hint_broker_vm_target_cpus",
            "What the VM would get if it wanted all its vCPUs, in pCPUs' worth of time.",
            of(&|vm| cpus(vm.target)),
        ),
        counter(
            "hint_broker_vm_run_seconds_total",
            "Time that the VM's vCPUs have run since the broker saw it first.",
            of(&|vm| measured(vm).then_some(vm.run_total.as_secs_f64())),
        ),
        counter(
            "hint_broker_vm_run_delay_seconds_total",
            "Time that the VM's vCPUs have waited for a pCPU since the broker saw it first.",
            of(&|vm| measured(vm).then_some(vm.run_delay_total.as_secs_f64())),
        ),
        counter(
            "hint_broker_vm_folds_total",
            "Times that usable was lowered since the broker saw the VM first.",
            of(&|vm| Some(float(vm.folds))),
        ),
        counter(
            "hint_broker_vm_unfolds_total",
            "Times that usable was raised since the broker saw the VM first.",
            of(&|vm| Some(float(vm.unfolds))),
        ),
        gauge(
            "hint_broker_vm_agent_connected",
            "1 while the VM's agent is connected, else 0.",
            of(&|vm| Some(f64::from(u8::from(vm.agent.is_some())))),
        ),
        gauge(
            "hint_broker_vm_agent_failing",
            "1 while the agent's last hint could not be applied, else 0; no series without an agent.",
            agent_of(&|agent| {
                let failing = matches!(agent.outcome, Some(Outcome::Failed(_)));
                Some(f64::from(u8::from(failing)))
            }),
        ),
        gauge(
            "hint_broker_vm_runnable_tasks",
            "Runnable tasks of the guest, by its agent's word.",
            agent_of(&|agent| agent.runnable_tasks.map(f64::from)),
        ),
    ]
}

fn info(vm: &VmView) -> Metric {
    let accelerator = match vm.vm.accelerator {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg => "tcg",
    };
    series(
        &[
            ("vm", &vm.vm.id.to_string()),
            ("name", &printable(&vm.vm.name)),
            (
                "uuid",
                &printable(vm.vm.uuid.as_deref().unwrap_or_default()),
            ),
            ("pid", &vm.vm.id.pid.to_string()),
            ("accelerator", accelerator),
        ],
        1.0,
    )
}

fn agent_info(vm: &VmView) -> Option<Metric> {
    let agent = vm.agent.as_ref()?;
    Some(series(
        &[
            ("vm", &vm.vm.id.to_string()),
            ("version", &agent.version),
            ("actuator", &agent.actuator),
            ("kernel_release", &agent.kernel_release),
        ],
        1.0,
    ))
}

/// Are there vCPU threads to measure?
fn measured(vm: &VmView) -> bool {
    matches!(vm.vm.vcpus, Vcpus::Known(_))
}

fn level(mode: Mode) -> f64 {
    match mode {
        Mode::Observe => 0.0,
        Mode::Advise => 1.0,
        Mode::Enforce => 2.0,
    }
}

/// Prometheus has no other numbers; counts are exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn float(count: u64) -> f64 {
    count as f64
}

fn gauge(name: &str, help: &str, series: impl IntoIterator<Item = Metric>) -> MetricFamily {
    family(name, help, MetricType::GAUGE, series)
}

/// A family of counters, of series made as gauges.
fn counter(name: &str, help: &str, series: impl IntoIterator<Item = Metric>) -> MetricFamily {
    let counters = series.into_iter().map(|mut metric| {
        let mut counter = Counter::default();
        counter.set_value(metric.get_gauge().get_value());
        metric.set_counter(counter);
        metric
    });
    family(name, help, MetricType::COUNTER, counters)
}

fn family(
    name: &str,
    help: &str,
    kind: MetricType,
    series: impl IntoIterator<Item = Metric>,
) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(series.into_iter().collect());
    family
}

fn series(labels: &[(&str, &str)], value: f64) -> Metric {
    let labels = labels
        .iter()
        .map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        })
        .collect();
    let mut metric = Metric::from_label(labels);
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    metric.set_gauge(gauge);
    metric
}
