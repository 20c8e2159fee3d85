/*
 * Tasks that the scheduler moves to a CPU of another NUMA node, per cgroup. `cpu_nodes` has the node of each CPU plus one, 0
 * where it is not known; the reader fills it. Moves across nodes are rare beside moves: they are added atomically.
 */
#include "common.bpf.h"

BPF_ARRAY(cpu_nodes, u32, CPUS);
BPF_ARRAY(migrations, u64, PLACES);

/* sched_migrate_task(struct task_struct *p, int dest_cpu): the task is still on the CPU that it comes from */
int on_migrate(u64 *ctx)
{
	u64 task = ctx[0], *count;
	u32 from_cpu = FIELD(u32, task, TASK_CPU), to_cpu = ctx[1], place, *from, *to;

	from = cpu_nodes.lookup(&from_cpu);
	to = cpu_nodes.lookup(&to_cpu);
	if (!from || !to || !*from || !*to || *from == *to)
		return 0;
	place = place_of(FIELD(u64, task, TASK_GROUP));
	count = migrations.lookup(&place);
	if (!count)
		return lose(LOST_FULL);
	lock_xadd(count, 1);
	return 0;
}
