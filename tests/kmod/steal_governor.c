// SPDX-License-Identifier: GPL-2.0
/* Nothing but the name of the kernel's own writer of the mask. */
#include <linux/module.h>

static int __init stub_init(void)
{
	return 0;
}

static void __exit stub_exit(void)
{
}

module_init(stub_init);
module_exit(stub_exit);
MODULE_DESCRIPTION("A module with the name of the kernel's steal_governor, for tests");
MODULE_LICENSE("GPL");
