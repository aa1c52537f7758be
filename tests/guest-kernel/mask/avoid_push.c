// SPDX-License-Identifier: GPL-2.0
/*
 * Getting fair tasks off avoided CPUs that they are on already. Included at the end of core.c, whose migration it uses.
 *
 * Tasks are on an avoided CPU when the mask changes, when their affinity widens, when they were pushed off a CPU that goes
 * offline, or when they wake where they were still queued. A change of the mask kicks its CPUs at once; the tick of a CPU
 * finds the rest. Both have the CPU's stopper, which interrupts even the running task, move them.
 */
#ifdef CONFIG_SMP

struct avoid_push {
	struct cpu_stop_work	work;
	/* The work is queued, or runs. */
	atomic_t		busy;
};

static DEFINE_PER_CPU(struct avoid_push, avoid_push);

static bool avoid_must_leave(struct task_struct *p, int cpu)
{
	/* A delayed task sleeps already: it is placed anew, or found by a tick, when it wakes. */
	return avoid_refuses(p, cpu) && !is_migration_disabled(p) &&
	       !p->se.sched_delayed;
}

/*
 * A task that must leave, among so many at the tail of the queue. Those that may stay go to its head, so that a search that
 * found nothing but them goes on behind them the next time.
 */
static struct task_struct *avoid_find_task(struct rq *rq)
{
	unsigned int budget = SCHED_NR_MIGRATE_BREAK;
	struct task_struct *first = NULL;

	lockdep_assert_rq_held(rq);
	while (budget-- && !list_empty(&rq->cfs_tasks)) {
		struct task_struct *p = list_last_entry(&rq->cfs_tasks,
							struct task_struct,
							se.group_node);

		if (p == first)
			break;
		if (avoid_must_leave(p, cpu_of(rq)))
			return p;
		if (!first)
			first = p;
		list_move(&p->se.group_node, &rq->cfs_tasks);
	}
	return NULL;
}

/*
 * Where a fair task goes instead of an avoided CPU: an idle preferred CPU that it may use, else the one with the fewest tasks.
 * Gives @near when there is none.
 */
int avoid_pick_cpu(struct task_struct *p, int near)
{
	unsigned int fewest = UINT_MAX;
	int cpu, best = near;

	for_each_cpu_wrap(cpu, p->cpus_ptr, near) {
		unsigned int tasks;

		if (!cpumask_test_cpu(cpu, &preferred_cpus) || !cpu_active(cpu))
			continue;
		if (idle_cpu(cpu))
			return cpu;
		tasks = READ_ONCE(cpu_rq(cpu)->nr_running);
		if (tasks < fewest) {
			fewest = tasks;
			best = cpu;
		}
	}
	return best;
}

static void avoid_push_task(struct rq *rq, struct task_struct *p)
{
	struct rq_flags rf;

	raw_spin_lock_irq(&p->pi_lock);
	rq_lock(rq, &rf);
	update_rq_clock(rq);
	/* Much may have happened since it was found. */
	if (task_rq(p) == rq && task_on_rq_queued(p) &&
	    p->sched_class == &fair_sched_class &&
	    avoid_must_leave(p, cpu_of(rq))) {
		int cpu = avoid_pick_cpu(p, cpu_of(rq));

		if (cpu != cpu_of(rq))
			rq = __migrate_task(rq, &rf, p, cpu);
	}
	rq_unlock(rq, &rf);
	raw_spin_unlock_irq(&p->pi_lock);
}

/* Runs on the avoided CPU, so that none of its fair tasks is running. What is left after some tasks, the next tick finds. */
static int avoid_push_stop(void *arg)
{
	struct avoid_push *push = arg;
	unsigned int budget = SCHED_NR_MIGRATE_BREAK;
	struct rq *rq = this_rq();

	while (budget--) {
		struct task_struct *p;
		struct rq_flags rf;

		rq_lock_irq(rq, &rf);
		p = avoid_find_task(rq);
		if (p)
			get_task_struct(p);
		rq_unlock_irq(rq, &rf);
		if (!p)
			break;
		avoid_push_task(rq, p);
		put_task_struct(p);
	}
	atomic_set_release(&push->busy, 0);
	return 0;
}

/* Has an avoided CPU look through its fair tasks; not with a run queue locked. */
void avoid_kick(int cpu)
{
	struct avoid_push *push = per_cpu_ptr(&avoid_push, cpu);

	if (list_empty(&cpu_rq(cpu)->cfs_tasks) ||
	    atomic_cmpxchg_acquire(&push->busy, 0, 1))
		return;
	/* A CPU that goes offline has no stopper any more, and no tasks either. */
	if (!stop_one_cpu_nowait(cpu, avoid_push_stop, push, &push->work))
		atomic_set_release(&push->busy, 0);
}

/* At each tick of a CPU, on it. */
void avoid_tick(int cpu)
{
	struct rq *rq = cpu_rq(cpu);
	struct rq_flags rf;
	bool found;

	if (!cpu_is_avoided(cpu) || !cpu_active(cpu) ||
	    list_empty(&rq->cfs_tasks))
		return;
	rq_lock(rq, &rf);
	found = avoid_find_task(rq);
	rq_unlock(rq, &rf);
	if (found)
		avoid_kick(cpu);
}

#endif /* CONFIG_SMP */
