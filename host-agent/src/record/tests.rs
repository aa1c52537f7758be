use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use hint_proto::CpuSet;

use super::block::{self, BLOCK_HEAD_LEN};
use super::*;
use crate::config::{Config, VmPolicy};
use crate::discover::Found;
use crate::model::{Accelerator, CpuGroup, Cpus, GroupTree, Limit, Mode, Vcpus, Vm, VmGroup, VmId};
use crate::observe::{CpuTimes, ThreadTimes, VmTimes};
use crate::replay::replay;

const EPOCH: u64 = 1_700_000_000_000_000;

fn set(list: &str) -> CpuSet {
    list.parse().unwrap()
}

fn id(pid: u32) -> VmId {
    VmId {
        pid,
        start_ticks: u64::MAX - u64::from(pid),
    }
}

fn found(pid: u32) -> Found {
    let vcpus = (0..4).map(|vcpu| (vcpu, pid * 10 + vcpu)).collect();
    Found {
        vm: Vm {
            id: id(pid),
            name: format!("vm-{pid}"),
            uuid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
            accelerator: Accelerator::Tcg,
            vcpus: Vcpus::Known(vcpus),
            cid: None,
            hybrid_socket: None,
        },
        allowed: None,
        reach: set("0-1"),
        affinity: BTreeMap::from([(0, set("0")), (1, set("0-1"))]),
    }
}

fn scene() -> Scene {
    let group = |path: &str, parent, weight, quota| CpuGroup {
        path: path.to_owned(),
        parent,
        weight,
        quota,
        cpus: Some(set("0-1")),
        holds_vms: true,
    };
    let mut unknown = found(8);
    unknown.vm.vcpus = Vcpus::Unclassified("nothing tells".to_owned());
    unknown.vm.uuid = None;
    let place = VmGroup {
        group: 1,
        vcpu_quota: Some(Limit::At(Cpus(1.25))),
        shared_with: vec![id(9)],
        scattered: true,
    };
    Scene {
        found: vec![found(7), unknown],
        tree: GroupTree {
            groups: vec![
                group("", None, None, None),
                group("a", Some(0), Some(300.5), Some(Limit::At(Cpus(1.5)))),
                group("b", Some(0), Some(100.0), Some(Limit::None)),
            ],
            vms: BTreeMap::from([(id(7), place)]),
        },
        common: set("0-1"),
        online: set("0-2"),
        settings: Settings {
            mode: Mode::Advise,
            host_weight: 30,
            vms: vec![VmPolicy {
                name: Some("vm-7".to_owned()),
                weight: Some(3),
                max_usable: Some(4),
                usable: Some(2),
                reservation: 0.1,
                mode: Mode::Observe,
                ..VmPolicy::default()
            }],
        },
    }
}

fn sample(random: &mut fastrand::Rng, number: u64) -> Sample {
    let mut time = || Duration::from_nanos(random.u64(..));
    let pcpus: BTreeMap<u32, CpuTimes> = (0..2)
        .map(|pcpu| {
            let times = CpuTimes {
                idle: time(),
                irq: time(),
                steal: time(),
            };
            (pcpu, times)
        })
        .collect();
    let thread = |vcpu: u32| {
        let known = ThreadTimes {
            run: time(),
            run_delay: time(),
            waiting: (u64::from(vcpu) + number).is_multiple_of(3),
        };
        (
            70 + vcpu,
            (!(u64::from(vcpu) + number).is_multiple_of(5)).then_some(known),
        )
    };
    let vm = VmTimes {
        at: Duration::from_millis(100 * number) + Duration::from_nanos(7),
        threads: (0..4).map(thread).collect(),
    };
    Sample {
        at: Duration::from_millis(100 * number),
        pcpus: (!number.is_multiple_of(7)).then_some(pcpus),
        vms: BTreeMap::from([(id(7), vm)]),
        degraded: Vec::new(),
    }
}

