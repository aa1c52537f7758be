//! What the broker's discovery and observation see where this runs, in lines for a test; and, under the name of a VMM, a process
//! that looks like one.
//!
//! `lab-observe vm 2` has two threads named like vCPUs, which sleep. `lab-observe groups` prints a line for each group and VM.

use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use hint_broker::discover::Discovery;
use hint_broker::model::{Limit, Vm};
use hint_broker::observe::cgroups::Cgroups;
use hint_broker::root::Root;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["vm", vcpus, ..] => hold(vcpus.parse().context("a number of vCPUs is expected")?),
        ["groups"] => {
            show();
            Ok(())
        }
        _ => bail!("expected `vm NUMBER` or `groups`"),
    }
}

fn hold(vcpus: u32) -> anyhow::Result<()> {
    for index in 0..vcpus {
        let thread = thread::Builder::new().name(format!("CPU {index}/TCG"));
        thread
            .spawn(|| {
                loop {
                    thread::sleep(Duration::from_secs(3600));
                }
            })
            .context("can't start a thread")?;
    }
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

fn show() {
    let root = Root::new("/");
    let vms: Vec<Vm> = Discovery::new(root.clone(), true)
        .scan()
        .vms
        .into_iter()
        .map(|found| found.vm)
        .collect();
    let mut cgroups = Cgroups::new(root);
    let scan = cgroups.scan(&vms);
    let usage = cgroups.usage(&scan.tree);
    for (group, used) in scan.tree.groups.iter().zip(usage) {
        println!(
            "group /{} weight {} quota {} cpus {} vms {} used {}",
            group.path,
            group
                .weight
                .map_or("?".to_owned(), |weight| format!("{weight:.1}")),
            shown(group.quota),
            group
                .cpus
                .as_ref()
                .map_or("?".to_owned(), ToString::to_string),
            group.holds_vms,
            used.is_some(),
        );
    }
    for vm in &vms {
        match scan.tree.vms.get(&vm.id) {
            Some(place) => println!(
                "vm {} in /{} vcpus {} shared {} scattered {}",
                vm.name,
                scan.tree.groups[place.group].path,
                shown(place.vcpu_quota),
                place.shared_with.len(),
                place.scattered,
            ),
            None => println!("vm {} nowhere", vm.name),
        }
    }
    for message in &scan.degraded {
        println!("degraded {message}");
    }
}

fn shown(limit: Option<Limit>) -> String {
    match limit {
        None => "?".to_owned(),
        Some(Limit::None) => "max".to_owned(),
        Some(Limit::At(cpus)) => cpus.to_string(),
    }
}
