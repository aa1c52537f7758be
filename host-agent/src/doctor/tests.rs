use super::*;
use crate::fixture::Tree;
use crate::root::{Fault, Faults};
use std::sync::Arc;

const PROXMOX: &str = include_str!("../../tests/fixtures/proxmox.tree");

/// A host where all is well.
fn host() -> Tree {
    let tree = Tree::new(PROXMOX);
    tree.add(
        "[proc/self]\nstatus = Name:\\tx\\nCapEff:\\t000001ffffffffff\nschedstat = 100 200 3\n\
         [proc/pressure]\ncpu = some avg10=0.00 avg60=1.25 avg300=0.10 total=1\n\
         [dev]\nvhost-vsock =\n\
         [sys/fs/cgroup/qemu.slice/103.scope]\ncpu.weight = 100\n",
    );
    for (vm, tids) in [
        (101, vec![1010]),
        (102, vec![1020]),
        (103, vec![1030, 1031]),
    ] {
        for (index, tid) in tids.into_iter().enumerate() {
            tree.write(
                &format!("sys/kernel/debug/kvm/{vm}-9/vcpu{index}/pid"),
                &format!("{tid}\n"),
            );
        }
    }
    tree
}

fn diagnosis(tree: &Tree) -> Diagnosis {
    diagnose(&tree.root, &Config::default())
}

/// The findings of a weight, as `probe: found`.
fn of(diagnosis: &Diagnosis, weight: Weight) -> Vec<String> {
    let findings = diagnosis
        .findings
        .iter()
        .filter(|finding| finding.weight == weight);
    findings
        .map(|finding| format!("{}: {}", finding.probe, finding.found))
        .collect()
}

/// The one finding that is not good.
fn complaint(tree: &Tree, weight: Weight) -> String {
    let found = diagnosis(tree);
    assert_eq!(found.enforce_is_safe, weight < Weight::Bad, "{found}");
    let mut all = of(&found, Weight::Warning);
    all.extend(of(&found, Weight::Bad));
    assert_eq!(all.len(), 1, "{found}");
    assert_eq!(of(&found, weight).len(), 1, "{found}");
    assert!(
        found
            .findings
            .iter()
            .all(|finding| (finding.weight == Weight::Good) == finding.mend.is_empty())
    );
    all.remove(0)
}

#[test]
fn a_host_in_order_is_safe() {
    let found = diagnosis(&host());
    assert!(found.enforce_is_safe);
    assert_eq!(
        of(&found, Weight::Good),
        [
            "rights: processes of all users can be looked into".to_owned(),
            "proc: times of 2 pCPUs".to_owned(),
            "proc: run and run delay of threads".to_owned(),
            "pressure: tasks waited for pCPUs during 1.25 % of the last minute".to_owned(),
            format!("debugfs: {} tells vCPU threads exactly", found_path(&found)),
            "pcpus: 2 pCPUs online, 0 isolated, 2 cores, 1 NUMA nodes".to_owned(),
            "vms: 3 VMs, 3 with known vCPUs".to_owned(),
            "groups: 3 VMs have a CPU group of their own".to_owned(),
            found
                .findings
                .last()
                .map(|last| format!("vsock: {}", last.found))
                .unwrap(),
        ],
        "{found}"
    );
    assert_eq!(found.findings.len(), 9, "{found}");
    assert!(found.to_string().ends_with("enforcing would be safe\n"));
}

fn found_path(diagnosis: &Diagnosis) -> String {
    let debugfs = diagnosis
        .findings
        .iter()
        .find(|finding| finding.probe == "debugfs")
        .unwrap();
    debugfs.found.split(' ').next().unwrap().to_owned()
}

#[test]
fn what_makes_enforcing_unsafe_is_bad() {
    let cases: [(&str, &str, &str); 5] = [
        (
            "proc/self/status",
            "CapEff:\t0000000000000000\n",
            "rights: without CAP_SYS_PTRACE",
        ),
        ("proc/stat", "", "proc: "),
        ("proc/self/schedstat", "0 0 0\n", "proc: "),
        (
            "proc/101/task/1010/cgroup",
            "0::/qemu.slice/102.scope\n",
            "groups: copy (101-1010), copy (102-1020): in one CPU group, qemu.slice/102.scope",
        ),
        (
            "proc/101/task/1010/cgroup",
            "0::/\n",
            "groups: copy (101-1010): in no CPU group",
        ),
    ];
    for (path, text, wanted) in cases {
        let tree = host();
        tree.write(path, text);
        let found = complaint(&tree, Weight::Bad);
        assert!(found.starts_with(wanted), "{path}: {found}");
    }
}