fn moments(count: u64) -> Vec<Moment> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut last = Arc::new(scene());
    (1..=count)
        .map(|number| {
            if number.is_multiple_of(20) {
                let mut scene = scene();
                scene.settings.host_weight = u32::try_from(number).unwrap();
                last = Arc::new(scene);
            }
            let in_use = u32::try_from(number % 4).ok();
            Moment {
                number,
                scene: Arc::clone(&last),
                sample: Arc::new(sample(&mut random, number)),
                agents: vec![AgentState::Works { in_use }, AgentState::Absent],
                decided: vec![
                    Decided {
                        usable: in_use,
                        reason: "contention".to_owned(),
                    },
                    Decided {
                        usable: None,
                        reason: "a reason of a later version".to_owned(),
                    },
                ],
            }
        })
        .collect()
}

/// Has them written, in parts that fit into the writer's queue.
fn record(path: &Path, most: u64, epoch: u64, moments: &[Moment]) {
    for part in moments.chunks(50) {
        let mut recorder = Recorder::start(path, most, epoch).unwrap();
        for moment in part {
            recorder.take(moment.clone());
        }
        assert_eq!(recorder.state().lost_ticks, 0, "{:?}", recorder.failure());
    }
}

fn read(path: &Path) -> (Vec<(u64, Moment)>, Vec<Loss>) {
    let mut reader = Reader::open(path).unwrap();
    let mut moments = Vec::new();
    while let Some(moment) = reader.next_moment().unwrap() {
        moments.push(moment);
    }
    (moments, reader.losses().to_vec())
}

fn wait(recorder: &Recorder, wanted: impl Fn(&Recorder) -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !wanted(recorder) {
        assert!(
            Instant::now() < end,
            "{:?} {:?}",
            recorder.state(),
            recorder.failure()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_read_is_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let written = moments(100);
    record(&path, 64 << 20, EPOCH, &written);
    record(&path, 64 << 20, EPOCH + 1, &written[..3]);
    let (read, losses) = read(&path);
    assert_eq!(losses, []);
    let wanted = written.iter().map(|moment| (EPOCH, moment));
    let wanted = wanted.chain(written[..3].iter().map(|moment| (EPOCH + 1, moment)));
    assert!(
        read.iter()
            .map(|(epoch, moment)| (*epoch, moment))
            .eq(wanted)
    );
    assert!(
        Arc::ptr_eq(&read[0].1.scene, &read[1].1.scene),
        "followed once"
    );
    let summary = replay(&path, None, |_| true).unwrap();
    assert_eq!(
        (summary.runs, summary.ticks, summary.ticks_missing),
        (2, 103, 0)
    );
}

#[test]
fn it_stays_in_its_bounds_and_the_newest_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let written = moments(40);
    let most = 20_000;
    for run in 0..20 {
        record(&path, most, EPOCH + run, &written);
        let length = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        assert!(length(&path) + length(&old_path(&path)) <= most);
    }
    let (read, losses) = read(&path);
    assert_eq!(losses, []);
    assert_eq!(read.last().unwrap().0, EPOCH + 19);
    assert!(read.len() > 40, "{}", read.len());
}

#[test]
fn of_a_cut_or_damaged_file_the_rest_is_read_and_the_loss_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let written = moments(10);
    for run in 0..3 {
        record(&path, 64 << 20, EPOCH + run, &written);
    }
    let whole = fs::read(&path).unwrap();
    let third = (whole.len() - 10) / 3;
    // Cut in its last block; what is written later stands behind that.
    fs::write(&path, &whole[..whole.len() - 5]).unwrap();
    let (moments, losses) = read(&path);
    assert_eq!((moments.len(), losses.len()), (20, 1));
    assert!(
        losses[0].at_end && losses[0].to_string().contains("cut off"),
        "{losses:?}"
    );
    record(&path, 64 << 20, EPOCH + 9, &written);
    let (moments, losses) = read(&path);
    assert_eq!((moments.len(), losses.len()), (30, 1));
    assert!(!losses[0].at_end);
    // A byte in the middle.
    let mut damaged = whole.clone();
    damaged[10 + third + third / 2] ^= 1;
    fs::write(&path, &damaged).unwrap();
    let (moments, losses) = read(&path);
    assert_eq!((moments.len(), losses.len()), (20, 1));
    assert_eq!(losses[0].offset, 10 + third as u64);
    let summary = replay(&path, None, |_| true).unwrap();
    assert_eq!((summary.ticks, summary.losses.len()), (20, 1));
    // A head alone, or half of one, is a recording of nothing.
    for length in [0, 5, 10] {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(replay(&path, None, |_| true).unwrap().ticks, 0);
    }
    record(&path, 64 << 20, EPOCH, &written);
    assert_eq!(read(&path).0.len(), 10);
}

