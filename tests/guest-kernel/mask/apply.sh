#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# apply.sh SOURCE: puts the mask of CPUs to avoid into a kernel source tree.
#
# Our lines go beside lines of the kernel (anchors), each named by its function, so that they find their place in every point
# release. Where a function or an anchor is gone, or an anchor stands there twice, nothing is guessed: the script fails
# and names it. Then look at that function in the new source, and at what the line here is for.
set -euo pipefail

source=${1:?usage: apply.sh SOURCE}
mask=$(cd "$(dirname "$0")" && pwd)
sched=$source/kernel/sched

fail() {
    printf 'apply: %s\n' "$@" >&2
    exit 1
}

# insert FILE FUNCTION before|after ANCHOR: puts standard input beside the one line of the function that is ANCHOR (white space
# at its ends aside). A function begins where a line begins with its name or ends its declarator with it, and ends at "}".
insert() {
    local file=$sched/$1 function=$2 where=$3 anchor=$4 status=0
    cp /dev/stdin "$file.lines"
    awk -v name="$function" -v where="$where" -v anchor="$anchor" -v lines="$file.lines" '
        function put(   line) { while ((getline line <lines) > 0) print line; close(lines) }
        function trimmed(text) { gsub(/^[ \t]+|[ \t]+$/, "", text); return text }
        # A line at the margin with the name and a bracket: a definition, unless a ";" comes before the "{".
        !inside && /^[A-Za-z_]/ && match($0, "(^|[^A-Za-z0-9_])" name "\\(") { head = 1 }
        head && /^{/ { head = 0; inside = 1; functions++ }
        head && /;[ \t]*$/ { head = 0 }
        inside && trimmed($0) == anchor {
            anchors++
            if (where == "before") put()
            print
            if (where == "after") put()
            next
        }
        { print }
        inside && /^}/ { inside = 0 }
        END { if (functions != 1) exit 3; if (anchors != 1) exit 4 }
    ' "$file" >"$file.new" || status=$?
    rm "$file.lines"
    case $status in
    0) mv "$file.new" "$file" ;;
    3) fail "kernel/sched/$1: expected one definition of $function(), found none or several" ;;
    4) fail "kernel/sched/$1, $function(): expected one line '$anchor', found none or several" ;;
    *) fail "kernel/sched/$1: awk failed with $status" ;;
    esac
}

for file in core.c fair.c sched.h syscalls.c Makefile; do
    [ -f "$sched/$file" ] || fail "$sched/$file is missing: is $source a kernel source tree?"
done
[ ! -e "$sched/avoid.h" ] || fail "$source has the mask already"
cp "$mask"/avoid.h "$mask"/avoid.c "$mask"/avoid_push.c "$sched"

# The parts of our own.
printf '\n# The mask of CPUs to avoid.\nobj-$(CONFIG_SMP) += avoid.o\n' >>"$sched/Makefile"
printf '\n#include "avoid_push.c"\n' >>"$sched/core.c"
[ "$(tail -n 1 "$sched/sched.h")" = '#endif /* _KERNEL_SCHED_SCHED_H */' ] ||
    fail "kernel/sched/sched.h: expected '#endif /* _KERNEL_SCHED_SCHED_H */' in its last line"
sed -i '$i #include "avoid.h"\n' "$sched/sched.h"

# Placing a task that wakes or is new, and one that execs.
insert core.c select_task_rq after 'cpu = p->sched_class->select_task_rq(p, cpu, *wake_flags);' <<'END'
		cpu = avoid_place(p, cpu);
END
insert core.c sched_exec after 'dest_cpu = p->sched_class->select_task_rq(p, task_cpu(p), WF_EXEC);' <<'END'
		dest_cpu = avoid_place(p, dest_cpu);
END

# An avoided CPU that idles draws no task that wakes.
insert syscalls.c available_idle_cpu before 'if (vcpu_is_preempted(cpu))' <<'END'
	if (cpu_is_avoided(cpu))
		return 0;

END

# A CPU balances with those of its own kind, and the first of them stands for its group where none is idle.
insert fair.c sched_balance_rq after 'cpumask_and(cpus, sched_domain_span(sd), cpu_active_mask);' <<'END'
	avoid_same_kind(cpus, this_cpu);
END
insert fair.c should_we_balance before 'return group_balance_cpu(sg) == env->dst_cpu;' <<'END'
	if (static_branch_unlikely(&avoid_in_use))
		return cpumask_first_and(group_balance_mask(sg), env->cpus) ==
		       env->dst_cpu;
END
insert fair.c update_sg_lb_stats after 'sgs->group_weight = group->group_weight;' <<'END'
	avoid_fit_group(group, env->dst_cpu, &sgs->group_weight,
			&sgs->group_capacity);
END
insert fair.c can_migrate_task before 'if (throttled_lb_pair(task_group(p), env->src_cpu, env->dst_cpu))' <<'END'
	if (avoid_refuses(p, env->dst_cpu))
		return 0;
END

# A preferred CPU wakes no avoided one to have it balance for others.
insert fair.c find_new_ilb before 'if (idle_cpu(ilb_cpu))' <<'END'
		if (cpu_is_avoided(ilb_cpu) &&
		    !cpu_is_avoided(smp_processor_id()))
			continue;

END

# Tasks that are on an avoided CPU in spite of all that.
insert core.c sched_tick before 'sched_balance_trigger(rq);' <<'END'
		avoid_tick(cpu);
END
