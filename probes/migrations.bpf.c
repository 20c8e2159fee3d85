/*
 * Tasks that the scheduler moves to a CPU of another NUMA node, per cgroup. `cpu_nodes` has the node of each CPU plus one, or
 * 0 if unknown; the reader fills it. Moves across nodes are rare among all moves, so the counter is shared and atomic.
 */
#include "per_cgroup.bpf.h"

BPF_ARRAY(cpu_nodes, u32, CPUS);
BPF_ARRAY(migrations, u64, CGROUP_SLOTS);

/* sched_migrate_task(struct task_struct *p, int dest_cpu): task_cpu(p) is still the old CPU */
int on_migrate(u64 *ctx)
{
	u64 task = ctx[0], *count;
	u32 from_cpu = FIELD(u32, task, TASK_CPU), to_cpu = ctx[1], cgroup_slot, *from, *to;

	from = cpu_nodes.lookup(&from_cpu);
	to = cpu_nodes.lookup(&to_cpu);
	if (!from || !to || !*from || !*to || *from == *to)
		return 0;
	cgroup_slot = cgroup_slot_of(FIELD(u64, task, TASK_GROUP));
	count = migrations.lookup(&cgroup_slot);
	if (!count)
		return count_lost(LOST_FULL);
	lock_xadd(count, 1);
	return 0;
}