#[test]
fn other_files_and_other_formats_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    for text in ["precious", "HINTREd\n123"] {
        fs::write(&path, text).unwrap();
        let error = Reader::open(&path).unwrap_err().to_string();
        assert!(error.contains("no recording"), "{error}");
        let recorder = Recorder::start(&path, 1 << 20, EPOCH).unwrap();
        wait(&recorder, |recorder| recorder.failure().is_some());
        drop(recorder);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    let mut head = block::file_head();
    head[8] = 77;
    fs::write(&path, head).unwrap();
    let error = Reader::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("format 77") && error.contains("format 1"),
        "{error}"
    );
    // A newer broker's recording is kept as the older half.
    record(&path, 1 << 20, EPOCH, &moments(3));
    assert_eq!(fs::read(old_path(&path)).unwrap(), head);
    fs::remove_file(old_path(&path)).unwrap();
    assert_eq!(read(&path).0.len(), 3);

    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for (path, says) in [
        (link.as_path(), "open"),
        (Path::new("/dev/full"), "no recording"),
        (folder.path(), "open"),
        (Path::new("/nonexistent/record"), "/nonexistent/record"),
    ] {
        let recorder = Recorder::start(path, 1 << 20, EPOCH).unwrap();
        wait(&recorder, |recorder| recorder.failure().is_some());
        let failure = recorder.failure().unwrap();
        assert!(
            failure.contains(says) && failure.contains("nothing is recorded"),
            "{failure}"
        );
    }
}

#[test]
fn two_writers_do_not_share_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let first = Recorder::start(&path, 1 << 20, EPOCH).unwrap();
    wait(&first, |recorder| recorder.state().bytes > 0);
    let second = Recorder::start(&path, 1 << 20, EPOCH).unwrap();
    wait(&second, |recorder| {
        recorder
            .failure()
            .is_some_and(|failure| failure.contains("another process"))
    });
}

#[test]
fn a_file_that_comes_back_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("below");
    let path = below.join("record");
    let written = moments(2);
    let mut recorder = Recorder::start(&path, 1 << 20, EPOCH).unwrap();
    wait(&recorder, |recorder| recorder.state().failing);
    fs::create_dir(&below).unwrap();
    for moment in written {
        recorder.take(moment);
    }
    drop(recorder);
    assert_eq!(read(&path).0.len(), 2);
}

#[test]
fn no_garbage_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    record(&path, 64 << 20, EPOCH, &moments(30));
    let whole = fs::read(&path).unwrap();
    let payload = block::unpack(&whole[10 + BLOCK_HEAD_LEN..]).unwrap();
    let mut random = fastrand::Rng::with_seed(2);
    let fixed = Config::default();
    for round in 0..500 {
        // Damage behind the check sum, as a faulty or hostile writer makes it, is found by meaning alone.
        let mut payload = payload.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..payload.len());
            match random.u8(..3) {
                0 => payload[at] = random.u8(..),
                1 => {
                    payload.remove(at);
                }
                _ => payload.insert(at, random.u8(..)),
            }
        }
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&block::file_head()).unwrap();
        file.write_all(&block::pack(&payload).unwrap().unwrap())
            .unwrap();
        let config = (round % 2 == 0).then_some(&fixed);
        replay(&path, config, |change| !change.to_string().is_empty()).unwrap();
    }
    for _ in 0..100 {
        let mut bytes = whole.clone();
        let file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        for _ in 0..random.usize(1..50) {
            let at = random.usize(10..bytes.len());
            bytes[at] = random.u8(..);
        }
        file.write_all_at(&bytes, 0).unwrap();
        replay(&path, None, |_| true).unwrap();
    }
}
