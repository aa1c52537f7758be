/* SPDX-License-Identifier: GPL-2.0 */
/* What a kernel with a mask of preferred CPUs declares in linux/cpumask.h, for kernels that have none; stub.c has the mask. */
#ifndef STUB_H
#define STUB_H

#include <linux/cpumask.h>

#define CONFIG_PREFERRED_CPU 1
/* Its name since Linux 6.15. */
#define HK_TYPE_KERNEL_NOISE HK_TYPE_TICK

extern struct cpumask stub_preferred_mask;

#define cpu_preferred_mask ((const struct cpumask *)&stub_preferred_mask)

static inline void set_cpu_preferred(unsigned int cpu, bool preferred)
{
	if (preferred)
		cpumask_set_cpu(cpu, &stub_preferred_mask);
	else
		cpumask_clear_cpu(cpu, &stub_preferred_mask);
}

#endif
