/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The mask of CPUs to avoid, as the fair class asks for it. Included at the end of sched.h.
 *
 * A fair task may be on an avoided CPU only where its affinity allows no preferred one. So the fair class knows two kinds
 * of CPUs, preferred and avoided, and balances among CPUs of one kind only. See avoid.c for the mask itself, and
 * avoid_push.c for tasks that are on the wrong kind already.
 */
#ifndef _KERNEL_SCHED_AVOID_H
#define _KERNEL_SCHED_AVOID_H

#ifdef CONFIG_SMP

/* Turned on by the first mask and left on: until then the checks cost nothing. */
DECLARE_STATIC_KEY_FALSE(avoid_in_use);

extern struct cpumask avoided_cpus;
/* All possible CPUs that are not avoided. */
extern struct cpumask preferred_cpus;

int avoid_pick_cpu(struct task_struct *p, int near);
void avoid_kick(int cpu);
void avoid_tick(int cpu);

static inline bool cpu_is_avoided(int cpu)
{
	return static_branch_unlikely(&avoid_in_use) &&
	       cpumask_test_cpu(cpu, &avoided_cpus);
}

/* Must this fair task be elsewhere than on this CPU? */
static inline bool avoid_refuses(struct task_struct *p, int cpu)
{
	return cpu_is_avoided(cpu) &&
	       cpumask_first_and_and(p->cpus_ptr, &preferred_cpus,
				     cpu_active_mask) < nr_cpu_ids;
}

/* Where a task goes that its class would place on this CPU. */
static inline int avoid_place(struct task_struct *p, int cpu)
{
	if (p->sched_class != &fair_sched_class || !avoid_refuses(p, cpu))
		return cpu;
	return avoid_pick_cpu(p, cpu);
}

/* Leaves those CPUs that are of the same kind as this one: what it balances with. */
static inline void avoid_same_kind(struct cpumask *cpus, int cpu)
{
	if (!static_branch_unlikely(&avoid_in_use))
		return;
	cpumask_and(cpus, cpus,
		    cpu_is_avoided(cpu) ? &avoided_cpus : &preferred_cpus);
}

/*
 * Weight and capacity of a group as the balancing CPU sees it: CPUs of the other kind are no spare room, or groups that
 * have some would never look full.
 */
static inline void avoid_fit_group(struct sched_group *group, int cpu,
				   unsigned int *weight,
				   unsigned long *capacity)
{
	const struct cpumask *kind;
	unsigned int usable;

	if (!static_branch_unlikely(&avoid_in_use))
		return;
	kind = cpu_is_avoided(cpu) ? &avoided_cpus : &preferred_cpus;
	usable = cpumask_weight_and(sched_group_span(group), kind);
	/* Neither may be 0, also where no CPU is of that kind: the fair class divides by them. */
	*capacity = max(*capacity * usable / *weight, 1UL);
	*weight = max(usable, 1U);
}

#else /* !CONFIG_SMP */

static inline bool cpu_is_avoided(int cpu) { return false; }

#endif /* CONFIG_SMP */

#endif /* _KERNEL_SCHED_AVOID_H */
