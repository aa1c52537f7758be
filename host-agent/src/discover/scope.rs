//! Names of VMs from their cgroups, for VMMs that don't know the name themselves: systemd-machined's scopes, and what libvirt
//! makes where there is no systemd.

use crate::procfs::{Escapes, unescape};

/// The VM's name in the text of a `/proc/<pid>/cgroup`. A label, no identity.
pub(super) fn name(cgroup: &str) -> Option<String> {
    let paths = cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths
        .flat_map(|path| path.split('/'))
        .find_map(|part| from_scope(part).or_else(|| from_libvirt(part)))
}

/// `machine-qemu\x2d37\x2dweb.scope`
fn from_scope(part: &str) -> Option<String> {
    let name = part.strip_prefix("machine-")?.strip_suffix(".scope")?;
    // systemd writes bytes that unit names may not have as `\xHH`.
    Some(without_driver(&unescape(name, Escapes::Hex)).to_owned())
}

/// `qemu-37-web.libvirt-qemu`
fn from_libvirt(part: &str) -> Option<String> {
    let (name, _) = part.rsplit_once(".libvirt-")?;
    Some(without_driver(name).to_owned())
}

/// Takes off the driver, and libvirt's number of the VM where there is one.
fn without_driver(name: &str) -> &str {
    let Some(rest) = ["qemu-", "ch-"]
        .iter()
        .find_map(|driver| name.strip_prefix(driver))
    else {
        return name;
    };
    match rest.split_once('-') {
        Some((id, name)) if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_decoded_and_hyphens_kept() {
        let long = "a".repeat(60);
        for (scope, wanted) in [
            (r"machine-qemu\x2d37\x2dunifi.scope", "unifi"),
            (r"machine-qemu\x2d3\x2dvm01\x2dweb.scope", "vm01-web"),
            (
                r"machine-qemu\x2dhost01\x2dgo\x2dvlin\x2da.scope",
                "host01-go-vlin-a",
            ),
            (
                &format!(r"machine-qemu\x2d1\x2d{long}\x2d1.scope"),
                &format!("{long}-1"),
            ),
            (r"machine-b\xc3\xbcro.scope", "büro"),
            (r"machine-odd\x2.scope", r"odd\x2"),
            ("qemu-1-web-2.libvirt-qemu", "web-2"),
        ] {
            let text = format!("0::/machine.slice/{scope}/libvirt/emulator\n");
            assert_eq!(name(&text).as_deref(), Some(wanted), "{scope}");
        }
    }

    #[test]
    fn other_groups_name_nothing() {
        for text in [
            "0::/user.slice/user-0.slice/session-1.scope\n",
            "4:cpu:/kubepods/burstable/pod1/c1\n",
            "0::/\n",
            "",
            "machine-x.scope",
        ] {
            assert_eq!(name(text), None, "{text:?}");
        }
    }
}
