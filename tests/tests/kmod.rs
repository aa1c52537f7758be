//! The module that makes the kernel's mask of preferred CPUs writable, in a real guest. No released kernel has that mask, so a stub module
//! has one that follows the active CPUs as the kernel's would; all the rest is real.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use std::{env, fs};

use lab::skip::{self, Need};
use lab::{Guest, GuestSpec, Topology, assets, lock};

const SOON: Duration = Duration::from_secs(60);
const SOURCE: &str = "../guest-agent/kmod";
const MODULES: [&str; 3] = ["preferred_stub", "preferred_cpus", "steal_governor"];

/// Copies sources to a folder that goes with the test.
fn copied(folders: &[&str]) -> tempfile::TempDir {
    let target = tempfile::Builder::new()
        .prefix("hint-kmod-")
        .tempdir_in(env::temp_dir())
        .unwrap();
    for folder in folders {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, target.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    target
}

fn make(arguments: &[String]) -> Output {
    Command::new("make").args(arguments).output().unwrap()
}

/// Where nothing but the module's source and a kernel's headers are, as with dkms.
fn a_kernel_without_the_mask_is_refused(headers: &Path) {
    let folder = copied(&[SOURCE]);
    let output = make(&[
        "-C".to_owned(),
        folder.path().display().to_string(),
        format!("KDIR={}", headers.display()),
        "modules".to_owned(),
    ]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(text.contains("CONFIG_PREFERRED_CPU is not set"), "{text}");
}

fn built(folder: &Path, headers: &Path) -> Vec<(PathBuf, PathBuf)> {
    let output = make(&[
        "-C".to_owned(),
        headers.display().to_string(),
        format!("M={}", folder.display()),
        "W=1".to_owned(),
        "modules".to_owned(),
    ]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("warning: unused"), "{text}");
    let file = |module: &str| {
        let name = format!("{module}.ko");
        (folder.join(&name), Path::new("/kmod").join(&name))
    };
    MODULES.map(file).to_vec()
}

fn preferred(guest: &Guest) -> String {
    guest.sh("cat /dev/preferred_cpus").unwrap()
}

#[track_caller]
fn wait_for(guest: &Guest, wanted: &str) {
    let found = guest
        .wait_for(SOON, |guest| Ok(preferred(guest)), |found| found == wanted)
        .unwrap();
    assert_eq!(found, wanted);
}

#[test]
fn the_mask_of_preferred_cpus_is_the_writers_while_it_has_the_node() {
    const NAME: &str = "the_mask_of_preferred_cpus_is_the_writers_while_it_has_the_node";
    if !skip::can_run(NAME, &[Need::Guests, Need::KernelHeaders]) {
        return;
    }
    let headers = assets::kernel_headers().unwrap();
    a_kernel_without_the_mask_is_refused(&headers);
    let folder = copied(&[SOURCE, "kmod"]);
    let files = built(folder.path(), &headers);

    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&GuestSpec {
        vcpus: 6,
        topology: Some(Topology {
            sockets: 1,
            cores: 3,
            threads: 2,
        }),
        files,
        ..GuestSpec::named("kmod")
    })
    .unwrap();
    guest
        .sh("insmod /kmod/preferred_stub.ko && insmod /kmod/preferred_cpus.ko")
        .unwrap();
    assert_eq!(preferred(&guest), "0-5");
    what_is_written_is_kept_within_the_rules(&guest);
    whatever_ends_the_writer_opens_the_mask(&guest);
    cpus_may_come_and_go(&guest);
    it_does_not_fight_the_kernels_own_writer(&guest);
    let log = guest.sh("dmesg").unwrap();
    for sign in ["WARNING:", "BUG:", "Oops"] {
        assert!(!log.contains(sign), "{log}");
    }
}

fn what_is_written_is_kept_within_the_rules(guest: &Guest) {
    let found = guest
        .sh("exec 3>/dev/preferred_cpus
             for list in 2-3 5 '' 4 x 9999 3-2; do
                 echo \"$list\" 2>/dev/null >&3 && end=taken || end=refused
                 echo \"'$list' $end: $(cat /dev/preferred_cpus)\"
             done
             (exec 4>/dev/preferred_cpus) 2>/dev/null && echo 'a second writer' || echo 'one writer'
             rmmod preferred_cpus 2>/dev/null && echo 'unloaded in use' || echo 'stays in use'")
        .unwrap();
    // The first core is always preferred; what is refused changes nothing.
    let wanted = "'2-3' taken: 0-3\n'5' taken: 0-1,5\n'' taken: 0-5\n'4' taken: 0-1,4\n'x' refused: 0-1,4\n\
        '9999' refused: 0-1,4\n'3-2' refused: 0-1,4\none writer\nstays in use";
    assert_eq!(found, wanted);
    assert_eq!(preferred(guest), "0-5", "closed");
}

fn whatever_ends_the_writer_opens_the_mask(guest: &Guest) {
    let writer = guest
        .spawn_work("exec 3>/dev/preferred_cpus; echo 4 >&3; exec sleep 1000")
        .unwrap();
    wait_for(guest, "0-1,4");
    // By SIGKILL.
    guest.kill_work(writer).unwrap();
    wait_for(guest, "0-5");
    // Unloaded, it leaves all preferred; the stub's mask outlives it.
    guest
        .sh("rmmod preferred_cpus && insmod /kmod/preferred_cpus.ko")
        .unwrap();
    assert_eq!(preferred(guest), "0-5");
}

fn cpus_may_come_and_go(guest: &Guest) {
    let found = guest
        .sh("exec 3>/dev/preferred_cpus
             cpu=/sys/devices/system/cpu/cpu2/online
             echo 2 >&3; cat /dev/preferred_cpus
             echo 0 >$cpu; cat /dev/preferred_cpus
             echo 2 2>/dev/null >&3 && echo taken || echo 'refused: not active'
             echo 1 >$cpu; cat /dev/preferred_cpus")
        .unwrap();
    assert_eq!(found, "0-2\n0-1\nrefused: not active\n0-2");
    assert_eq!(preferred(guest), "0-5");
    // Both at once: whenever one looks, the first core is there, and nothing but CPUs that are online in the end.
    let found = guest
        .sh("(for turn in $(seq 40); do
                 for cpu in 3 5; do
                     echo $((turn % 2)) >/sys/devices/system/cpu/cpu$cpu/online
                 done
             done) &
             exec 3>/dev/preferred_cpus
             for turn in $(seq 200); do
                 echo $((turn % 6)) 2>/dev/null >&3
                 case $(cat /dev/preferred_cpus) in 0-*) ;; *) echo 'lost the first core' ;; esac
             done
             wait
             echo 1 >/sys/devices/system/cpu/cpu3/online
             echo 1 >/sys/devices/system/cpu/cpu5/online
             echo done")
        .unwrap();
    assert_eq!(found, "done");
    assert_eq!(preferred(guest), "0-5");
}

fn it_does_not_fight_the_kernels_own_writer(guest: &Guest) {
    guest.sh("insmod /kmod/steal_governor.ko").unwrap();
    let opened = guest.run("exec 3>/dev/preferred_cpus").unwrap();
    assert_ne!(opened.status, 0);
    guest.sh("rmmod preferred_cpus").unwrap();
    let loaded = guest.run("insmod /kmod/preferred_cpus.ko").unwrap();
    assert_ne!(loaded.status, 0);
    let log = guest.sh("dmesg").unwrap();
    assert!(
        log.contains("unload it first (modprobe -r steal_governor)"),
        "{log}"
    );
    guest
        .sh("rmmod steal_governor && insmod /kmod/preferred_cpus.ko && rmmod preferred_cpus")
        .unwrap();
}
