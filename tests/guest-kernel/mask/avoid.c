// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/devices/system/cpu/paravirt: the mask of CPUs that fair tasks avoid.
 *
 * Reading gives the avoided CPUs as a list. Writing a list replaces the mask, and an empty line clears it. EINVAL: no list,
 * or a mask that leaves no CPU to prefer, which is one that equals the online CPUs or has more CPUs than are online. Offline
 * CPUs may be in it: they are avoided from the moment they come.
 *
 * The mask stays valid while CPUs come and go: one that goes offline leaves the mask, and when no CPU is left to prefer, the
 * mask is cleared. Affinities are never touched.
 *
 * Readers take no lock: a reader that sees half a new mask places a task as the old or the new one would have, and the next
 * tick finds tasks that are wrong.
 */
#include <linux/cpuhotplug.h>
#include <linux/device.h>
#include <linux/mmu_context.h>
#include <linux/sysfs.h>

#include "sched.h"

DEFINE_STATIC_KEY_FALSE(avoid_in_use);
struct cpumask avoided_cpus;
struct cpumask preferred_cpus = CPU_MASK_ALL;

/* Held to change the masks, inside of the hotplug lock. */
static DEFINE_MUTEX(avoid_lock);

static bool avoid_is_valid(const struct cpumask *mask,
			   const struct cpumask *online)
{
	return !cpumask_equal(mask, online) &&
	       cpumask_weight(mask) <= cpumask_weight(online);
}

static void avoid_set(const struct cpumask *mask)
{
	lockdep_assert_held(&avoid_lock);
	cpumask_copy(&avoided_cpus, mask);
	cpumask_andnot(&preferred_cpus, cpu_possible_mask, mask);
}

static ssize_t paravirt_show(struct device *dev, struct device_attribute *attr,
			     char *buf)
{
	ssize_t length;

	mutex_lock(&avoid_lock);
	length = sysfs_emit(buf, "%*pbl\n", cpumask_pr_args(&avoided_cpus));
	mutex_unlock(&avoid_lock);
	return length;
}

static ssize_t paravirt_store(struct device *dev, struct device_attribute *attr,
			      const char *buf, size_t count)
{
	cpumask_var_t mask;
	ssize_t result = count;
	int cpu;

	if (!alloc_cpumask_var(&mask, GFP_KERNEL))
		return -ENOMEM;
	if (cpulist_parse(buf, mask)) {
		free_cpumask_var(mask);
		return -EINVAL;
	}

	cpus_read_lock();
	mutex_lock(&avoid_lock);
	if (avoid_is_valid(mask, cpu_online_mask)) {
		if (!cpumask_empty(mask))
			static_branch_enable_cpuslocked(&avoid_in_use);
		avoid_set(mask);
		for_each_cpu_and(cpu, mask, cpu_online_mask)
			avoid_kick(cpu);
	} else {
		result = -EINVAL;
	}
	mutex_unlock(&avoid_lock);
	cpus_read_unlock();

	free_cpumask_var(mask);
	return result;
}

static DEVICE_ATTR_RW(paravirt);

/* Called while the CPU is still online. */
static int avoid_cpu_goes(unsigned int cpu)
{
	/* Too large for the stack of some configurations; the lock guards it. */
	static struct cpumask mask, online;

	mutex_lock(&avoid_lock);
	cpumask_andnot(&mask, &avoided_cpus, cpumask_of(cpu));
	cpumask_andnot(&online, cpu_online_mask, cpumask_of(cpu));
	if (!avoid_is_valid(&mask, &online)) {
		pr_info("CPU %u goes offline, and only avoided CPUs would be left: none is avoided now\n",
			cpu);
		cpumask_clear(&mask);
	}
	avoid_set(&mask);
	mutex_unlock(&avoid_lock);
	return 0;
}

static int __init avoid_init(void)
{
	struct device *root = bus_get_dev_root(&cpu_subsys);
	int result;

	if (!root)
		return -ENODEV;
	result = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, "sched/avoid",
					   NULL, avoid_cpu_goes);
	if (result >= 0)
		result = sysfs_create_file(&root->kobj, &dev_attr_paravirt.attr);
	put_device(root);
	return result;
}
device_initcall(avoid_init);
