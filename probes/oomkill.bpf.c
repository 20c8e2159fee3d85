/*
 * Ring of the latest processes that the kernel killed for memory. The kernel marks one victim at a time, under oom_lock, so one
 * counter gives both the number of victims and the next position.
 */
#include "kernel.bpf.h"

struct victim {
	u64 at_ns;
	u64 cgroup_id;
	u64 pid;
	char command[16];
};
BPF_ARRAY(oomkill, struct victim, VICTIMS);
BPF_ARRAY(kills, u64, 1);

static __always_inline int record_victim(u64 task)
{
	u64 leader, *count;
	struct victim *victim;
	u32 at = 0;

	count = kills.lookup(&at);
	if (!count)
		return 0;
	at = *count & (VICTIMS - 1);
	victim = oomkill.lookup(&at);
	if (!victim)
		return 0;
	victim->at_ns = bpf_ktime_get_ns();
	victim->cgroup_id = cgroup_id_of_task(task);
	victim->pid = FIELD(u32, task, TGID);
	leader = FIELD(u64, task, LEADER);
	bpf_probe_read_kernel(victim->command, sizeof(victim->command), (void *)(leader + COMM));
	(*count)++;
	return 0;
}

#ifndef OOM_MM
/* mark_victim(struct task_struct *task, uid_t uid) */
int on_victim(u64 *ctx)
{
	return record_victim(ctx[0]);
}
#else
/* mark_oom_victim(struct task_struct *tsk): signal->oom_mm is still NULL for a process that was not marked before */
int on_mark(u64 *ctx)
{
	u64 task = ARGUMENT(ctx), signal = FIELD(u64, task, SIGNAL);

	return FIELD(u64, signal, OOM_MM) ? 0 : record_victim(task);
}
#endif
