// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/preferred_cpus: a writable node for the kernel's mask of preferred CPUs.
 *
 * One writer at a time. It writes the list of the CPUs to use, as in "0-3,6"; an empty list means all. Reading gives the mask as it is.
 * The mask is the writer's while it holds the node open: when the node is closed, whatever ended the writer, all active CPUs are
 * preferred again, and so they are when the module is unloaded.
 *
 * Always preferred is the first housekeeping core. The mask is never empty and holds active CPUs only. A CPU that comes online is
 * preferred, as the kernel has it, until the writer writes again.
 */

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/cpumask.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/namei.h>
#include <linux/sched/isolation.h>
#include <linux/slab.h>
#include <linux/topology.h>
#include <linux/uaccess.h>

#ifndef CONFIG_PREFERRED_CPU
#error "This kernel has no mask of preferred CPUs: CONFIG_PREFERRED_CPU is not set. The agent's other actuators need no module."
#endif

/* The kernel's own writer of the mask. */
#define STEAL_GOVERNOR "/sys/module/steal_governor"
/* A list of every other CPU of the largest kernels is shorter. */
#define MOST_BYTES (64 * 1024)

/* Who has the node open for writing; guarded by the lock, which also orders writes. */
static DEFINE_MUTEX(lock);
static struct file *writer;
static int hotplug_state;

static bool steal_governor_is_loaded(void)
{
	struct path path;

	if (kern_path(STEAL_GOVERNOR, LOOKUP_FOLLOW, &path))
		return false;
	path_put(&path);
	return true;
}

/* The caller holds the lock of CPU hotplug, for reading or writing. */
static void prefer_all_active(void)
{
	int cpu;

	for_each_cpu(cpu, cpu_active_mask)
		set_cpu_preferred(cpu, true);
}

/* Adds before it takes away, so that nobody ever sees an empty mask. The caller holds the lock of CPU hotplug. */
static int prefer(const struct cpumask *wanted)
{
	const struct cpumask *core;
	int cpu, first;

	if (cpumask_empty(wanted)) {
		prefer_all_active();
		return 0;
	}
	if (!cpumask_intersects(wanted, cpu_active_mask))
		return -EINVAL;
	first = cpumask_first_and(housekeeping_cpumask(HK_TYPE_KERNEL_NOISE), cpu_active_mask);
	if (first >= nr_cpu_ids)
		first = cpumask_first(cpu_active_mask);
	core = topology_sibling_cpumask(first);
	for_each_cpu(cpu, cpu_active_mask)
		if (cpumask_test_cpu(cpu, wanted) || cpumask_test_cpu(cpu, core))
			set_cpu_preferred(cpu, true);
	for_each_cpu(cpu, cpu_active_mask)
		if (!cpumask_test_cpu(cpu, wanted) && !cpumask_test_cpu(cpu, core))
			set_cpu_preferred(cpu, false);
	return 0;
}

static int node_open(struct inode *inode, struct file *file)
{
	int error = 0;

	if (!(file->f_mode & FMODE_WRITE))
		return 0;
	mutex_lock(&lock);
	if (writer)
		error = -EBUSY;
	else if (steal_governor_is_loaded())
		error = -EBUSY;
	else
		writer = file;
	mutex_unlock(&lock);
	return error;
}

static int node_release(struct inode *inode, struct file *file)
{
	mutex_lock(&lock);
	if (writer == file) {
		cpus_read_lock();
		prefer_all_active();
		cpus_read_unlock();
		writer = NULL;
	}
	mutex_unlock(&lock);
	return 0;
}

static ssize_t node_write(struct file *file, const char __user *text, size_t count, loff_t *position)
{
	cpumask_var_t wanted;
	char *list;
	int error;

	if (count > MOST_BYTES)
		return -E2BIG;
	list = memdup_user_nul(text, count);
	if (IS_ERR(list))
		return PTR_ERR(list);
	if (!zalloc_cpumask_var(&wanted, GFP_KERNEL)) {
		kfree(list);
		return -ENOMEM;
	}
	error = cpulist_parse(strim(list), wanted);
	if (!error) {
		mutex_lock(&lock);
		cpus_read_lock();
		error = prefer(wanted);
		cpus_read_unlock();
		mutex_unlock(&lock);
	}
	free_cpumask_var(wanted);
	kfree(list);
	return error ? error : count;
}

static ssize_t node_read(struct file *file, char __user *text, size_t count, loff_t *position)
{
	char *list = kasprintf(GFP_KERNEL, "%*pbl\n", cpumask_pr_args(cpu_preferred_mask));
	ssize_t given;

	if (!list)
		return -ENOMEM;
	given = simple_read_from_buffer(text, count, position, list, strlen(list));
	kfree(list);
	return given;
}

static const struct file_operations node_operations = {
	.owner = THIS_MODULE,
	.open = node_open,
	.release = node_release,
	.read = node_read,
	.write = node_write,
	.llseek = default_llseek,
};

static struct miscdevice node = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = KBUILD_MODNAME,
	.mode = 0600,
	.fops = &node_operations,
};

/* This CPU is active no more. Where it was the last one preferred, all others are. */
static int cpu_goes(unsigned int cpu)
{
	if (!cpumask_intersects(cpu_preferred_mask, cpu_active_mask))
		prefer_all_active();
	return 0;
}

static int __init preferred_cpus_init(void)
{
	int error;

	if (steal_governor_is_loaded()) {
		pr_err(KBUILD_MODNAME ": the kernel's steal_governor writes the mask; unload it first (modprobe -r steal_governor)\n");
		return -EBUSY;
	}
	hotplug_state = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, KBUILD_MODNAME ":online", NULL, cpu_goes);
	if (hotplug_state < 0)
		return hotplug_state;
	error = misc_register(&node);
	if (error)
		cpuhp_remove_state_nocalls(hotplug_state);
	return error;
}

static void __exit preferred_cpus_exit(void)
{
	misc_deregister(&node);
	cpuhp_remove_state_nocalls(hotplug_state);
	cpus_read_lock();
	prefer_all_active();
	cpus_read_unlock();
}

module_init(preferred_cpus_init);
module_exit(preferred_cpus_exit);
MODULE_DESCRIPTION("A writable node for the mask of preferred CPUs");
MODULE_LICENSE("GPL");
