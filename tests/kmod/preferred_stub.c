// SPDX-License-Identifier: GPL-2.0
/* A mask of preferred CPUs that follows the active CPUs as the kernel's own does; the scheduler does not look at it. */
#include <linux/cpuhotplug.h>
#include <linux/module.h>

#include "stub.h"

struct cpumask stub_preferred_mask;
EXPORT_SYMBOL_GPL(stub_preferred_mask);

static int state;

static int cpu_comes(unsigned int cpu)
{
	set_cpu_preferred(cpu, true);
	return 0;
}

static int cpu_goes(unsigned int cpu)
{
	set_cpu_preferred(cpu, false);
	return 0;
}

static int __init stub_init(void)
{
	state = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "preferred_stub:online", cpu_comes, cpu_goes);
	return state < 0 ? state : 0;
}

static void __exit stub_exit(void)
{
	cpuhp_remove_state_nocalls(state);
}

module_init(stub_init);
module_exit(stub_exit);
MODULE_DESCRIPTION("A mask of preferred CPUs for tests");
MODULE_LICENSE("GPL");