#[test]
fn a_weight_that_the_kernel_does_not_know_of_is_a_warning() {
    let tree = host();
    tree.write("sys/fs/cgroup/qemu.slice/103.scope/cpu.weight", "300\n");
    let complaints = |config: &str| {
        let config: Config = toml::from_str(config).unwrap();
        of(&diagnose(&tree.root, &config), Weight::Warning)
    };
    assert_eq!(complaints(""), [""; 0], "the group's own weight counts");
    assert_eq!(
        complaints("[[vm]]\nname = \"big\"\nweight = 300\n"),
        [""; 0]
    );
    let found = complaints("[[vm]]\nname = \"big\"\nweight = 100\n");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("groups: big (103-1030): weight"),
        "{found:?}"
    );
}

#[test]
fn what_works_less_well_is_a_warning() {
    let gone = |path: &str| {
        let tree = host();
        tree.remove(path);
        complaint(&tree, Weight::Warning)
    };
    assert!(gone("proc/pressure").starts_with("pressure: "));
    assert!(gone("sys/kernel/debug").starts_with("debugfs: "));
    assert!(gone("sys/devices/system/cpu/online").starts_with("pcpus: "));
    assert!(gone("dev/vhost-vsock").starts_with("vsock: "));

    let tree = host();
    tree.remove("dev/vhost-vsock");
    tree.write(
        "proc/modules",
        "vmw_vsock_virtio_transport_common 32768 0 - Live 0\nvmw_vsock_vmci_transport 32768 1 - Live 0\nvsock 36864 3 vmw_vsock_vmci_transport, Live 0\n",
    );
    assert!(complaint(&tree, Weight::Warning).contains("vmw_vsock_vmci_transport has taken vsock"));

    let tree = host();
    tree.remove("sys/kernel/debug/kvm/101-9");
    tree.write("proc/101/task/1010/comm", "kvm\n");
    let found = complaint(&tree, Weight::Warning);
    assert!(
        found.starts_with("vms: copy (101-1010) is shown and never hinted"),
        "{found}"
    );

    let tree = host();
    for (cpu, speed) in [(0, 414), (1, 1024)] {
        tree.write(
            &format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity"),
            &format!("{speed}\n"),
        );
    }
    assert!(complaint(&tree, Weight::Warning).contains("different speeds"));
}

#[test]
fn nothing_at_all_is_bad_and_no_panic() {
    let tree = Tree::new("[empty]");
    let found = diagnosis(&tree);
    assert!(!found.enforce_is_safe);
    assert!(of(&found, Weight::Bad).len() >= 2, "{found}");
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["enforce_is_safe"], false);
    assert_eq!(json["findings"][0]["probe"], "rights");
}

#[test]
fn whatever_fails_doctor_says_something_and_does_not_panic() {
    let tree = host();
    for seed in 0..60 {
        let root = Root::with_faults(tree.path(), Arc::new(Faults::any("", seed)));
        let found = diagnose(&root, &Config::default());
        for (probe, _) in PROBES
            .iter()
            .filter(|(probe, _)| !matches!(*probe, "groups" | "pcpus"))
        {
            assert!(
                found.findings.iter().any(|finding| finding.probe == *probe),
                "{seed} {probe}: {found}"
            );
        }
        serde_json::to_string(&found).unwrap();
    }
}

#[test]
fn what_is_refused_or_nonsense_is_no_good_finding() {
    let tree = host();
    for path in [
        "proc/self/status",
        "proc/self/schedstat",
        "proc/pressure/cpu",
        "proc/stat",
        "sys/devices/system/cpu/online",
        "qemu.slice/103.scope/cpu.weight",
        "proc/103/task/1030/status",
    ] {
        for fault in [Fault::Error(rustix::io::Errno::ACCESS), Fault::Garbage] {
            let root = Root::with_faults(tree.path(), Arc::new(Faults::always(path, fault)));
            let found = diagnose(&root, &Config::default());
            let mut complaints = of(&found, Weight::Warning);
            complaints.extend(of(&found, Weight::Bad));
            assert!(
                complaints
                    .iter()
                    .any(|text| text.contains(path) || text.contains("look like VMMs")),
                "{path} {fault:?}: {found}"
            );
        }
    }
}
