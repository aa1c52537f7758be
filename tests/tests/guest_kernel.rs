//! The script that puts the mask of CPUs to avoid into a kernel's source: it guesses nothing.
//!
//! It works here on sources that have no more than the lines it looks for. That it fits real ones is shown by the kernel that
//! boots.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// File, function, and the line of it that ours goes beside.
const ANCHORS: [(&str, &str, &str); 9] = [
    (
        "core.c",
        "select_task_rq",
        "cpu = p->sched_class->select_task_rq(p, cpu, *wake_flags);",
    ),
    (
        "core.c",
        "sched_exec",
        "dest_cpu = p->sched_class->select_task_rq(p, task_cpu(p), WF_EXEC);",
    ),
    ("core.c", "sched_tick", "sched_balance_trigger(rq);"),
    (
        "syscalls.c",
        "available_idle_cpu",
        "if (vcpu_is_preempted(cpu))",
    ),
    (
        "fair.c",
        "sched_balance_rq",
        "cpumask_and(cpus, sched_domain_span(sd), cpu_active_mask);",
    ),
    (
        "fair.c",
        "should_we_balance",
        "return group_balance_cpu(sg) == env->dst_cpu;",
    ),
    (
        "fair.c",
        "update_sg_lb_stats",
        "sgs->group_weight = group->group_weight;",
    ),
    (
        "fair.c",
        "can_migrate_task",
        "if (throttled_lb_pair(task_group(p), env->src_cpu, env->dst_cpu))",
    ),
    ("fair.c", "find_new_ilb", "if (idle_cpu(ilb_cpu))"),
];

/// Sources with one function for each anchor, after a declaration of it and before one that has the same line.
fn sources(anchors: &[(&str, &str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let sched = dir.path().join("kernel/sched");
    fs::create_dir_all(&sched).unwrap();
    fs::write(sched.join("Makefile"), "obj-y += core.o\n").unwrap();
    fs::write(
        sched.join("sched.h"),
        "#ifndef A\n#define A\n#endif /* _KERNEL_SCHED_SCHED_H */\n",
    )
    .unwrap();
    for file in ["core.c", "fair.c", "syscalls.c"] {
        let mut text = String::new();
        for (_, function, anchor) in anchors.iter().filter(|(of, _, _)| *of == file) {
            text += &format!(
                "static int {function}(int a,\n\t\tint b);\n\
                 static int\n{function}(int a,\n\t\tint b)\n{{\n\tfirst();\n\t{anchor}\n\tlast();\n}}\n\
                 void not_{function}(void)\n{{\n\t{anchor}\n}}\n"
            );
        }
        fs::write(sched.join(file), text).unwrap();
    }
    dir
}

fn apply(source: &Path) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest-kernel/mask/apply.sh");
    Command::new(script).arg(source).output().unwrap()
}

fn refusal(source: &Path) -> String {
    let output = apply(source);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{stderr}");
    stderr
}

#[test]
fn our_lines_go_beside_the_lines_of_the_named_functions() {
    let source = sources(&ANCHORS);
    let output = apply(source.path());
    assert!(output.status.success(), "{output:?}");
    let read =
        |file: &str| fs::read_to_string(source.path().join("kernel/sched").join(file)).unwrap();
    let fair = read("fair.c");
    let balance = "{\n\tfirst();\n\tcpumask_and(cpus, sched_domain_span(sd), cpu_active_mask);\n\
        \tavoid_same_kind(cpus, this_cpu);\n\tlast();\n}\n";
    assert!(fair.contains(balance), "{fair}");
    let migrate =
        "{\n\tfirst();\n\tif (avoid_refuses(p, env->dst_cpu))\n\t\treturn 0;\n\tif (throttled";
    assert!(fair.contains(migrate), "{fair}");
    // The functions with other names are as they were.
    let other = "not_find_new_ilb(void)\n{\n\tif (idle_cpu(ilb_cpu))\n}\n";
    assert!(fair.contains(other), "{fair}");
    assert_eq!(fair.matches("avoid_refuses").count(), 1);
    assert!(
        read("sched.h").ends_with("#include \"avoid.h\"\n\n#endif /* _KERNEL_SCHED_SCHED_H */\n")
    );
    assert!(read("core.c").ends_with("#include \"avoid_push.c\"\n"));
    assert!(read("avoid.c").contains("paravirt_store"));

    let again = refusal(source.path());
    assert!(again.contains("has the mask already"), "{again}");
}

#[test]
fn an_anchor_that_is_gone_or_stands_twice_is_named() {
    for (gone, (file, function, anchor)) in ANCHORS.iter().enumerate() {
        let mut anchors = ANCHORS;
        anchors[gone].2 = "other();";
        let stderr = refusal(sources(&anchors).path());
        let names_it =
            stderr.contains(file) && stderr.contains(function) && stderr.contains(anchor);
        assert!(names_it, "{stderr}");

        let twice = format!("{anchor}\n\t{anchor}");
        anchors[gone].2 = &twice;
        let stderr = refusal(sources(&anchors).path());
        assert!(stderr.contains(anchor), "{stderr}");

        let mut anchors = ANCHORS;
        anchors[gone].1 = "renamed";
        let stderr = refusal(sources(&anchors).path());
        assert!(
            stderr.contains(&format!("expected one definition of {function}()")),
            "{stderr}"
        );
    }
}
